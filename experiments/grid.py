"""The grid of runs that the flags ask for, as cells; each cell is one compiled program."""

import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_inv.inputs import Run

from . import build, draws, factories
from .config import Config
from .factories import takes


class Cell(NamedTuple):
    """Runs that share a compiled program: of one algorithm with its settings that are no real
    numbers, and one held-out domain.
    """

    algorithm: str
    settings: dict[str, Any]  # without real numbers: those are hyperparameters of the runs
    held_out: str | None
    runs: tuple[Run, ...]
    validate: str | None = None  # the domain of --validate

    @property
    def label(self) -> str:
        """The algorithm and all its settings."""
        return " ".join([self.algorithm, *(f"{k}={v}" for k, v in self.settings.items())])

    @property
    def name(self) -> str:
        """The label and the held-out domain."""
        return f"{self.label} {self.held_out or 'test'}"

    def record(self) -> dict[str, Any]:
        """The cell as values of JSON."""
        return json.loads(json.dumps(self._asdict() | {"runs": [r._asdict() for r in self.runs]}))


def of_record(record: Mapping[str, Any]) -> Cell:
    """The cell that a record describes."""
    return Cell(**{**record, "runs": tuple(Run(**run) for run in record["runs"])})


def folder_name(name: str) -> str:
    """The name with only characters that every file system allows."""
    return "".join(c if c.isalnum() or c in "=._-" else "-" for c in name)


def folder_names(cells: Sequence[Cell]) -> dict[str, str]:
    """A folder for each cell, by the cell's name; a checksum tells equal names apart."""
    plain = {cell.name: folder_name(cell.name) for cell in cells}
    taken = [folder.casefold() for folder in plain.values()]
    return {
        name: folder
        if taken.count(folder.casefold()) == 1
        else f"{folder}-{zlib.crc32(name.encode()):08x}"
        for name, folder in plain.items()
    }


def short_labels(cells: Sequence[Cell]) -> list[str]:
    """Names of cells for tables: the algorithm, and the settings in which its cells differ."""
    labels = []
    for cell in cells:
        others = [other.settings for other in cells if other.algorithm == cell.algorithm]
        varied = {k: v for k, v in cell.settings.items() if any(o[k] != v for o in others)}
        labels.append(cell._replace(settings=varied).label)
    return labels


def cells(
    config: Config,
    held_out: Sequence[str | None],
    validate: Mapping[str | None, str | None] | None = None,
    left_out: Mapping[str | None, Sequence[str]] | None = None,
) -> list[Cell]:
    """A cell for each algorithm, held-out domain and combination of settings that are not real.

    A cell has a run for each seed and each combination of real numbers, or draw of them.

    validate: the domain of --validate by held-out domain.
    left_out: the domains by held-out domain that further runs of each seed and setting leave out.
    """
    result = []
    for (algorithm, chosen), domain in itertools.product(build.settings(config).items(), held_out):
        numbers: dict[str, tuple[float, ...]] = {"learning_rate": config.training.learning_rate}
        if takes(factories.algorithm(algorithm), "server_optimizer"):
            numbers["server_learning_rate"] = config.training.server_learning_rate
        numbers |= {k: v for k, v in chosen.items() if all(isinstance(x, float) for x in v)}
        fixed = {k: v for k, v in chosen.items() if k not in numbers}
        hypers = _product(numbers)
        if config.method.draws:
            hypers = draws.hypers(config, algorithm, numbers, fixed)
        whole = [Run(seed, hyper) for hyper in hypers for seed in config.training.seeds]
        names = ["", *(left_out or {}).get(domain, ())]
        runs = tuple(run._replace(left_out=name) for name in names for run in whole)
        by = (validate or {}).get(domain)
        result += [Cell(algorithm, setting, domain, runs, by) for setting in _product(fixed)]
    return result


def _product(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]
