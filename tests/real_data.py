"""A part of the real data sets that are prepared here: to decode all of one takes half a minute."""

import os
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from fedjax_inv.data import sources
from fedjax_inv.data.dataset import Dataset

PART_SIZE = 400  # examples of each split
_TFDS_DIR = Path(os.environ.get("TFDS_DATA_DIR") or Path.home() / "tensorflow_datasets")


def version_folder(name: str) -> Path:
    """Where a data set is prepared; skips the test if it is not."""
    folders = sorted((_TFDS_DIR / name).glob("*.*.*"))
    if not folders:
        pytest.skip(f"{name} is not prepared in {_TFDS_DIR}")
    return folders[-1]


def load_part(name: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """The first examples of train and test, decoded and cached in a folder of the test."""
    original = version_folder(name)
    links = data_dir / name / original.name
    links.mkdir(parents=True)
    for file in original.iterdir():
        if not file.name.startswith("fedjax_inv.npz"):
            (links / file.name).symlink_to(file)
    whole = tfds.core.DatasetBuilder.as_data_source

    def part(self: tfds.core.DatasetBuilder, split: str):
        return whole(self, split=f"{split}[:{PART_SIZE}]")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "as_data_source", part)
    return sources.load(name, data_dir=str(data_dir))
