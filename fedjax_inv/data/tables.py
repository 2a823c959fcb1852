"""Tables of a .csv or .parquet file as data sets: a column is a feature unless it has another role.

Categories become features of 0 and 1, one for each category of the file. Which of them occur in
training depends on the split, so `models.scaling` sets the others to 0 inside the network. If a
column has paths of images, these are the examples.
"""

import collections
import difflib
import re
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_inv import checks, platforms
from fedjax_inv.checks import UsageError
from fedjax_inv.data import images
from fedjax_inv.data.dataset import TASKS, Column, Dataset, suspicions

# pandas is imported where it is used, as it is optional. It comes without types.

MOST_CLASSES = 20  # whole numbers with more different values are values, not classes
MOST_CATEGORIES = 1000  # of a column
SUFFIXES = (".csv", ".parquet")
FEW_WHOLE = "holds few different whole numbers in floating point, which are read as values"
LARGE_WHOLE = "holds whole numbers above 2^24, such as identifiers, which float32 rounds"
_MISSING = ["", "NA", "N/A", "n/a", "NULL", "null", "NaN", "nan", "#N/A", "<NA>"]
_TRUTH = ("false", "true")
# Roles with a default name, which a table may lack.
_DEFAULTS = {"domain": "domain", "client": "client", "test": "test", "image": "img_filename"}
_NAMED = ("group", "split")  # roles that no column has by default
# The texts in a column of splits, and the numbers of WILDS.
_SPLITS = {"train": "train", "training": "train", "0": "train", "test": "test", "2": "test"}
_SPLITS |= dict.fromkeys(("val", "valid", "validation", "1"), "val")
_SPLITS |= {name: name for name in ("id_val", "id_test")}
_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # a frame's index that was written too
# A number, also as 1,234.5 or 5%, or a date of numbers. So many beside a text are no categories.
_NUMBER = re.compile(r"[-+]?[\d.,']*\d[\d.,']*(e[-+]?\d+)?%?|\d+([/.-])\d+\2\d+", re.IGNORECASE)
_NUMBERS_AMONG_TEXTS = 20
_TWEETS = "; tweets of Sentiment140 are sentiment140:FILE"
_KINDS = {"boolean": "truth", "string": "text"} | dict.fromkeys(
    ("integer", "floating", "decimal", "mixed-integer-float"), "number"
)


class Roles(NamedTuple):
    """The columns of a table that are no features, and what its targets are.

    A column of domains, clients, images or the test split may be absent if it has its default
    name, and "" stands for none.
    """

    target: tuple[str, ...] = ("target",)
    domain: str = "domain"  # texts or whole numbers
    client: str = "client"  # texts or whole numbers: the user of an example
    test: str = "test"  # true/false or 0/1: whether an example is in the test split
    group: str = ""  # texts or whole numbers: no random split separates the rows of a group
    # train, val and test, or 0, 1 and 2, in place of `test` and of a random validation. With id_val
    # or id_test, which are of domains that train, val and test are of unseen ones, as in WILDS. "":
    # a column called split
    split: str = ""
    image: str = _DEFAULTS["image"]  # paths of images, in place of features; the default is WILDS's
    ignored: tuple[str, ...] = ()
    # "auto" or one of TASKS. With "auto", one target is of classes if it holds texts, true/false or
    # whole numbers with at most MOST_CLASSES different values, else of values; several targets are
    # labels if they hold true/false, else values
    task: str = "auto"


def table(
    path: Path,
    roles: Roles | None = None,
    *,
    decode: images.Decode = images.decoded,
    like: Dataset | None = None,
) -> Dataset:
    """Read a table: a .csv file in UTF-8 with a line of column names, or a .parquet file.

    Columns of numbers are one feature each. Columns of texts and of true/false have a feature for
    each category, 1 where the example has it. Features are in the order of columns, categories in
    alphabetical order. Blanks around names and texts do not count.

    In a table with a column of images the examples are these, and other columns without a role are
    not read. Paths are relative to the table's folder. A column of paths without a role is that
    column if it is the only one without a role. Targets of images are in a column y unless another
    one is named or called target.

    The splits of a column of splits are those of the examples. Without rows of validation a part is
    drawn, and without rows of the test there is none.

    Args:
      path: the file.
      roles: the columns that are no features; by default those of `Roles`.
      decode: what makes the images [M, height, width, channels] of their files.
      like: the data set of a training. The targets are of the same task. If it is of a table of
        features, the new one gets its columns, categories and classes; a category that the earlier
        table does not have is 0 in all its features.

    Returns:
      The data set, with `columns`, and with users if there is a column of clients.

    Warns:
      UserWarning: for a column of whole numbers that float32 rounds, of texts of which the
        earlier table has none, and of splits without a test.
    """
    roles = _checked(Roles() if roles is None else roles)
    frame, roles, is_of_images = _frame(path, roles, like)
    if like is not None and not like.columns:
        roles, like = roles._replace(task=like.task), None
    features = [name for name in frame if name not in _used(roles)]
    known = {} if like is None else {column.name: column for column in like.columns}
    if known:
        for name in sorted(known.keys() ^ {*features}):
            what = f"lacks the column {name!r}" if name in known else f"has a column {name!r}"
            raise ValueError(f"{what}, must have those of training, {_listed([*known])}")
        features = [*known]
    if not (features or is_of_images) or frame.empty:
        raise ValueError("must hold an example, and a column of features beside those with roles")
    y, classes = _targets(frame, roles, like)
    domains: tuple[str, ...] = ("all",)
    domain = np.zeros(len(y), np.int32)
    if roles.domain in frame:
        domain, domains = _groups(frame, roles.domain)
    test, valid, of_known = np.zeros(len(y), bool), None, None
    if roles.split in frame:
        names = _column(frame, roles.split)[0].astype(str).to_numpy(str)
        test, valid, of_known = splits(f"column {roles.split!r}", names)
    elif roles.test in frame:
        test = _truth(frame, roles.test)
    of_test = roles.split or roles.test
    if like is None and (test if valid is None else test | valid).all():
        raise ValueError(f"column {of_test!r} must leave a row to train on")
    if like is None and of_test in frame and not test.any():
        _warn(frame, of_test, "has no row for the test: the data have no test split")
    user = _groups(frame, roles.client)[0] if roles.client in frame else None
    group = _groups(frame, roles.group)[0] if roles.group in frame else None
    columns: tuple[Column, ...] = ()
    source = None
    if is_of_images:
        x = _images(frame, roles.image, decode)
        source = np.array([*map(str, _column(frame, roles.image)[0])])
    else:
        x, columns = _features(frame, features, known)
    more: dict[str, Any] = {"user": user, "original": group, "valid": valid, "known": of_known}
    more["columns"] = columns
    return Dataset(x, y, classes, domain, domains, test, source=source, **more)


def _used(roles: Roles) -> set[str]:
    """Return the names of all columns with a role."""
    single = {getattr(roles, role) for role in (*_DEFAULTS, *_NAMED)}
    return {*roles.target, *single, *roles.ignored}


def _checked(roles: Roles) -> Roles:
    """Return the roles, of which one that another column has by default is dropped."""
    checks.one_of("roles.task", roles.task, ("auto", *TASKS))
    if not roles.target or isinstance(roles.target, str):
        raise UsageError("roles.target", roles.target, "must be names of columns")
    before: dict[str, str] = {}
    # Roles with their default name come last, and are left to others.
    optional = sorted(_DEFAULTS, key=lambda role: getattr(roles, role) == _DEFAULTS[role])
    for role in ("target", "ignored", *_NAMED, *optional):
        value = getattr(roles, role)
        for name in filter(None, (value,) if isinstance(value, str) else value):
            if name not in before:
                before[name] = role
            elif name == _DEFAULTS.get(role):
                roles = Roles(**{**roles._asdict(), role: ""})
            else:
                other = (f"roles.{before[name]}", ...)
                raise UsageError(f"roles.{role}", name, "must differ from {other}", other=other)
    return roles


def _resolved(
    roles: Roles, like: Dataset | None, names: Sequence[str], first: Mapping[str, Any]
) -> tuple[Roles, bool]:
    """Return the roles of a table with these names and first row, and whether it has images."""
    if not roles.split and "split" in names and "split" not in _used(roles):
        roles = roles._replace(split="split")
    if roles.split in names and roles.test in names and roles.test:
        text = f"must be ignored, as {roles.split!r} has the splits; or the other way round"
        raise UsageError("roles.test", roles.test, text)
    is_of_features = like is not None and bool(like.columns)
    free = [name for name in names if name not in _used(roles) and not _INDEX.fullmatch(name)]
    paths = [name for name in free if images.NAME.fullmatch(str(first.get(name, "")).strip())]
    if not is_of_features and (paths or roles.image in names):
        if roles.target == Roles().target and "target" not in names and "y" in free:
            roles = roles._replace(target=("y",))
        others = [name for name in free if name not in (*roles.target, *paths[:1])]
        if roles.image not in names and others:
            text = f"must be {paths[0]!r} if the examples are the images in that column, and not "
            text += f"{_listed(others)}; else that column must be ignored"
            raise UsageError("roles.image", roles.image, text)
        if roles.image not in names:
            roles = roles._replace(image=paths[0])
    is_of_images = roles.image in names and not is_of_features
    read = [name for name in names if not (is_of_images and _INDEX.fullmatch(name))]
    _check_names(read, roles if like is None else roles._replace(group="", split=""))
    return roles, is_of_images


def _frame(path: Path, roles: Roles, like: Dataset | None) -> tuple[Any, Roles, bool]:
    """Return the file as a frame of pandas, its roles, and whether it has images.

    In the frame codes are texts: "01" is not 1.
    """
    import pandas as pd
    import pyarrow.fs

    if path.suffix != ".csv":
        # From pyarrow's own file: with Python's a process that runs JAX may abort at its end.
        local = pyarrow.fs.LocalFileSystem()
        frame = pd.read_parquet(path, filesystem=local, partitioning=None, use_threads=False)
        frame.columns = [str(name) for name in frame.columns]
        first = {name: frame[name].iloc[0] for name in frame if len(frame)}
        roles, is_of_images = _resolved(roles, like, [*frame], first)
    else:
        if not path.stat().st_size:
            raise ValueError("must be a table, is empty")
        texts = {"encoding": "utf-8-sig", "skipinitialspace": True, "keep_default_na": False}
        begin = pd.read_csv(path, header=None, nrows=2, dtype=str, **texts)
        names = [name.strip() for name in begin.iloc[0]]
        first = dict(zip(names, begin.iloc[-1], strict=True))
        roles, is_of_images = _resolved(roles, like, names, first)
        codes = {roles.domain, roles.client, roles.group} - {""}
        if (roles.task if like is None else like.task) in ("auto", "classes"):
            codes |= {*roles.target}
        as_texts = {*codes}
        for column in () if like is None else like.columns:
            if column.categories and not {*column.categories} <= {*_TRUTH}:
                as_texts.add(column.name)
        with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
            frame = pd.read_csv(
                path,
                header=0,
                names=names,
                index_col=False,
                dtype=dict.fromkeys(as_texts, str),
                na_values=_MISSING,
                low_memory=False,  # types are found in the whole file
                **texts,
            )
        if not any(map(pd.api.types.is_numeric_dtype, frame.dtypes)):
            again = (frame == names).all(axis=1).to_numpy()
            if again.any():
                raise ValueError(f"has the line of names again, in row {again.argmax() + 1}")
        for name in codes & {*names}:
            frame[name] = _inferred(frame[name].str.strip())
    if is_of_images:  # an index is passed over, and is no column of a role that is ""
        frame = frame[[name for name in frame if not _INDEX.fullmatch(name)]]
    frame.attrs["path"] = str(path)
    return frame, roles, is_of_images


def _inferred(texts: Any) -> Any:
    """Return a column of texts as truths or numbers, but not codes with a first 0 or 20 digits."""
    import pandas as pd

    small = texts.str.lower()
    if small.isin(_TRUTH).all():
        return small == "true"
    try:
        numbers = pd.to_numeric(texts)
    except ValueError:
        return texts
    are_whole = texts.str.fullmatch(r"[+-]?\d+").all()
    are_exact = numbers.dtype.kind in "iu" and not texts.str.match(r"[+-]?0\d").any()
    return texts if are_whole and not are_exact else numbers


def _check_names(names: Sequence[str], roles: Roles) -> None:
    """Raise ValueError or UsageError unless the names of the columns differ and fit the roles."""
    if len(names) == 1 and {*names[0]} & {*";\t"}:
        raise ValueError("must have commas between its columns, not semicolons or tabs")
    if all(map(_NUMBER.fullmatch, names)):
        raise ValueError(f"must begin with a line of the columns' names, begins with {names[0]}")
    single = (*_DEFAULTS, *_NAMED)
    needed = {getattr(roles, role): role for role in single if getattr(roles, role)}
    needed |= dict.fromkeys(roles.target, "target") | dict.fromkeys(roles.ignored, "ignored")
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise ValueError(f"must name each column differently, two are called {name!r}")
        if _INDEX.fullmatch(name) and name not in needed:
            text = f"has a column {name!r}, a frame's index: write it with index=False"
            raise ValueError(f"{text}, or ignore it" if name else text)
    for name, role in needed.items():
        near = [other for other in names if other.lower() == name]
        if name not in names and name == _DEFAULTS.get(role, "target") and near:
            raise ValueError(f"has a column {near[0]!r}, must be {name!r} to be read as such")
        if name not in names and name == role == "target":
            text = "must hold the targets in a column target, unless another one is named; it has "
            raise ValueError(text + _listed(names) + _TWEETS * (names[0] in ("0", "4")))
        if name not in names and name != _DEFAULTS.get(role):
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}? All: " if near else "it has "
            text = f"is no column of the table; {hint}{_listed(names)}"
            raise UsageError(f"roles.{role}", name, text)


def _column(frame: Any, name: str) -> tuple[Any, str]:
    """Return a column without missing values, and "number", "text" or "truth"."""
    import pandas as pd

    column = frame[name]
    if column.dtype == "category":
        column = column.astype(column.cat.categories.dtype)
    found = pd.api.types.infer_dtype(column)
    if found == "string":
        column = column.str.strip().replace("", None)
    missing = column.isna().to_numpy()
    if missing.any():
        raise ValueError(f"column {name!r} has no value in row {missing.argmax() + 1}")
    if found not in _KINDS:
        text = f"holds {found}, must hold numbers, texts or true/false, or be ignored"
        raise ValueError(f"column {name!r} {text}")
    return column, _KINDS[found]


def _numbers(frame: Any, name: str, needed: str = "numbers") -> np.ndarray:
    """Return a column of numbers, or of true/false, as they are [M]."""
    column, kind = _column(frame, name)
    if kind == "text":
        raise ValueError(f"column {name!r} must hold {needed}")
    return column.to_numpy(np.float64 if column.dtype == object else None)


def _float32(frame: Any, name: str) -> np.ndarray:
    exact = _numbers(frame, name)
    with np.errstate(over="ignore"):  # too large numbers become infinite
        numbers = exact.astype(np.float32)
    if not np.isfinite(numbers).all():
        row = np.isfinite(numbers).argmin() + 1
        raise ValueError(f"column {name!r} must be finite in float32, row {row} is not")
    if is_rounded(exact, numbers):
        _warn(frame, name, LARGE_WHOLE)
    return numbers


def _truth(frame: Any, name: str) -> np.ndarray:
    """Return a column of true/false or of 0/1 as bool [M]."""
    needed = "true/false or 0/1"
    numbers = _numbers(frame, name, needed)
    if not np.isin(numbers, (0, 1)).all():
        raise ValueError(f"column {name!r} must hold {needed}")
    return numbers.astype(bool)


class Splits(NamedTuple):
    """The splits of M examples, as a `Dataset` has them."""

    test: np.ndarray
    valid: np.ndarray
    known: np.ndarray | None


def splits(what: str, names: np.ndarray) -> Splits:
    """Return the splits of names [M]; raise ValueError, which begins with `what`, for others."""
    texts = np.char.lower(np.char.strip(names))
    unknown = ~np.isin(texts, [*_SPLITS])
    if unknown.any():
        row = unknown.argmax()
        text = f"{what} holds {names[row]} in row {row + 1}, must hold train, val, test, id_val or "
        raise ValueError(f"{text}id_test")
    found = np.array([_SPLITS[text] for text in texts])
    known = np.isin(found, ("id_val", "id_test"))
    test, valid = (np.isin(found, (name, f"id_{name}")) for name in ("test", "val"))
    return Splits(test, valid, known if known.any() else None)


def split_names(dataset: Dataset) -> np.ndarray:
    """Return the names of `splits` [M] of a data set that has all three."""
    assert dataset.valid is not None
    assert dataset.known is not None
    kinds = [part & dataset.known for part in (dataset.test, dataset.valid)]
    kinds += [dataset.test, dataset.valid]
    return np.select(kinds, ["id_test", "id_val", "test", "val"], "train")


def plain(name: str) -> str:
    """Return a name without outer blanks, in one of Unicode's spellings."""
    return unicodedata.normalize("NFC", name).strip()


def _groups(
    frame: Any, name: str, known: Sequence[str] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the numbers [M] int32 of a column's different values, and the values as texts.

    They are in the order of numbers or of the alphabet, or those that are known; then -1 stands for
    others.
    """
    import pandas as pd

    column, kind = _column(frame, name)
    number, found = pd.factorize(column)
    if kind == "number":
        if any(value % 1 for value in found):
            raise ValueError(f"column {name!r} must hold texts, true/false or whole numbers")
        texts = [str(int(value)) for value in found]
        if known is not None and {*known} <= {*_TRUTH}:
            texts = [{"0": "false", "1": "true"}.get(text, text) for text in texts]
    else:
        texts = [plain(str(value)) for value in found]
        texts = [text.lower() for text in texts] if kind == "truth" else texts
        if known is None and len({text.casefold() for text in texts}) < len({*texts}):
            _warn(frame, name, "holds texts that differ in capitals alone")
    names = sorted({*texts}, key=int if kind == "number" else str) if known is None else known
    of = {text: index for index, text in enumerate(names)}
    return np.array([of.get(text, -1) for text in texts], np.int32)[number], tuple(names)


def _targets(frame: Any, roles: Roles, like: Dataset | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the targets as `Dataset.y`, and the names of their classes or columns."""
    one, *more = roles.target
    task = roles.task if like is None else like.task
    if task == "auto":
        kinds = {_column(frame, name)[1] for name in roles.target}
        task = "values"
        if kinds == {"truth"} and more:
            task = "labels"
        elif kinds != {"number"} and not more:
            task = "classes"
        elif not more:
            numbers = _numbers(frame, one)
            if len(np.unique(numbers)) <= MOST_CLASSES and (numbers == np.rint(numbers)).all():
                if numbers.dtype.kind in "iu":
                    task = "classes"
                else:
                    _warn(frame, one, f"{FEW_WHOLE}; task=classes makes them classes")
    if task == "classes":
        if more:
            raise UsageError("roles.target", roles.target, "must be one column for classes")
        y, classes = _groups(frame, one, None if like is None else like.classes)
        if (y < 0).any():
            row = (y < 0).argmax()
            text = f"the class {frame[one].iloc[row]}, must have those of training"
            raise ValueError(f"column {one!r} has in row {row + 1} {text}, {_listed(classes)}")
        return y, classes
    if task == "labels":
        return np.stack([_truth(frame, name) for name in roles.target], 1), roles.target
    for name in roles.target:
        if _column(frame, name)[1] != "number":
            raise ValueError(f"column {name!r} must hold numbers, or true/false if all targets do")
    y = np.stack([_float32(frame, name) for name in roles.target], 1)
    for text in suspicions(f"{frame.attrs['path']}: ", (), y):
        warnings.warn(text, stacklevel=4)
    return (y if more else y[:, 0]), roles.target


def _feature(frame: Any, name: str, known: Column | None) -> tuple[np.ndarray, Column]:
    """Return the features [M, D] of a column, and its record. With a known one it is the same."""
    _, kind = _column(frame, name)
    if known.categories is None if known else kind == "number":
        return _float32(frame, name)[:, None], Column(name)
    number, names = _groups(frame, name, known.categories if known else None)
    if known and (number < 0).all():
        text = f"holds no category of training, {_listed(names)}; it is ignored"
        _warn(frame, name, text)
    if not known and kind == "text":
        are_numbers = np.array([_NUMBER.fullmatch(text) is not None for text in names])
        wrong = ""
        if are_numbers.sum() > max(_NUMBERS_AMONG_TEXTS, len(names) / 2):
            row = are_numbers[number].argmin()
            wrong = f"numbers or dates as texts, such as {names[number[row]]!r} in row {row + 1}"
        elif len(names) == len(number) > 1:
            wrong = f"a different text in each row, such as {names[0]!r}"
        elif len(names) > MOST_CATEGORIES:
            wrong = f"{len(names)} different texts, more than {MOST_CATEGORIES}"
        if wrong:
            text = "must hold categories or plain numbers, or be ignored"
            raise ValueError(f"column {name!r} holds {wrong}; {text}")
    return number[:, None] == np.arange(len(names)), Column(name, names)


def _features(
    frame: Any, names: Sequence[str], known: Mapping[str, Column]
) -> tuple[np.ndarray, tuple[Column, ...]]:
    """Return the features [M, D] of columns, and their records."""
    made = [_feature(frame, name, known.get(name)) for name in names]
    columns = tuple(column for _, column in made)
    features = [feature for column in columns for feature in column.features]
    for name, count in collections.Counter(features).items():
        if count > 1:  # of a column "a=b" beside a text b in a column "a"
            raise ValueError(f"has two features {name!r}, must have other names of columns")
    platforms.check_memory(frame.attrs["path"], ..., 4 * len(frame) * len(features))
    return np.concatenate([block for block, _ in made], axis=1, dtype=np.float32), columns


def _images(frame: Any, name: str, decode: images.Decode) -> np.ndarray:
    """Return the images [M, height, width, channels] of a column of paths."""
    folder = Path(frame.attrs["path"]).parent
    files = [folder / str(text) for text in _column(frame, name)[0]]
    try:
        return decode(files)
    except UsageError as error:
        rows = [row for row, file in enumerate(files, 1) if str(file) == error.argument]
        where = f" (row {rows[0]}, column {name!r})" if rows else ""
        raise UsageError(error.argument, ..., error.allowed + where, **error.others) from None


def is_rounded(exact: np.ndarray, numbers: np.ndarray) -> bool:
    """Return whether whole numbers are others in float32."""
    with np.errstate(invalid="ignore"):  # 2^63 as an integer
        return exact.dtype.kind in "iu" and bool((numbers.astype(exact.dtype) != exact).any())


def _warn(frame: Any, name: str, text: str) -> None:
    warnings.warn(f"{frame.attrs['path']}: column {name!r} {text}", stacklevel=5)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:12]) + more
