"""FEMNIST as LEAF writes it: characters by their writers (Caldas et al. 2018, arXiv 1812.01097)."""

import json
import os
import string
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset

_CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
_SIDE = 28


def files(path: Path) -> list[tuple[Path, bool]]:
    """The json files of a data set and whether they are for the test; none if it is not LEAF's.

    path: a .json file; or a folder of all_data*.json, or with folders train and test of any.
    """
    if path.suffix == ".json" and not os.path.isdir(path):
        return [(path, False)]
    if not os.path.isdir(path):  # nor a name that is too long for a path
        return []
    test = sorted(path.glob("test/*.json"))
    train = [*sorted(path.glob("all_data*.json")), *sorted(path.glob("train/*.json"))]
    return [*((file, False) for file in train), *((file, True) for file in test)]


def femnist(found: list[tuple[Path, bool]]) -> Dataset:
    """Reads the files that `files` found: images [M, 28, 28, 1] of 62 classes, and their writers.

    Ink is dark on a light ground, as in LEAF's. Raises ValueError for a file of another kind.
    """
    x, y, test, users = [], [], [], []
    for file, is_test in found:
        for user, held in _read(file).items():
            pixels, labels = _arrays(file, user, held)
            x.append(pixels)
            y.append(labels)
            test.append(np.full(len(labels), is_test))
            users += [user] * len(labels)
    if not users:
        raise UsageError(f"name='{found[0][0]}': must hold at least one example")
    labels = np.concatenate(y)
    return Dataset(
        np.concatenate(x),
        labels,
        _CLASSES,
        np.zeros(len(labels), np.int32),
        ("all",),
        np.concatenate(test),
        user=np.unique(users, return_inverse=True)[1].astype(np.int32),
    )


def _read(file: Path) -> dict[str, Any]:
    """What each user of a file holds."""
    if not file.is_file():  # reading a pipe would wait for somebody to write
        raise UsageError(f"name='{file}': must be a file")
    try:
        record = json.loads(file.read_bytes())
        users, data = record["users"], record["user_data"]
        return {user: data[user] for user in users}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"name='{file}': must be LEAF's json, with users and user_data of each of them; "
            f"{type(error).__name__}: {error}"
        ) from None


def _arrays(file: Path, user: str, held: Any) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 28, 28, 1] and labels [n] of a user."""
    try:
        pixels, labels = np.asarray(held["x"], np.float32), np.asarray(held["y"])
    except (ValueError, TypeError, KeyError, OverflowError):
        pixels, labels = np.empty(0, np.float32), np.empty(0)
    fits = (
        labels.ndim == 1
        and pixels.shape == (len(labels), _SIDE**2)
        and labels.dtype.kind in "iu"
        and (pixels >= 0).all()
        and (pixels <= 1).all()
        and (labels >= 0).all()
        and (labels < len(_CLASSES)).all()
    )
    if not fits:
        raise UsageError(
            f"name='{file}': user {user!r} must have x, lists of {_SIDE**2} numbers between 0 and "
            f"1, and as many y, integers in 0..{len(_CLASSES) - 1}, at least one"
        )
    levels = np.rint(pixels * 255).astype(np.uint8)
    return levels.reshape(-1, _SIDE, _SIDE, 1), labels.astype(np.int32)
