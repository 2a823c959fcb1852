"""Optimizers by name, and learning rates that go with the rounds."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import experiment, method
from fedjax_inv_experiments.config import Config

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.1, -0.2])}
GRADS = jax.tree.map(lambda leaf: 0.3 * leaf + 0.1, PARAMS)


def updates(optimizer: optax.GradientTransformation, steps: int = 2) -> list[Any]:
    result, state = [], optimizer.init(PARAMS)
    for _ in range(steps):
        update, state = optimizer.update(GRADS, state, PARAMS)
        result.append(update)
    return result


@pytest.mark.parametrize("name", method.OPTIMIZERS)
def test_an_optimizer_of_any_name_steps_with_a_traced_rate(name: str) -> None:
    """And its state keeps its shapes, as loops need it to."""

    def step(rate: jax.Array) -> Any:
        optimizer = method.optimizer(config.of(optimizer=name).training, "optimizer", rate)
        state = optimizer.init(PARAMS)
        return state, optimizer.update(GRADS, state, PARAMS)

    before, (update, after) = jax.eval_shape(step, jnp.float32(0.1))
    chex.assert_trees_all_equal_shapes_and_dtypes(update, PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)


@pytest.mark.parametrize(
    ("group", "field", "expected"),
    [
        (config.of(), "optimizer", optax.sgd(0.2)),
        (config.of(momentum=0.9), "optimizer", optax.sgd(0.2, momentum=0.9)),
        (
            config.of(momentum=0.9, optimizer_set=("nesterov=true",)),
            "optimizer",
            optax.sgd(0.2, momentum=0.9, nesterov=True),
        ),
        (
            config.of(optimizer="adamw", optimizer_set=("b1=0.8", "weight_decay=0.5")),
            "optimizer",
            optax.adamw(0.2, b1=0.8, weight_decay=0.5),
        ),
        (
            config.of(optimizer="rmsprop", optimizer_set=("momentum=0.5",)),
            "optimizer",
            optax.rmsprop(0.2, momentum=0.5),
        ),
        (config.of(), "server_optimizer", optax.sgd(0.2)),
        (
            config.of(server_optimizer="adam"),
            "server_optimizer",
            optax.adam(0.2, b1=0.9, b2=0.99, eps=1e-3),
        ),
        (
            config.of(server_optimizer="yogi"),
            "server_optimizer",
            optax.yogi(0.2, b1=0.9, b2=0.99, eps=1e-3),
        ),
        (config.of(server_optimizer="lion"), "server_optimizer", optax.lion(0.2)),
    ],
)
def test_an_optimizer_is_what_its_flags_say(
    group: Config, field: str, expected: optax.GradientTransformation
) -> None:
    optimizer = method.optimizer(group.training, field, 0.2)
    chex.assert_trees_all_equal(optimizer.init(PARAMS), expected.init(PARAMS))
    chex.assert_trees_all_equal(updates(optimizer), updates(expected))


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_schedules_are_their_formulas(kind: str, warmup: int) -> None:
    def factor(t: int) -> float:
        if t < warmup:
            return (t + 1) / (warmup + 1)
        progress = min((t - warmup) / (9 - warmup), 1)
        return (1 + np.cos(np.pi * progress)) / 2 if kind == "cosine" else 1.0

    flags = dict(schedule=kind, warmup_rounds=warmup, rounds=9)
    assembled = experiment.make(config.of(**flags))
    schedules = assembled.plan(assembled.cells[0]).experiment.schedules
    if (kind, warmup) == ("constant", 0):
        assert schedules == {}
        return
    found = [schedules["learning_rate"](jnp.int32(t)) for t in range(9)]
    np.testing.assert_allclose(found, [factor(t) for t in range(9)], rtol=1e-5, atol=1e-7)
