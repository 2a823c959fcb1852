"""CAFE's kernels against their identities, its rounds against NumPy, in float64."""

from typing import NamedTuple

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

import federations
import linear_networks as linear
from federations import plain
from fedjax_inv import devices, local, models, rounds
from fedjax_inv.algorithms import cafe
from fedjax_inv.types import Array

SERVER_RATE, SERVER_MOMENTUM = 1.3, 0.5
DECAY = 0.7
K, D = 4, 3  # of the kernels' tests
SETTINGS = {"alpha": 0.4, "beta": 0.3, "gamma": 0.1, "scale": 3.0}


def normalised(v: np.ndarray) -> np.ndarray:
    norm = np.sqrt((v**2).sum(-1, keepdims=True))
    return np.where(norm > 0, v / np.where(norm > 0, norm, 1), 0)


def direction(mode: str, source: np.ndarray) -> np.ndarray:
    if mode == "svd":
        return np.linalg.svd(source)[2][0] if source.any() else np.zeros(len(source[0]))
    return normalised(source.mean(0) if mode == "row_mean" else source)


class Chosen(NamedTuple):
    """The arguments of a test, with their defaults."""

    drift_mode: str = "svd"
    orthogonal_directions: bool = True
    feature_calibration: bool = True
    parameter_calibration: bool = True
    history_average: bool = True


def project(rows: np.ndarray, d: np.ndarray) -> np.ndarray:
    return (rows * d).sum(-1, keepdims=True) * d


def calibrated(w: np.ndarray, d_g: np.ndarray, d_l: np.ndarray, c: Chosen) -> np.ndarray:
    norm = np.sqrt((w**2).sum(1, keepdims=True) + 1e-12)
    u = w / (norm + SETTINGS["gamma"]) if c.parameter_calibration else w
    if not c.feature_calibration:
        return u
    return u - SETTINGS["alpha"] * project(u, d_g) - SETTINGS["beta"] * project(u, d_l)


def trained(
    start: linear.Weights, mean: np.ndarray, x: np.ndarray, y: np.ndarray, c: Chosen
) -> tuple[linear.Weights, np.ndarray]:
    """A client's change by its steps, and its mean features: the chain rule by hand."""
    body, w = start[0], start[1].T
    d_g = direction(c.drift_mode, mean if c.drift_mode == "features" else w)
    velocity = [np.zeros_like(body), np.zeros_like(w)]
    total, mean = np.zeros_like(w), np.zeros(w.shape[1])
    for t in range(1, 1 + linear.NUM_STEPS):
        d_l = direction(c.drift_mode, mean if c.drift_mode == "features" else velocity[1])
        if c.orthogonal_directions:
            d_l = normalised(d_l - project(d_l, d_g))
        q = calibrated(w, d_g, d_l, c)
        average = (total + q) / t if c.history_average else q
        h = x @ body
        n = np.sqrt((h**2).sum(1, keepdims=True) + 1e-12)
        z = SETTINGS["scale"] * (h / n) @ average.T
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        dz = SETTINGS["scale"] * (p - np.eye(len(w))[y]) / len(y)
        dq = dz.T @ (h / n)
        if c.history_average:
            dq = dq / t
        if c.feature_calibration:
            dq = dq - SETTINGS["alpha"] * project(dq, d_g) - SETTINGS["beta"] * project(dq, d_l)
        if c.parameter_calibration:
            norm = np.sqrt((w**2).sum(1, keepdims=True) + 1e-12)
            whole = norm + SETTINGS["gamma"]
            dq = dq / whole - w * (w * dq).sum(1, keepdims=True) / (norm * whole**2)
        dh = dz @ average
        dh = dh / n - h * (h * dh).sum(1, keepdims=True) / n**3
        grads = zip(velocity, (x.T @ dh, dq), strict=True)
        velocity = [linear.MOMENTUM * v + g for v, g in grads]
        body, w = body - linear.RATE * velocity[0], w - linear.RATE * velocity[1]
        total = total + q
        mean = DECAY * mean + (1 - DECAY) * h.mean(0)
    return [body - start[0], w.T - start[1]], mean


@pytest.mark.parametrize(
    "chosen",
    [
        Chosen("row_mean"),
        Chosen("classwise", orthogonal_directions=False),
        Chosen("features"),
        Chosen(feature_calibration=False),
        Chosen(),
        *(
            pytest.param(chosen, marks=pytest.mark.slow)
            for chosen in (
                Chosen("classwise", history_average=False),
                Chosen(parameter_calibration=False),
            )
        ),
    ],
    ids=lambda chosen: ",".join(map(str, chosen)),
)
def test_cafe_is_its_formula(chosen: Chosen) -> None:
    with jax.enable_x64(True):
        held = linear.held()
        algorithm = cafe.cafe(
            linear.MODEL,
            linear.work(),
            server_optimizer=optax.sgd(SERVER_RATE, SERVER_MOMENTUM),
            feature_decay=DECAY,
            **SETTINGS,
            **chosen._asdict(),
        )
        states = linear.run(algorithm, held)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        velocity, mean = [np.zeros_like(part) for part in w], np.zeros(3)
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            ends = [trained(w, mean, *examples[client], chosen) for client in clients]
            sizes = [linear.SIZES[client] for client in clients]
            mean = np.average([end[1] for end in ends], 0, sizes)
            moves = linear.mean([end[0] for end in ends], sizes)
            velocity = [SERVER_MOMENTUM * v + m for v, m in zip(velocity, moves, strict=True)]
            w = [a + SERVER_RATE * v for a, v in zip(w, velocity, strict=True)]
            linear.assert_weights(state, w)
            h = np.asarray(held.data.x) @ w[0]
            source = mean if chosen.drift_mode == "features" else w[1].T
            q = calibrated(w[1].T, direction(chosen.drift_mode, source), np.zeros(3), chosen)
            z = SETTINGS["scale"] * h / np.sqrt((h**2).sum(1, keepdims=True) + 1e-12) @ q.T
            served = algorithm.predict(state.server, (), held.data.x)
            np.testing.assert_allclose(served, z, rtol=1e-9, atol=1e-11)


def test_the_leading_direction_is_that_of_the_singular_value_decomposition() -> None:
    rng = np.random.default_rng(0)
    leading = jax.jit(cafe.leading_direction)
    for rows, columns in ((1, 5), (5, 1), (10, 3), (10, 64)):
        matrix = rng.normal(size=(rows, columns)).astype(np.float32)
        expected = np.linalg.svd(matrix)[2][0]
        for factor in (1e-30, 1.0, -1e30):  # squares of the first underflow, of the last overflow
            got = np.asarray(leading(jnp.asarray(factor * matrix, jnp.float32)))
            np.testing.assert_allclose(got * np.sign(got @ expected), expected, atol=2e-5)
    # Rows that sum to 0, as those of a linear softmax's gradient.
    matrix = rng.normal(size=(10, 64)).astype(np.float32)
    matrix -= matrix.mean(0)
    got, expected = leading(jnp.asarray(matrix)), np.linalg.svd(matrix)[2][0]
    np.testing.assert_allclose(abs(got @ expected), 1, atol=1e-5)


def test_nan_stays_nan() -> None:
    matrix = np.array([[3, np.nan], [1, 2]])
    assert np.isnan(cafe.leading_direction(matrix)).all()
    np.testing.assert_allclose(cafe.unit(matrix), [[np.nan] * 2, matrix[1] / 5**0.5], rtol=1e-6)
    unit = np.array([1.0, 0])
    assert np.isnan(cafe.orthogonal(unit * np.nan, unit)).all()


def test_nothing_has_no_direction_and_no_bad_gradient() -> None:
    """Neither a zero momentum, nor zero features, nor zero rows, nor parallel directions."""
    zeros, some = jnp.zeros((4, 3)), jnp.arange(12.0).reshape(4, 3)

    def value(matrix: Array, classifier: Array, features: Array, same: Array) -> Array:
        total = jnp.zeros(())
        for of in (cafe.leading_direction, cafe.unit, lambda m: cafe.unit(m.mean(0))):
            direction = of(matrix)
            there = cafe.orthogonal(cafe.unit(same), cafe.unit(same))
            for d in (direction, jnp.broadcast_to(there, direction.shape)):
                rows = cafe.calibrate(classifier, d, d, alpha=0.5, beta=0.5, gamma=0.0)
                total += cafe.logits(features, rows, scale=16.0).sum()
        return total

    same = jnp.array([0.3, -0.2, 1.0])
    gradients = jax.jit(jax.value_and_grad(value, (0, 1, 2, 3)))
    for arguments in (
        (zeros, some, some, same),
        (some, zeros, some, same),
        (some, some, zeros, same),
        (zeros, zeros, zeros, jnp.zeros(3)),
        (1e-38 * some, some.at[1].set(0), some.at[2].set(0), same),
    ):
        chex.assert_tree_all_finite(gradients(*arguments))

    @jax.jit
    def directions() -> tuple[Array, ...]:
        unit = cafe.unit(same)
        turned = cafe.unit(unit + 1e-3 * jnp.array([1.0, 0, 0]))
        none = cafe.leading_direction(zeros), cafe.unit(zeros), cafe.orthogonal(unit, -unit)
        return *none, cafe.orthogonal(turned, unit) @ unit

    *none, overlap = directions()
    assert not any(direction.any() for direction in none)
    assert abs(overlap) < 1e-3


class Drawn(NamedTuple):
    classifier: Array
    features: Array
    d_g: Array
    d_l: Array


def drawn(seed: int, *, classwise: bool) -> Drawn:
    rng = np.random.default_rng(seed)
    shape = (K, D) if classwise else (D,)
    d_g, d_l = (cafe.unit(jnp.asarray(rng.normal(size=shape))) for _ in range(2))
    classifier, features = (
        jnp.asarray(rng.normal(size=(K, D))),
        jnp.asarray(rng.normal(size=(6, D))),
    )
    return Drawn(classifier, features, d_g, cafe.orthogonal(d_l, d_g))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    alpha=st.floats(0, 1),
    beta=st.floats(0, 1),
    classwise=st.booleans(),
)
def test_identities_of_the_calibrated_logits(
    seed: int, alpha: float, beta: float, classwise: bool
) -> None:
    with jax.enable_x64(True):
        w, h, d_g, d_l = drawn(seed, classwise=classwise)

        def z(h: Array = h, d_g: Array = d_g, d_l: Array = d_l) -> Array:
            q = cafe.calibrate(w, d_g, d_l, alpha=alpha, beta=beta, gamma=0.1)
            return cafe.logits(h, q, scale=16.0)

        np.testing.assert_allclose(z(h=2.5 * h), z(), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(z(d_g=-d_g, d_l=-d_l), z(), rtol=1e-12, atol=1e-12)
        assert np.abs(z()).max() <= 16
        q = cafe.calibrate(w, d_g, d_l, alpha=1.0, beta=1.0, gamma=0.1)
        for d in (d_g, d_l):
            np.testing.assert_allclose((q * d).sum(-1), 0, atol=1e-12)


def test_features_of_zeros_have_logits_and_gradients_of_zero() -> None:
    q = jnp.ones((4, 3))
    h = jnp.array([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    value, grad = jax.value_and_grad(lambda h: cafe.logits(h, q, scale=16.0)[:, 0].sum())(h)
    np.testing.assert_allclose(value, 16 * np.sqrt(2), rtol=1e-6)
    assert not grad[0].any()
    np.testing.assert_allclose(grad[1], [0, 0, 16 / np.sqrt(2)], atol=1e-5)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_drift_is_removed_once_it_leads_the_classifier(factor: float) -> None:
    """A drift t a d^T of a classifier to which it is orthogonal on both sides.

    Its singular value is t ||a||. The classifier's own ones stay.
    """
    with jax.enable_x64(True):
        a, d = np.array([1.0, 1, 0, 0]), np.ones(D) / np.sqrt(D)
        free = [np.eye(len(v)) - np.outer(v, v) / (v @ v) for v in (a, d)]
        plain = free[0] @ np.random.default_rng(0).normal(size=(K, D)) @ free[1]
        t = factor * np.linalg.svd(plain)[1][0] / np.linalg.norm(a)
        drifted = plain + t * np.outer(a, d)
        leading = cafe.leading_direction(jnp.asarray(drifted))
        np.testing.assert_allclose(abs(leading @ d), factor > 1, atol=1e-9)
        lengths = np.sqrt((plain**2).sum(1) + (t * a) ** 2)[:, None] + 0.1
        for alpha in (0.2, 1.0):
            left = 1 - alpha if factor > 1 else 1.0
            got = cafe.calibrate(
                jnp.asarray(drifted), leading, 0 * leading, alpha=alpha, beta=0.0, gamma=0.1
            )
            np.testing.assert_allclose(got @ d, left * t * a / lengths[:, 0], atol=1e-9)
            if factor > 1:  # the rest stays, but the drift has made its rows shorter
                np.testing.assert_allclose(got @ free[1], plain / lengths, atol=1e-9)


def test_a_traced_beta_without_momentum_is_nan_unless_it_is_0() -> None:
    federation, key = linear.held(), jax.random.key(0)
    plain = local.full_batch(optax.sgd(0.1), capacity=8)

    def loss(beta: Array) -> Array:
        algorithm = cafe.cafe(linear.MODEL, plain, beta=beta)
        variables = linear.MODEL.init(key, federation.data.x)
        state = rounds.init(algorithm, variables, federation, key)
        cohort = federations.cohort([0])
        state, _ = rounds.step(algorithm, state, cohort, federation, axis=devices.chunked(1))
        return jnp.stack([jnp.sum(leaf) for leaf in jax.tree.leaves(state.server.variables)]).sum()

    losses = jax.jit(jax.vmap(loss))(np.array([0.0, 0.2], np.float32))
    np.testing.assert_array_equal(jnp.isnan(losses), [False, True])


def test_positions_are_averaged_as_the_head_does() -> None:
    """With all parts off, and features at length 1, the logits are those of the network."""
    model = federations.cnn
    federation = federations.in_floats(federations.federation())
    algorithm = cafe.cafe(
        model(),
        linear.work(),
        scale=1.0,
        feature_calibration=False,
        parameter_calibration=False,
    )

    @jax.jit
    def outputs() -> tuple[Array, Array]:
        variables = federations.initial(model(), jax.random.key(0))
        state = rounds.init(algorithm, variables, federation, jax.random.key(0))
        got = algorithm.predict(state.server, (), federation.data.x)
        return got, models.predict(model(), variables, federation.data.x)

    got, whole = plain(outputs())
    lengths = np.linalg.norm(whole, axis=1) / np.linalg.norm(got, axis=1)
    np.testing.assert_allclose(got * lengths[:, None], whole, rtol=1e-4, atol=1e-5)
