"""The pre-training phases of runs of an exit strategy, finished or not."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_inv.algorithms import exit_strategy
from fedjax_inv.algorithms.exit_strategy import Outcome
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.reporting import finished
from fedjax_inv_experiments.reporting.finished import Runs


class Phase(NamedTuple):
    """The pre-training phase of R runs that differ in their seed, P rounds and C clients."""

    title: str
    seeds: tuple[int, ...]
    domains: tuple[str, ...]  # [C], of the client's examples
    aberrant: tuple[str, ...]  # [C], how the flags make a client aberrant, or ""
    outcome: Outcome  # with a leading axis R
    critical: np.ndarray  # [R, C] the smoothness at which the mean contribution is 0


def find(folder: Path, data_dir: str = "", named: Collection[str] = ()) -> list[Phase]:
    """The phases in a run folder, one for each combination of hyperparameters.

    named: the code of one's own that the command names.

    Raises UsageError for a folder without runs of an exit strategy, or without a checkpoint.
    """
    runs = finished.open("runs", folder, named=named, data_dir=data_dir, unfinished=True)
    cell = runs.cell
    if exit_strategy.server_in(runs.shapes.state.server) is None:
        text = f"is of --algorithm={cell.algorithm}, must be of exit_strategy"
        raise UsageError(runs.where, ..., text)
    done, states = runs.newest()
    server = exit_strategy.server_in(states.state.server)
    assert server is not None
    outcome = exit_strategy.outcome(server)
    settings = [tuple(run.hyper.items()) for run in cell.runs]
    result = []
    for setting in dict.fromkeys(settings):
        which = [index for index, other in enumerate(settings) if other == setting]
        seeds = tuple(cell.runs[index].seed for index in which)
        name = " ".join([folder.resolve().name, *finished.varied(cell, which[0])])
        result.append(
            Phase(
                _title(name, done, outcome),
                seeds,
                _domains(runs, seeds),
                aberrant(runs.config, outcome.mean.shape[-1]),
                Outcome(*(leaf[which] for leaf in outcome)),
                critical(server)[which],
            )
        )
    return result


def critical(server: exit_strategy.Server) -> np.ndarray:
    """[R, C] the smoothness at which a client's mean contribution is 0; NaN if never measured."""
    linear, quadratic = (
        np.asarray(leaf).sum(-2) for leaf in (server.assessment.linear, server.assessment.quadratic)
    )
    return np.divide(linear, quadratic, out=np.full_like(linear, np.nan), where=quadratic > 0)


def in_range(values: np.ndarray) -> str:
    """The least and the greatest of some values, as text; NaNs are left out."""
    known = values[np.isfinite(values)]
    if not known.size:
        return ""
    low, high = (f"{value:.3g}" for value in (known.min(), known.max()))
    return low if low == high else f"{low} to {high}"


def aberrant(chosen: Config, num_clients: int) -> tuple[str, ...]:
    """How the flags make each client aberrant, "" for regular clients."""
    texts: list[list[str]] = [[] for _ in range(num_clients)]
    for entries, text in (
        (chosen.participation.slow, "{} rounds an update"),
        (chosen.participation.lossy, "arrives with p = {}"),
    ):
        for entry in entries:
            client, _, value = entry.partition(":")
            texts[int(client)].append(text.format(value))
    return tuple(", ".join(each) for each in texts)


def _domains(runs: Runs, seeds: Sequence[int]) -> tuple[str, ...]:
    splits = [runs.data.splits[runs.cell.held_out][seed] for seed in seeds]
    domains = np.stack([split.domain for split in splits], axis=1)  # [C, R]
    names = (*runs.data.dataset.domains, "mixed")  # of -1
    return tuple(" or ".join(dict.fromkeys(names[each] for each in line)) for line in domains)


def _title(name: str, done: int, outcome: Outcome) -> str:
    length = outcome.contributions.shape[-2]
    rounds = "1 round" if length == 1 else f"{length} rounds"
    return f"{name}, {f'{done} of ' if done < length else ''}{rounds} of pre-training"
