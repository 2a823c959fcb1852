"""MOON against its formulas, and two rounds of it against a loop by `jax.grad` over plain code."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

import federations
import slow
from federations import assert_close
from fedjax_inv import devices, local, rounds
from fedjax_inv.algorithms import moon
from fedjax_inv.types import Tree, Variables

RATE, NUM_STEPS, PENALTY, TEMPERATURE = 0.2, 2, 1.5, 0.6
ATTEND = ((0, 3), (3, 4, 2))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), temperature=st.floats(0.1, 3), factor=st.floats(0.01, 100))
def test_contrastive_is_its_formula_and_of_no_length(
    seed: int, temperature: float, factor: float
) -> None:
    z, near, last = np.random.default_rng(seed).normal(size=(3, 5, 4))
    expected = []
    for row in zip(z, near, last, strict=True):
        g, p = (np.exp(cosine(row[0], other) / temperature) for other in row[1:])
        expected.append(-np.log(g / (g + p)))
    got = moon.contrastive(*map(jnp.asarray, (factor * z, near, last)), temperature=temperature)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_features_of_zeros_and_equal_networks_have_gradients() -> None:
    for z in (jnp.zeros((2, 3)), jnp.ones((2, 3))):
        value, grad = jax.value_and_grad(
            lambda z: moon.contrastive(z, jnp.ones((2, 3)), jnp.ones((2, 3)), temperature=0.5).sum()
        )(z)
        np.testing.assert_allclose(value, 2 * np.log(2), rtol=1e-6)
        np.testing.assert_allclose(grad, 0, atol=1e-6)
    near, last = jnp.eye(3)[:2], -jnp.eye(3)[:2]
    mixed = jnp.array([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    grad = jax.grad(lambda z: moon.contrastive(z, near, last, temperature=0.5).sum())(mixed)
    assert not grad[0].any()
    assert 0.01 < abs(grad[1]).max() < 1


def reference(params: Tree, federation: Any, projection: int) -> Tree:
    """The network after the rounds: one hidden layer, full batches."""
    data = federation.data

    def z_of(params: Tree, x: Any) -> Any:
        hidden = jax.nn.relu(x @ params["w"] + params["a"])
        if not projection:
            return hidden, hidden
        inner = jax.nn.relu(hidden @ params["p"] + params["pa"])
        return hidden, inner @ params["q"] + params["qa"]

    def risk(params: Tree, received: Tree, previous: Tree, x: Any, y: Any) -> Any:
        hidden, z = z_of(params, x)
        log_p = jax.nn.log_softmax(hidden @ params["c"] + params["b"])

        def similar(other: Tree) -> Any:
            its = z_of(other, x)[1]
            norms = jnp.linalg.norm(z, axis=1) * jnp.linalg.norm(its, axis=1)
            return jnp.exp((z * its).sum(1) / norms / TEMPERATURE)

        g, p = similar(received), similar(previous)
        return -log_p[jnp.arange(len(y)), y].mean() - PENALTY * jnp.log(g / (g + p)).mean()

    gradient = jax.jit(jax.grad(risk))
    previous = dict.fromkeys(range(federations.NUM_CLIENTS), params)
    for cohort in ATTEND:
        ends, sizes = [], []
        for who in cohort:
            rows = federations.rows_of(federation, who)
            x = np.asarray(data.x, np.float64)[rows].reshape(len(rows), -1)
            now = params
            for _ in range(NUM_STEPS):
                grads = gradient(now, params, previous[who], x, np.asarray(data.y)[rows])
                now = jax.tree.map(lambda w, g: w - RATE * np.asarray(g), now, grads)
            previous[who] = now
            ends.append(now)
            sizes.append(len(rows))
        params = jax.tree.map(lambda *leaves, n=sizes: np.average(leaves, 0, n), *ends)
    return params


@pytest.mark.parametrize("projection", slow.after(1, [5, 0]))
def test_moon_is_its_formula(projection: int) -> None:
    federation = federations.in_floats(federations.federation())
    work = local.full_batch(optax.sgd(RATE), capacity=8, num_steps=NUM_STEPS)
    algorithm = moon.moon(
        federations.mlp(), work, penalty=PENALTY, temperature=TEMPERATURE, projection=projection
    )
    variables = federations.initial(federations.mlp(), jax.random.key(0))
    state = rounds.init(algorithm, variables, federation, jax.random.key(1))

    def named(variables: Variables) -> Tree:
        body, head = variables.params
        hidden, last = body["blocks_0"]["Dense_0"], head["blocks_0"]["Dense_0"]
        leaves = {
            "w": hidden["kernel"],
            "a": hidden["bias"],
            "c": last["kernel"],
            "b": last["bias"],
        }
        if projection:
            inner, outer = (head["projection"][name] for name in ("Dense_0", "Dense_1"))
            leaves |= {"p": inner["kernel"], "pa": inner["bias"]}
            leaves |= {"q": outer["kernel"], "qa": outer["bias"]}
        return jax.tree.map(np.asarray, leaves)

    with jax.enable_x64(True):
        expected = reference(named(state.server.variables), federation, projection)

    @jax.jit
    def step(state: rounds.State, present: Any) -> Any:
        cohort = federations.cohort([3, 0, 4, 2, 1])._replace(present=present)
        return rounds.step(algorithm, state, cohort, federation, axis=devices.chunked(1))

    first = named(state.server.variables)
    for cohort in ATTEND:
        state, reports = step(state, np.isin([3, 0, 4, 2, 1], cohort))
    assert set(reports[0].metrics) == {"loss", "contrast"}
    got = named(state.server.variables)
    assert_close(got, jax.tree.map(np.float32, expected))
    if projection:
        assert np.abs(got["q"] - first["q"]).max() > 1e-3
