"""The files that a command writes where a flag says: all are checked before it starts.

None of them is a file that the command reads, none is written twice, and one that exists is
replaced only if the same command has written it.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources

from .errors import check_place, flag_error

_MOST = 2**20  # bytes at each end of a file in which its mark is looked for
# The first columns of the tables that `evaluate` writes: scores and predictions.
_COLUMNS = re.compile(rb"(run,algorithm,held_out,)?seed,round,(by,name|source),")


class OutputFile(NamedTuple):
    """A file that a command will write."""

    flag: str  # the flag that asks for it, with its value
    path: Path


def mark(command: str) -> str:
    """The text by which a command knows the pictures and networks that it has written."""
    return f"fedjax-inv {command}"


def of_picture(flag: str, text: str) -> list[OutputFile]:
    """A picture and the .pdf beside it; raises UsageError if it is no .png. text: its path."""
    path = Path(os.path.expanduser(text))
    if path.suffix != ".png":
        raise flag_error(flag, text, "must end in .png")
    return [OutputFile(f"--{flag}={text}", path.with_suffix(suffix)) for suffix in (".png", ".pdf")]


def of_table(flag: str, text: str) -> OutputFile:
    """A table; raises UsageError if it is no .csv. text: its path."""
    path = Path(os.path.expanduser(text))
    if path.suffix != ".csv":
        raise flag_error(flag, text, "must end in .csv")
    return OutputFile(f"--{flag}={text}", path)


def of_data(*datasets: str) -> dict[str, Path]:
    """The files and folders that are read of data sets, as `check` takes them."""
    paths = {f"--dataset={name}": sources.path_of(name) for name in datasets if name}
    # Of a folder of arrays only .npy files are read, of other folders files of many kinds.
    return {
        flag: path
        for flag, path in paths.items()
        if path.exists() and not (path / "x.npy").exists()
    }


def check(command: str, outputs: Sequence[OutputFile], inputs: Mapping[str, Path]) -> None:
    """Raises UsageError if a command cannot write a file, or would replace another one.

    outputs: all files that it will write. inputs: the files and folders that it reads, by the flag
    that names them, with its value.
    """
    earlier: dict[Path, str] = {}
    for flag, path in outputs:
        check_place(flag.partition("=")[0].lstrip("-"), path)
        place = path.resolve()
        for source, there in inputs.items():
            if place.is_relative_to(there.resolve()):
                raise UsageError(flag, ..., f"{path} belongs to the data of {source}; {_ANOTHER}")
        if place in earlier:
            text = f"{path} is written for {earlier[place]}, too; {_ANOTHER}"
            raise UsageError(flag, ..., text)
        earlier[place] = flag
        if path.exists() and not _is_of(command, path):
            text = f"{path} is there and was not written by this command; remove it, or {_ANOTHER}"
            raise UsageError(flag, ..., text)


_ANOTHER = "choose another"


def _is_of(command: str, path: Path) -> bool:
    """Whether a command has written a file."""
    with open(path, "rb") as file:
        if path.suffix == ".csv":
            return command == "evaluate" and bool(_COLUMNS.match(file.read(_MOST)))
        # A PDF holds the mark near its end, other files near their beginning.
        ends = [file.read(_MOST)]
        file.seek(max(0, path.stat().st_size - _MOST))
        return any(mark(command).encode() in end for end in [*ends, file.read()])
