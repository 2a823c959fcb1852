"""The training of `fit`, segment by segment: history, stops, progress and Ctrl-C."""

import contextlib
import dataclasses
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_inv.fitting.fitted import Fitted, History, Serving
from fedjax_inv.program import Outcome, Run
from fedjax_inv.types import Cohort, Examples


def train(
    serving: Serving,
    runs: tuple[Run, ...],
    examples: Examples,
    cohorts: Cohort,
    *,
    every: int,
    patience: int | None,
    rank: Callable[[Any], Any],
    callbacks: Sequence[Callable[[Fitted], object]],
    drop_nonfinite: bool = False,
) -> Fitted:
    """Play the rounds of all runs.

    Args:
      serving: the program and its inputs.
      runs: R.
      examples: the examples, placed on the devices.
      cohorts: [R, T, S], on the host.
      every: as `evaluate_every` of `fit`.
      patience: as in `fit`.
      rank: score -> a number that is higher, the better the score is.
      callbacks: as in `fit`.
      drop_nonfinite: as in `fit`.

    Returns:
      The runs after their last round.
    """
    compiled, inputs, rounds = serving.program, serving.inputs, cohorts.who.shape[1]

    def segment(done: int) -> Cohort:
        return jax.tree.map(lambda leaf: leaf[:, done : done + every], cohorts)

    training = compiled.init(examples, inputs)
    # Compiled before the loop, in which Ctrl-C waits for the end of a segment.
    starts = {0, rounds - rounds % every} - {rounds}  # the last segment may be shorter
    for start in sorted(starts):
        compiled.rounds.lower(examples, inputs, training, segment(start)).compile()
    compiled.evaluate.lower(examples, inputs, training).compile()
    best, since = np.full(len(runs), -np.inf), np.zeros(len(runs), int)
    lines: list[dict[str, np.ndarray]] = []
    fitted, done, is_warned = None, 0, False
    try:
        while done < rounds:
            with _interrupted_at_end():
                training, outcome = compiled.segment(examples, inputs, training, segment(done))
                outcome = compiled.gathered(outcome)
                lines.append(_values(outcome, drop_nonfinite))
                is_warned = is_warned or _is_broken(runs, outcome, done)
                done = min(done + every, rounds)
                at = np.minimum(every * np.arange(1, len(lines) + 1), rounds)
                values = {name: np.stack([line[name] for line in lines], 1) for name in lines[0]}
                fitted = Fitted(runs, History(runs, at, values), done, "", serving, training)
            so_far = fitted
            if any([_asks_to_stop(callback, so_far) for callback in callbacks]):
                return dataclasses.replace(so_far, stopped="callback")
            if patience is not None:
                now = rank(values["valid_score"][:, -1])
                since = np.where(now > best, 0, since + 1)
                best = np.fmax(best, now)
                if (since >= patience).all():
                    return dataclasses.replace(so_far, stopped="patience")
    except KeyboardInterrupt:
        if fitted is None:
            raise
        return dataclasses.replace(fitted, stopped="interrupt")
    assert fitted is not None  # there is at least one round
    return fitted


def _asks_to_stop(callback: Callable[[Fitted], object], so_far: Fitted) -> bool:
    """Return whether a callback answers true. Its error gets the result so far as `fitted`."""
    try:
        return bool(callback(so_far))
    except Exception as error:
        error.fitted = so_far  # type: ignore[attr-defined]
        error.add_note(
            f"A callback of fit raised this after round {so_far.round}. The result so far is the "
            "error's attribute `fitted`; in a notebook, sys.last_value.fitted."
        )
        raise


def _values(outcome: Outcome, drop_nonfinite: bool) -> dict[str, np.ndarray]:
    """Return the values [R] of a segment's rounds, by name, as in `History`."""
    values = {}
    # Such a round's NaN is a loss; another round's says that nobody took part. An update that is
    # left out has no part in a mean.
    diverged = (np.asarray(outcome.broken) >= 0) & np.asarray(outcome.attended).any(-1)
    diverged &= not drop_nonfinite
    for name, metric in outcome.metrics.items():
        of_rounds = np.asarray(metric)
        counts = ~np.isnan(of_rounds) | diverged
        count = counts.sum(1)
        mean = np.where(counts, of_rounds, 0).sum(1) / np.maximum(count, 1)
        values[f"train_{name}"] = np.where(count > 0, mean, np.nan)
    for kind, scores in (("valid", outcome.valid), ("test", outcome.test)):
        if np.asarray(scores.size).any():
            values[f"{kind}_score"] = np.asarray(scores.score)[:, 0]
            values[f"{kind}_loss"] = np.asarray(scores.loss)[:, 0]
    return values


def _is_broken(runs: Sequence[Run], outcome: Outcome, done: int) -> bool:
    """Return whether an update is not finite, and warn of the first one."""
    broken = np.asarray(outcome.broken)
    for index, at in np.argwhere(broken >= 0)[:1]:
        run = runs[index]
        of = ", ".join([f"seed={run.seed}", *(f"{k}={v:g}" for k, v in run.hyper.items())])
        where = f"round {done + at + 1}, client {broken[index, at]}, run {index} ({of})"
        warnings.warn(f"{where}: its loss or its update is NaN or infinite", stacklevel=4)
    return bool((broken >= 0).any())


@contextlib.contextmanager
def _interrupted_at_end() -> Iterator[None]:
    """Let Ctrl-C act at the end of the block, which therefore runs as a whole."""
    is_main = threading.current_thread() is threading.main_thread()  # it alone gets signals
    if not is_main or signal.getsignal(signal.SIGINT) is None:  # None: no handler of Python
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(signal.SIGINT, None)  # by default it raises KeyboardInterrupt


class Progress:
    """The progress on stderr: a bar if tqdm is installed, else a line."""

    def __init__(self, rounds: int, *, is_on: bool) -> None:
        self._rounds, self._is_on = rounds, is_on
        self._bar: Any = None
        if is_on:
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self._bar = tqdm(total=rounds, unit="round")

    def show(self, fitted: Fitted) -> None:
        """Show the newest values, as means over the runs."""
        if not self._is_on:
            return
        means = {
            name: f"{values[:, -1].mean():.3f}"
            for name, values in fitted.history.values.items()
            if name in ("train_loss", "valid_score", "test_score")
        }
        if self._bar is not None:
            self._bar.set_postfix(means, refresh=False)
            self._bar.update(fitted.round - self._bar.n)
            return
        parts = [f"round {fitted.round} of {self._rounds}", *(f"{k} {v}" for k, v in means.items())]
        print("\r" + ", ".join(parts), end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the bar or the line."""
        if self._bar is not None:
            self._bar.close()
        elif self._is_on:
            print(file=sys.stderr)
