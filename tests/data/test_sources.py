"""Data sets from every source, and the errors of unfit ones."""

import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image
from tensorflow_datasets.core import registered

from fedjax_inv.data import sources
from fedjax_inv.data.dataset import Dataset


def assert_same(left: Dataset, right: Dataset) -> None:
    assert (left.classes, left.domains) == (right.classes, right.domains)
    for field in ("x", "y", "domain", "test"):
        a, b = getattr(left, field), getattr(right, field)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def error_of(name, **kwargs) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        sources.load(str(name), **kwargs)
    message = str(error.value)
    assert "\n" not in message
    return message


# digits


def test_digits_are_scaled_to_8_bits():
    from sklearn.datasets import load_digits  # slow, and no other test needs it

    dataset = sources.load("digits")
    assert dataset.x.shape == (1797, 8, 8, 1)
    assert dataset.x.dtype == np.uint8
    assert dataset.x.max() == 255
    np.testing.assert_allclose(dataset.x[..., 0] / 255, load_digits().images / 16, atol=0.5 / 255)
    np.testing.assert_array_equal(dataset.y, load_digits().target)
    assert dataset.y.dtype == np.int32
    assert dataset.classes == tuple("0123456789")
    assert dataset.domains == ("all",)
    assert not dataset.domain.any()
    assert not dataset.test.any()


# names


def test_an_unknown_name_is_answered_with_near_ones(tmp_path):
    assert "mnist" in error_of("mnsit", data_dir=str(tmp_path))
    assert "digits" in error_of("digit", data_dir=str(tmp_path))
    for path in ("no/such/folder", "/no/such/folder", "digits/no"):
        assert "folder domain/class/image" in error_of(path, data_dir=str(tmp_path))


# TFDS


@pytest.mark.slow
def test_mnist_is_what_it_is_elsewhere():
    folder = Path(os.environ.get("TFDS_DATA_DIR") or Path.home() / "tensorflow_datasets")
    if not (folder / "mnist").exists():
        pytest.skip(f"mnist is not prepared in {folder}")
    dataset = sources.load("mnist")
    assert (dataset.x.shape, dataset.classes) == ((70_000, 28, 28, 1), tuple("0123456789"))
    counts = [np.bincount(dataset.y[dataset.test == is_test]).tolist() for is_test in (0, 1)]
    assert counts[0] == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts[1] == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    np.testing.assert_allclose(dataset.x[~dataset.test].mean() / 255, 0.1307, atol=1e-4)


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write_cifar100(data_dir: Path) -> None:
    """Prepares a cifar100 of five images, as TFDS does without its download."""
    x = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    rows = [
        (i, {"id": str(i), "image": png(image), "label": 10 * i, "coarse_label": i})
        for i, image in enumerate(x)
    ]
    official = tfds.builder_cls("cifar100")  # importing it registers it: not to be skipped
    with registered.skip_registration():

        class Local(official):
            def _split_generators(self, dl_manager):
                self.info.features["label"].names = [f"fine{i}" for i in range(100)]
                self.info.features["coarse_label"].names = [f"coarse{i}" for i in range(20)]
                return {"train": iter(rows[:3]), "test": iter(rows[3:])}

    Local.name = "cifar100"
    Local(data_dir=str(data_dir), file_format="array_record").download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("tfds")
    write_cifar100(data_dir)
    return data_dir


@pytest.fixture
def tiny(prepared, tmp_path):
    """A TFDS folder with a cifar100 of three train and two test images."""
    shutil.copytree(prepared, tmp_path / "tfds")
    return tmp_path / "tfds"


def version_folder(data_dir: Path) -> Path:
    (info,) = data_dir.glob("cifar100/*/dataset_info.json")
    return info.parent


def test_a_tfds_data_set_is_decoded(tiny):
    dataset = sources.load("cifar100", data_dir=str(tiny))
    assert dataset.x.shape == (5, 32, 32, 3)
    assert dataset.test.tolist() == [False] * 3 + [True] * 2
    assert sorted(dataset.y[:3]) == [0, 10, 20]  # TFDS shuffles within a split
    assert sorted(dataset.y[3:]) == [30, 40]
    assert dataset.classes == tuple(f"fine{i}" for i in range(100))
    x = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    np.testing.assert_array_equal(dataset.x, x[dataset.y // 10])
    assert dataset.domains == ("all",)


@pytest.mark.parametrize("damage", ["cut", "deleted", "dataset_info.json", "features.json"])
def test_a_damaged_data_set_is_named(tiny, damage):
    folder = version_folder(tiny)
    (path,) = folder.glob("*train*" if damage in ("cut", "deleted") else damage)
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:500])
    assert str(folder) in error_of("cifar100", data_dir=str(tiny))


def test_the_highest_prepared_version_is_read_unless_one_is_named(tiny):
    old = version_folder(tiny)
    new = old.with_name("10.0.0")  # higher, though not as a string
    shutil.copytree(old, new)
    first = sources.load(f"cifar100:{old.name}", data_dir=str(tiny))
    for path in new.glob("*train*"):
        path.unlink()
    assert "10.0.0" in error_of("cifar100", data_dir=str(tiny))
    assert len(first.y) == 5
    assert "cifar100:9.9.9" in error_of("cifar100:9.9.9", data_dir=str(tiny))


def test_a_configuration_is_named(tiny, monkeypatch):
    folder = version_folder(tiny)
    shutil.move(folder, tiny / "emnist" / "letters" / folder.name)
    assert "emnist/letters" in error_of("emnist", data_dir=str(tiny))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tiny))
    assert len(sources.load("emnist/letters").y) == 5


@pytest.mark.parametrize("form", ["proto", "nested", "legacy"])
def test_a_data_set_imports_no_class_of_its_own(form, tiny, tmp_path, monkeypatch):
    """TFDS imports the module of a class that features.json names."""
    marker = tmp_path / "marker"
    (tmp_path / "planted.py").write_text(f"open({str(marker)!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    path = version_folder(tiny) / "features.json"
    features = json.loads(path.read_text())
    if form == "legacy":
        features = {"type": "planted.Image", "content": {}}
    elif form == "proto":
        features["featuresDict"]["features"]["image"]["pythonClassName"] = "planted.Image"
    else:
        inner = {"feature": {"type": "planted.Image", "content": "{}"}}
        sequence = "tensorflow_datasets.core.features.sequence_feature.Sequence"
        features = {"pythonClassName": sequence, "jsonFeature": {"json": json.dumps(inner)}}
    path.write_text(json.dumps(features))
    message = error_of("cifar100", data_dir=str(tiny))
    assert "planted.Image" in message
    assert not marker.exists()


# .npz


def save(folder: Path, **arrays) -> Path:
    np.savez(folder / "data.npz", **arrays)
    return folder / "data.npz"


def test_npz_round_trip(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), np.uint8)
    path = save(
        tmp_path,
        x=x,
        y=np.array([7, 3, 7, 40]),
        domain=np.array(["b", "a", "b", "c"]),
        client=np.array([30, 4, 30, 5]),
        test=np.array([True, False, False, True]),
        path=np.array(["a.png", "b.png", "c.png", "d.png"]),
    )
    dataset = sources.load(str(path))
    assert dataset.source.tolist() == ["a.png", "b.png", "c.png", "d.png"]
    np.testing.assert_array_equal(dataset.x, x)
    assert dataset.x.dtype == np.uint8
    assert dataset.y.tolist() == [1, 0, 1, 2]
    assert dataset.y.dtype == np.int32
    assert dataset.classes == ("3", "7", "40")
    assert dataset.domain.tolist() == [1, 0, 1, 2]
    assert dataset.domain.dtype == np.int32
    assert dataset.domains == ("a", "b", "c")
    assert dataset.test.tolist() == [True, False, False, True]
    assert dataset.user.tolist() == [2, 0, 2, 1]
    assert dataset.user.dtype == np.int32


def test_a_folder_of_arrays_is_mapped(tmp_path):
    arrays = {
        "x": np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), np.uint8),
        "y": np.array([7, 3, 7, 40]),
        "client": np.array([30, 4, 30, 5]),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    dataset = sources.load(str(tmp_path))
    assert isinstance(dataset.x, np.memmap)
    assert_same(dataset, sources.load(str(save(tmp_path, **arrays))))
    np.save(tmp_path / "x.npy", arrays["x"][..., 0].astype(np.float32))
    assert isinstance(sources.load(str(tmp_path)).x, np.memmap)
    (tmp_path / "y.npy").write_bytes(b"no array")
    assert "y.npy" in error_of(tmp_path)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint8, bool])
def test_npz_numbers_become_float32(tmp_path, dtype):
    """Also vectors of 8 bits, which are no images; and what is left out has its default."""
    x = np.random.default_rng(0).uniform(0, 3, (4, 5)).astype(dtype)
    dataset = sources.load(str(save(tmp_path, x=x, y=np.arange(4))))
    assert dataset.x.dtype == np.float32
    np.testing.assert_array_equal(dataset.x, x.astype(np.float32))
    assert (dataset.domains, dataset.user) == (("all",), None)
    assert dataset.domain.tolist() == dataset.test.tolist() == [0] * 4


def test_npz_grey_images_get_a_channel_and_domains_are_in_the_order_of_numbers(tmp_path):
    x, domain = np.ones((2, 3, 4), np.uint8), np.array([10, 9])
    dataset = sources.load(str(save(tmp_path, x=x, y=np.arange(2), domain=domain)))
    assert dataset.x.shape == (2, 3, 4, 1)
    assert dataset.domains == ("9", "10")


@pytest.mark.parametrize(
    ("y", "task", "classes"),
    [
        (np.array([0.5, -1, 2]), "values", ("target",)),
        (np.array([[0.5], [-1], [2]], np.float32), "values", ("target",)),
        (np.array([[0.5, 1], [2, 3], [4, 5]]), "values", ("0", "1")),
        (np.array([[True, False], [True, True], [False, False]]), "labels", ("0", "1")),
    ],
)
def test_npz_values_and_labels(tmp_path, y, task, classes):
    dataset = sources.load(str(save(tmp_path, x=np.ones((3, 2)), y=y)))
    np.testing.assert_array_equal(dataset.y, y)
    assert dataset.y.dtype == (bool if task == "labels" else np.float32)
    assert (dataset.task, dataset.classes) == (task, classes)


def test_npz_that_may_mean_something_else_is_told(tmp_path):
    y = np.array([0, 1, 1])
    with pytest.warns(UserWarning, match="x "):
        sources.load(str(save(tmp_path, x=np.full((3, 2), 2**24 + 1), y=y)))
    with pytest.warns(UserWarning, match="x "):
        sources.load(str(save(tmp_path, x=np.zeros((3, 3, 16, 16), np.uint8), y=y)))
    with pytest.warns(UserWarning, match="y "):
        sources.load(str(save(tmp_path, x=np.zeros((3, 2)), y=y / 1)))
    with pytest.warns(UserWarning, match="test "):
        sources.load(str(save(tmp_path, x=np.zeros((3, 2)), y=y, test=y > 1)))
    path = save(tmp_path, x=np.zeros((3, 2)), y=y, hospital=y, age=y)
    np.savez(path, x=np.zeros((3, 2)), y=y, hospital=y, age=y)
    for each in (path, tmp_path):
        with pytest.warns(UserWarning, match="age, hospital"):
            sources.load(str(each))
        for key in ("x", "y", "hospital", "age"):
            np.save(tmp_path / f"{key}.npy", np.load(path)[key])


def test_npz_classes_may_be_names(tmp_path):
    found = sources.load(str(save(tmp_path, x=np.zeros((3, 2)), y=np.array(["no", "yes", "no"]))))
    assert (found.y.tolist(), found.classes, found.task) == ([0, 1, 0], ("no", "yes"), "classes")


GOOD = {"x": np.ones((3, 2)), "y": np.arange(3)}


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": GOOD["x"]},
        GOOD | {"x": np.array([[1, 2], [3, np.nan], [5, 6]])},
        GOOD | {"x": np.ones((4, 2))},
        GOOD | {"x": np.full((3, 2), "a")},
        GOOD | {"y": np.array([0.0, 1.0, np.nan])},
        GOOD | {"y": np.zeros((3, 2, 1))},
        GOOD | {"y": np.array([0, -1, 2])},
        GOOD | {"domain": np.ones(3)},
        GOOD | {"client": np.arange(2)},
        GOOD | {"test": np.ones(3)},
        GOOD | {"domain": np.array([None] * 3)},
        GOOD | {"test": np.ones(3, bool)},
        GOOD | {"test": np.arange(3) > 1, "valid": np.arange(3) > 0},
        GOOD | {"test": np.arange(3) > 1, "valid": np.arange(3) < 2},
    ],
)
def test_npz_that_does_not_fit_is_named(tmp_path, arrays):
    path = save(tmp_path, **arrays)
    assert str(path) in error_of(path)


def test_a_file_that_is_no_npz_is_named(tmp_path):
    (tmp_path / "data.npz").write_bytes(b"PK\x03\x04 cut")
    assert "data.npz" in error_of(tmp_path / "data.npz")


# folders of images


def draw(path: Path, pixels: np.ndarray) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def colours(seed: int, size=(4, 5)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def test_image_folder(tmp_path):
    dog = draw(tmp_path / "photo" / "dog" / "1.png", colours(0))
    cat = draw(tmp_path / "photo" / "cat" / "1.PNG", colours(1))
    grey = draw(tmp_path / "art" / "dog" / "2.png", colours(2)[..., 0])
    draw(tmp_path / "art" / "elk" / "3.jpeg", np.full((4, 5, 3), 200, np.uint8))
    (tmp_path / "README.txt").write_text("above the classes, anything may lie")
    (tmp_path / "art" / "notes.txt").write_text("")
    (tmp_path / "art" / "dog" / ".hidden").write_text("")
    dataset = sources.load(str(tmp_path))
    assert dataset.domains == ("art", "photo")
    assert dataset.classes == ("cat", "dog", "elk")  # each domain lacks one
    assert dataset.domain.tolist() == [0, 0, 1, 1]
    assert dataset.y.tolist() == [1, 2, 0, 1]
    assert dataset.x.shape == (4, 4, 5, 3)
    assert dataset.x.dtype == np.uint8
    np.testing.assert_array_equal(dataset.x[0], np.repeat(grey[..., None], 3, -1))
    np.testing.assert_allclose(dataset.x[1], 200, atol=2)  # JPEG
    np.testing.assert_array_equal(dataset.x[2], cat)
    np.testing.assert_array_equal(dataset.x[3], dog)
    assert not dataset.test.any()
    files = ["art/dog/2.png", "art/elk/3.jpeg", "photo/cat/1.PNG", "photo/dog/1.png"]
    assert dataset.source.tolist() == files
    assert dataset.take(dataset.y == 1).source.tolist() == [files[0], files[3]]


def test_images_of_several_sizes_are_resized(tmp_path):
    draw(tmp_path / "d" / "c" / "1.png", np.full((4, 5, 3), 9, np.uint8))
    draw(tmp_path / "d" / "c" / "2.png", np.full((8, 3, 3), 90, np.uint8))
    assert str(tmp_path / "d" / "c" / "2.png") in error_of(tmp_path)
    dataset = sources.load(str(tmp_path), image_size=6)
    assert dataset.x.shape == (2, 6, 6, 3)
    assert (dataset.x[0] == 9).all()
    assert (dataset.x[1] == 90).all()


@pytest.mark.parametrize("content", ["text", "truncated"])
def test_a_file_that_is_no_image_is_named(tmp_path, content):
    path = tmp_path / "d" / "c" / "1.png"
    draw(path, colours(0, size=(64, 64)))
    path.write_bytes(b"text" if content == "text" else path.read_bytes()[:2000])
    assert str(path) in error_of(tmp_path)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_images_of_more_than_8_bits_are_not_clipped(tmp_path, dtype):
    grey = draw(tmp_path / "d" / "c" / "1.png", colours(0)[..., 0])
    np.testing.assert_array_equal(sources.load(str(tmp_path)).x, grey[None, ..., None])
    draw(tmp_path / "d" / "c" / "2.tiff", np.ones((4, 5), dtype))
    assert "2.tiff" in error_of(tmp_path)


def test_photos_are_turned_as_their_exif_data_say(tmp_path):
    seen = np.zeros((16, 12, 3), np.uint8)
    seen[:8] = 255  # bright above
    upright = Image.fromarray(seen)
    turned, tag = upright.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    tag[0x0112] = 6  # viewers turn it back
    (tmp_path / "d" / "c").mkdir(parents=True)
    upright.save(tmp_path / "d" / "c" / "1.jpg", quality=100)
    turned.save(tmp_path / "d" / "c" / "2.jpg", quality=100, exif=tag)
    x = sources.load(str(tmp_path)).x
    assert x.shape == (2, 16, 12, 3)
    np.testing.assert_allclose(x[1], seen, atol=3)


@pytest.mark.parametrize("place", ["im/a/x/1.png", "arrays/x.npy", "leaf/train/1.json"])
def test_what_is_no_file_is_refused(tmp_path, place):
    """To read a pipe would wait for its writer."""
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(ValueError, match=path.name):
        sources.load(str(tmp_path / place.split("/")[0]))


def test_files_that_are_no_images_are_counted(tmp_path):
    """Windows' Thumbs.db, and an image at another depth than the others."""
    (tmp_path / "d" / "c").mkdir(parents=True)
    for place in ("d/c/1.png", "d/c/2.JPG", "d/3.png"):
        Image.fromarray(colours(0)).save(tmp_path / place)
    for place in ("d/c/Thumbs.db", "notes.txt", "d/c/.hidden"):
        (tmp_path / place).write_bytes(b"1")
    with pytest.warns(UserWarning, match=r": 3 other files .*d/3.png"):
        assert len(sources.load(str(tmp_path)).y) == 2


def test_files_for_which_pillow_starts_a_program_are_no_images(tmp_path):
    (tmp_path / "d" / "c").mkdir(parents=True)
    Image.fromarray(colours(0)).save(tmp_path / "d" / "c" / "1.eps")
    assert "1.eps" in error_of(tmp_path)
