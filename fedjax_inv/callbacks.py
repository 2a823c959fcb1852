"""What acts while `fit` trains: progress, early stopping, and whatever a user writes.

class Print(callbacks.Callback):
    def evaluated(self, fitted):
        print(fitted.round, fitted.history["train_loss"][:, -1])

fit(fedavg.fedavg, model, clients, rounds=50, callbacks=[Print(), callbacks.Patience(5)])
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fedjax_inv.fitted import Fitted

from fedjax_inv import checks
from fedjax_inv.checks import UsageError


class Callback:
    """The base of callbacks; each method does nothing unless it is overridden.

    `fitted` is the result so far (`Fitted`), the same object at each call: its `history`, `round`
    and networks grow with the training.
    """

    def begin(self, fitted: Fitted) -> None:
        """Act before the first round; `fitted.restore` then continues an earlier training."""

    def evaluated(self, fitted: Fitted) -> object:
        """Act after an evaluation. True, or a text that says why, ends the training.

        None, False and "" do not; any other answer is an error.

        `fitted.stopped` holds what a callback before this one in the list answered.
        """

    def end(self, fitted: Fitted) -> None:
        """Act after the last evaluation, and after an error; the last callback begins."""


class _Function(Callback):
    """A function that is called after each evaluation."""

    def __init__(self, function: Callable[[Fitted], object]) -> None:
        self._function = function

    def evaluated(self, fitted: Fitted) -> object:
        return self._function(fitted)


def of(callbacks: Iterable[Callback | Callable[[Fitted], object]]) -> list[Callback]:
    """Return callbacks; a plain function is called after each evaluation."""
    listed = [*callbacks] if isinstance(callbacks, Iterable) else [None]
    for each in listed:
        if isinstance(each, type) or not (isinstance(each, Callback) or callable(each)):
            raise UsageError("callbacks", ..., "must be a list of Callbacks and of functions")
    return [each if isinstance(each, Callback) else _Function(each) for each in listed]


class Patience(Callback):
    """Ends the training when no run improves any more.

    It ends when for so many evaluations no run has reached a score that is better than all of its
    own before: of validation, or with `score="unseen_domain_score"` of a domain that no client has.
    The networks are those of the last round. A training that goes on from a checkpoint counts anew.
    """

    def __init__(self, evaluations: int, score: str = "valid_score") -> None:
        checks.integer("evaluations", evaluations)
        self._evaluations, self._score = evaluations, score

    def begin(self, fitted: Fitted) -> None:
        inputs = fitted.plan.inputs
        watched = {"valid_score": inputs.valid}
        watched |= {f"{name}_score": shards for name, shards in inputs.unseen.items()}
        checks.one_of("score", self._score, watched)
        if not np.asarray(watched[self._score].size).any(1).all():
            raise UsageError("validation", ..., "must leave examples for Patience to watch")
        self._best = np.full(len(fitted.runs), -np.inf)
        self._since = np.zeros(len(fitted.runs), int)

    def evaluated(self, fitted: Fitted) -> object:
        now = fitted.plan.task.score.rank(fitted.latest[self._score])
        self._since = np.where(now > self._best, 0, self._since + 1)
        self._best = np.fmax(self._best, now)
        return "patience" if (self._since >= self._evaluations).all() else ""


class Progress(Callback):
    """Shows the newest values on stderr, as means over the runs: a bar if tqdm is installed."""

    def begin(self, fitted: Fitted) -> None:
        self._bar: Any = None
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            self._bar = tqdm(total=fitted.plan.rounds, initial=fitted.round, unit="round")

    def evaluated(self, fitted: Fitted) -> None:
        means = {
            name: f"{values.mean():.3f}"
            for name, values in fitted.latest.items()
            if name in ("train_loss", "valid_score", "test_score")
        }
        if self._bar is not None:
            self._bar.set_postfix(means, refresh=False)
            self._bar.update(fitted.round - self._bar.n)
            return
        at = f"round {fitted.round} of {fitted.plan.rounds}"
        parts = [at, *(f"{k} {v}" for k, v in means.items())]
        print("\r" + ", ".join(parts), end="", file=sys.stderr, flush=True)

    def end(self, fitted: Fitted) -> None:
        if self._bar is not None:
            self._bar.close()
        else:
            print(file=sys.stderr)
