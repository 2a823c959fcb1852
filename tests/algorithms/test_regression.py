"""A round of regression of every algorithm that takes values."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
from fedjax_inv import algorithms, devices, evaluation, local, models, objectives, rounds
from fedjax_inv.data import federation as data
from fedjax_inv.types import Facts


def _facts(name: str) -> Facts:
    module = importlib.import_module(f"{algorithms.__name__}.{name}")
    return getattr(module, "FACTS", Facts())


OTHERS = [name for name in algorithms.LISTED if not _facts(name).needs_classes]


def test_four_algorithms_need_classes() -> None:
    assert set(algorithms.LISTED) - set(OTHERS) == {"cafe", "fedcfa", "fedproto", "fedsr"}


@pytest.mark.parametrize("name", OTHERS)
def test_a_round_takes_values(name: str) -> None:
    """By shapes alone: nothing is compiled."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(15, 4)), rng.normal(size=(15, 2))
    examples = data.examples(x.astype(np.float32), y.astype(np.float32), np.arange(15) % 2)
    clients = data.of_parts(examples, np.split(np.arange(15), [3, 10]))
    if _facts(name).pooled:
        clients = data.pooled(clients)
    model = models.mlp(2, widths=(3,), norm="batch")
    work = local.steps(optax.sgd(0.1), batch_size=2, num_steps=2, momentum=0.0)
    loss, score = objectives.DEFAULTS["values"]
    module = importlib.import_module(f"{algorithms.__name__}.{name}")
    more = {"num_domains": 2} if _facts(name).needs_domains else {}
    algorithm = getattr(module, name)(model, work._replace(learning_rate=0.1), loss=loss, **more)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 4)))
    cohort = federations.cohort(list(range(clients.num_clients)))
    state = jax.eval_shape(lambda: rounds.init(algorithm, variables, clients, jax.random.key(1)))

    def play(state: rounds.State) -> Any:
        state, reports = rounds.step(algorithm, state, cohort, clients, axis=devices.chunked(1))
        of = evaluation.evaluate(algorithm, state, clients, loss=loss, score=score.function)
        return state, reports, of

    after, reports, scores = jax.eval_shape(play, state)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert scores.score.shape == (clients.num_clients,)
    assert all(leaf.dtype == jnp.float32 for each in reports for leaf in each.metrics.values())
