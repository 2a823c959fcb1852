"""The progress of a cell on stderr: a bar on a terminal, elsewhere a line per event."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from fedjax_inv.callbacks import Callback
from fedjax_inv.fitted import Fitted

from ..assembly import machine
from . import divergence
from .log import Log
from .records import Line

_COMPILED = "/jax/core/compile/backend_compile_duration"
_EXPLODED = 1e4  # a loss that has grown by this factor tells of steps that are too long
_LINES = 20  # the most lines about a cell's evaluations, besides the first and the last


class ProgressLines(Callback):
    """The progress of a cell; only the leading process shows it."""

    def __init__(self, title: str, log: Log) -> None:
        """title: the cell's. log: of the cell; its callback comes before this one."""
        self._title = title
        self._log = log
        self._num_diverged = 0
        self._limit = math.inf  # the loss above which there is a warning; NaN after it
        self._bar: Any = None  # tqdm's

    def begin(self, fitted: Fitted) -> None:
        """Says that the programs compile, if they are new."""
        self._rounds = fitted.plan.rounds
        self._first = fitted.round
        self._done = fitted.round
        self._listening = contextlib.ExitStack()
        self._start = time.monotonic()
        self._compiled: list[float] | None = None  # when compilations ended; None: all are known
        if not (fitted.plan.is_compiled or fitted.is_over):
            self.tell("compiling")
            self._compiled = self._listening.enter_context(compilations())

    def evaluated(self, fitted: Fitted) -> None:
        """Shows an evaluation: means over the runs that have not diverged.

        It also shows how many runs have diverged, and names their settings when they change.
        """
        if fitted.round > self._first and self._compiled is not None:
            self._listening.close()
            if self._compiled:
                self.tell(f"compiled in {self._compiled[-1] - self._start:.1f} s")
            self._compiled = None
        is_terminal = machine.leads() and sys.stderr.isatty()
        if self._bar is None and fitted.round > self._first and is_terminal:
            at = self._done = fitted.round  # the time until here is that of compiling, too
            self._bar = tqdm(total=self._rounds, initial=at, desc=self._title, unit="round")
        self._show(fitted.round, self._log.new)

    def end(self, fitted: Fitted) -> None:
        """Ends the bar, which stays on the terminal."""
        self._listening.close()
        if self._bar is not None:
            self._bar.close()

    def tell(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if machine.leads():
            tqdm.write(f"{self._title}: {text}", file=sys.stderr)

    def _show(self, done: int, lines: Sequence[Line]) -> None:
        lines = [line for line in lines if not line.left_out]
        finite = [line for line in lines if not line.diverged]
        num_diverged = len(lines) - len(finite)
        if num_diverged > self._num_diverged:
            text = f"round {done}: {divergence.text(lines)}; "
            text += "the numbers below are of the others" if finite else divergence.REMEDY
            self.tell(text)
        largest = _largest(finite)
        if self._limit == math.inf:
            self._limit = _EXPLODED * largest or math.inf
        elif largest > self._limit:
            self.tell(f"round {done}: the loss on a domain is {largest:.1e}; {divergence.REMEDY}")
            self._limit = math.nan
        means = {}
        if any(of.split == "validation" and of.examples for of in lines[0].domains.values()):
            means["valid"] = _mean([line.validation_score for line in finite])
        means["test"] = _mean([line.test_score for line in finite])
        if done:
            means["loss"] = _mean([line.train_loss for line in finite])
        means = means if finite else {}
        count = {"diverged": divergence.count(lines)} if num_diverged else {}
        of_runs = {"mean of": f"{len(finite)} runs"} if len(finite) > 1 else {}
        if self._bar is not None:
            self._bar.update(done - self._done)
            self._bar.set_postfix(means | of_runs | count)
        elif done in (0, self._rounds) or self._part(done) > self._part(self._done):
            parts = [f"round {done} of {self._rounds}"]
            parts += [f"{name} {value}" for name, value in (means | of_runs).items()]
            parts += [f"{of} runs diverged" for of in count.values()]
            self.tell(", ".join([*parts, f"{lines[0].seconds:.1f} s"]))
        self._done = done
        self._num_diverged = num_diverged

    def _part(self, done: int) -> int:
        return int(_LINES * done // self._rounds)


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """The times, by `time.monotonic`, at which compilations in the `with` block end.

    They come from an event of JAX; a JAX without this event gives no times.
    """
    ends: list[float] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        del duration_secs, about
        if event == _COMPILED:
            ends.append(time.monotonic())

    try:
        register = jax.monitoring.register_event_duration_secs_listener
        unregister = jax.monitoring.unregister_event_duration_listener
    except AttributeError:
        yield ends
        return
    register(listen)
    try:
        yield ends
    finally:
        unregister(listen)


def _largest(lines: Sequence[Line]) -> float:
    """The largest loss on a domain; 0 without one."""
    losses = (domain.loss for line in lines for domain in line.domains.values())
    return max((loss for loss in losses if loss is not None), default=0.0)


def _mean(values: Sequence[float | None]) -> str:
    finite = [value for value in values if value is not None]
    if not finite:
        return "nan"
    mean = float(np.mean(finite))
    return f"{mean:.3f}" if 0.01 <= abs(mean) < 1000 or mean == 0 else f"{mean:.3g}"
