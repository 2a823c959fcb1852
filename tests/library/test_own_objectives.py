"""The check of losses and scores that a user has written."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_inv import objectives, own_objectives
from fedjax_inv.checks import UsageError

OUTPUTS = jax.ShapeDtypeStruct((1, 3), jnp.float32)
TARGETS = {"classes": np.array([2]), "labels": np.array([[True, False, True]])}
TARGETS["values"] = np.array([[0.5, -1.0, 2.0]], np.float32)


@pytest.mark.parametrize("task", TARGETS)
def test_the_listed_losses_and_scores_are_means(task: str) -> None:
    loss, score = objectives.DEFAULTS[task]
    more = {"classes": objectives.focal(2.0), "values": objectives.huber(0.5)}.get(task, loss)
    for function in (loss, more, score.function):
        own_objectives.check_mean("loss", function, OUTPUTS, TARGETS[task])


def squares(outputs: Any) -> Any:
    return (outputs**2).mean(-1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda o, y, m: squares(o).mean(), "must leave out examples whose mask is false"),
        (lambda o, y, m: squares(o).sum() / m.sum(), "must leave out examples whose mask is"),
        (lambda o, y, m: (squares(o) * m).mean(), "must leave out examples whose mask is false"),
        (lambda o, y, m: (squares(o) * m).sum() / m.sum(), "returns nan where the mask is false"),
        (lambda o, y, m: objectives.masked_mean(squares(o), m) + 1, "returns 1 where the mask is"),
        (lambda o, y, m: (squares(o) * m).sum(), "returns the sum over examples, must return"),
    ],
)
def test_what_is_no_mean_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^--loss=mine: {message}"):
        own_objectives.check_mean("--loss=mine", function, OUTPUTS, TARGETS["classes"])


def test_a_value_that_is_not_finite_tells_nothing() -> None:
    own_objectives.check_mean(
        "loss", lambda o, y, m: jnp.log(-squares(o).sum()), OUTPUTS, np.ones(1)
    )
