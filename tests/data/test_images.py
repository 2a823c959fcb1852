"""Images that a table lists, and images that are mapped from a file."""

import itertools
import os
import platform
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedjax_inv.checks import UsageError
from fedjax_inv.data import images, sources
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.tables import Roles


def colours(seed: int, *size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of 4 x 6 pixels in several modes."""
    (tmp_path / "im").mkdir()
    for seed in range(3):
        Image.fromarray(colours(seed, 4, 6, 3)).save(tmp_path / "im" / f"{seed}.png")
    Image.fromarray(colours(3, 4, 6)).save(tmp_path / "im" / "grey.png")
    Image.fromarray(colours(4, 4, 6, 4)).save(tmp_path / "im" / "clear.png")
    tag = Image.Exif()
    tag[0x0112] = 6  # viewers turn it
    turned = Image.fromarray(colours(5, 4, 6, 3)).transpose(Image.Transpose.ROTATE_90)
    turned.save(tmp_path / "im" / "turned.png", exif=tag)
    Image.fromarray(np.ones((4, 6), np.uint16)).save(tmp_path / "im" / "deep.png")
    cut = (tmp_path / "im" / "0.png").read_bytes()[:80]
    (tmp_path / "im" / "damaged.png").write_bytes(cut)
    return tmp_path


def read(folder: Path, suffix: str = "csv", **columns: Any) -> tuple[Path, Dataset]:
    path = folder / f"metadata.{suffix}"
    frame = pd.DataFrame(columns)
    _ = frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path, index=False)
    return path, sources.load(str(path))


NAMES = ["im/0.png", "im/grey.png", "im/clear.png", "im/turned.png"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_of_images(folder: Path, suffix: str) -> None:
    """As in WILDS: columns of other things, which may lack values, are not read."""
    columns = {"img_id": range(4), "img_filename": NAMES, "y": [1, 0, 0, 1], "split": [0, 1, 2, 0]}
    columns["place_filename"] = ["/b/bamboo.jpg", None, "/c/no.jpg", "x"]
    path, found = read(folder, suffix, **columns, hospital=["n", "s", "s", "n"])
    grey = np.repeat(colours(3, 4, 6)[..., None], 3, -1)
    x = [colours(0, 4, 6, 3), grey, colours(4, 4, 6, 4)[..., :3], colours(5, 4, 6, 3)]
    np.testing.assert_array_equal(found.x, x, strict=True)
    assert (found.y.tolist(), found.classes, found.columns) == ([1, 0, 0, 1], ("0", "1"), ())
    assert found.source is not None
    assert found.source.tolist() == NAMES
    assert found.valid is not None
    assert (found.valid.tolist(), found.test.tolist()) == ([0, 1, 0, 0], [0, 0, 1, 0])
    roles = Roles(target=("hospital",), domain="y", group="img_id", ignored=("split",))
    other = sources.load(str(path), roles=roles, image_size=2)
    assert (other.x.shape, other.classes, other.domains) == ((4, 2, 2, 3), ("n", "s"), ("0", "1"))
    assert other.valid is None
    assert other.original is not None


def test_grey_images_have_one_channel(folder: Path) -> None:
    assert read(folder, path=["im/grey.png"] * 2, target=[0, 1])[1].x.shape == (2, 4, 6, 1)


@pytest.mark.parametrize("name", ["none", "damaged", "deep", ""])
def test_an_image_that_cannot_be_read_is_told_with_its_row(folder: Path, name: str) -> None:
    for at in (0, 2):
        files = ["im/0.png", "im/1.png", "im/2.png"]
        files[at] = f"im/{name}.png" if name else ""
        if not (at == 0 and not name):  # a first row without a path is of another table
            with pytest.raises(UsageError, match=rf"{name}.*row {at + 1}"):
                read(folder, path=files, target=[0, 1, 0])


def test_sizes_and_columns_of_images_that_do_not_fit(folder: Path) -> None:
    Image.new("RGB", (9, 8)).save(folder / "im" / "large.png")
    with pytest.raises(UsageError, match=r"large.png: is 9x8.* 6x4 .*image_size .*row 2"):
        read(folder, path=["im/0.png", "im/large.png"], target=[0, 1])


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_paths_beside_other_columns_are_a_question(folder: Path, suffix: str) -> None:
    """Features are not dropped, and images are not features, without a word of the user."""
    columns = {"f0": [0.5, 1.5], "photo": ["im/0.png", "im/1.png"], "target": [0, 1]}
    for rest in ({}, {"after": ["im/1.png", "im/2.png"]}):
        with pytest.raises(UsageError, match=r"^roles.image.*'photo'.* f0"):
            read(folder, suffix, **columns, **rest)
    path = str(folder / f"metadata.{suffix}")
    assert sources.load(path, roles=Roles(ignored=("photo", "after"))).features == ("f0",)
    found = sources.load(path, roles=Roles(image="photo"))
    np.testing.assert_array_equal(found.x, [colours(0, 4, 6, 3), colours(1, 4, 6, 3)])
    with pytest.raises(UsageError, match=r"^roles.image='none'"):
        sources.load(path, roles=Roles(image="none"))


def test_an_index_is_no_column(folder: Path) -> None:
    """As `to_csv` writes it by default: of numbers that could be splits or groups."""
    path = folder / "t.csv"
    frame = pd.DataFrame({"path": [f"im/{i}.png" for i in range(3)], "y": [0, 1, 0]})
    for name in ("", "Unnamed: 0"):
        frame.to_csv(path, index_label=name)
        found = sources.load(str(path), roles=Roles(domain="", client="", test="", group=""))
        assert (len(found.y), found.test.any(), found.valid) == (3, False, None)
        assert (found.domains, found.user, found.original) == (("all",), None, None)


def test_new_images_have_the_task_of_the_training(folder: Path) -> None:
    """30 whole numbers would be values."""
    path, new = read(folder, path=["im/0.png"] * 30, target=range(30))
    assert new.task == "values"
    old = Dataset(new.x, np.zeros(30, np.int32), ("0",), new.domain, new.domains, new.test)
    assert sources.load(str(path), like=old).task == "classes"


@pytest.fixture
def mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which files for mapped images are."""
    monkeypatch.setattr(images, "_IN_MEMORY", 0)
    monkeypatch.setattr(images, "_BATCH", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return folder / "cache" / "fedjax_inv" / "images"


@pytest.mark.parametrize("names", [*itertools.permutations(["0", "grey", "clear"]), ["grey"] * 3])
def test_many_images_are_mapped(folder: Path, mapped: Path, names: Any, monkeypatch: Any) -> None:
    """Grey ones before the first that is not are decoded again; the next start decodes nothing."""
    files = [folder / "im" / f"{name}.png" for name in names]
    x = images.decoded(files, None)
    assert isinstance(x, np.memmap)
    monkeypatch.setattr(images, "_IN_MEMORY", 2**20)
    np.testing.assert_array_equal(x, images.decoded(files, None))
    monkeypatch.setattr(images, "_IN_MEMORY", 0)
    monkeypatch.setattr(images, "_decode", None)
    np.testing.assert_array_equal(x, images.decoded(files, None))
    (path,) = mapped.iterdir()
    monkeypatch.undo()
    monkeypatch.setattr(images, "_IN_MEMORY", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    whole = path.read_bytes()
    for length in (0, len(whole) // 3, len(whole) - 1):  # a third would be grey images
        path.write_bytes(whole[:length])
        assert images.decoded(files, None).tobytes() == whole


def test_parts_of_dead_processes_are_removed(folder: Path, mapped: Path) -> None:
    mapped.mkdir(parents=True)
    with subprocess.Popen(["true"]) as ended:
        pass
    for process in (ended.pid, os.getppid()):
        (mapped / f"a.{platform.node()}.{process}.part").write_bytes(b"1")
    images.decoded([folder / "im" / "0.png"], None)
    (left,) = mapped.glob("*.part")
    assert str(os.getppid()) in left.name


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_pngs_of_16_bits_are_told(tmp_path: Path, channels: int) -> None:
    """Pillow reads the upper eight of them, and so makes nothing of 12-bit data."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = zlib.compress(b"".join(b"\0" + bytes(2 * 5 * channels) for _ in range(4)))
    header = struct.pack(">IIBBBBB", 5, 4, 16, kind, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b"")
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    with pytest.raises(UsageError, match=r"x.png.* 16 bits"):
        images.image_of(tmp_path / "x.png")


def test_images_that_have_changed_are_decoded_again(folder: Path, mapped: Path) -> None:
    files = [folder / "im" / "0.png", folder / "im" / "1.png"]
    images.decoded(files, None)
    Image.fromarray(colours(9, 4, 6, 3)).save(files[1])
    np.testing.assert_array_equal(images.decoded(files, None)[1], colours(9, 4, 6, 3))
    assert images.decoded(files, 3).shape == (2, 3, 3, 3)
    assert len([*mapped.iterdir()]) == 3


def test_nothing_stays_of_images_that_cannot_be_mapped(
    folder: Path, mapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [folder / "im" / f"{name}.png" for name in ("0", "1", "damaged")]
    with pytest.raises(UsageError, match=r"damaged.png"):
        images.decoded(files, None)
    assert not [*mapped.iterdir()]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(UsageError, match=r"XDG_CACHE_HOME"):
        images.decoded(files, None)
