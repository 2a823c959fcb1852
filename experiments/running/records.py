"""What the json files of a run folder hold, and the door that they are read through."""

import json
from pathlib import Path
from typing import Any

from fedjax_inv.checks import UsageError

# What a value of json may be: a type, None, one of several (a, b), a list of such [a], a record
# with at least these names {"name": a} ("name?": if it is there), or one of any names {str: a}.
Kind = Any

NUMBER = (int, float)
_DOMAIN = {"accuracy": NUMBER, "split": str, "loss?": (*NUMBER, None), "examples?": int}
# An evaluation of a run.
_LINE = {
    "round": int,
    "validation_accuracy": NUMBER,
    "test_accuracy": NUMBER,
    "domains": {str: _DOMAIN},
}
# The same, as metrics.jsonl has it.
LINE = _LINE | {"run": int, "diverged": bool, "seconds": NUMBER, "bytes": int, "dropped?": int}
_CELL = {
    "algorithm": str,
    "settings": {str: (str, bool, *NUMBER, None)},
    "held_out": (str, None),
    "runs": [{"seed": int, "hyper": {str: NUMBER}}],
}
# config.json
CONFIG = {"flags": {str: (str, bool, *NUMBER, [(str, *NUMBER)])}, "cell": _CELL}
CONFIG |= {"starts?": [{"data?": str}]}
# result.json of a cell
RESULT = {
    "cell": _CELL,
    "runs": [
        {
            "seed": int,
            "hyper": {str: NUMBER},
            "diverged": bool,
            "selected": (_LINE, None),
            "by_rule?": {str: (_LINE, None)},
            "last": _LINE,
            "stops?": [{"threshold": NUMBER, "round": (int, None)}],
        }
    ],
}
# start.json
START = {"networks": str}


def is_of(value: Any, kind: Kind) -> bool:
    """Whether a value is of a kind; True is no number."""
    if isinstance(kind, tuple):
        return any(is_of(value, each) for each in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(is_of(item, kind[0]) for item in value)
    if not isinstance(kind, dict):
        return value is None if kind is None else type(value) is kind
    if not isinstance(value, dict):
        return False
    if str in kind:
        return all(is_of(each, kind[str]) for each in value.values())
    for name, of in kind.items():
        may_lack, name = name.endswith("?"), name.removesuffix("?")
        if not (may_lack if name not in value else is_of(value[name], of)):
            return False
    return True


def read(path: Path, kind: Kind, remedy: str = "") -> Any:
    """What a json file holds. remedy: what to do about a damaged one, but for a copy.

    Raises UsageError, in one line, if it is damaged, and OSError if it cannot be read.
    """
    try:
        record = json.loads(path.read_text())
    except (ValueError, RecursionError):
        record = None
    if record is None or not is_of(record, kind):
        raise damaged(path, remedy)
    return record


def damaged(path: Path, remedy: str = "") -> UsageError:
    """What is told of a file that does not hold what it must."""
    remedy = remedy or f"delete {path.parent} to begin anew"
    return UsageError(f"{path}: is damaged; put a copy in its place, or {remedy}")
