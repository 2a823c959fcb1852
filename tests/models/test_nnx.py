"""flax.nnx modules as networks: equal to their linen twins, pure, and cut at an attribute."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import federations
import formulas
from federations import assert_close, assert_equal
from fedjax_inv import averaging, models
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Batch, Halves, Model, Tree, Variables
from fedjax_inv_experiments.assembly import factories

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


VARIABLES = formulas.randomised(WHOLE, X)  # of the whole network


def parted(variables: Variables) -> Variables:
    """The same variables, with the head's in the head."""
    (_, params), (_, stats) = variables
    body = {name: params[name] for name in ("hidden", "norm")}
    return Variables(Halves(body, params["head"]), Halves(stats, {}))


PARTED = parted(VARIABLES)


@partial(jax.jit, static_argnums=(0, 3))
def everything(
    model: Model, variables: Variables, x: Array, train: bool, key: Array | None = None
) -> tuple[Any, ...]:
    """Outputs of real examples, statistics, and the gradient of the loss."""
    outputs, stats = models.apply(model, variables, x, MASK, train, key)
    step = averaging.gradient(model)(variables, Batch(x, Y, MASK), KEY)
    return jnp.where(MASK[:, None], outputs, 0), stats, step


@pytest.mark.parametrize("train", [True, False])
def test_it_equals_its_twin_of_linen(train: bool) -> None:
    expected = everything(TWIN, VARIABLES, X, train)
    assert_close(everything(WHOLE, VARIABLES, X, train), expected)
    outputs, stats, step = everything(CUT, PARTED, X, train)
    assert_close((outputs, stats.body), (expected[0], expected[1].head))
    assert_close(step.grads, parted(Variables(expected[2].grads, expected[2].stats)).params)
    garbled = np.where(MASK[:, None, None, None], X, 255 - np.asarray(X))  # padding acts on nothing
    assert_close(everything(WHOLE, VARIABLES, garbled, train), expected)


def test_dropout_draws_by_its_key_alone_and_clients_of_a_vmap_on_their_own() -> None:
    @jax.jit
    @jax.vmap
    def drawn(key: Array) -> tuple[Array, Halves]:
        outputs, stats = models.apply(DROPPING, PARTED, X, MASK, True, key)
        return jnp.where(MASK[:, None], outputs, 0), stats

    first, other = jax.random.split(KEY)
    outputs, stats = drawn(jnp.stack([first, first, other]))
    assert_equal(outputs[0], outputs[1])
    assert (outputs[0] != outputs[2]).any()
    alone, own, _ = everything(DROPPING, PARTED, X, True, other)
    assert_close((outputs[2], jax.tree.map(lambda a: a[2], stats)), (alone, own))
    assert_close(
        everything(DROPPING, PARTED, X, False, KEY)[0], everything(CUT, PARTED, X, False)[0]
    )
    with pytest.raises(UsageError, match="key"):
        models.apply(DROPPING, PARTED, X, MASK, True)


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


class Tied(nnx.Module):
    """Whose two layers share a kernel."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.head = nnx.Linear(3, 3, rngs=rngs)
        self.head.kernel = self.first.kernel

    def __call__(self, x: Array) -> Array:
        return self.head(self.first(x))


NARROW = np.ones((2, 3), np.float32)


def predicted(module: Any, **arguments: Any) -> Tree:
    model = models.from_nnx(module, **arguments)
    return models.predict(model, model.init(KEY, NARROW), NARROW)


class Forgetful(nnx.Module):
    """Leaves the padding to nobody."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.norm(x)


@pytest.mark.parametrize(
    ("make", "cut"),
    [
        (lambda rngs: Calling(lambda head, x, mask: head(head(x)), rngs=rngs), "head"),
        (lambda rngs: Calling(lambda head, x, mask: 2 * head(x), rngs=rngs), "head"),
        (lambda rngs: Tied(rngs=rngs), "head"),
        (lambda rngs: Forgetful(rngs=rngs), 0),
    ],
)
def test_what_would_be_wrong_in_silence_is_refused(make: Any, cut: str | int) -> None:
    """A head that is not the module's last step, parted tied layers, statistics with padding."""
    with pytest.raises(UsageError):
        predicted(make, cut=cut)


def test_tied_layers_stay_tied_in_one_half() -> None:
    model = models.from_nnx(lambda rngs: Tied(rngs=rngs))
    params = model.init(KEY, NARROW).params.head
    kernels = [name for name in ("first", "head") if "kernel" in params[name]]
    assert len(kernels) == 1
    kernel = np.float64(params[kernels[0]]["kernel"])
    assert_close(predicted(lambda rngs: Tied(rngs=rngs)), NARROW @ kernel @ kernel)


def test_a_class_of_the_command_line_draws_a_network_for_each_seed() -> None:
    model = factories.network(f"{__name__}:Net")(3)
    first, other = (model.init(jax.random.key(seed), X).params for seed in (0, 1))
    assert (first.head["hidden"]["kernel"] != other.head["hidden"]["kernel"]).any()
