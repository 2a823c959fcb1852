"""The command `fedjax-inv`, also `python -m experiments`: its commands are the binaries.

`fedjax-inv show-data --images=3` starts the file show_data.py, and `fedjax-inv paper cafe` the file
studies/cafe.py. The list of commands needs no package but the standard library.
"""

import ast
import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from . import before_imports
from .flags import extras, standins

_PROGRAM = "fedjax-inv"
_ABOUT = """\
Causal and invariant federated learning: experiments, their tables and their figures.

fedjax-inv COMMAND --flag=value ...

COMMANDS: --help after a command lists its flags"""


class Command(NamedTuple):
    """A binary, as the command starts it."""

    module: str  # in this package
    about: str  # the first line of its text


def main() -> None:
    """Starts the binary that the first argument names."""
    before_imports(sys.argv)
    found = commands()
    name, arguments = chosen(sys.argv[1:], found)
    sys.argv[:] = [f"{_PROGRAM} {name}", *arguments]
    try:
        module = importlib.import_module(f".{found[name].module}", __package__)
        from .flags import command
    except ImportError as error:
        line = extras.missing(error)
        if line is None:
            raise
        _fail(line)
    command.main(module.BINARY)


def commands() -> dict[str, Command]:
    """The commands by name: each binary in the root, and the table of each paper."""
    found = {}
    root = Path(__file__).parent
    for folder, before in ((root, ""), (root / "studies", "paper ")):
        for path in sorted(folder.glob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "\nBINARY = " in text:
                about = ast.get_docstring(ast.parse(text)) or ""
                name = before + (path.stem if before else path.stem.replace("_", "-"))
                module = ".".join(path.relative_to(root).with_suffix("").parts)
                found[name] = Command(module, about.partition("\n")[0])
    return found


def chosen(words: Sequence[str], found: Mapping[str, Command]) -> tuple[str, Sequence[str]]:
    """The command's name that the first words give, and the words after it.

    Ends the process for other words: with the list of commands, the version or an error.
    """
    if not words or (words[0].startswith("-") and standins.asks_for_help(["", words[0]])):
        print(_help(found))
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        print(_version())
        sys.exit(0)
    if words[0].startswith("-"):
        _fail(f"{words[0]}: must stand after a command, such as {_PROGRAM} train {words[0]}")
    if words[0] == "paper" and standins.asks_for_help(["", *words[1:2]]):
        print(_help({name: each for name, each in found.items() if name.startswith("paper ")}))
        sys.exit(0)
    if [*words] == ["paper"]:
        names = [name.removeprefix("paper ") for name in found if name.startswith("paper ")]
        _fail(f"paper needs a name: {', '.join(names)}")
    length = 2 if words[0] == "paper" else 1
    word = " ".join(words[:length])
    same = {name.replace("_", "-"): name for name in found}
    name = same.get(word.replace("_", "-"))
    if name is None:
        near = difflib.get_close_matches(word, found, 1)
        hint = f"did you mean {near[0]}? All: " if near else "must be one of "
        _fail(f"{word}: unknown command; {hint}{', '.join(found)}")
    return name, words[length:]


def _help(found: Mapping[str, Command]) -> str:
    width = max(map(len, found)) + 2
    lines = (f"  {name:<{width}}{command.about}" for name, command in found.items())
    return "\n".join([_ABOUT, *lines])


def _version() -> str:
    """The library's version, read without importing JAX."""
    library = importlib.util.find_spec("fedjax_inv")
    assert library is not None
    assert library.origin is not None
    found = re.search(r'^__version__ = "(.*)"$', Path(library.origin).read_text(), re.MULTILINE)
    assert found is not None
    return f"{_PROGRAM} {found[1]}"


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
