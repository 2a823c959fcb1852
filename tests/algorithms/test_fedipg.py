"""FedIPG's identities, in float64: Eq. 9, 30, 36, 37 and what follows from them."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

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
from federations import assert_equal
from fedjax_inv import averaging, local, models, penalties
from fedjax_inv.algorithms import fedipg
from fedjax_inv.types import (
    Algorithm,
    Array,
    GradFn,
    Halves,
    Local,
    Metrics,
    Model,
    Shard,
    Trained,
    Tree,
    Variables,
    Visit,
    Work,
)

Risk = Callable[[Tree], Array]


def forward_over_reverse(risk: Risk, params: Tree, penalty: float) -> Tree:
    """The gradient by pushing w through the gradient of R, which gives grad R and H w together."""
    grads, products = jax.jvp(jax.grad(risk), (params,), (params,))
    scale = 2 * penalty * optax.tree.vdot(grads, params)
    return optax.tree.add_scale(grads, scale, optax.tree.add(grads, products))


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


def test_the_gradient_is_that_of_an_explicit_hessian() -> None:
    with jax.enable_x64(True):
        penalty, (risk, params) = 0.3, smooth_risk()
        fn = fedipg.penalised_value_and_grad(risk, penalty)
        value, grads = jax.jit(fn)(params)
        s, expected_value, expected = explicit(risk, params, penalty)
        assert abs(s) > 0.1
        np.testing.assert_allclose(jax.jit(partial(fedipg.invariance, risk))(params), s, rtol=1e-12)
        np.testing.assert_allclose(value, expected_value, rtol=1e-12)
        np.testing.assert_allclose(ravel_pytree(grads)[0], expected, rtol=1e-10, atol=1e-12)
        pushed = jax.jit(partial(forward_over_reverse, risk))(params, penalty)
        federations.assert_close(grads, pushed, rtol=1e-10, atol=1e-12)


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


def shard_in_float64(who: int) -> Shard:
    """A client of `federations.federation`."""
    held = federations.in_floats(federations.federation())
    return federations.shard_of(widened(held), who)


def real_examples(who: int) -> tuple[Array, Array]:
    """x and y of `shard_in_float64`, in their order."""
    rows = federations.rows_of(federations.federation(), who)
    x, y = shard_in_float64(who).data[:2]
    return x[rows], y[rows]


def logits_of(model: Model, params: Halves, stats: Halves, x: Array) -> Array:
    return models.apply(model, Variables(params, stats), x, jnp.ones(len(x), bool), True)[0]


def mean_loss(logits: Array, y: Array) -> Array:
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@pytest.mark.parametrize("penalty_on", slow.after(1, ["classifier", "all"]))
def test_a_client_follows_the_formula_whatever_lies_beside_its_rows(penalty_on: str) -> None:
    """grad R + 2 penalty s (P grad R + H P w), s = <P grad R, w>, over the real examples."""
    with jax.enable_x64(True):
        who = 4  # has fewer examples than the batch has places
        model = models.from_blocks([federations.NormedHidden(3), federations.Linear(3)], 1)
        variables, (x, y) = point(model), real_examples(who)

        @jax.jit
        def risk(params: Halves) -> Array:
            return mean_loss(logits_of(model, params, variables.stats, x), y)

        kept = kept_by(penalty_on, variables.params)
        s, _, expected = explicit(risk, variables.params, 0.4, kept)
        assert abs(s) > 1e-2
        relaid = federations.shard_of(widened(federations.relaid(federations.federation())), who)
        algorithm = fedipg.fedipg(model, one_gradient(), penalty=0.4, penalty_on=penalty_on)
        client = jax.jit(partial(gradient_of, algorithm))
        for shard in (shard_in_float64(who), relaid):
            grads, _, metrics = client(variables, shard)
            np.testing.assert_allclose(ravel_pytree(grads)[0], expected, rtol=1e-8, atol=1e-10)
            np.testing.assert_allclose(metrics["invariance"], s, rtol=1e-10)
            np.testing.assert_allclose(metrics["loss"], risk(variables.params), rtol=1e-10)


def test_on_a_linear_classifier_it_is_irm() -> None:
    """R + penalty (d/dt R(t logits))^2 at t = 1, Arjovsky et al. 2019, whatever the body is."""
    with jax.enable_x64(True):
        model, who = federations.mlp(), 4
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


def test_halves_are_unbiased_and_the_square_is_not() -> None:
    """Over all batches of 2 drawn with replacement from 4 examples."""
    with jax.enable_x64(True):
        mean, expected = on_all_draws("halves", 2)
        np.testing.assert_allclose(mean, expected, rtol=1e-9, atol=1e-12)
        mean, _ = on_all_draws("square", 2)
        assert np.abs(mean - expected).max() > 1e-2


half_masks = jax.jit(fedipg.half_masks)


@given(mask=st.lists(st.booleans(), min_size=1, max_size=9))
def test_half_masks_part_the_real_examples(mask: list[bool]) -> None:
    first, second = map(np.asarray, half_masks(np.array(mask)))
    assert not (first & second).any()
    np.testing.assert_array_equal(first | second, mask)
    assert first.sum() - second.sum() in (0, 1)


def decay(round: Array | float) -> Array | float:
    """A schedule: 8, 4, 2, 1, 1/2, ..."""
    return 2.0 ** (3 - round)


def test_penalties_of_rounds_and_the_scale_of_the_loss() -> None:
    """(grad R + 2 penalty s (grad R + H w)) / max(1, penalty), each round with its own penalty."""
    with jax.enable_x64(True):
        expected = [0.4, 0.4, 2.0, 1.0, 0.5]
        model, who = federations.softmax_regression(), 3
        variables, (x, y) = point(model), real_examples(who)
        shard = shard_in_float64(who)

        def risk(params: Halves) -> Array:
            return mean_loss(logits_of(model, params, variables.stats, x), y)

        rounds = jnp.arange(5)

        def of_rounds(**arguments: Any) -> Array:
            def one(round: Array) -> Array:
                algorithm = fedipg.fedipg(model, one_gradient(), penalty=decay, **arguments)
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
    penalty_at = jax.jit(penalties.schedule(lambda round: 1.0 - round, 1, 0.0))
    np.testing.assert_array_equal([penalty_at(t) for t in range(3)], [0.0, 0.0, np.nan])


def test_a_penalty_may_be_traced() -> None:
    """And vmapped, whatever its values are: nobody can look at them."""

    def penalised(penalty: Array) -> tuple[Array, Array]:
        fn = fedipg.penalised_value_and_grad(lambda w: w**2 / 2, penalty)
        return fn(jnp.float32(3))

    penalties = np.array([0.0, 0.5, -1.0], np.float32)
    value, grad = jax.jit(jax.vmap(penalised))(penalties)
    # R = w^2 / 2, s = w^2, f = w^2 / 2 + penalty w^4.
    np.testing.assert_allclose(value, 4.5 + 81 * penalties)
    np.testing.assert_allclose(grad, 3 + 108 * penalties)


def test_what_the_risk_tells_beside_its_value_is_handed_on() -> None:
    def risk(w: Array) -> tuple[Array, dict[str, Array]]:
        return w**2 / 2, {"twice": 2 * w}

    fn = fedipg.penalised_value_and_grad(risk, 0.5, has_aux=True)
    plain = fedipg.penalised_value_and_grad(lambda w: risk(w)[0], 0.5)
    (value, aux), grad = fn(jnp.float32(3))
    assert_equal((value, grad), plain(jnp.float32(3)))
    # Of the risk itself, not a derivative of it.
    assert_equal(aux, {"twice": np.float32(6)})
