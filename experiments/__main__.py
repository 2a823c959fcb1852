"""The command `fedjax-inv`, also `python -m experiments`: its commands are the binaries.

`fedjax-inv show-data --images=3` starts the file show_data.py.
"""

import difflib
import importlib.metadata
import runpy
import sys
from typing import NoReturn

from .start import keep_printing, missing

_PROGRAM = "fedjax-inv"
_COMMANDS = {
    "train": ("train", "Trains one algorithm, or a grid of experiments."),
    "sweep": ("train", "The same."),
    "compare": ("compare", "The rows of a file, each with flags of its own, in one table."),
    "evaluate": ("evaluate", "Scores of finished runs by domain, class and client; exports."),
    "features": ("features", "Features of images by a frozen network, as a data set."),
    "show-data": ("show_data", "Images of every domain, and the examples of each client."),
    "paper": ("paper", "The tables and figures of a paper."),
    "map": ("map", "Which method helps against which kind of shift between clients."),
}


def main() -> None:
    """Starts the binary that the first argument names."""
    keep_printing()
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "--helpshort", "--helpfull"):
        lines = (f"  {name:<11}{about}" for name, (_, about) in _COMMANDS.items())
        print("\n".join([f"{_PROGRAM} COMMAND --flag=value ...", "", *lines]))
        print(f"\n{_PROGRAM} COMMAND --help lists the command's flags.")
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        print(f"{_PROGRAM} {importlib.metadata.version('fedjax_inv')}")
        return
    if words[0].startswith("-"):
        _fail(f"{words[0]}: must stand after a command, such as {_PROGRAM} train {words[0]}")
    name = words[0].replace("_", "-")
    if name not in _COMMANDS:
        near = difflib.get_close_matches(name, _COMMANDS, 1)
        hint = f"did you mean {near[0]}? All: " if near else "must be one of "
        _fail(f"{words[0]}: unknown command; {hint}{', '.join(_COMMANDS)}")
    sys.argv[1:] = words[1:]
    try:
        runpy.run_module(f"{__package__}.{_COMMANDS[name][0]}", run_name="__main__", alter_sys=True)
    except ImportError as error:
        line = missing(error)
        if line is None:
            raise
        _fail(line)


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
