"""Sources of data sets: scikit-learn's digits, TFDS, local files and folders."""

import difflib
import functools
import importlib.util
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import dsprites, images, leaf, tables, text
from fedjax_inv.data.dataset import Dataset, for_texts, holds_finite, suspicions

# Optional packages are imported where they are used: the core works without them.

TWEETS = "sentiment140:"  # before the path of a file of tweets
NEEDS_NO_FILE = ("digits", "moved_digits", "dsprites")
FILES = (".npz", ".json", *tables.SUFFIXES)  # suffixes of data sets that are one file
_DIGITS_TO_8_BITS = 255 / 16  # the digits have levels 0 to 16
# The arrays that are read; path are the files that the examples come from.
_KEYS = ("x", "y", "domain", "client", "test", "group", "valid", "split", "path")
_ABOUT = ("record",)  # what `fedjax-inv features` writes about features
# What readers raise for content that does not fit; the warnings are pandas' of too long lines.
_UNFIT: tuple[type[Exception], ...] = (
    EOFError,
    MemoryError,
    NotImplementedError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
    Warning,
    zipfile.BadZipFile,
    zlib.error,
)
_BATCH = 1000  # records of TFDS that are read at once


def load(
    name: str,
    *,
    data_dir: str | None = None,
    image_size: int | None = None,
    num_images: int | None = None,
    vocabulary: int | None = None,
    text_length: int | None = None,
    roles: tables.Roles | None = None,
    like: Dataset | None = None,
    decode: images.Decode | None = None,
) -> Dataset:
    """Load a data set by name or by path.

    Args:
      name: one of
        - "digits": scikit-learn's 1,797 grey images of 8x8 pixels;
        - "moved_digits": nine copies of each, moved by at most a pixel down and right, on 10x10
          pixels, of which `original` tells the copies of one digit;
        - "dsprites": squares and ellipses, rendered by `dsprites.load`;
        - an image-classification data set of TFDS, such as "mnist", "emnist/letters" or
          "mnist:3.0.1", by default in its highest prepared version;
        - the path of an `.npz` file, or of a folder of files x.npy, y.npy and so on, of which x is
          mapped into memory: see `of_arrays`;
        - the path of a table, a `.csv` or `.parquet` file, of features or of paths of images: see
          `tables.table`;
        - "sentiment140:" and the path of a `.csv` file of Sentiment140, with users: see
          `text.sentiment140`;
        - the path of LEAF's FEMNIST, with users: a `.json` file, or a folder of them, in which
          folders train and test are the splits;
        - the path of a folder of images `domain/class/file`, as in PACS and VLCS. Other files are
          passed over, with a warning that counts them.
      data_dir: the folder of TFDS; by default $TFDS_DATA_DIR, else ~/tensorflow_datasets.
      image_size: the height and width in pixels to which images of files are resized.
      num_images: how many images of "dsprites" are rendered; by default 20,000.
      vocabulary: the number of words in the vocabulary of texts; by default 10,000.
      text_length: the number of words to which texts are cut or padded; by default 30.
      roles: which columns of a table are no features, and what its targets are.
      decode: makes x of files of images, in place of `images.decoded`, such as `images.Files`.
      like: the data set of an earlier table, whose columns a new table must have.

    Returns:
      The data set on the host.

    Raises:
      UsageError: if there is no such data set, or if its content does not fit.
      ImportError: if a package that reads it is missing.
    """
    vocabulary = text.VOCABULARY if vocabulary is None else vocabulary
    length = text.TEXT_LENGTH if text_length is None else text_length
    checks.integer("vocabulary", vocabulary, len(text.SPECIAL) + 1)
    tfds_dir = _tfds_dir(data_dir)
    decode = decode or functools.partial(images.decoded, image_size=image_size)
    path = path_of(name)
    try:
        # Names go before paths: a folder "mnist" in the working directory must not hide the data.
        if name in NEEDS_NO_FILE:
            return _made(name, num_images)
        if prepared := _prepared(name, tfds_dir):
            return _tfds(prepared)
        if name and os.path.isdir(path):  # Path.is_dir would raise OSError for too long a name
            if (path / "x.npy").exists():
                return _npy(path)
            of_leaf = leaf.files(path)
            return leaf.femnist(of_leaf) if of_leaf else _image_folder(path, decode)
        if name.startswith(TWEETS):
            return text.sentiment140(checks.regular(path), vocabulary, length)
        if os.path.isfile(path) and path.suffix in FILES:
            return _file(path, decode, roles, like)
        raise ValueError(_not_found(name, tfds_dir))
    except UsageError:
        raise
    except ImportError as error:
        raise ImportError(f"{name=}: {error}: pip install 'fedjax_inv[experiments]'") from error
    except _UNFIT as error:
        raise UsageError("name", name, checks.one_line(error)) from None


def path_of(name: str) -> Path:
    """Return the path in the name of a data set; its other names give paths where nothing is."""
    return Path(name.removeprefix(TWEETS)).expanduser()


def _made(name: str, num_images: int | None) -> Dataset:
    if name == "dsprites":
        return dsprites.load() if num_images is None else dsprites.load(num_images=num_images)
    levels, labels = _digits()
    x = np.rint(levels * _DIGITS_TO_8_BITS).astype(np.uint8)[..., None]
    digits = _one_domain(x, labels, [*map(str, range(10))], np.zeros(len(x), bool))
    return digits if name == "digits" else _moved(digits)


@functools.cache  # a study loads them for each row
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Read scikit-learn's file; importing the package takes a second."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ImportError("digits need scikit-learn")
    table = np.loadtxt(
        Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=","
    )
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1]


def _moved(dataset: Dataset) -> Dataset:
    """Return nine copies of each image, moved by at most a pixel, with a frame one pixel wide."""
    count, height, width, channels = dataset.x.shape
    x = np.zeros((count, 9, height + 2, width + 2, channels), dataset.x.dtype)
    for move in range(9):
        down, right = divmod(move, 3)
        x[:, move, down : down + height, right : right + width] = dataset.x
    y = np.repeat(dataset.y, 9)
    test = np.repeat(dataset.test, 9)
    moved = _one_domain(x.reshape(-1, *x.shape[2:]), y, dataset.classes, test)
    return moved._replace(original=np.repeat(np.arange(count, dtype=np.int32), 9))


def _one_domain(x: np.ndarray, y: np.ndarray, classes: Sequence[str], test: np.ndarray) -> Dataset:
    domain = np.zeros(len(y), np.int32)
    return Dataset(x, y.astype(np.int32), tuple(classes), domain, ("all",), test)


def _file(
    path: Path, decode: images.Decode, roles: tables.Roles | None, like: Dataset | None
) -> Dataset:
    if path.suffix == ".npz":
        archive: Any = np.load(path)
        with archive:
            return of_arrays(str(path), {key: archive[key] for key in _known(path, archive)})
    if path.suffix == ".json":
        return leaf.femnist(leaf.files(path))
    return tables.table(path, roles, decode=decode, like=like)


# TFDS


def _tfds_dir(data_dir: str | None) -> Path:
    folder = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(folder).expanduser()


def _prepared(name: str, tfds_dir: Path) -> Path | None:
    """Return the folder of the highest prepared version of a TFDS data set, or None."""
    match = re.fullmatch(r"(\w{1,100}(?:/[\w.-]{1,100})?)(?::(\d+\.\d+\.\d+))?", name)
    if match is None:
        return None
    folder, version = match.groups()
    wanted = re.escape(version) if version else r"\d+\.\d+\.\d+"
    infos = (tfds_dir / folder).glob("*/dataset_info.json")
    versions = [info.parent for info in infos if re.fullmatch(wanted, info.parent.name)]
    return max(versions, key=lambda path: [int(n) for n in path.name.split(".")], default=None)


def _not_found(name: str, tfds_dir: Path) -> str:
    """Return the text of the error for an unknown name, which says how to get a data set."""
    path = Path(name).expanduser()
    if path.suffix in FILES:
        return "must be a file, there is none"
    if os.path.isfile(path):
        return f"must be a file that ends in {', '.join(FILES)} in small letters, unpacked"
    import tensorflow_datasets as tfds

    base = re.split("[/:]", name)[0]
    infos = tfds_dir.glob(f"{base}/*/*/dataset_info.json") if base else ()
    configs = sorted({f"{base}/{info.parent.parent.name}" for info in infos})
    if configs:
        return f"must name its configuration, one of {', '.join(configs)}"
    # Without community data sets, whose list would be downloaded.
    names = tfds.list_builders(with_community_datasets=False)
    if base in names:
        command = f"tfds build {name} --file_format=array_record --data_dir={tfds_dir}"
        return f"must be prepared: run `{command}` (pip install 'fedjax_inv[prepare]')"
    near = difflib.get_close_matches(base, [*NEEDS_NO_FILE, *names]) or ["digits", "mnist"]
    return (
        f"must be a data set, did you mean {', '.join(near)}? Or the path of an .npz file, of a "
        "table (.csv, .parquet), of a folder domain/class/image or of x.npy and y.npy, or of "
        "LEAF's .json; or sentiment140: and the path of its .csv"
    )


@functools.lru_cache(1)  # a study loads one for each row, and to decode it takes seconds
def _tfds(folder: Path) -> Dataset:
    """Read a prepared TFDS data set of images with its splits train and test."""
    import tensorflow_datasets as tfds

    _check_features(folder / "features.json")
    try:
        builder = tfds.builder_from_directory(folder)
        features = dict(builder.info.features)
        splits = builder.info.splits
        image: Any = features.get("image")
        label: Any = features.get("label")
        is_image = isinstance(image, tfds.features.Image) and None not in image.shape
        is_known = is_image and isinstance(label, tfds.features.ClassLabel)
        if not is_known or image.np_dtype != np.uint8 or "train" not in splits:
            text = "must have features image (uint8, of one size) and label (a class) and a split "
            text += f"train, it has {', '.join(sorted(features))} and {', '.join(splits)}"
            raise UsageError(str(folder), ..., text)
        parts = [builder.as_data_source(split) for split in ("train", "test") if split in splits]
        sizes = [len(part) for part in parts]
        x = np.empty((sum(sizes), *image.shape), np.uint8)
        y = np.empty(sum(sizes), np.int32)
        for row, record in enumerate(record for part in parts for record in _records(part)):
            x[row], y[row] = record["image"], record["label"]
    except UsageError:
        raise
    except Exception as error:  # of many types, such as RuntimeError and ParseError
        text = "must be whole, in the array_record format: delete it and prepare it again"
        raise UsageError(str(folder), ..., f"{text} ({checks.one_line(error)})") from None
    return _one_domain(x, y, [*map(str, label.names)], np.arange(len(y)) >= sizes[0])


def _records(part: Any) -> Iterator[Any]:
    """Read the records of a split, several at once, which is faster than one by one."""
    for first in range(0, len(part), _BATCH):
        yield from part.__getitems__([*range(first, min(first + _BATCH, len(part)))])


def _check_features(path: Path) -> None:
    """Raise UsageError if a data set names features of others: TFDS would import their modules."""
    content = path.read_text() if path.is_file() else "\\u"
    key_and_text = r'(?:class_?name|\btype)[\\"]+\s*:\s*[\\"]+([\w.]+)'
    kinds = re.findall(key_and_text, content, re.IGNORECASE)
    others = [kind for kind in kinds if not kind.startswith("tensorflow_datasets.")]
    if others or "\\u" in content:  # an escape may hide a name
        text = f"must be there, with features of TFDS alone, not {', '.join(others)}"
        raise UsageError(str(path), ..., text)


# arrays


def _npy(folder: Path) -> Dataset:
    paths = {path.stem: path for path in sorted(folder.glob("*.npy"))}
    arrays = {}
    for key in _known(folder, paths):
        try:
            arrays[key] = np.load(checks.regular(paths[key]), mmap_mode="r" if key == "x" else None)
        except _UNFIT as error:
            raise UsageError(str(paths[key]), ..., checks.one_line(error)) from None
    return of_arrays(str(folder), arrays)


def _known(path: Path, keys: Collection[str]) -> list[str]:
    """Return the keys that are read, and warn of others.

    Raises ValueError for another one that is nearly one of these.
    """
    others = sorted({*keys} - {*_KEYS, *_ABOUT})
    for key in others:
        near = difflib.get_close_matches(key.lower(), _KEYS, 1, 0.7)
        if near and near[0] not in keys:
            text = f"has an array {key!r}, must be {near[0]!r} to be read, or another name"
            raise ValueError(text)
    if others:
        warnings.warn(f"{path}: arrays that are not read: {', '.join(others)}", stacklevel=4)
    return [key for key in _KEYS if key in keys]


def of_arrays(name: str, arrays: Mapping[str, np.ndarray]) -> Dataset:
    """Make a data set of arrays of M examples; clients are its users.

    Args:
      name: of the data, for warnings.
      arrays: x and y, and domain, client and test, if there are any. x: [M, ...]; uint8 with three
        axes or more are images [M, height, width] or [M, height, width, channels], which networks
        see in [0, 1]; other numbers become float32. y: classes, [M] integers, which become 0..K-1
        in increasing order, or strings [M], their names; labels, [M, K] bool; or values, [M] or
        [M, K] floating. domain and client and group: [M] integers or strings; no random split
        separates a group. test and valid: [M] bool, the splits; if no example is `valid`, a part
        is drawn. split: in place of both the names of splits [M], as in a table. path: [M] strings,
        the file of each example.
    """
    lacking = [key for key in ("x", "y") if key not in arrays]
    if lacking:
        raise ValueError(f"must hold arrays x [M, ...] and y [M], it has no {lacking[0]}")
    x, y = arrays["x"], arrays["y"]
    of_y = {"b": ("b", (2,)), "f": ("f", (1, 2))}.get(y.dtype.kind, ("iuU", (1,)))
    named = ("iuU", (1,), "integers or strings [M]")
    allowed = {
        "y": (*of_y, "integers or strings [M] (classes), bool [M, K] (labels), floating (values)"),
        "x": ("biuf", range(2, 99), "numbers [M, ...]"),
        "domain": named,
        "client": named,
        "group": named,
        "test": ("b", (1,), "bool [M]"),
        "valid": ("b", (1,), "bool [M]"),
        "split": named,
        "path": ("U", (1,), "strings [M]"),
    }
    for key, (kinds, ndims, needed) in allowed.items():
        array = arrays.get(key)
        if array is None:
            continue
        fits = array.dtype.kind in kinds and array.ndim in ndims and len(array) == len(y)
        if not fits or 0 in array.shape:
            text = f"{key} must be {needed}, of one length M above 0; it is {array.dtype}"
            raise ValueError(f"{text} {array.shape}{for_texts(key, array)}")
    if x.dtype != np.uint8 or x.ndim == 2:  # features are the numbers themselves
        x = _float32(name, "x", x)
    elif x.ndim == 3:
        x = x[..., None]
    for text in suspicions(f"{name}: ", x, y):
        warnings.warn(text, stacklevel=3)
    y, classes = _targets(name, y)
    domain, domains = _numbered(arrays.get("domain", np.full(len(y), "all")))
    user = _numbered(arrays["client"])[0] if "client" in arrays else None
    group = _numbered(arrays["group"])[0] if "group" in arrays else None
    none = np.zeros(len(y), bool)
    test = arrays.get("test", none)
    valid = arrays.get("valid", none)
    known = None
    if "split" in arrays:
        if "test" in arrays or "valid" in arrays:
            raise ValueError("split must stand alone, without test and valid")
        test, valid, known = tables.splits("split", arrays["split"].astype(str))
    if (test & valid).any() or (test | valid).all():
        text = "must leave an example to train on, and have none in common"
        raise ValueError(f"test and valid {text}")
    if {"test", "split"} & {*arrays} and not test.any():
        text = "no example is of the test: the data have no test split"
        warnings.warn(f"{name}: {text}", stacklevel=3)
    more: dict[str, Any] = {"user": user, "original": group, "known": known}
    more["valid"] = valid if {"valid", "split"} & {*arrays} else None
    more["source"] = arrays.get("path")
    return Dataset(x, y, classes, domain, domains, test, **more)


def _numbered(names: Sequence[str] | np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the number of each name among the different ones in order, and these."""
    found, numbers = np.unique(names, return_inverse=True)
    if found.dtype.kind == "U":
        found, again = np.unique([tables.plain(name) for name in found], return_inverse=True)
        numbers = again[numbers]
    return numbers.astype(np.int32), tuple(map(str, found))


def _float32(name: str, key: str, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # too large numbers become infinite
        numbers = array.astype(np.float32, copy=False)
    if not holds_finite(numbers):
        raise ValueError(f"{key} must be finite in float32, it holds NaN or infinity")
    if tables.is_rounded(array, numbers):
        warnings.warn(f"{name}: {key} {tables.LARGE_WHOLE}", stacklevel=4)
    return numbers


def _targets(name: str, y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the targets as `Dataset.y`, and the names of their classes or columns."""
    if y.dtype.kind in "iuU":
        if y.dtype.kind == "i" and y.min() < 0:
            raise ValueError(f"y must be at least 0, its smallest is {y.min()}")
        return _numbered(y)
    num_columns = 1 if y.ndim == 1 else y.shape[1]
    names = ("target",) if num_columns == 1 else tuple(map(str, range(num_columns)))
    if y.dtype == bool:
        return y, names
    y = _float32(name, "y", y)
    if len(np.unique(y)) <= tables.MOST_CLASSES and (y == np.rint(y)).all():
        warnings.warn(f"{name}: y {tables.FEW_WHOLE}; classes are integers", stacklevel=4)
    return y, names


# images


def _image_folder(root: Path, decode: images.Decode) -> Dataset:
    every = sorted(path for path in root.rglob("[!.]*") if path.is_file())
    files = [file for file in root.glob("[!.]*/[!.]*/[!.]*") if images.NAME.fullmatch(file.name)]
    files.sort()
    passed_over = ""
    if others := sorted({*every} - {*files}):
        passed_over = (
            f"{len(others)} other files are passed over, such as {others[0].relative_to(root)}"
        )
    if not files:
        raise ValueError(
            f"must hold images in folders domain/class/, there are none; {passed_over}"
        )
    if passed_over:
        warnings.warn(f"{root}: {passed_over}", stacklevel=3)
    of_label, of_domain = ([file.parents[above].name for file in files] for above in (0, 1))
    domain, domains = _numbered(of_domain)
    y, classes = _numbered(of_label)
    x = decode(files)
    source = np.array([str(file.relative_to(root)) for file in files])
    none = np.zeros(len(y), bool)
    return Dataset(x, y, classes, domain, domains, none, source=source)
