"""The state of each run that --select selects, stored while the run continues."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedjax_inv.program import Training
from fedjax_inv.types import Array, Tree

from .. import selection
from ..running.records import Line
from ..selection import Rule


class Served(NamedTuple):
    """The part of the states of R runs that predictions need; each run has its own round."""

    server: Tree  # [R, ...]
    clients: Tree  # [R, C, ...]; () unless the algorithm is personal
    round: Array  # [R] int32, the round of the state's evaluation; 0: there is no state


def of(states: Training, personal: bool) -> Served:
    """The part of states that predictions need. Given shapes, it returns shapes."""
    state = states.state
    return Served(state.server, state.clients if personal else (), state.round)


def none(like: Served) -> Served:
    """Zeros on the host, for runs without a selected state. like: shapes."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)


class SelectedStates:
    """The state of each run at the evaluation that a rule picks among all so far.

    The choice depends only on the lines of the log, so a resumed run makes the same choice. A state
    that was not stored when its evaluation was new is lost; then `round` is another round or 0.
    """

    def __init__(self, rule: Rule, lines: Sequence[Line], served: Served) -> None:
        """lines: those of the log so far. served: the states selected so far."""
        self._rule, self.served = rule, served
        self._lines: dict[int, list[Line]] = {}
        for line in lines:
            self._add(line)

    def look(self, lines: Sequence[Line], states: Callable[[], Training], personal: bool) -> None:
        """Stores the states of the runs whose newest line is picked. lines: one per run."""
        picked = np.array([self._is_picked(line) for line in lines])
        if not picked.any():
            return
        # The round in the state also counts the empty rounds that fill the last segment.
        done = np.array([line.round for line in lines], np.int32)
        now = jax.device_get(of(states(), personal))._replace(round=done)

        def chosen(new: np.ndarray, old: np.ndarray) -> np.ndarray:
            # New arrays, because orbax may still be writing the old ones.
            return np.where(picked.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        self.served = jax.tree.map(chosen, now, self.served)

    def _add(self, line: Line) -> list[Line]:
        """Adds a line to those of its run, and returns those that may be picked."""
        mine = self._lines.setdefault(line.run, [])
        mine += selection.candidates([line])
        return mine

    def _is_picked(self, line: Line) -> bool:
        mine = self._add(line)
        return bool(mine) and self._rule.pick(mine) is line
