"""What is told on stderr while a cell runs: a bar on a terminal, elsewhere a line per event."""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from experiments.parts import machine

_COMPILED = "/jax/core/compile/backend_compile_duration"
_LINES = 20  # at most, for the evaluations of a cell, but for its first and last


class Progress:
    """Of a cell that is run; nothing is told but by the leading process."""

    def __init__(self, title: str, rounds: int, done: int) -> None:
        """title: what is run. rounds: in all. done: those before."""
        self._title, self._rounds, self._done = title, rounds, done
        self._bar: tqdm | None = None

    def tell(self, text: str) -> None:
        """A line, above the bar if there is one."""
        if machine.leads():
            tqdm.write(f"{self._title}: {text}", file=sys.stderr)

    @contextlib.contextmanager
    def compiling(self, what: str, likely: bool) -> Iterator[None]:
        """Tells what is compiled meanwhile, and then how long that took.

        likely: whether it is worth a line before.
        """
        if likely:
            self.tell(f"compiling {what}")
        start, compiled = time.monotonic(), 0.0

        def listen(event: str, duration_secs: float, **about: str | int) -> None:
            nonlocal compiled
            del duration_secs, about  # of the last step alone
            if event == _COMPILED:
                compiled = time.monotonic()

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        if compiled:
            self.tell(f"compiled {what} in {compiled - start:.1f} s")

    def start(self) -> None:
        """Shows the bar, where it is to be seen."""
        if self._bar is None and machine.leads() and sys.stderr.isatty():
            self._bar = tqdm(total=self._rounds, initial=self._done, desc=self._title, unit="round")

    def evaluated(self, done: int, lines: Sequence[dict[str, Any]]) -> None:
        """Tells an evaluation after `done` rounds, as means over its runs."""
        keys = {"valid": "validation_accuracy", "test": "test_accuracy"}
        keys |= {"loss": "train_loss"} if done else {}
        told = {name: _mean([line[key] for line in lines]) for name, key in keys.items()}
        if self._bar is not None:
            self._bar.update(done - self._done)
            self._bar.set_postfix(told)
        elif done in (0, self._rounds) or self._part(done) > self._part(self._done):
            numbers = ", ".join(f"{name} {value}" for name, value in told.items())
            seconds = lines[0]["seconds"]
            self.tell(f"round {done} of {self._rounds}, {numbers}, {seconds:.1f} s")
        self._done = done

    def _part(self, done: int) -> int:
        return _LINES * done // self._rounds

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _mean(values: Sequence[float | None]) -> str:
    finite = [value for value in values if value is not None]
    return f"{np.mean(finite):.3f}" if finite else "nan"
