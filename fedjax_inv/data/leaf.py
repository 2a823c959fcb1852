"""FEMNIST in LEAF's format: characters by their writers (Caldas et al. 2018, arXiv 1812.01097)."""

import json
import os
import string
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
_SIDE = 28


def files(path: Path) -> list[tuple[Path, bool]]:
    """Return (file, whether it is for the test) for each json file of a LEAF data set.

    The path is a .json file; a folder of all_data*.json; or one with folders train and test of
    .json files. There are none if it is not LEAF's.
    """
    if path.suffix == ".json" and not os.path.isdir(path):
        return [(path, False)]
    if not os.path.isdir(path):  # unlike Path.is_dir, false for a name that is too long
        return []
    test = sorted(path.glob("test/*.json"))
    train = [*sorted(path.glob("all_data*.json")), *sorted(path.glob("train/*.json"))]
    return [*((file, False) for file in train), *((file, True) for file in test)]


def femnist(found: list[tuple[Path, bool]]) -> Dataset:
    """Read images [M, 28, 28, 1] of 62 classes, and their writers, from the files of `files`.

    Ink is dark on a light ground, as in LEAF.
    """
    x, y, test, users = [], [], [], []
    for file, is_test in found:
        for user, record in _read(file).items():
            pixels, labels = _arrays(file, user, record)
            x.append(pixels)
            y.append(labels)
            test.append(np.full(len(labels), is_test))
            users += [user] * len(labels)
    if not users:
        raise UsageError(str(found[0][0]), ..., "must hold at least one example")
    labels = np.concatenate(y)
    return Dataset(
        np.concatenate(x),
        labels,
        CLASSES,
        np.zeros(len(labels), np.int32),
        ("all",),
        np.concatenate(test),
        user=np.unique(users, return_inverse=True)[1].astype(np.int32),
    )


def _read(file: Path) -> dict[str, Any]:
    """Return the record of each user of a file."""
    needed = "must be LEAF's json, with users and user_data of each of them"
    try:
        record = json.loads(checks.regular(file).read_bytes())
        return {user: record["user_data"][user] for user in record["users"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(str(file), ..., f"{needed}: {checks.one_line(error)}") from None


def _arrays(file: Path, user: str, record: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return images [n, 28, 28, 1] and labels [n] of a user, whose record has lists x and y."""
    try:
        pixels = np.asarray(record["x"], np.float32)
        labels = np.asarray(record["y"])
        if labels.size == 0:  # lists without numbers are of floating point
            pixels = pixels.reshape(-1, _SIDE**2)
            labels = labels.astype(int)
        is_image = pixels.shape == (len(labels), _SIDE**2) and labels.dtype.kind in "iu"
        fits = is_image and np.isin(labels, range(len(CLASSES))).all()
        fits = fits and ((pixels >= 0) & (pixels <= 1)).all()
    except (ValueError, TypeError, KeyError, OverflowError):
        fits = False
    if not fits:
        text = f"user {user!r} must have x, lists of {_SIDE**2} numbers between 0 and 1, "
        text += f"and as many y, integers in 0..{len(CLASSES) - 1}"
        raise UsageError(str(file), ..., text)
    levels = np.rint(pixels * 255).astype(np.uint8)
    return levels.reshape(-1, _SIDE, _SIDE, 1), labels.astype(np.int32)
