"""MOON against its formulas, and two rounds of it against a loop by `jax.grad` over plain code."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import linear_networks as linear
import slow
from fedjax_inv import local, rounds
from fedjax_inv.algorithms import moon
from fedjax_inv.types import Algorithm, Setup, Tree

NUM_STEPS, PENALTY, TEMPERATURE = 2, 1.5, 0.6


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


def risk(params: Tree, received: Tree, previous: Tree, x: Any, y: Any) -> Any:
    """Of one client's examples, all at once."""

    def z_of(params: Tree) -> Any:
        z = x @ params["body"]
        if "Dense_0" in params:
            inner, outer = params["Dense_0"], params["Dense_1"]
            z = jax.nn.relu(z @ inner["kernel"] + inner["bias"]) @ outer["kernel"] + outer["bias"]
        return z

    z, log_p = z_of(params), jax.nn.log_softmax(x @ params["body"] @ params["w"])

    def unit(z: Any) -> Any:
        return z / jnp.linalg.norm(z, axis=1, keepdims=True)

    def similar(other: Tree) -> Any:
        return jnp.exp((unit(z) * unit(z_of(other))).sum(1) / TEMPERATURE)

    g, p = similar(received), similar(previous)
    return -log_p[jnp.arange(len(y)), y].mean() - PENALTY * jnp.log(g / (g + p)).mean()


def named(state: rounds.State) -> Tree:
    body, head = state.server.variables.params
    return jax.tree.map(np.asarray, {"body": body, "w": head["w"], **head.get("projection", {})})


def with_biases(algorithm: Algorithm) -> Algorithm:
    """The algorithm from biases that are not 0.

    Else those of an example whose units are all off are its z, and after a round among equal
    networks they are mere rounding.
    """

    def init_server(setup: Setup) -> Tree:
        server = algorithm.init_server(setup)

        def moved(path: Any, leaf: Any) -> Any:
            return leaf + 0.3 if path[-1].key == "bias" else leaf

        params = server.variables.params
        head = jax.tree_util.tree_map_with_path(moved, params.head)
        variables = server.variables._replace(params=params._replace(head=head))
        return server._replace(variables=variables)

    return algorithm._replace(init_server=init_server)


@pytest.mark.parametrize("projection", slow.after(1, [5, 0]))
def test_moon_is_its_formula(projection: int) -> None:
    settings = {"penalty": PENALTY, "temperature": TEMPERATURE, "projection": projection}
    with jax.enable_x64(True):
        held, gradient = linear.held(), jax.jit(jax.grad(risk))
        work = local.full_batch(optax.sgd(linear.RATE), capacity=8, num_steps=NUM_STEPS)
        algorithm = with_biases(moon.moon(linear.NAMED, work, **settings))
        states = linear.run(algorithm, held, model=linear.NAMED)
        params = first = named(states[0])
        previous, examples = [params] * len(linear.SIZES), linear.examples_of(held)
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            for who in clients:
                now = params
                for _ in range(NUM_STEPS):
                    grads = gradient(now, params, previous[who], *examples[who])
                    now = jax.tree.map(lambda w, g: w - linear.RATE * np.asarray(g), now, grads)
                previous[who] = now
            sizes, ends = [linear.SIZES[who] for who in clients], [previous[i] for i in clients]
            params = jax.tree.map(lambda *leaves, n=sizes: np.average(leaves, 0, n), *ends)
            chex.assert_trees_all_close(named(state), params, rtol=1e-5, atol=1e-6)
        assert np.abs(params["body"] - first["body"]).max() > 1e-2
