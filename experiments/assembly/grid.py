"""The grid of runs that the flags ask for, as cells; each cell is one compiled program."""

import itertools
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_inv.inputs import Run

from ..config import Config
from . import draws, factories, method
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
        values = self._asdict() | {"runs": [run._asdict() for run in self.runs]}
        return dict(json.loads(json.dumps(values)))


def of_record(record: Mapping[str, Any]) -> Cell:
    """The cell that a record describes."""
    return Cell(**{**record, "runs": tuple(Run(**run) for run in record["runs"])})


# The endings of files beside the folders.
_OF_FILES = (".csv", ".json", ".md", ".pdf", ".png", ".tex")


def folder_name(name: str) -> str:
    """The name with only characters that every file system allows."""
    return "".join(c if c.isalnum() or c in "=._-" else "-" for c in name)


_LONGEST = 120  # characters of a folder's name


def names_of_folders(names: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """A folder for each name; a checksum stands where two would clash.

    It also ends a long name, and one that is hidden or ends as a file does.

    taken: the folders that are there.
    """
    plain = {name: folder_name(name) for name in names}
    used = [folder.casefold() for folder in [*plain.values(), *taken]]

    def is_free(folder: str) -> bool:
        is_plain = not folder.startswith(".") and Path(folder).suffix not in _OF_FILES
        return is_plain and len(folder) <= _LONGEST and used.count(folder.casefold()) == 1

    return {
        name: folder
        if is_free(folder)
        else f"{folder[:_LONGEST].lstrip('.')}-{zlib.crc32(name.encode()):08x}"
        for name, folder in plain.items()
    }


def folder_names(cells: Sequence[Cell]) -> dict[str, str]:
    """A folder for each cell, by the cell's name."""
    return names_of_folders([cell.name for cell in cells])


def _varied(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The settings in which each cell differs from others of its algorithm."""
    varied = []
    for cell in cells:
        others = [other.settings for other in cells if other.algorithm == cell.algorithm]
        varied.append({k: v for k, v in cell.settings.items() if any(o[k] != v for o in others)})
    return varied


def short_labels(cells: Sequence[Cell]) -> list[str]:
    """Names of cells for tables: the algorithm, and the settings in which its cells differ."""
    pairs = zip(cells, _varied(cells), strict=True)
    return [cell._replace(settings=settings).label for cell, settings in pairs]


def settings_of(cells: Sequence[Cell]) -> list[str]:
    """How cells differ, besides the held-out domain: in the algorithm and its settings."""
    if len({cell.algorithm for cell in cells}) > 1:
        return short_labels(cells)
    return [" ".join(f"{k}={v}" for k, v in settings.items()) for settings in _varied(cells)]


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
    settings = method.settings(config.method)
    for (algorithm, chosen), domain in itertools.product(settings.items(), held_out):
        numbers: dict[str, tuple[float, ...]] = {"learning_rate": config.training.learning_rate}
        if takes(factories.algorithm(algorithm), "server_optimizer"):
            numbers["server_learning_rate"] = config.training.server_learning_rate
        numbers |= {k: v for k, v in chosen.items() if all(isinstance(x, float) for x in v)}
        fixed = {k: v for k, v in chosen.items() if k not in numbers}
        hypers = _product(numbers)
        if config.method.draws:
            fixed = {k: (v,) for k, v in draws.SETTINGS.get(algorithm, {}).items()} | fixed
            hypers = draws.hypers(config.method.draws, config.training, algorithm, numbers, fixed)
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
