"""The state of each run that --select selects, stored while the run continues."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedjax_inv.callbacks import Callback
from fedjax_inv.fitted import Fitted
from fedjax_inv.one_run import Training
from fedjax_inv.types import Array, Tree

from . import selection
from .log import Log
from .records import Line
from .selection import Rule


class ServingState(NamedTuple):
    """The part of the states of R runs that predictions need; each run has its own round."""

    server: Tree  # [R, ...]
    clients: Tree  # [R, C, ...]; () unless the algorithm is personal
    round: Array  # [R] int32, the round of the state's evaluation; 0: there is no state


def of(states: Training, personal: bool) -> ServingState:
    """The part of states that predictions need. Given shapes, it returns shapes."""
    state = states.state
    return ServingState(state.server, state.clients if personal else (), state.round)


def none(like: ServingState) -> ServingState:
    """Zeros on the host, for runs without a selected state. like: shapes."""
    zeros: ServingState = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    return zeros


class SelectedStates(Callback):
    """The state of each run at the evaluation that a rule picks among all so far.

    The choice depends only on the lines of the log, so a resumed run makes the same choice. A state
    that was not stored when its evaluation was new is lost; then `round` is another round or 0.
    """

    def __init__(self, rule: Rule, log: Log) -> None:
        """log: of the cell; its callback comes before this one."""
        self._rule = rule
        self._log = log
        self._personal = False
        self._lines: dict[int, list[Line]] = {}
        self.served: ServingState | None = None  # the states selected so far; None: none yet

    def begin(self, fitted: Fitted) -> None:
        """Looks at the lines of the log so far."""
        plan = fitted.plan
        self._personal = plan.build(plan.runs[0].hyper).personal
        self.shapes = of(plan.program.shapes(plan.data, plan.inputs), self._personal)
        if self.served is None:
            self.served = none(self.shapes)
        for line in self._log.lines:
            self._add(line)

    def evaluated(self, fitted: Fitted) -> None:
        """Stores the states of the runs whose newest line is picked."""
        if fitted.round:
            self.look(self._log.new, fitted.stored)

    def look(self, lines: Sequence[Line], states: Callable[[], Training]) -> None:
        """Stores the states of the runs whose line is picked. lines: one per run."""
        picked = np.array([self._is_picked(line) for line in lines])
        if not picked.any():
            return
        # The round in a state stands still once its run has ended.
        done = np.array([line.round for line in lines], np.int32)
        now = jax.device_get(of(states(), self._personal))._replace(round=done)

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
