"""Sources of data sets: scikit-learn's digits, TFDS, local files and folders."""

import contextlib
import csv
import difflib
import functools
import importlib.util
import json
import logging
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import dsprites, leaf, tables, text
from fedjax_inv.data.dataset import Dataset, check_dataset

if TYPE_CHECKING:
    from PIL import Image

# Optional packages are imported where they are used: the core works without them, and importing
# one takes longer than loading a cached data set.

_LOG = logging.getLogger("fedjax_inv")
NEEDS_NO_FILE = ("digits", "moved_digits", "dsprites")
FILES = (".npz", ".json", *tables.SUFFIXES)  # suffixes of data sets that are one file
# Of images. For others, such as EPS, Pillow starts another program.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_DIGITS_TO_8_BITS = 255 / 16  # the digits have levels 0 to 16
_KEYS = ("x", "y", "domain", "client", "test")  # the arrays of an .npz file that are read
# Errors that reading a damaged .npz file raises.
_DAMAGES = (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)
# Pillow's modes of more than 8 bits, which a conversion would clip.
_DEEP_MODES = {"I", "F", "I;16", "I;16L", "I;16B", "I;16N"}


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
) -> Dataset:
    """Load a data set by name or by path.

    Args:
      name: one of
        - "digits": scikit-learn's 1,797 grey images of 8x8 pixels, which need no file;
        - "moved_digits": nine copies of each, moved by a pixel up, down, left, right or both ways
          on 10x10 pixels: 16,173 images, of which `original` tells the copies of one digit;
        - "dsprites": squares and ellipses, rendered by `dsprites.load`, which need no file;
        - an image-classification data set of TFDS, such as "mnist", "emnist/letters" or
          "mnist:3.0.1", with its train and test splits. Without a version, it is the highest
          prepared one. It is decoded once, then cached in that version's folder;
        - the path of an `.npz` file with x [M, ...], y and optionally domain and client, [M]
          integers or strings, and test [M] bool. Clients are the users. Other arrays are not read.
          y are classes, [M] integers, which become 0..K-1 in increasing order; labels, [M, K]
          bool; or values, [M] or [M, K] floating. uint8 x with three axes or more are images
          [M, height, width] or [M, height, width, channels], which networks see in [0, 1]; other
          numbers become float32;
        - the path of a table, a `.csv` or `.parquet` file, as `tables.table` reads it;
        - the path of a `.csv` file of Sentiment140, as `text.sentiment140` reads it, with users. It
          is known by its first line, which has six fields, and is no table's line of names: it
          starts with a whole number, or ends with Sentiment140's own names user and text;
        - the path of LEAF's FEMNIST, as `leaf.femnist` reads it, with users: a `.json` file, or a
          folder of them. Folders train and test in it are the splits;
        - the path of a folder of these arrays as files, `x.npy`, `y.npy` and so on; x is mapped
          into memory, so that it may be larger;
        - the path of Tiny-ImageNet: a folder of `train/class/images/file` and of `val/images` with
          `val/val_annotations.txt`, which is the test split;
        - the path of a folder of images `domain/class/file` (the layout of PACS and VLCS).
        Images in folders have 8 bits a channel; they become RGB unless all are grey.
      data_dir: the folder of TFDS; by default $TFDS_DATA_DIR, else ~/tensorflow_datasets.
      image_size: the height and width in pixels to which the images of a folder are resized.
      num_images: how many images of "dsprites" are rendered; by default 20,000.
      vocabulary: the number of words in the vocabulary of texts; by default 10,000.
      text_length: the number of words to which texts are cut or padded; by default 30.
      roles: which columns of a table are no features, and what its targets are.
      like: the data set of an earlier table, whose columns a new table must have.

    Returns:
      The data set on the host.

    Raises:
      UsageError: if there is no such data set, if it is not prepared, or if its content does not
        fit.
      ImportError: if a package that reads it is missing.
    """
    if not isinstance(name, str) or not name:
        raise UsageError("name", name, "must be the name or the path of a data set")
    tfds_dir = _tfds_dir(data_dir)
    prepared = _prepared(name, tfds_dir)
    path = Path(name).expanduser()
    # Names go before paths: a folder "mnist" in the working directory must not hide the data set.
    is_path = name not in NEEDS_NO_FILE and prepared is None
    # Path.is_dir and Path.is_file would raise OSError for a name that is too long.
    is_folder = is_path and os.path.isdir(path)
    is_file = is_path and os.path.isfile(path)
    is_text = is_file and path.suffix == ".csv" and _is_sentiment140(path)
    is_table = is_file and path.suffix in tables.SUFFIXES and not is_text
    is_mapped = is_folder and os.path.isfile(path / "x.npy")
    of_leaf = leaf.files(path) if is_path and not is_mapped else []
    if is_path and not (is_folder or is_file):
        is_of_file = path.suffix in FILES
        missing = "must be a file, there is none" if is_of_file else _not_found(name, tfds_dir)
        raise UsageError("name", name, missing)
    for setting, value, fits, needed in (
        ("image_size", image_size, is_folder and not (of_leaf or is_mapped), "a folder of images"),
        ("num_images", num_images, name == "dsprites", "rendered"),
        ("vocabulary", vocabulary, is_text, "texts"),
        ("text_length", text_length, is_text, "texts"),
        ("roles", roles, is_table, "a table"),
        ("like", like, is_table, "a table"),
    ):
        if value is not None and not fits:
            shown = value if isinstance(value, int) else ...
            raise UsageError(setting, shown, f"must be left out for data that are not {needed}")
    if name == "dsprites":
        return dsprites.load() if num_images is None else dsprites.load(num_images=num_images)
    if is_mapped:
        dataset = _npy(path)
    elif of_leaf:
        with _of_load(name):
            dataset = leaf.femnist(of_leaf)
    elif is_folder and _is_tiny_imagenet(path):
        dataset = _tiny_imagenet(path, image_size)
    elif is_folder:
        dataset = _image_folder(path, image_size)
    elif is_table:
        with _of_load(name):
            dataset = tables.table(path, roles, like=like)
    elif is_text:
        size = text.VOCABULARY if vocabulary is None else vocabulary
        length = text.TEXT_LENGTH if text_length is None else text_length
        with _of_load(name):
            dataset = text.sentiment140(path, size, length)
    elif name == "digits":
        dataset = _digits()
    elif name == "moved_digits":
        dataset = _moved(_digits())
    elif prepared is not None:
        dataset = _tfds(name, prepared)
    elif path.suffix == ".npz":
        dataset = _npz(path)
    else:
        raise UsageError("name", name, _not_found(name, tfds_dir))
    try:
        check_dataset(dataset)
    except UsageError as error:
        raise UsageError("name", name, str(error)) from None
    return dataset


# Arguments of readers of one format -> those of `load`.
_OF_LOAD = {
    "found": "name",
    "path": "name",
    "folder": "name",
    "vocabulary_size": "vocabulary",
    "length": "text_length",
}


@contextlib.contextmanager
def _of_load(name: str) -> Iterator[None]:
    """Turn a reader's errors into errors about the arguments of `load`, or about a file inside."""
    try:
        yield
    except UsageError as error:
        argument = _OF_LOAD.get(str(error.argument), str(error.argument))
        value, allowed = error.value, error.allowed
        if argument == "name":
            file = str(value)
            is_inside = Path(file) != Path(name).expanduser()
            argument, value = (file, ...) if is_inside else ("name", name)
        raise UsageError(argument, value, allowed, **error.others) from None


@contextlib.contextmanager
def _experiments_extra() -> Iterator[None]:
    """Add the command that installs the package to the error of an import."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'fedjax_inv[experiments]'") from error


def _digits() -> Dataset:
    images, labels = _read_digits()
    x = np.rint(images * _DIGITS_TO_8_BITS).astype(np.uint8)[..., None]
    return _one_domain(x, labels, map(str, range(10)), np.zeros(len(x), bool))


@functools.cache  # a study loads them for each row
def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    sklearn = importlib.util.find_spec("sklearn")
    wheel = Path(sklearn.origin).parent if sklearn and sklearn.origin else Path()
    path = wheel / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():  # importing scikit-learn takes a second, reading its file does not
        table = np.loadtxt(path, delimiter=",")
        return table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    with _experiments_extra():
        from sklearn.datasets import load_digits

    return load_digits().images, load_digits().target


def _moved(dataset: Dataset) -> Dataset:
    """Return nine copies of each image, moved by at most a pixel, with a frame one pixel wide."""
    count, height, width, channels = dataset.x.shape
    x = np.zeros((count, 9, height + 2, width + 2, channels), dataset.x.dtype)
    for move in range(9):
        down, right = divmod(move, 3)
        x[:, move, down : down + height, right : right + width] = dataset.x
    y, test = np.repeat(dataset.y, 9), np.repeat(dataset.test, 9)
    moved = _one_domain(x.reshape(-1, *x.shape[2:]), y, dataset.classes, test)
    return moved._replace(original=np.repeat(np.arange(count, dtype=np.int32), 9))


def _one_domain(x: np.ndarray, y: np.ndarray, classes: Iterable[str], test: np.ndarray) -> Dataset:
    domain = np.zeros(len(y), np.int32)
    return Dataset(x, y.astype(np.int32), tuple(classes), domain, ("all",), test)


def may_be_prepared(name: str) -> bool:
    """Return whether a name could be that of a TFDS data set."""
    checks.record("name", name, str)
    return name not in NEEDS_NO_FILE and _tfds_name(name) is not None


def _tfds_name(name: str) -> re.Match[str] | None:
    """Match a name of TFDS, with the groups (name and configuration, version)."""
    return re.fullmatch(r"(\w{1,100}(?:/[\w.-]{1,100})?)(?::(\d+\.\d+\.\d+))?", name)


def _prepared(name: str, tfds_dir: Path) -> Path | None:
    """Return the folder of the highest prepared version of a TFDS data set, or None."""
    match = _tfds_name(name)
    if match is None:
        return None
    folder, version = match.groups()
    wanted = re.escape(version) if version else r"\d+\.\d+\.\d+"
    infos = (tfds_dir / folder).glob("*/dataset_info.json")
    versions = [info.parent for info in infos if re.fullmatch(wanted, info.parent.name)]
    return max(versions, key=lambda path: [int(n) for n in path.name.split(".")], default=None)


def _not_found(name: str, tfds_dir: Path) -> str:
    """Return the text of the error for an unknown name, which says how to get a data set."""
    try:
        with _experiments_extra():
            import tensorflow_datasets as tfds
    except ImportError as error:
        text = "is no file, no folder and no built-in data set; for one of TFDS"
        raise ImportError(f"name={name}: {text}: {error}") from error

    base = re.split("[/:]", name)[0]
    infos = (tfds_dir / name).glob("*/*/dataset_info.json") if may_be_prepared(name) else ()
    configs = sorted({f"{name}/{info.parent.parent.name}" for info in infos})
    if configs:
        return f"must name its configuration, one of {', '.join(configs)}"
    # Without community data sets, whose list would be downloaded.
    names = tfds.list_builders(with_community_datasets=False)
    if base in names:
        command = f"tfds build {name} --file_format=array_record --data_dir={tfds_dir}"
        return f"must be prepared: run `{command}` (pip install 'fedjax_inv[prepare]')"
    near = (
        ", ".join(difflib.get_close_matches(base, ["digits", *names])) or "digits, mnist, cifar10"
    )
    if os.path.isfile(os.path.expanduser(name)):  # false for impossible names
        endings = ", ".join(FILES)
        return f"must be a data set, a file that ends in {endings} in small letters, unpacked"
    return (
        f"must be a data set, did you mean {near}? "
        "Or the path of an .npz file, of a table (.csv, .parquet), of a folder domain/class/image "
        "or of x.npy and y.npy, of Sentiment140's .csv or of LEAF's .json"
    )


def _tfds(name: str, folder: Path) -> Dataset:
    """Read a prepared TFDS data set, from its cache if there is one."""
    cache = folder / "fedjax_inv.npz"
    if cache.exists():
        try:
            with np.load(cache) as arrays:
                dataset = _one_domain(
                    arrays["x"], arrays["y"], map(str, arrays["classes"]), arrays["test"]
                )
            check_dataset(dataset)
            return dataset
        except Exception as error:  # whatever is wrong with the cache, it can be built again
            _LOG.warning("%s cannot be read (%s): decoding %s again", cache, error, name)
    dataset = _decode(name, folder)
    # Written under another name first, so that another process never reads half a file.
    partial = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            np.savez(file, x=dataset.x, y=dataset.y, classes=dataset.classes, test=dataset.test)
        os.replace(partial, cache)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        warnings.warn(f"{name=} is decoded but not cached: {error}", stacklevel=3)
    return dataset


def _decode(name: str, folder: Path) -> Dataset:
    builder, shape, classes = _builder(name, folder)
    rows = [
        _rows(name, folder, builder, split)
        for split in ("train", "test")
        if split in builder.info.splits
    ]
    sizes = [len(source) for source in rows]
    _LOG.info("decoding %d images of %s, once", sum(sizes), name)
    x = np.empty((sum(sizes), *shape), np.uint8)
    y = np.empty(sum(sizes), np.int32)
    for i, example in enumerate(example for source in rows for example in source):
        x[i], y[i] = example["image"], example["label"]
    return _one_domain(x, y, classes, np.arange(len(y)) >= sizes[0])


def _builder(name: str, folder: Path) -> tuple[Any, tuple[int, ...], tuple[str, ...]]:
    """Return TFDS's builder of a prepared data set of images, their shape, and the classes."""
    with _experiments_extra():
        import tensorflow_datasets as tfds

    _check_features(name, folder / "features.json")
    builder = tfds.builder_from_directory(folder)
    features, splits = dict(builder.info.features), builder.info.splits
    image, label = features.get("image"), features.get("label")
    if (
        not isinstance(image, tfds.features.Image)
        or None in image.shape
        or image.np_dtype != np.uint8
        or not isinstance(label, tfds.features.ClassLabel)
        or "train" not in splits
    ):
        raise UsageError(
            "name",
            name,
            f"must have features image (uint8, of one size) and label (a class) and a "
            f"split train, it has {', '.join(sorted(features))} and {', '.join(splits)}",
        )
    return builder, image.shape, tuple(map(str, label.names))


def _rows(name: str, folder: Path, builder: Any, split: str) -> Sequence[Any]:
    """Return the examples of a split, decoded where they are read."""
    try:
        return builder.as_data_source(split=split)
    except NotImplementedError:
        raise UsageError(
            "name",
            name,
            f"must be prepared in the array_record format: delete {folder} and prepare it again",
        ) from None


def _tfds_dir(data_dir: str | None) -> Path:
    folder = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(folder).expanduser()


def _check_features(name: str, path: Path) -> None:
    """Raise UsageError if a data set has features of classes that TFDS does not define.

    TFDS would import their modules, which runs them.
    """
    try:
        kinds = list(_feature_classes(path.read_text()))
    except (OSError, ValueError, RecursionError):
        raise UsageError("name", name, f"must have {path} whole: prepare it again") from None
    for kind in kinds:
        if not kind.startswith("tensorflow_datasets."):
            text = f"must have features of TFDS alone, {path} names the class {kind}"
            raise UsageError("name", name, text)


def _feature_classes(value: Any) -> Iterator[str]:
    """The names of classes in a text of JSON, whose strings may be such texts themselves."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        yield from _feature_classes(json.loads(value))
    for key, each in value.items() if isinstance(value, dict) else ():
        if key in ("pythonClassName", "python_class_name", "type") and isinstance(each, str):
            yield each
        yield from _feature_classes(each)
    for each in value if isinstance(value, list) else ():
        yield from _feature_classes(each)


def _check_keys(name: str, read: Collection[str], others: Collection[str]) -> None:
    """Raise UsageError for an array that is not read, but whose key is nearly one that is."""
    for key in others:
        near = difflib.get_close_matches(key.lower(), _KEYS, 1, 0.7)
        if near and near[0] not in read:
            text = f"has an array {key!r}, must be {near[0]!r} to be read, or another name"
            raise UsageError("name", name, text)


def _npz(path: Path) -> Dataset:
    name = str(path)
    arrays: dict[str, np.ndarray] = {}
    key = ""
    try:
        with np.load(path) as archive:
            others = [key for key in archive if key not in _KEYS]
            for key in filter(archive.__contains__, _KEYS):
                arrays[key] = archive[key]
    except MemoryError as error:
        raise UsageError("name", name, f"must fit into memory: {error}") from None
    except _DAMAGES as error:
        reason = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        if "Object arrays" in str(error):  # numpy's ValueError
            saved = (
                "np.unique(y, return_inverse=True)[1]" if key == "y" else f"np.array({key}, str)"
            )
            reason = f", {key} is of Python objects; save texts as {saved}"
        raise UsageError("name", name, f"must be an .npz file of plain arrays{reason}") from None
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise UsageError("name", name, "must be an .npz file of plain arrays")
    _check_keys(name, arrays, others)
    return _of_arrays(name, arrays)


def _npy(folder: Path) -> Dataset:
    name = str(folder)
    arrays: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.npy")):
        if path.stem in _KEYS:
            try:
                arrays[path.stem] = np.load(path, mmap_mode="r" if path.stem == "x" else None)
            except _DAMAGES as error:
                raise UsageError(str(path), ..., f"must be an array: {error}") from None
    _check_keys(name, arrays, [path.stem for path in folder.glob("*.npy")])
    return _of_arrays(name, arrays)


def _of_arrays(name: str, arrays: Mapping[str, np.ndarray]) -> Dataset:
    for key in ("x", "y"):
        if key not in arrays:
            raise UsageError(
                "name", name, f"must hold arrays x [M, ...] and y [M], it has no {key}"
            )
    x, y = arrays["x"], arrays["y"]
    if y.ndim not in {"i": (1,), "u": (1,), "b": (2,), "f": (1, 2)}.get(y.dtype.kind, ()):
        raise UsageError(
            "name",
            name,
            "y must be integers [M] (classes), bool [M, K] (labels), or floating [M] or [M, K] "
            f"(values), it is {y.dtype} {y.shape}{checks.for_texts('y', y)}",
        )
    if y.size == 0:
        raise UsageError("name", name, "must hold at least one example")
    if x.ndim and len(x) != len(y):
        text = f"x and y must be of one length, they have {len(x)} and {len(y)}"
        raise UsageError("name", name, text)
    domain = arrays.get("domain", np.full(len(y), "all"))
    client = arrays.get("client", domain)
    test = arrays.get("test", np.zeros(len(y), bool))
    for key, array, ndim, kinds, needed in (
        ("x", x, max(x.ndim, 2), "biuf", f"numbers [{len(y)}, ...]"),
        ("domain", domain, 1, "iuU", f"integers or strings [{len(y)}]"),
        ("client", client, 1, "iuU", f"integers or strings [{len(y)}]"),
        ("test", test, 1, "b", f"bool [{len(y)}]"),
    ):
        if array.ndim != ndim or len(array) != len(y) or array.dtype.kind not in kinds:
            raise UsageError(
                "name", name, f"{key} must be {needed}, it is {array.dtype} {array.shape}"
            )
    if x.dtype != np.uint8 or x.ndim == 2:  # features are the numbers themselves
        x = _float32(name, "x", x)
    elif x.ndim == 3:
        x = x[..., None]
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] > 4:
        text = f"{name}: x has {x.shape[3]} channels, as the last axis counts them; images of "
        text += "PyTorch [M, channels, height, width] must be saved as x.transpose(0, 2, 3, 1)"
        warnings.warn(text, stacklevel=3)
    y, classes = _targets(name, y)
    if y.dtype.kind == "f" and len(np.unique(y)) <= tables.MOST_CLASSES and (y == np.rint(y)).all():
        warnings.warn(f"{name}: y {tables.FEW_WHOLE}; classes are integers", stacklevel=3)
    domains, domain = np.unique(domain, return_inverse=True)
    user = None
    if "client" in arrays:
        user = np.unique(client, return_inverse=True)[1].astype(np.int32)
    return Dataset(
        x,
        y,
        classes,
        domain.astype(np.int32),
        tuple(map(str, domains)),
        test,
        user=user,
    )


def _float32(name: str, key: str, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # too large numbers become infinite
        numbers = array.astype(np.float32, copy=False)
    if not checks.holds_finite(numbers):
        text = f"{key} must be finite in float32, it holds NaN or infinity"
        raise UsageError("name", name, text)
    if tables.is_rounded(array, numbers):
        warnings.warn(f"{name}: {key} {tables.LARGE_WHOLE}", stacklevel=4)
    return numbers


def _targets(name: str, y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the targets as `Dataset.y`, and the names of their classes or columns."""
    if y.dtype.kind in "iu":
        if y.min() < 0:
            raise UsageError("name", name, f"y must be at least 0, its smallest is {y.min()}")
        classes, y = np.unique(y, return_inverse=True)
        return y.astype(np.int32), tuple(map(str, classes))
    num_columns = 1 if y.ndim == 1 else y.shape[1]
    names = ("target",) if num_columns == 1 else tuple(map(str, range(num_columns)))
    return (y if y.dtype == bool else _float32(name, "y", y)), names


def _image_folder(root: Path, image_size: int | None) -> Dataset:
    name = str(root)
    files = [
        (domain.name, label.name, file)
        for domain in visible(root)
        for label in (visible(domain) if domain.is_dir() else ())
        for file in (visible(label) if label.is_dir() else ())
    ]
    if not files:
        raise UsageError("name", name, "must hold images in folders domain/class/, there are none")
    x = _decoded(name, [file for _, _, file in files], image_size)
    domains, domain = np.unique([domain for domain, _, _ in files], return_inverse=True)
    classes, y = np.unique([label for _, label, _ in files], return_inverse=True)
    return Dataset(
        x,
        y.astype(np.int32),
        tuple(map(str, classes)),
        domain.astype(np.int32),
        tuple(map(str, domains)),
        np.zeros(len(y), bool),
    )


def _is_sentiment140(path: Path) -> bool:
    """Return whether a .csv file is Sentiment140 and no table, by its first line."""
    try:
        with path.open(encoding="latin-1", newline="") as file:
            first = next(csv.reader(file), [])
    except (OSError, csv.Error):  # its reader tells
        return False
    return len(first) == len(text.COLUMNS) and (
        first[0].isdecimal() or tuple(first[-2:]) == text.COLUMNS[-2:]
    )


def _is_tiny_imagenet(root: Path) -> bool:
    return (root / "train").is_dir() and (root / "val" / "val_annotations.txt").is_file()


def _tiny_imagenet(root: Path, image_size: int | None) -> Dataset:
    """Read Tiny-ImageNet. Classes are named by WordNet's numbers, as words occur twice."""
    name = str(root)
    folders = [folder for folder in visible(root / "train") if (folder / "images").is_dir()]
    files = [(label.name, file) for label in folders for file in visible(label / "images")]
    if not files:
        raise UsageError(
            "name", name, "must hold images in folders train/class/images, there are none"
        )
    num_train, annotations = len(files), root / "val" / "val_annotations.txt"
    for number, line in enumerate(annotations.read_text(errors="replace").splitlines(), 1):
        file, _, rest = line.partition("\t")
        label = rest.partition("\t")[0]
        if not (root / "train" / label / "images").is_dir() or not label:
            raise UsageError(
                str(annotations),
                ...,
                f"line {number} must be of an image and a class of train, with a "
                f"tab between, it is {line[:60]!r}",
            )
        files.append((label, root / "val" / "images" / file))
    x = _decoded(name, [file for _, file in files], image_size)
    classes, y = np.unique([label for label, _ in files], return_inverse=True)
    return _one_domain(x, y, map(str, classes), np.arange(len(y)) >= num_train)


def _decoded(name: str, files: Sequence[Path], image_size: int | None) -> np.ndarray:
    """Decode the images of a folder `name`: [M, height, width, 1 or 3]."""
    if image_size is not None:
        checks.integer("image_size", image_size, 1, meaning=" pixel")
    sizes: dict[tuple[int, int], Path] = {}
    modes: dict[str, Path] = {}
    for file in files:
        with image(file) as opened:
            sizes.setdefault(opened.size, file)
            modes.setdefault(opened.mode, file)
    for mode, file in modes.items():
        check_mode(file, mode)
    if image_size is None and len(sizes) > 1:
        (first, one), (second, other) = list(sizes.items())[:2]
        raise UsageError(
            "name",
            name,
            "must hold images of one size unless image_size is given, "
            f"{one} is {first} and {other} {second}",
        )
    width, height = next(iter(sizes)) if image_size is None else (image_size, image_size)
    mode = "L" if modes.keys() <= {"1", "L"} else "RGB"
    needed = len(files) * height * width * len(mode)
    if image_size is None:
        checks.memory("name", name, needed, what=f" for images of {width}x{height} pixels")
    else:
        checks.memory("image_size", image_size, needed)
    x = np.empty((len(files), height, width, len(mode)), np.uint8)
    for i, file in enumerate(files):
        with image(file) as opened:
            x[i] = resized(opened.convert(mode), (width, height)).reshape(x.shape[1:])
    return x


def image_of(file: Path, size: tuple[int, int], mode: str = "RGB") -> np.ndarray:
    """Decode a file of an image.

    Args:
      file: its path.
      size: (width, height) to which it is resized.
      mode: "RGB" or "L".

    Returns:
      [height, width, 3 or 1] uint8.

    Raises:
      UsageError: for another mode, and if the file is no image of 8 bits a channel that can be
        decoded.
    """
    checks.one_of("mode", mode, ("RGB", "L"))
    with image(file) as opened:
        check_mode(file, opened.mode)
        return resized(opened.convert(mode), size).reshape(*size[::-1], len(mode))


def check_mode(file: Path, mode: str) -> None:
    """Raise UsageError if an image of this mode of Pillow has more than 8 bits a channel."""
    if mode in _DEEP_MODES:
        raise UsageError(str(file), ..., f"must have 8 bits a channel, its mode is {mode}")


def resized(opened: "Image.Image", size: tuple[int, int]) -> np.ndarray:
    """Return the pixels of an image, scaled to a width and height."""
    with _experiments_extra():
        from PIL.Image import Resampling

    return np.asarray(opened.resize(size, Resampling.BILINEAR))


def visible(folder: Path) -> list[Path]:
    """Return what lies in a folder, in the order of names, without hidden files."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise UsageError(str(folder), ..., f"cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def image(file: Path) -> "Iterator[Image.Image]":
    """Open an image; UsageError names a file that cannot be decoded."""
    with _experiments_extra():
        from PIL import Image

    if not file.is_file():  # opening a pipe would wait for its writer
        raise UsageError(str(file), ..., "must be an image that can be decoded, is no file")
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images and refuses larger ones; the large ones are allowed here.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(file, formats=_FORMATS) as opened:
                yield opened
    except UsageError:  # of the block
        raise
    except MemoryError:
        raise UsageError(str(file), ..., "must be an image that fits into memory") from None
    # Pillow's errors for damaged files and for absurd sizes.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UsageError(str(file), ..., f"must be an image that can be decoded: {error}") from None
