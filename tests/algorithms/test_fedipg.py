"""FedIPG's identities, in float64: Eq. 9, 30, 36, 37 and what follows from them."""

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

import federations
import slow
from federations import assert_close, assert_equal
from fedjax_inv import averaging, devices, local, models, objectives, rounds, schedules
from fedjax_inv.algorithms import fedavg, fedipg
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Examples,
    Federation,
    GradFn,
    Halves,
    Local,
    Metrics,
    Model,
    Shard,
    Step,
    Trained,
    Tree,
    Variables,
    Visit,
    Work,
)

DERIVATIVES = ("forward_over_reverse", "reverse_over_forward")
derivatives = pytest.mark.parametrize("derivative", DERIVATIVES)
Risk = Callable[[Tree], Array]


def randomised(tree: Tree, seed: int = 0) -> Tree:
    """Normal numbers in float64 in the shape of a tree."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), tree)


def smooth_risk(seed: int = 0) -> tuple[Risk, Tree]:
    """Cross-entropy of a network of two tanh layers with biases, and a point."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(6, 3)), rng.integers(0, 3, 6)
    shapes = {"a": (np.zeros((3, 4)), np.zeros(4)), "b": (np.zeros((4, 3)), np.zeros(3))}

    def risk(params: Tree) -> Array:
        hidden = jnp.tanh(x @ params["a"][0] + params["a"][1])
        logits = hidden @ params["b"][0] + params["b"][1]
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return risk, randomised(shapes, seed)


def explicit(
    risk: Risk, params: Tree, penalty: float, kept: np.ndarray | float = 1.0
) -> tuple[float, float, np.ndarray]:
    """(s, f, grad f) by Eq. 30 with an explicit Hessian; `kept` is P's diagonal."""
    flat, unravel = ravel_pytree(params)

    @jax.jit
    def derivatives(w: Array) -> tuple[Array, Array, Array]:
        value, gradient = jax.value_and_grad(lambda w: risk(unravel(w)))(w)
        return value, gradient, jax.hessian(lambda w: risk(unravel(w)))(w)

    value, gradient, hessian = map(np.asarray, derivatives(flat))
    s = gradient @ (kept * flat)
    direction = kept * gradient + hessian @ (kept * flat)
    return s, value + penalty * s**2, gradient + 2 * penalty * s * direction


@derivatives
@pytest.mark.parametrize("penalty", slow.after(1, [0.3, 0.0, 5.0]))
def test_the_gradient_is_that_of_an_explicit_hessian(derivative: str, penalty: float) -> None:
    with jax.enable_x64(True):
        risk, params = smooth_risk()
        fn = fedipg.penalised_value_and_grad(risk, penalty, derivative=derivative)
        value, grads = jax.jit(fn)(params)
        s, expected_value, expected = explicit(risk, params, penalty)
        assert abs(s) > 0.1
        np.testing.assert_allclose(jax.jit(partial(fedipg.invariance, risk))(params), s, rtol=1e-12)
        np.testing.assert_allclose(value, expected_value, rtol=1e-12)
        np.testing.assert_allclose(ravel_pytree(grads)[0], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@derivatives
def test_the_gradient_is_that_of_central_differences(derivative: str) -> None:
    with jax.enable_x64(True):
        risk, params = smooth_risk(1)
        penalty, step = 0.7, 1e-5
        flat, unravel = ravel_pytree(params)

        @jax.jit
        def objective(w: Array) -> Array:
            return risk(unravel(w)) + penalty * (jax.grad(lambda v: risk(unravel(v)))(w) @ w) ** 2

        differences = [
            (objective(flat + step * unit) - objective(flat - step * unit)) / (2 * step)
            for unit in np.eye(len(flat))
        ]
        fn = fedipg.penalised_value_and_grad(risk, penalty, derivative=derivative)
        grads, _ = ravel_pytree(jax.jit(fn)(params)[1])
        np.testing.assert_allclose(grads, np.array(differences), rtol=1e-6, atol=1e-8)


@derivatives
def test_a_stationary_point_of_the_risk_is_one_of_the_objective(derivative: str) -> None:
    """Eq. 37."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        center, matrix = rng.normal(size=4), rng.normal(size=(6, 4))

        def risk(w: Array) -> Array:
            return jnp.logaddexp(matrix @ (w - center), -(matrix @ (w - center))).sum()

        fn = fedipg.penalised_value_and_grad(risk, 3.0, derivative=derivative)
        np.testing.assert_allclose(fn(jnp.asarray(center))[1], 0, atol=1e-12)
        assert np.abs(fn(jnp.asarray(center + 0.1))[1]).max() > 1e-2


@cache
def scaled(depth: int) -> Callable[..., tuple[Array, Array]]:
    """(s, d/dscale R(scale x logits) at 1) of a ReLU network without biases."""

    def both(x: Array, y: Array, params: list[Array]) -> tuple[Array, Array]:
        def risk(params: list[Array], scale: float | Array = 1.0) -> Array:
            hidden = x
            for i, kernel in enumerate(params):
                hidden = hidden @ kernel
                hidden = hidden if i == depth - 1 else jax.nn.relu(hidden)
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(scale * hidden, y)
            return losses.mean()

        return fedipg.invariance(risk, params), jax.grad(lambda scale: risk(params, scale))(1.0)

    return jax.jit(both)


@given(depth=st.integers(1, 4), seed=st.integers(0, 99))
def test_a_bias_free_relu_network_has_irm_times_its_depth(depth: int, seed: int) -> None:
    """s = L d/dscale R(scale x logits) at 1: the penalty is L^2 times IRMv1's."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(5, 3)), rng.integers(0, 3, 5)
        params = [rng.normal(size=(3, 3)) for _ in range(depth)]
        s, by_scale = scaled(depth)(x, y, params)
        np.testing.assert_allclose(s, depth * by_scale, rtol=1e-9, atol=1e-12)


class Normalised(nn.Module):
    """Dense, ReLU, a normalisation with a negligible epsilon, Dense."""

    norm: str

    @nn.compact
    def __call__(self, x: Array, mask: Array) -> Array:
        x = nn.relu(nn.Dense(6, name="before")(x))
        if self.norm == "layer":
            x = nn.LayerNorm(epsilon=1e-12, name="norm")(x)
        elif self.norm == "group":
            x = nn.GroupNorm(2, epsilon=1e-12, name="norm")(x)
        else:
            x = models.BatchNorm(epsilon=1e-12, name="norm")(x, mask, True)
        return nn.Dense(3, name="after")(x)


@pytest.mark.parametrize("norm", slow.after(1, ["batch", "layer", "group"]))
def test_a_layer_before_relu_and_a_norm_adds_nothing(norm: str) -> None:
    """Its kernel and bias together: scaling both scales what the norm divides by."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, y = jnp.asarray(rng.normal(size=(8, 4))), jnp.asarray(rng.integers(0, 3, 8))
        mask = jnp.arange(8) < 6
        variables = jax.jit(Normalised(norm).init)(jax.random.key(0), x, mask)
        params = randomised(variables["params"])

        @jax.jit
        def risk(params: Tree) -> Array:
            given = {**variables, "params": params}
            logits, _ = Normalised(norm).apply(given, x, mask, mutable=["batch_stats"])
            losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)
            return jnp.where(mask, losses, 0).sum() / 6

        parts = jax.tree.map(lambda g, w: (g * w).sum(), jax.jit(jax.grad(risk))(params), params)
        before = parts.pop("before")
        assert abs(before["kernel"]) > 1e-2
        np.testing.assert_allclose(before["kernel"] + before["bias"], 0, atol=1e-8)
        rest = sum(jax.tree.leaves(parts))
        assert abs(rest) > 1e-2
        np.testing.assert_allclose(fedipg.invariance(risk, params), rest, atol=1e-8)


def test_only_the_norms_and_the_classifier_of_the_cnn_add_to_s() -> None:
    """Up to GroupNorm's epsilon of 1e-6, against variances of about one."""
    with jax.enable_x64(True):
        model = models.cnn(3, widths=(8, 16))
        rng = np.random.default_rng(0)
        batch = Batch(
            jnp.asarray(rng.normal(size=(5, 6, 6, 1))),
            jnp.asarray(rng.integers(0, 3, 5)),
            jnp.arange(5) < 4,
        )
        variables = jax.jit(model.init)(jax.random.key(0), batch.x)
        params = randomised(variables.params)

        @jax.jit
        def risk(params: Halves) -> Array:
            return averaging.risk(
                model, objectives.cross_entropy, params, variables.stats, batch, jax.random.key(0)
            )[0]

        grads = jax.jit(jax.grad(risk))(params)
        parts: Any = jax.tree.map(lambda g, w: (g * w).sum(), grads, params)
        for block in parts.body.values():
            convolution = block.pop("Conv_0")
            assert abs(convolution["kernel"]) > 1e-3
            np.testing.assert_allclose(sum(convolution.values()), 0, atol=1e-5)
        s = fedipg.invariance(risk, params)
        assert abs(s) > 1e-2
        np.testing.assert_allclose(s, sum(jax.tree.leaves(parts)), atol=1e-5)


def one_gradient() -> Work:
    """Work whose client returns with what it received, less one gradient of all its examples."""

    def run(grad_fn: GradFn, start: Local, shard: Shard, key: Array) -> Trained:
        positions = jnp.arange(max(federations.SIZES))
        batch = local.take_batch(shard, positions, positions < shard.size)
        step = grad_fn(start.variables, batch, key)
        params = jax.tree.map(jnp.subtract, start.variables.params, step.grads)
        return Trained(Local(Variables(params, step.stats), ()), jnp.int32(1), step.metrics, ())

    return Work(lambda variables: Local(variables, ()), run)


def gradient_of(
    algorithm: Algorithm, variables: Variables, shard: Shard, round: Array | int = 0
) -> tuple[Halves, Halves, Metrics]:
    """What the client of an algorithm computes from its examples."""
    message = averaging.Message(variables, ())
    visit = Visit(message, (), shard, jnp.int32(round), jnp.int32(0), jax.random.key(0))
    reply = algorithm.exchanges[0].client(visit)
    delta = reply.upload.delta
    return jax.tree.map(jnp.negative, delta.params), delta.stats, reply.metrics


def widened(tree: Tree) -> Tree:
    """`tree` in float64 if that is enabled."""
    wide = jnp.zeros(()).dtype
    return jax.tree.map(
        lambda a: a.astype(wide) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
    )


def point(model: Model) -> Variables:
    """Where no parameter is 0."""

    @jax.jit
    def moved(noise: Tree) -> Variables:
        variables = federations.initial(model, jax.random.key(0))
        return widened(jax.tree.map(lambda leaf, change: leaf + 0.3 * change, variables, noise))

    shapes = jax.eval_shape(partial(federations.initial, model), jax.random.key(0))
    return moved(jax.tree.map(randomised, shapes))


def kept_by(penalty_on: str, params: Halves) -> Array:
    """P's diagonal."""
    body = 1.0 if penalty_on == "all" else 0.0
    kept = Halves(
        jax.tree.map(lambda leaf: jnp.full(leaf.shape, body), params.body),
        jax.tree.map(jnp.ones_like, params.head),
    )
    return ravel_pytree(kept)[0]


@pytest.mark.parametrize("penalty_on", slow.after(1, ["classifier", "all"]))
def test_a_client_follows_the_formula_whatever_lies_beside_its_rows(penalty_on: str) -> None:
    """grad R + 2 penalty s (P grad R + H P w), s = <P grad R, w>, over the real examples."""
    with jax.enable_x64(True):
        who = 4  # has fewer examples than the batch has places
        model = models.from_blocks([federations.NormedHidden(3), federations.Linear(3)], 1)
        variables, federation = point(model), federations.federation()
        rows = federations.rows_of(federation, who)
        x, y = (leaf[rows] for leaf in widened(federations.in_floats(federation)).data)

        @jax.jit
        def risk(params: Halves) -> Array:
            given, mask = Variables(params, variables.stats), jnp.ones(len(rows), bool)
            logits, _ = models.apply(model, given, x, mask, True)
            return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        kept = kept_by(penalty_on, variables.params)
        s, _, expected = explicit(risk, variables.params, 0.4, kept)
        assert abs(s) > 1e-2
        value = risk(variables.params)
        for derivative in DERIVATIVES:
            algorithm = fedipg.fedipg(
                model, one_gradient(), penalty=0.4, penalty_on=penalty_on, derivative=derivative
            )
            client = jax.jit(partial(gradient_of, algorithm))
            for held in (federations.in_floats(federation), federations.relaid(federation)):
                shard = federations.shard_of(widened(held), who)
                grads, _, metrics = client(variables, shard)
                np.testing.assert_allclose(ravel_pytree(grads)[0], expected, rtol=1e-8, atol=1e-10)
                np.testing.assert_allclose(metrics["invariance"], s, rtol=1e-10)
                np.testing.assert_allclose(metrics["loss"], value, rtol=1e-10)


@pytest.mark.slow
def test_without_penalty_a_client_with_norms_is_fedavg() -> None:
    """Bit for bit as written: beside other code, the compiler would rearrange the norm's sums; and
    where the penalty's work is shared, terms are summed that FedAvg transposes one by one."""
    model = federations.normed_body()
    variables, shard = point(model), federations.shard_of(federations.federation(), 4)
    options = {"xla_disable_hlo_passes": "fusion,cpu-instruction-fusion,algsimp"}

    def client(algorithm: Algorithm) -> tuple[Halves, Halves, Metrics]:
        run = jax.jit(partial(gradient_of, algorithm), compiler_options=options)
        return run(variables, shard)

    expected = client(fedavg.fedavg(model, one_gradient()))
    for derivative in DERIVATIVES:
        algorithm = fedipg.fedipg(model, one_gradient(), penalty=0.0, derivative=derivative)
        grads, stats, metrics = client(algorithm)
        assert metrics["invariance"] != 0
        compare = assert_equal if derivative == "forward_over_reverse" else assert_close
        compare((grads, stats, {"loss": metrics["loss"]}), expected)


def tanh_layers() -> Model:
    """A sequence of flax's own layers, cut before the last."""
    layers = [lambda x: x.reshape(len(x), -1), nn.Dense(5), nn.tanh, nn.Dense(3)]
    return models.from_flax(nn.Sequential(layers), cut=3)


def shard_in_float64(who: int) -> Shard:
    """A client of `federations.federation`."""
    held = federations.in_floats(federations.federation())
    return federations.shard_of(widened(held), who)


def real_examples(who: int) -> tuple[Array, Array]:
    """x and y of a client of `federations.federation`, in its order."""
    federation = federations.federation()
    rows = federations.rows_of(federation, who)

    @jax.jit
    def examples(federation: Federation) -> tuple[Array, Array]:
        x, y = widened(federations.in_floats(federation)).data
        return x[rows], y[rows]

    return examples(federation)


def logits_of(model: Model, params: Halves, stats: Halves, x: Array) -> Array:
    return models.apply(model, Variables(params, stats), x, jnp.ones(len(x), bool), True)[0]


def mean_loss(logits: Array, y: Array) -> Array:
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@pytest.mark.parametrize("network", slow.after(1, [federations.mlp, federations.cnn, tanh_layers]))
def test_on_a_linear_classifier_it_is_irm(network: Callable[[], Model]) -> None:
    """R + penalty (d/dt R(t logits))^2 at t = 1, Arjovsky et al. 2019, whatever the body is."""
    with jax.enable_x64(True):
        model, who = network(), 4
        variables, (x, y) = point(model), real_examples(who)
        shard = shard_in_float64(who)

        def irm(params: Halves) -> Array:
            logits = logits_of(model, params, variables.stats, x)
            slope = jax.grad(lambda t: mean_loss(t * logits, y))(1.0)
            return mean_loss(logits, y) + 0.7 * slope**2

        arguments = {"penalty": 0.7, "penalty_on": "classifier"}
        algorithm = fedipg.fedipg(model, one_gradient(), **arguments)
        got, expected = jax.jit(
            lambda: (gradient_of(algorithm, variables, shard)[0], jax.grad(irm)(variables.params))
        )()
        np.testing.assert_allclose(
            ravel_pytree(got)[0], ravel_pytree(expected)[0], rtol=1e-8, atol=1e-12
        )
        assert np.abs(ravel_pytree(got.body)[0]).max() > 1e-3


@pytest.mark.parametrize("penalty_on", slow.after(1, ["all", "classifier"]))
def test_halves_follow_their_own_objective(penalty_on: str) -> None:
    """Central differences of R + penalty s_1 s_2; 5 real examples, whose batch statistics they
    share, in 7 places."""
    with jax.enable_x64(True):
        who, step = 4, 1e-5
        model = models.from_blocks([federations.NormedHidden(2), federations.Linear(3)], 1)
        variables, (x, y) = point(model), real_examples(who)
        assert len(y) == 5
        flat, unravel = ravel_pytree(variables.params)

        def risks(w: Array) -> Array:
            logits = logits_of(model, unravel(w), variables.stats, x)
            return jnp.stack([mean_loss(logits[part], y[part]) for part in HALVES])

        kept = kept_by(penalty_on, variables.params)

        def objective(w: Array) -> Array:
            slopes = jax.jacrev(risks)(w) @ (kept * w)
            return risks(w) @ jnp.array([3, 2]) / 5 + 0.9 * slopes[0] * slopes[1]

        ends = jax.jit(jax.vmap(objective))(
            jnp.concatenate([flat + step * np.eye(len(flat)), flat - step * np.eye(len(flat))])
        )
        differences = (ends[: len(flat)] - ends[len(flat) :]) / (2 * step)
        arguments = {"penalty": 0.9, "penalty_on": penalty_on, "estimator": "halves"}
        algorithm = fedipg.fedipg(model, one_gradient(), **arguments)
        client = jax.jit(partial(gradient_of, algorithm))
        s = jax.jit(jax.grad(lambda w: risks(w) @ jnp.array([3, 2]) / 5))(flat) @ (kept * flat)
        relaid = federations.relaid(federations.federation())
        for shard in (shard_in_float64(who), federations.shard_of(widened(relaid), who)):
            grads, _, metrics = client(variables, shard)
            np.testing.assert_allclose(ravel_pytree(grads)[0], differences, rtol=1e-6, atol=1e-8)
            np.testing.assert_allclose(metrics["invariance"], s, rtol=1e-9)


HALVES = (slice(0, None, 2), slice(1, None, 2))  # of a batch's real examples


def on_all_draws(estimator: str, size: int) -> tuple[Array, Array]:
    """(the mean gradient of all batches that can be drawn from a client, that of its own s^2)."""
    who, penalty = 0, 2.0
    model, federation = federations.softmax_regression(), federations.federation()
    variables, (x, y) = point(model), real_examples(who)
    held, rows = shard_in_float64(who), federations.rows_of(federation, who)
    draws = rows[np.stack(np.meshgrid(*[np.arange(len(rows))] * size), -1).reshape(-1, size)]
    arguments = {"penalty": penalty, "estimator": estimator}
    algorithm = fedipg.fedipg(model, one_gradient(), **arguments)

    @jax.jit
    def mean() -> Array:
        def of(order: Array) -> Array:
            shard = held._replace(order=order, start=jnp.int32(0), size=jnp.int32(size))
            return ravel_pytree(gradient_of(algorithm, variables, shard)[0])[0]

        return jax.vmap(of)(jnp.asarray(draws)).mean(0)

    def risk(params: Halves) -> Array:
        return mean_loss(logits_of(model, params, variables.stats, x), y)

    whole = jax.jit(fedipg.penalised_value_and_grad(risk, penalty))(variables.params)[1]
    return mean(), ravel_pytree(whole)[0]


@pytest.mark.parametrize("size", slow.after(1, [2, 3]))
def test_halves_are_unbiased_and_the_square_is_not(size: int) -> None:
    """Over all batches of 2 and of 3 drawn with replacement from 4 examples."""
    with jax.enable_x64(True):
        mean, expected = on_all_draws("halves", size)
        np.testing.assert_allclose(mean, expected, rtol=1e-9, atol=1e-12)
        mean, _ = on_all_draws("square", size)
        assert np.abs(mean - expected).max() > 1e-2


def test_a_single_example_is_not_penalised_in_halves() -> None:
    with jax.enable_x64(True):
        who = 2
        model = federations.mlp()
        variables, (x, y) = point(model), real_examples(who)
        assert len(y) == 1
        shard = shard_in_float64(who)
        algorithm = fedipg.fedipg(model, one_gradient(), penalty=1e4, estimator="halves")
        grads, _, metrics = jax.jit(partial(gradient_of, algorithm))(variables, shard)
        expected = jax.jit(
            jax.grad(lambda params: mean_loss(logits_of(model, params, variables.stats, x), y))
        )(variables.params)
        np.testing.assert_allclose(
            ravel_pytree(grads)[0], ravel_pytree(expected)[0], rtol=1e-9, atol=1e-12
        )
        assert metrics["invariance"] != 0


half_masks = jax.jit(fedipg.half_masks)


@given(mask=st.lists(st.booleans(), min_size=1, max_size=9))
def test_half_masks_part_the_real_examples(mask: list[bool]) -> None:
    first, second = map(np.asarray, half_masks(np.array(mask)))
    assert not (first & second).any()
    np.testing.assert_array_equal(first | second, mask)
    assert first.sum() - second.sum() in (0, 1)


def test_halves_take_one_pass() -> None:
    """As many matrix products as the square takes; this network's convolutions are some."""
    variables, shard = point(federations.cnn()), federations.shard_of(federations.federation(), 4)

    def products(estimator: str) -> int:
        algorithm = fedipg.fedipg(federations.cnn(), one_gradient(), estimator=estimator)
        traced = jax.make_jaxpr(partial(gradient_of, algorithm))(variables, shard)
        return str(traced).count("dot_general[")

    assert products("halves") == products("square") > 5


def decay(round: Array | float) -> Array | float:
    """A schedule: 8, 4, 2, 1, 1/2, ..."""
    return 2.0 ** (3 - round)


@derivatives
@pytest.mark.parametrize(
    ("penalty", "expected"),
    slow.after(1, [(decay, [0.4, 0.4, 2.0, 1.0, 0.5]), (5.0, [0.4, 0.4, 5.0, 5.0, 5.0])]),
)
def test_penalties_of_rounds_and_the_scale_of_the_loss(
    derivative: str, penalty: Any, expected: list[float]
) -> None:
    """(grad R + 2 penalty s (grad R + H w)) / max(1, penalty), each round with its own penalty."""
    with jax.enable_x64(True):
        model, who = federations.softmax_regression(), 3
        variables, (x, y) = point(model), real_examples(who)
        shard = shard_in_float64(who)

        def risk(params: Halves) -> Array:
            return mean_loss(logits_of(model, params, variables.stats, x), y)

        rounds = jnp.arange(5)

        def of_rounds(**arguments: Any) -> Array:
            def one(round: Array) -> Array:
                algorithm = fedipg.fedipg(
                    model, one_gradient(), derivative=derivative, penalty=penalty, **arguments
                )
                return ravel_pytree(gradient_of(algorithm, variables, shard, round)[0])[0]

            return jax.jit(jax.vmap(one))(rounds)

        plain, _, steep = (
            explicit(risk, variables.params, number)[2] for number in (0.0, 0.5, 1.0)
        )
        warm = {"warmup_rounds": 2, "warmup_penalty": 0.4}
        got, scaled = of_rounds(**warm), of_rounds(**warm, scale_loss=True)
        wanted = plain + np.array(expected)[:, None] * (steep - plain)
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
        scale = np.maximum(1, expected)[:, None]
        np.testing.assert_allclose(scaled, wanted / scale, rtol=1e-9, atol=1e-12)
        assert np.abs(steep - plain).max() > 1e-2


def test_a_schedule_that_turns_negative_is_told_as_nan() -> None:
    penalty_at = jax.jit(fedipg.penalty_schedule(lambda round: 1.0 - round, warmup_rounds=1))
    np.testing.assert_array_equal([penalty_at(t) for t in range(3)], [0.0, 0.0, np.nan])


CURVATURES = np.array([[1.0, 3.0], [2.0, 1.0], [1.5, 2.0]])  # of each client's quadratic
CENTERS = np.array([[2.0, -1.0], [-0.5, 1.5], [1.0, 2.0]])


def on_quadratics(penalty: float, num_rounds: int) -> np.ndarray:
    """The server's path [T + 1, 2] through the engine, from a point far away.

    Client i has the risk (w - center_i)' diag(curvature_i) (w - center_i) / 2.
    """
    data = Examples(jnp.asarray(np.stack([CURVATURES, CENTERS], 1)), jnp.zeros(3, jnp.int32))
    federation = Federation(data, jnp.arange(3), jnp.arange(3), jnp.ones(3, jnp.int32))

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
        curvature, center = batch.x[0]

        def risk(params: Halves) -> Array:
            return (curvature * (params.head - center) ** 2).sum() / 2

        fn = fedipg.penalised_value_and_grad(risk, penalty)
        head = variables.params.head
        return Step(fn(variables.params)[1], variables.stats, {"w0": head[0], "w1": head[1]})

    algorithm = averaging.averaging(
        federations.softmax_regression(),
        local.full_batch(optax.sgd(0.1), capacity=1),
        lambda visit: grad_fn,
        server_optimizer=optax.sgd(1.0),
        weighting="size",
    )
    start = Variables(Halves((), jnp.array([3.0, 3.0])), Halves((), ()))
    state = rounds.init(algorithm, start, federation, jax.random.key(0))
    _, (report,) = jax.jit(
        lambda: rounds.run(
            algorithm,
            state,
            schedules.everyone(3, num_rounds),
            federation,
            axis=devices.vmapped(),
        )
    )()
    return np.stack([report.metrics[name][:, 0] for name in ("w0", "w1")], 1)


@pytest.mark.slow
def test_on_quadratics_it_converges_at_fedavgs_rate_to_a_smaller_s() -> None:
    """Theorems 4 to 6 in spirit."""

    def rate(path: np.ndarray) -> float:
        distances = np.linalg.norm(path - path[-1], axis=1)
        return (distances[120] / distances[80]) ** (1 / 40)

    def invariances(w: np.ndarray) -> np.ndarray:
        return (CURVATURES * (w - CENTERS) * w).sum(1)

    def risk(w: np.ndarray) -> float:
        return (CURVATURES * (w - CENTERS) ** 2).sum(1).mean() / 2

    with jax.enable_x64(True):
        average, invariant = on_quadratics(0.0, 300), on_quadratics(0.02, 300)
    # The minimum of the mean risk, and the rate of gradient descent on it.
    minimum = (CURVATURES * CENTERS).sum(0) / CURVATURES.sum(0)
    np.testing.assert_allclose(average[-1], minimum, rtol=1e-9)
    np.testing.assert_allclose(rate(average), 1 - 0.1 * CURVATURES.mean(0).min(), rtol=1e-4)
    assert rate(invariant) < rate(average) + 0.01
    # It gives up a little risk for s, as the minimum of the mean of R + penalty s^2 must.
    assert (invariances(invariant[-1]) ** 2).mean() < 0.9 * (invariances(minimum) ** 2).mean()
    assert risk(minimum) < risk(invariant[-1]) < risk(minimum) + 0.1


def coloured_bits(right: int, wrong: int) -> np.ndarray:
    """[n, 3] a bit, its colour, the label: the bit tells 3 labels of 4, colours right : wrong."""
    rows = []
    for bit, noise, flip in itertools.product((0, 1), repeat=3):
        label = bit ^ noise
        count = (1 if noise else 3) * (wrong if flip else right)
        rows += [(2 * bit - 1, 2 * (label ^ flip) - 1, label)] * count
    return np.array(rows)


@pytest.mark.slow
@pytest.mark.parametrize("penalty_on", ["all", "classifier"])
def test_it_leaves_the_colour_for_what_all_clients_agree_on(penalty_on: str) -> None:
    """Colours tell the label of 80% and 90% of the clients' examples, and of 10% of the test's.

    Clients' gradients at FedAvg's network are opposite: one wants more of the colour, one less.
    Where the penalty has set in, and the server adapts, they point the same way.
    """
    model, parts = models.mlp(2, widths=(8,)), [coloured_bits(4, 1), coloured_bits(9, 1)]
    rows = np.concatenate(parts)
    starts = np.array([0, len(parts[0]), len(rows)])
    federation = Federation(
        Examples(jnp.asarray(rows[:, :2], jnp.float32), jnp.asarray(rows[:, 2])),
        jnp.arange(len(rows)),
        jnp.asarray(starts[:2]),
        jnp.asarray(np.diff(starts)),
    )
    work = local.full_batch(optax.sgd(1.0), capacity=len(parts[1]))
    optimizer = optax.chain(optax.add_decayed_weights(1e-3), optax.adam(0.03))

    def of_client(params: Halves, stats: Halves, part: np.ndarray) -> Array:
        logits = models.predict(
            model, Variables(params, stats), jnp.asarray(part[:, :2], jnp.float32)
        )
        return objectives.cross_entropy(logits, jnp.asarray(part[:, 2]), jnp.ones(len(part), bool))

    def run(penalty: Array, seed: Array) -> tuple[Array, Array]:
        """(accuracy [3] of both clients and the test, the cosine of the clients' gradients)."""
        algorithm = fedipg.fedipg(
            model,
            work,
            penalty=penalty,
            penalty_on=penalty_on,
            warmup_rounds=40,
            scale_loss=True,
            server_optimizer=optimizer,
            weighting="uniform",
        )
        key = jax.random.key(seed)
        variables = model.init(key, federation.data.x[:1])
        state = rounds.init(algorithm, variables, federation, key)
        schedule = schedules.everyone(2, 300)
        state, _ = rounds.run(algorithm, state, schedule, federation, axis=devices.vmapped())
        end = state.server.variables

        def accuracy(part: np.ndarray) -> Array:
            logits = models.predict(model, end, jnp.asarray(part[:, :2], jnp.float32))
            return objectives.accuracy(logits, jnp.asarray(part[:, 2]), jnp.ones(len(part), bool))

        scores = jnp.stack([accuracy(part) for part in (*parts, coloured_bits(1, 9))])
        first, second = (
            ravel_pytree(jax.grad(of_client)(end.params, end.stats, part))[0] for part in parts
        )
        norms = jnp.linalg.norm(first) * jnp.linalg.norm(second)
        return scores, first @ second / norms

    over_seeds = jax.vmap(run, in_axes=(None, 0))
    scores, cosine = jax.jit(jax.vmap(over_seeds, in_axes=(0, None)))(
        jnp.array([0.0, 100.0]), jnp.arange(5)
    )
    # One seed may need longer than the others to leave the colour.
    average, invariant = np.median(scores, axis=1)
    np.testing.assert_allclose(average, [0.8, 0.9, 0.1], atol=1e-6)
    np.testing.assert_allclose(invariant, [0.75, 0.75, 0.75], atol=1e-6)
    assert (cosine[0] < -0.9).all()
    assert (cosine[1] > 0.9).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"derivative": "reverse"},
            "derivative='reverse': must be one of forward_over_reverse, reverse_over_forward",
        ),
        ({"penalty_on": "head"}, "penalty_on='head': must be one of all, classifier"),
        ({"weighting": "n"}, "weighting='n': must be one of size, uniform"),
        *(
            ({"penalty": penalty}, f"penalty={penalty!r}: must be a finite number, at least 0")
            for penalty in (-1e-3, float("nan"), float("inf"), "0.1", True)
        ),
        (
            {"penalty": lambda round: -1.0},
            r"penalty\(0\)=-1.0: must be a finite number, at least 0",
        ),
        (
            {"penalty": lambda round: jnp.ones(2)},
            r"penalty\(0\)=float32 \(2,\): must be a finite number, at least 0",
        ),
        (
            {"warmup_rounds": 1.5},
            "warmup_rounds=1.5: must be an integer of at least 0",
        ),
        (
            {"warmup_penalty": -1.0},
            "warmup_penalty=-1.0: must be a finite number, at least 0",
        ),
        ({"estimator": "thirds"}, "estimator='thirds': must be one of square, halves"),
        (
            {"estimator": "halves", "derivative": "forward_over_reverse"},
            "derivative='forward_over_reverse': must be reverse_over_forward for "
            "estimator='halves'",
        ),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        fedipg.fedipg(federations.mlp(), one_gradient(), **arguments)


@pytest.mark.parametrize("penalty", [-1.0, float("nan"), "1"])
def test_the_kernel_refuses_wrong_arguments(penalty: Any) -> None:
    with pytest.raises(ValueError, match=r"^derivative='x': must be one of"):
        fedipg.penalised_value_and_grad(lambda w: w, 1.0, derivative="x")
    with pytest.raises(ValueError, match=f"^penalty={penalty!r}: must be a finite number"):
        fedipg.penalised_value_and_grad(lambda w: w, penalty)
    with pytest.raises(ValueError, match=r"^risk=3: must be a function params -> a scalar$"):
        fedipg.penalised_value_and_grad(3, 1.0)
    with pytest.raises(ValueError, match=r"^risk=3: must be a function params -> a scalar$"):
        fedipg.invariance(3, jnp.ones(2))


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"w": jnp.arange(2)}, r"int32 at \['w'\]"),
        (3, "int32"),
        ((1.0, np.zeros(2, bool)), r"bool at \[1\]"),
    ],
)
def test_the_kernels_refuse_parameters_that_are_no_floats(params: Any, found: str) -> None:
    def risk(w: Any) -> Array:
        return jnp.float32(0)

    message = f"^params: holds {found}, must hold floating point$"
    with pytest.raises(ValueError, match=message):
        fedipg.invariance(risk, params)
    with pytest.raises(ValueError, match=message):
        fedipg.penalised_value_and_grad(risk, 1.0)(params)


@derivatives
def test_a_penalty_may_be_traced(derivative: str) -> None:
    """And vmapped, whatever its values are: nobody can look at them."""

    def penalised(penalty: Array) -> tuple[Array, Array]:
        fn = fedipg.penalised_value_and_grad(lambda w: w**2 / 2, penalty, derivative=derivative)
        return fn(jnp.float32(3))

    penalties = np.array([0.0, 0.5, -1.0], np.float32)
    value, grad = jax.jit(jax.vmap(penalised))(penalties)
    # R = w^2 / 2, s = w^2, f = w^2 / 2 + penalty w^4.
    np.testing.assert_allclose(value, 4.5 + 81 * penalties)
    np.testing.assert_allclose(grad, 3 + 108 * penalties)


@derivatives
def test_what_the_risk_tells_beside_its_value_is_handed_on(derivative: str) -> None:
    def risk(w: Array) -> tuple[Array, dict[str, Array]]:
        return w**2 / 2, {"twice": 2 * w}

    options = {"derivative": derivative}
    fn = fedipg.penalised_value_and_grad(risk, 0.5, has_aux=True, **options)
    plain = fedipg.penalised_value_and_grad(lambda w: risk(w)[0], 0.5, **options)
    (value, aux), grad = fn(jnp.float32(3))
    assert_equal((value, grad), plain(jnp.float32(3)))
    # Of the risk itself, not a derivative of it.
    assert_equal(aux, {"twice": np.float32(6)})


@derivatives
def test_a_risk_of_another_form_is_refused(derivative: str) -> None:
    def fn(risk: Callable[[Array], Any], *, has_aux: bool = False) -> Any:
        make = fedipg.penalised_value_and_grad
        return make(risk, 0.5, derivative=derivative, has_aux=has_aux)(jnp.float32(3))

    for risk in (lambda w: (w, ()), lambda w: w[None], lambda w: w.astype(int), lambda w: {"a": w}):
        with pytest.raises(ValueError, match=r"^risk: returns .*, must return a real scalar"):
            fn(risk)
        with pytest.raises(ValueError, match="must return a real scalar"):
            fedipg.invariance(risk, jnp.float32(3))
    for risk in (lambda w: w, lambda w: (w[None], ()), lambda w: (w, (), ())):
        with pytest.raises(ValueError, match=r"must return \(a real scalar, aux\)"):
            fn(risk, has_aux=True)


def flops(model: Model, shape: tuple[int, ...], make: Callable[[Work], Algorithm]) -> float:
    """The floating-point operations of a local step, as XLA counts them; nothing runs."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    y = jax.ShapeDtypeStruct(shape[:1], jnp.int32)

    def gradient(variables: Variables, x: Array, y: Array) -> Halves:
        def run(grad_fn: GradFn, start: Local, shard: Shard, key: Array) -> Trained:
            step = grad_fn(start.variables, Batch(x, y, jnp.ones(len(y), bool)), key)
            moved = start.variables._replace(params=step.grads)
            return Trained(Local(moved, ()), jnp.int32(1), step.metrics, ())

        work = Work(lambda variables: Local(variables, ()), run)
        shard = federations.shard_of(federations.federation(), 0)
        return gradient_of(make(work), variables, shard)[0]

    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.jit(gradient).lower(variables, x, y).compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("model", "shape", "most"),
    slow.after(
        1,
        [
            (models.mlp(10, widths=(390, 390)), (64, 784), 1.2),
            (models.lenet(10), (64, 28, 28, 1), 2.4),
        ],
    ),
    ids=["mlp", "lenet"],
)
def test_a_step_costs_little_more_than_fedavgs(
    model: Model, shape: tuple[int, ...], most: float
) -> None:
    """Of a dense network the penalty takes its products from the gradient (`cse`)."""
    plain = flops(model, shape, lambda work: fedavg.fedavg(model, work))
    penalised = flops(model, shape, lambda work: fedipg.fedipg(model, work, penalty=0.1))
    assert plain < penalised < most * plain
