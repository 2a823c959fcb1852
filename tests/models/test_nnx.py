"""flax.nnx modules as networks: equal to their linen twins, pure, and cut at an attribute."""

import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import federations
from federations import assert_close, assert_equal
from fedjax_inv import averaging, devices, local, models, rounds
from fedjax_inv.algorithms import fedavg
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Batch, Halves, Model, Tree, Variables
from fedjax_inv_experiments.flags import names

KEY = jax.random.key(0)


class Net(nnx.Module):
    """An MLP with batch normalisation and dropout, as flax's pages write it, but for the mask."""

    def __init__(self, num_classes: int, *, rate: float = 0.0, rngs: nnx.Rngs) -> None:
        self.rngs = rngs  # as many do; nothing draws from it later
        self.hidden = nnx.Linear(36, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, epsilon=0.1, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(5, num_classes, rngs=rngs)

    def __call__(self, x: Array, mask: Array) -> Array:
        x = self.norm(self.hidden(x.reshape(x.shape[0], -1)), mask=mask[:, None])
        return self.head(self.dropout(nnx.relu(x)))


class Twin(nn.Module):
    """The same network of linen."""

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        x = nn.Dense(5, name="hidden")(x.reshape(x.shape[0], -1))
        norm = nn.BatchNorm(not train, epsilon=0.1, momentum=0.9, name="norm")
        return nn.Dense(3, name="head")(nn.relu(norm(x, mask=mask[:, None])))


def build(rngs: nnx.Rngs, rate: float = 0.0) -> Net:
    return Net(3, rate=rate, rngs=rngs)


WHOLE, CUT = models.from_nnx(build), models.from_nnx(build, cut="head")
DROPPING = models.from_nnx(partial(build, rate=0.5), cut="head")
TWIN = models.from_flax(Twin(), takes=("mask", "train"))
FEDERATION = federations.federation()
X, Y = FEDERATION.data.x[:6], FEDERATION.data.y[:6]
MASK = np.array([True, True, False, True, True, False])


@pytest.fixture(scope="module")
def variables() -> Variables:
    """Variables of no symmetry, of the whole network."""
    rng = np.random.default_rng(0)
    params, stats = jax.eval_shape(WHOLE.init, KEY, X)
    return Variables(
        jax.tree.map(lambda a: 0.3 * rng.normal(size=a.shape).astype(np.float32), params),
        jax.tree.map(lambda a: 0.5 + rng.random(a.shape, np.float32), stats),
    )


def parted(variables: Variables) -> Variables:
    """The same variables, with the head's in the head."""
    (_, params), (_, stats) = variables
    body = {name: params[name] for name in ("hidden", "norm")}
    return Variables(Halves(body, params["head"]), Halves(stats, {}))


@partial(jax.jit, static_argnums=(0, 3))
def everything(
    model: Model, variables: Variables, x: Array, train: bool, key: Array | None = None
) -> tuple[Any, ...]:
    """Outputs of real examples, statistics, and the gradient of the loss."""
    outputs, stats = models.apply(model, variables, x, MASK, train, key)
    step = averaging.gradient(model)(variables, Batch(x, Y, MASK), KEY)
    return jnp.where(MASK[:, None], outputs, 0), stats, step


@pytest.mark.parametrize("train", [True, False])
def test_it_equals_its_twin_of_linen(train: bool, variables: Variables) -> None:
    expected = everything(TWIN, variables, X, train)
    assert_close(everything(WHOLE, variables, X, train), expected)
    outputs, stats, step = everything(CUT, parted(variables), X, train)
    assert_close((outputs, stats.body), (expected[0], expected[1].head))
    assert_close(step.grads, parted(Variables(expected[2].grads, expected[2].stats)).params)


def test_padding_changes_nothing(variables: Variables) -> None:
    garbled = np.where(MASK[:, None, None, None], X, 255 - np.asarray(X))
    assert_close(everything(WHOLE, variables, garbled, True), everything(WHOLE, variables, X, True))


def test_dropout_draws_by_its_key_alone(variables: Variables) -> None:
    """And as the module itself does with streams of the same key."""
    cut = parted(variables)
    first, again, other = (
        everything(DROPPING, cut, X, True, jax.random.key(seed))[0] for seed in (1, 1, 2)
    )
    assert_equal(first, again)
    assert (first != other).any()
    assert_close(everything(DROPPING, cut, X, False, KEY)[0], everything(CUT, cut, X, False)[0])
    with pytest.raises(ValueError, match=r"^key=None: must be given to train a module that draws$"):
        models.apply(DROPPING, cut, X, MASK, True)


def test_clients_of_a_vmap_draw_and_count_on_their_own(variables: Variables) -> None:
    cut, keys = parted(variables), jax.random.split(KEY, 3)
    together = jax.jit(jax.vmap(lambda key: models.apply(DROPPING, cut, X, MASK, True, key)))(keys)
    for i, key in enumerate(keys):
        alone = everything(DROPPING, cut, X, True, key)[:2]
        outputs = jnp.where(MASK[:, None], together[0][i], 0)
        assert_close((outputs, jax.tree.map(lambda a, i=i: a[i], together[1])), alone)
    assert (together[0][0] != together[0][1]).any()


def test_dropout_keeps_its_share_and_both_halves_draw_apart() -> None:
    def wide(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

    x, mask = jnp.ones((128, 128)), jnp.ones(128, bool)
    for cut in (0, 1):
        model = models.from_nnx(wide, cut=cut)
        variables = model.init(KEY, x)
        assert jax.tree.leaves(variables) == []
        outputs, _ = models.apply(model, variables, x, mask, True, KEY)
        assert set(np.unique(outputs)) == {0, 4}
        kept = float((outputs > 0).mean())  # within 5 standard deviations
        assert abs(kept - 0.25) < 5 * (0.25 * 0.75 / x.size) ** 0.5


@pytest.mark.slow
def test_two_rounds_of_fedavg_are_those_of_its_twin(variables: Variables) -> None:
    cohorts = jax.tree.map(lambda a: a[:2], federations.schedule())

    def trained(model: Model) -> Variables:
        work = local.epochs(optax.sgd(0.1), batch_size=3)
        algorithm = fedavg.fedavg(model, work)
        state = rounds.init(algorithm, variables, FEDERATION, KEY)
        run = jax.jit(lambda *a: rounds.run(algorithm, *a, axis=devices.chunked(2)))
        return run(state, cohorts, FEDERATION)[0].server.variables

    result = trained(WHOLE)
    assert_close(result, trained(TWIN))
    moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), result, variables)
    moved.params.head["hidden"].pop("bias")  # the norm takes it away
    assert min(jax.tree.leaves(moved)) > 1e-3


def test_a_module_starts_from_its_own_values_and_a_function_from_the_key() -> None:
    module = build(nnx.Rngs(7))
    model = models.from_nnx(module, cut="head")
    for seed in (0, 1):
        params = model.init(jax.random.key(seed), X).params
        assert_equal(params.head["kernel"], module.head.kernel[...])
        assert_equal(params.body["hidden"]["kernel"], module.hidden.kernel[...])
    assert_equal(models.predict(model, model.init(KEY, X), X), own_outputs(module))
    first, again, other = (CUT.init(jax.random.key(seed), X).params for seed in (0, 0, 1))
    assert_equal(first, again)
    assert (first.head["kernel"] != other.head["kernel"]).any()


def own_outputs(module: Net) -> Array:
    module.eval()
    x = X.astype(jnp.float32) / 255
    return module(x, jnp.ones(len(x), bool))


class Forgetful(nnx.Module):
    """Leaves the padding to nobody."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.norm(x)


class Later(nnx.Module):
    """Whose head is not the last step."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.head = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return 2 * self.head(x)


class Calling(nnx.Module):
    """Which calls its head as it is told."""

    def __init__(self, call: Any, *, rngs: nnx.Rngs) -> None:
        self.call = call
        self.head = Scaling()

    def __call__(self, x: Array, mask: Array) -> Array:
        return self.call(self.head, x, mask)


class Scaling(nnx.Module):
    def __call__(self, x: Array, mask: Array | None = None, scale: float = 1.0) -> Array:
        return x * scale if mask is None else x * scale * mask[:, None]


@pytest.mark.parametrize(
    "call",
    [
        lambda head, x, mask: head(head(x)),
        lambda head, x, mask: head(x, scale=2.0),
        lambda head, x, mask: head(x, mask, 2.0),
    ],
)
def test_a_head_that_is_called_otherwise_is_refused(call: Any) -> None:
    with pytest.raises(UsageError, match=r"^cut='head': must be the attribute that is called"):
        predicted(lambda rngs: Calling(call, rngs=rngs), cut="head")


def test_a_head_may_take_the_mask() -> None:
    for call in (lambda head, x, mask: head(x, mask), lambda head, x, mask: head(x, mask=mask)):
        outputs = predicted(lambda rngs, call=call: Calling(call, rngs=rngs), cut="head")
        assert_equal(outputs, NARROW)


class Tied(nnx.Module):
    """Whose two layers share a kernel."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.head = nnx.Linear(3, 3, rngs=rngs)
        self.head.kernel = self.first.kernel

    def __call__(self, x: Array) -> Array:
        return self.head(self.first(x))


class Counting(nnx.Module):
    """With a variable of another kind."""

    def __init__(self) -> None:
        self.count = nnx.Cache(jnp.zeros(()))

    def __call__(self, x: Array) -> Array:
        return x


def always(rngs: nnx.Rngs) -> nnx.Module:
    class Always(nnx.Module):
        def __init__(self) -> None:
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Array) -> Array:
            return self.dropout(x, deterministic=False)

    return Always()


NARROW = np.ones((2, 3), np.float32)


def predicted(module: Any, **arguments: Any) -> Tree:
    model = models.from_nnx(module, **arguments)
    return models.predict(model, model.init(KEY, NARROW), NARROW)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: predicted(Net),
            "module: must be an nnx.Module, or a function from nnx.Rngs to one, not Net",
        ),
        (lambda: predicted(lambda rngs: 3), "module: must return an nnx.Module, it returns"),
        (
            lambda: predicted(lambda rngs: Forgetful(rngs=rngs)),
            "module: has batch statistics; Forgetful.__call__ must take 'mask'",
        ),
        (
            lambda: predicted(lambda rngs: Later(rngs=rngs), cut="head"),
            "cut='head': must be the attribute whose outputs are the module's",
        ),
        (
            lambda: predicted(lambda rngs: Later(rngs=rngs), cut="tail"),
            "cut='tail': must be the name of an attribute that is an nnx.Module",
        ),
        (lambda: predicted(build, cut=1), "cut=1: must be 0 or the name of an attribute"),
        (lambda: predicted(build, cut=-1), "cut=-1: must be an integer of at least 0"),
        (
            lambda: predicted(lambda rngs: nnx.Sequential(Scaling(), build(rngs)), cut=2),
            "cut=2: must be an integer in 0..1",
        ),
        (
            lambda: predicted(lambda rngs: Tied(rngs=rngs), cut="head"),
            "cut='head': must not part layers that share a variable",
        ),
        (lambda: predicted(Counting()), "variables='count': must be none but of nnx.Param"),
        (lambda: predicted(always), "module: draws in evaluation mode, must draw in training"),
        (lambda: predicted(build), "inputs: have shape (2, 3), must fit the network: dot_general"),
        (
            lambda: models.from_flax(build(nnx.Rngs(0))),
            "module: Net is a flax.nnx module, which models.from_nnx takes; must be linen",
        ),
        (lambda: averaging.gradient(build(nnx.Rngs(0))), "model: is of type Net, must be a Model"),
    ],
)
def test_refusals_are_one_line_without_the_module(make, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)) as caught:
        make()
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_tied_layers_stay_tied_in_one_half() -> None:
    model = models.from_nnx(lambda rngs: Tied(rngs=rngs))
    params = model.init(KEY, NARROW).params.head
    kernels = [name for name in ("first", "head") if "kernel" in params[name]]
    assert len(kernels) == 1
    kernel = np.float64(params[kernels[0]]["kernel"])
    assert_close(predicted(lambda rngs: Tied(rngs=rngs)), NARROW @ kernel @ kernel)


def fixed(num_classes: int) -> nnx.Module:
    """Another factory for --model, whose seeds all start from one network."""
    return Net(num_classes, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ["Net", "fixed"])
def test_a_factory_of_the_command_line_may_return_one(name: str) -> None:
    """A class that takes rngs draws an initial network for each seed."""
    model = names.network(f"{__name__}:{name}")(3)
    first, other = (model.init(jax.random.key(seed), X).params for seed in (0, 1))
    differs = (first.head["hidden"]["kernel"] != other.head["hidden"]["kernel"]).any()
    assert differs == (name == "Net")
    assert not names.takes(names.network(f"{__name__}:{name}"), "rngs")
