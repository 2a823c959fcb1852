"""The grid of runs that flags ask for: cells, each of them one compiled program."""

import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.experiment.groups import Config
from experiments.flags.flag import check_known
from experiments.flags.names import factory, hyperparameters, no_setting, parsed, takes
from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv.program import Run


class Cell(NamedTuple):
    """Runs that share a compiled program: one algorithm, one held-out domain."""

    algorithm: str
    settings: dict[str, Any]  # those that are not numbers, or whole ones
    held_out: str | None
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        """The algorithm and all its settings."""
        return " ".join([self.algorithm, *(f"{k}={v}" for k, v in self.settings.items())])

    @property
    def name(self) -> str:
        """The label and the held-out domain."""
        return f"{self.label} {self.held_out or 'test'}"

    def record(self) -> dict[str, Any]:
        """The cell as json holds it."""
        return json.loads(json.dumps(self._asdict() | {"runs": [r._asdict() for r in self.runs]}))


def of_record(record: Mapping[str, Any]) -> Cell:
    """The cell that json holds."""
    return Cell(**{**record, "runs": tuple(Run(**run) for run in record["runs"])})


def folder_name(name: str) -> str:
    """A name with which any file system can do."""
    return "".join(c if c.isalnum() or c in "=._-" else "-" for c in name)


def folder_names(cells: Sequence[Cell]) -> dict[str, str]:
    """A folder for each cell, by the cell's name; where two would share one, each has a mark."""
    plain = {cell.name: folder_name(cell.name) for cell in cells}
    taken = [folder.casefold() for folder in plain.values()]
    return {
        name: folder
        if taken.count(folder.casefold()) == 1
        else f"{folder}-{zlib.crc32(name.encode()):08x}"
        for name, folder in plain.items()
    }


def short_labels(cells: Sequence[Cell]) -> list[str]:
    """What tables call the cells: the algorithm, with the settings in which its cells differ."""
    labels = []
    for cell in cells:
        others = [other.settings for other in cells if other.algorithm == cell.algorithm]
        varied = {k: v for k, v in cell.settings.items() if any(o[k] != v for o in others)}
        labels.append(cell._replace(settings=varied).label)
    return labels


def held_out(config: Config, domains: Sequence[str]) -> list[str | None]:
    """What --held_out asks for: domains to hold out in turn, None for the test split."""
    asked = config.data.held_out
    if asked == "none" or (not asked and len(domains) == 1):
        return [None]
    if len(domains) == 1:
        raise UsageError(f"--held_out={asked}: must be none, as there is one domain only")
    if asked == "all":
        return list(domains)
    names = (asked or domains[-1]).split(",") if asked not in domains else [asked]
    for name in names:  # all and none stand alone
        check_known("held_out", name, domains if len(names) > 1 else [*domains, "all", "none"])
    return list(names)


def cells(config: Config, held_out: Sequence[str | None]) -> list[Cell]:
    """A cell per algorithm, held-out domain and setting that is not a real number; in it a run per
    seed and real hyperparameters."""
    result = []
    for (algorithm, chosen), domain in itertools.product(settings(config).items(), held_out):
        numbers: dict[str, tuple[float, ...]] = {"learning_rate": config.clients.learning_rate}
        if takes(factory(algorithm), "server_optimizer"):
            numbers["server_learning_rate"] = config.server.server_learning_rate
        numbers |= {k: v for k, v in chosen.items() if all(isinstance(x, float) for x in v)}
        fixed = {k: v for k, v in chosen.items() if k not in numbers}
        runs = tuple(program.grid(config.run.seeds, **numbers))
        result += [Cell(algorithm, setting, domain, runs) for setting in _product(fixed)]
    return result


def _product(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]


def settings(config: Config) -> dict[str, dict[str, tuple[Any, ...]]]:
    """The --set flags of each algorithm: name -> values, in the type that its factory asks for.

    A name counts for every algorithm that knows it, and at least one must.
    """
    algorithms = config.method.algorithm
    known = {name: hyperparameters(name) for name in algorithms}
    chosen: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in algorithms}
    for entry in config.method.settings:
        name, equals, text = entry.partition("=")
        if not equals or not text:
            raise UsageError(f"--set={entry}: must be name=value, or name=value,value")
        if not any(name in kinds_of for kinds_of in known.values()):
            # Those are left out that text cannot set.
            every = itertools.chain.from_iterable(kinds_of.items() for kinds_of in known.values())
            names = sorted({each for each, kinds in every if set(kinds) - {type(None)}})
            raise UsageError(f"--set={entry}: {no_setting(', '.join(known), name, names)}")
        for algorithm, kinds_of in known.items():
            if name in kinds_of:
                kinds = kinds_of[name]
                values = tuple(parsed("set", entry, value, kinds) for value in text.split(","))
                if len(set(values)) < len(values):
                    raise UsageError(f"--set={entry}: must be one or several different values")
                chosen[algorithm][name] = values
    return chosen
