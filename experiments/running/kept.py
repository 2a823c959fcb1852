"""The state that each run of a cell is judged by: kept while the run goes on past it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.parts import selection
from experiments.parts.selection import Rule
from fedjax_inv.program import Training
from fedjax_inv.types import Array, Tree


class Served(NamedTuple):
    """What R runs serve their clients by, each after a round of its own."""

    server: Tree  # [R, ...]
    clients: Tree  # [R, C, ...]; () unless the algorithm is personal
    round: Array  # [R] int32, of the evaluation after which it was so; 0: there was none


def of(states: Training, personal: bool) -> Served:
    """What the runs serve by as they are now; of shapes it tells shapes."""
    state = states.state
    return Served(state.server, state.clients if personal else (), state.round)


def none(like: Served) -> Served:
    """Where nothing is kept yet: zeros on the host. like: shapes."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)


class Kept:
    """Of each run the state after the evaluation that a rule picks of those that there were.

    What is picked follows from the lines of the log alone, so that a resumed run keeps what it
    would have kept. A state that was passed by unkept (`round` 0 or another) is not made up for.
    """

    def __init__(self, rule: Rule, lines: list[dict[str, Any]], served: Served) -> None:
        """lines: of the log until now. served: what was kept of them."""
        self._rule, self.served = rule, served
        self._lines: dict[int, list[dict[str, Any]]] = {}
        for line in lines:
            self._add(line)

    def look(
        self, lines: list[dict[str, Any]], states: Callable[[], Training], personal: bool
    ) -> None:
        """Takes the states of those runs whose newest line is picked. lines: one for each run."""
        picked = np.array([self._is_picked(line) for line in lines])
        if not picked.any():
            return
        # Not the state's own round, which counts those that fill up the last segment, too.
        done = np.array([line["round"] for line in lines], np.int32)
        now = jax.device_get(of(states(), personal))._replace(round=done)

        def chosen(new: np.ndarray, old: np.ndarray) -> np.ndarray:
            # New arrays: the old ones may still be on their way to the disk.
            return np.where(picked.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        self.served = jax.tree.map(chosen, now, self.served)

    def _add(self, line: dict[str, Any]) -> list[dict[str, Any]]:
        """The lines of its run that may be picked."""
        mine = self._lines.setdefault(line["run"], [])
        mine += selection.candidates([line])
        return mine

    def _is_picked(self, line: dict[str, Any]) -> bool:
        mine = self._add(line)
        return bool(mine) and self._rule.pick(mine) is line
