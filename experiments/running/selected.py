"""The state of each run that its --select selects, kept while the run goes on past it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.parts import selection
from experiments.parts.selection import Rule
from experiments.running.records import Line
from fedjax_inv.program import Training
from fedjax_inv.types import Array, Tree


class Served(NamedTuple):
    """The part of the states of R runs that predictions need, each after a round of its own."""

    server: Tree  # [R, ...]
    clients: Tree  # [R, C, ...]; () unless the algorithm is personal
    round: Array  # [R] int32, of the evaluation that saw this state; 0: there is no state


def of(states: Training, personal: bool) -> Served:
    """The part of the current states that predictions need; shapes for shapes."""
    state = states.state
    return Served(state.server, state.clients if personal else (), state.round)


def none(like: Served) -> Served:
    """No states yet: zeros on the host. like: shapes."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)


class SelectedStates:
    """The state of each run after the evaluation that a rule picks among those so far.

    The choice follows from the lines of the log alone, so that a resumed run makes the same one. A
    selected state that was not saved at its time is not recomputed: its `round` is 0 or another.
    """

    def __init__(self, rule: Rule, lines: Sequence[Line], served: Served) -> None:
        """lines: of the log until now. served: the states selected until now."""
        self._rule, self.served = rule, served
        self._lines: dict[int, list[Line]] = {}
        for line in lines:
            self._add(line)

    def look(self, lines: Sequence[Line], states: Callable[[], Training], personal: bool) -> None:
        """Takes the states of those runs whose newest line is picked. lines: one for each run."""
        picked = np.array([self._is_picked(line) for line in lines])
        if not picked.any():
            return
        # The state's own round also counts the rounds that fill up the last segment.
        done = np.array([line.round for line in lines], np.int32)
        now = jax.device_get(of(states(), personal))._replace(round=done)

        def chosen(new: np.ndarray, old: np.ndarray) -> np.ndarray:
            # New arrays, because orbax may still be writing the old ones.
            return np.where(picked.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        self.served = jax.tree.map(chosen, now, self.served)

    def _add(self, line: Line) -> list[Line]:
        """The lines of its run that may be picked."""
        mine = self._lines.setdefault(line.run, [])
        mine += selection.candidates([line])
        return mine

    def _is_picked(self, line: Line) -> bool:
        mine = self._add(line)
        return bool(mine) and self._rule.pick(mine) is line
