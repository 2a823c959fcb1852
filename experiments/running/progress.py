"""The progress of a cell on stderr: a bar on a terminal, elsewhere a line per event."""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from tqdm import tqdm

from ..parts import machine
from ..running import divergence
from ..running.records import Line

_COMPILED = "/jax/core/compile/backend_compile_duration"
_EXPLODED = 1e4  # a loss that has grown by this factor tells of steps that are too long
_LINES = 20  # the most lines about a cell's evaluations, besides the first and the last


class Progress:
    """The progress of a cell; only the leading process shows it."""

    def __init__(self, title: str, rounds: int, done: int) -> None:
        """title: the cell's. rounds: how many there are. done: how many are over already."""
        self._title, self._rounds, self._done = title, rounds, done
        self._num_diverged = 0
        self._limit = math.inf  # the loss above which there is a warning; NaN after it
        self._bar: tqdm | None = None

    def tell(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if machine.leads():
            tqdm.write(f"{self._title}: {text}", file=sys.stderr)

    @contextlib.contextmanager
    def compiling(self, what: str, likely: bool) -> Iterator[None]:
        """Prints how long the compilation in the `with` block took, if anything was compiled.

        likely: whether to print a line in advance, too, and to look at compilations of all threads.
        """
        if likely:
            self.tell(f"compiling {what}")
        start = time.monotonic()
        with compilations(here=not likely) as ends:
            yield
        if ends:
            self.tell(f"compiled {what} in {ends[-1] - start:.1f} s")

    def start(self) -> None:
        """Shows the bar, if stderr is a terminal."""
        if self._bar is None and machine.leads() and sys.stderr.isatty():
            self._bar = tqdm(total=self._rounds, initial=self._done, desc=self._title, unit="round")

    def evaluated(self, done: int, lines: Sequence[Line]) -> None:
        """Shows an evaluation after `done` rounds: means over the runs that have not diverged.

        It also shows how many runs have diverged, and names their settings when they change.
        """
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
        means = {
            "valid": _mean([line.validation_score for line in finite]),
            "test": _mean([line.test_score for line in finite]),
        }
        if done:
            means["loss"] = _mean([line.train_loss for line in finite])
        means = means if finite else {}
        count = {"diverged": divergence.count(lines)} if num_diverged else {}
        if self._bar is not None:
            self._bar.update(done - self._done)
            self._bar.set_postfix(means | count)
        elif done in (0, self._rounds) or self._part(done) > self._part(self._done):
            parts = [f"round {done} of {self._rounds}"]
            parts += [f"{name} {value}" for name, value in means.items()]
            parts += [f"{of} runs diverged" for of in count.values()]
            self.tell(", ".join([*parts, f"{lines[0].seconds:.1f} s"]))
        self._done, self._num_diverged = done, num_diverged

    def _part(self, done: int) -> int:
        return _LINES * done // self._rounds

    def close(self) -> None:
        """Ends the bar, which stays on the terminal."""
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def compilations(*, here: bool = False) -> Iterator[list[float]]:
    """The times, by `time.monotonic`, at which compilations in the `with` block end.

    here: whether only those of this thread count.
    They come from an event of JAX; a JAX without this event gives no times.
    """
    ends: list[float] = []
    thread = threading.get_ident()

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        del duration_secs, about
        if event == _COMPILED and not (here and threading.get_ident() != thread):
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
