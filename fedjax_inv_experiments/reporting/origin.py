"""The record of how a table came about, from the starts of its runs."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from fedjax_inv_experiments.running import folder as folders
from fedjax_inv_experiments.running.records import Origin, Result

_SEVERAL = "several"
_LEFT_OUT = ("data_dir", "resume")  # a folder of this machine, and how often a run was started


def of(
    words: Sequence[str], cells: Sequence[tuple[Path, Result]], code: Mapping[str, str]
) -> Origin:
    """The record of a table.

    words: of the command. cells: the folders of the runs, with their results. code: the digests of
    the files that made the rows and the table from the runs.
    """
    starts = [start for folder, _ in cells for start in folders.starts(folder)]
    runs = [run for _, result in cells for run in result.runs]
    return Origin(
        command=command(words),
        seeds=sorted({run.seed for run in runs}),
        date=max((start.date[:10] for start in starts), default=None),
        commit=_same([start.commit or "unknown" for start in starts]),
        versions=_merged([start.versions for start in starts]),
        processor=_same([start.processor or "unknown" for start in starts]),
        # The runs of a cell train at the same time.
        seconds=round(sum(max(run.last.seconds for run in result.runs) for _, result in cells), 1),
        code=dict(sorted({**_merged([start.sources for start in starts]), **code}.items())),
    )


def command(words: Sequence[str]) -> str:
    """A command line of fedjax-inv. A path shows its last part alone, as others lie elsewhere."""
    shown = ["fedjax-inv"]
    for word in words:
        name, equals, value = word.partition("=")
        if name.lstrip("-") not in _LEFT_OUT:
            shown.append(name + equals + ",".join(map(_without_place, value.split(","))))
    return shlex.join(shown)


def _without_place(path: str) -> str:
    return Path(path).name if path.startswith(("/", "~", ".")) else path


def _same(values: Collection[str]) -> str | None:
    """The value that all have, or "several"; None without values."""
    different = set(values)
    return _SEVERAL if len(different) > 1 else next(iter(different), None)


def _merged(records: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The values by name; "several" where they differ.

    A name may be in some records only: rows with other algorithms depend on other files.
    """
    merged: dict[str, str] = {}
    for name, value in (pair for record in records for pair in record.items()):
        merged[name] = value if merged.get(name, value) == value else _SEVERAL
    return merged
