"""Diverged runs in words: how many, in which settings, and the remedy.

A run diverges if the loss of an evaluation or, without --nonfinite=drop, a client's loss or update
becomes NaN or infinite.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ..errors import shown
from .records import Line, RunResult

REMEDY = (
    "lower --learning_rate, clip the gradients with --clip, or set --standardise if it is not set; "
    "for regression also scale the targets to about 1, or set --loss=huber"
)
_MOST = 6  # the most settings that a text names

Run: TypeAlias = RunResult | Line  # or the last line of its log


class Setting(NamedTuple):
    """The runs of a cell with the same hyperparameters."""

    hyper: dict[str, float]  # those in which the runs of the cell differ
    indices: list[int]  # of the runs, one per seed
    num_diverged: int

    @property
    def text(self) -> str:
        """The hyperparameters in words."""
        return ", ".join(f"{name}={shown(value)}" for name, value in self.hyper.items())


def varied(hypers: Sequence[Mapping[str, float]]) -> list[str]:
    """The names of the hyperparameters in which the runs of a cell differ."""
    return [
        name for name, value in hypers[0].items() if any(other[name] != value for other in hypers)
    ]


def settings(runs: Sequence[Run]) -> list[Setting]:
    """The settings of a cell's runs."""
    names = varied([run.hyper for run in runs])
    by_hyper: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        by_hyper.setdefault(str(run.hyper), []).append(index)
    return [
        Setting(
            {name: runs[indices[0]].hyper[name] for name in names},
            indices,
            sum(runs[index].diverged for index in indices),
        )
        for indices in by_hyper.values()
    ]


def count(runs: Sequence[Run]) -> str:
    """How many runs diverged, such as "6 of 9"."""
    return f"{sum(run['diverged'] for run in runs)} of {len(runs)}"


def text(runs: Sequence[Run]) -> str:
    """How many of a cell's runs diverged, and in which settings; "" if none did."""
    broken = [setting for setting in settings(runs) if setting.num_diverged]
    if not broken:
        return ""
    parts = [
        f"{setting.text} ({setting.num_diverged} of {len(setting.indices)} seeds)"
        for setting in broken
        if setting.hyper
    ]
    if len(parts) > _MOST:
        parts[_MOST:] = [f"{len(parts) - _MOST} more settings"]
    return f"{count(runs)} runs diverged{': ' if parts else ''}{', '.join(parts)}"
