"""The record of how a table came about, from the provenance of its runs."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from ..running import folder as folders
from ..running import provenance
from ..running.records import Origin, Result

_LEFT_OUT = ("data_dir", "resume")  # a folder of this machine, and how often a run was started


def of(words: Sequence[str], cells: Sequence[tuple[Path, Result]]) -> Origin:
    """The record of a table.

    words: of the command. cells: the folders of the runs, with their results; at least one.
    """
    start = provenance.merged(folders.begun(folder).start for folder, _ in cells)
    return Origin(
        command=command(words),
        seeds=sorted({run.seed for _, result in cells for run in result.runs}),
        date=start.date[:10],
        commit=start.commit,
        versions=start.versions,
        processor=start.processor,
        # The runs of a cell train at the same time.
        seconds=round(sum(max(run.last.seconds for run in result.runs) for _, result in cells), 1),
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
