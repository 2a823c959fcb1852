"""Tables of a .csv or .parquet file as data sets: a column is a feature unless it has another role.

Categories become features of 0 and 1, one for each category of the file. Which of them occur in
training depends on the split, so `models.scaling` sets the others to 0 inside the network.
"""

import csv
import difflib
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import TASKS, Column, Dataset

# pyarrow is imported where it is used, as it is optional. It comes without types.

MOST_CLASSES = 20  # whole numbers with more different values are values, not classes
MOST_CATEGORIES = 1000  # of a column
SUFFIXES = (".csv", ".parquet")
_NUMBERS_AMONG_TEXTS = 20  # so many different numbers beside a text are a column of numbers
_SHOWN = 12  # names of columns in an error
_TRUTH = {"false", "true"}
FEW_WHOLE = "holds few different whole numbers in floating point, which are read as values"
LARGE_WHOLE = "holds whole numbers above 2^24, such as identifiers, which float32 rounds"
_SEPARATOR = "must have commas between its columns, not semicolons or tabs"
_LONGEST_LINE = 100_000  # bytes of the names that are searched for separators
# A number as 1,5 or 1,234.5 or 5%, or a date of three numbers.
_OTHER_NUMBER = re.compile(r"[-+]?\d[\d.,']*[,'%][\d.,']*%?|\d+([/.-])\d+\1\d+")
_INDEX = re.compile(r"__index_level_\d+__")  # as pandas names an index in a .parquet file
_OPTIONAL = ("domain", "client", "test")  # roles that are also their default names


class Roles(NamedTuple):
    """The columns of a table that are no features, and what its targets are.

    A column of domains, clients or the test split may be absent if it has its default name, and ""
    stands for none.
    """

    target: tuple[str, ...] = ("target",)
    domain: str = "domain"  # texts or whole numbers
    client: str = "client"  # texts or whole numbers: the user of an example
    test: str = "test"  # true/false or 0/1: whether an example is in the test split
    ignored: tuple[str, ...] = ()
    # "auto" or one of TASKS. With "auto", one target is of classes if it holds texts, true/false or
    # whole numbers with at most MOST_CLASSES different values, else of values; several targets are
    # labels if they hold true/false, else values
    task: str = "auto"


def table(path: Path, roles: Roles | None = None, *, like: Dataset | None = None) -> Dataset:
    """Read a table: a .csv file in UTF-8 with a line of column names, or a .parquet file.

    Columns of numbers are one feature each. Columns of texts and of true/false have a feature for
    each category, 1 where the example has it. Features are in the order of columns, categories in
    alphabetical order.

    Args:
      path: the file.
      roles: the columns that are no features; by default those of `Roles`.
      like: a data set from an earlier table. The new one gets its columns, categories and classes,
        and its targets are of the same task; a category that the earlier table does not have is 0
        in all its features.

    Returns:
      The data set, with `columns`, and with users if there is a column of clients.

    Warns:
      UserWarning: for a column of whole numbers that float32 rounds.

    Raises:
      UsageError: for a file that is no such table, for a value that is missing, for a column with
        two roles, and for a class that `like` does not have.
      ImportError: without pyarrow.
    """
    checks.record("path", path, Path)
    roles = _checked(Roles() if roles is None else roles)
    if like is not None:
        checks.record("like", like, Dataset)
        if not like.columns:
            raise UsageError("like", ..., "must be a data set of a table, with columns")
    reader = _Reader(str(path), _read(path, roles, like))
    names = reader.check_names(roles, is_csv=path.suffix == ".csv")
    used = {*roles.target, roles.domain, roles.client, roles.test, *roles.ignored}
    features = [name for name in names if name not in used]
    if like is not None:
        features = reader.same_features(features, [column.name for column in like.columns])
    if not features:
        raise reader.error("must hold a column of features beside those with other roles")
    y, classes = reader.targets(roles, like)
    known = {} if like is None else {column.name: column for column in like.columns}
    blocks, columns = [], []
    for name in features:
        block, column = reader.feature(name, known.get(name))
        blocks.append(block)
        columns.append(column)
    reader.check_features(columns)
    domains: tuple[str, ...] = ("all",)
    domain = np.zeros(len(y), np.int32)
    if roles.domain in names:
        domain, domains = reader.groups(roles.domain, "domain")
    test = np.zeros(len(y), bool)
    if roles.test in names:
        test = reader.truth(roles.test, "test")
        if like is None and not test.any():
            text = "is false in every row, so the data have no test split of their own"
            warnings.warn(f"{path}: column {roles.test!r} {text}", stacklevel=3)
    return Dataset(
        reader.joined(blocks, columns),
        y,
        classes,
        domain,
        domains,
        test,
        user=reader.groups(roles.client, "client")[0] if roles.client in names else None,
        columns=tuple(columns),
    )


def _checked(roles: Roles) -> Roles:
    """Return the roles, of which one that another column has by default is dropped.

    Raises:
      UsageError: unless each column has one role.
    """
    checks.record("roles", roles, Roles)
    for role in ("target", "ignored"):
        names = getattr(roles, role)
        if not isinstance(names, tuple) or not all(
            isinstance(each, str) and each for each in names
        ):
            raise UsageError(f"roles.{role}", names, "must be names of columns")
    for role in _OPTIONAL:
        checks.record(f"roles.{role}", getattr(roles, role), str)
    checks.one_of("roles.task", roles.task, ("auto", *TASKS))
    if not roles.target:
        raise UsageError("roles.target", roles.target, "must be the name of a column")
    before: dict[str, str] = {}
    # Roles with their default name come last, and are left to others.
    optional = sorted(_OPTIONAL, key=lambda role: getattr(roles, role) == role)
    for role in ("target", "ignored", *optional):
        value = getattr(roles, role)
        for name in (value,) if isinstance(value, str) else value:
            if name in before and name == role:
                roles = Roles(**{**roles._asdict(), role: ""})
            elif name in before:
                if before[name] == role:
                    raise UsageError(f"roles.{role}", value, "must be different columns")
                other = (f"roles.{before[name]}", ...)
                raise UsageError(f"roles.{role}", name, "must differ from {other}", other=other)
            elif name:
                before[name] = role
    return roles


def _read(path: Path, roles: Roles, like: Dataset | None) -> Any:
    """Return the file as a table of pyarrow."""
    try:
        import pyarrow as pa
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'fedjax_inv[experiments]'") from error
    try:
        if path.suffix != ".csv":
            # Not the path, whose parent folders pyarrow would take for partitions.
            with path.open("rb") as file:
                return pyarrow.parquet.ParquetFile(file).read(use_threads=False)
        size = path.stat().st_size
        if size == 0:
            raise UsageError("path", str(path), "must hold at least one example")

        def read(texts: Sequence[str]) -> Any:
            return pyarrow.csv.read_csv(
                path,
                # Types are found in the first block, so the file is one block.
                pyarrow.csv.ReadOptions(use_threads=False, block_size=min(size + 1, 2**31 - 1)),
                pyarrow.csv.ParseOptions(newlines_in_values=True),
                pyarrow.csv.ConvertOptions(
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                    column_types=dict.fromkeys(texts, pa.string()),
                ),
            )

        texts = _texts(roles, like)
        content = read(texts)
        codes = _codes(content, read, [roles.domain, roles.client])
        return read([*texts, *codes]) if codes else content
    except UnicodeDecodeError:
        raise UsageError("path", str(path), "must be in UTF-8, its first line is not") from None
    except MemoryError as error:  # also pyarrow's
        raise UsageError("path", str(path), f"must fit into memory: {error}") from None
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())[:200]
        raise UsageError("path", str(path), f"cannot be read: {reason}") from None
    except pa.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        if "\x00" in reason and path.suffix == ".csv":
            raise UsageError("path", str(path), "must be in UTF-8, it has bytes of 0") from None
        with path.open("rb") as file:
            first = file.readline(_LONGEST_LINE)
        if path.suffix == ".csv" and max(map(first.count, b";\t")) > first.count(b","):
            raise UsageError("path", str(path), _SEPARATOR) from None
        if "cannot infer number of columns" in reason:
            reason = "it has a single line"
        kind = ".parquet file"
        if path.suffix == ".csv":
            kind = ".csv file with as many fields in each line as there are names in the first"
            reason = re.sub(r"Row #(\d+)", lambda at: f"line {_line(path, int(at[1]))}", reason)
        raise UsageError("path", str(path), f"must be a {kind}: {reason}") from None


def _line(path: Path, record: int) -> int:
    """Return the line of a .csv file in which a record ends; the names are record 1."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        ends = (reader.line_num for fields in reader if fields)  # not of empty lines
        try:
            return next(itertools.islice(ends, record - 1, None), record)
        except csv.Error:  # a field that is longer than its limit
            return record


def _texts(roles: Roles, like: Dataset | None) -> list[str]:
    """Return the columns that held texts in an earlier table, where "01" is not 1."""
    if like is None:
        return []
    names = [each.name for each in like.columns if each.categories and not _is_truth(each)]
    if like.task == "classes" and not set(like.classes) <= _TRUTH:
        names += roles.target
    return names


def _codes(content: Any, read: Callable[[Sequence[str]], Any], names: Sequence[str]) -> list[str]:
    """Return the columns of whole numbers that begin with zeros, as codes do: "01" is not 1.

    Args:
      content: a table of pyarrow.
      read: (names of columns) -> the table with texts in them.
      names: the columns that may hold codes.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    found = [name for name in names if content.column_names.count(name) == 1]
    whole = [name for name in found if pa.types.is_integer(content.schema.field(name).type)]
    if not whole:
        return []
    table = read(whole)
    return [
        name
        for name in whole
        if pc.any(pc.match_substring_regex(table.column(name), "^[+-]?0[0-9]")).as_py()
    ]


def _is_truth(column: Column) -> bool:
    return column.categories is not None and set(column.categories) <= _TRUTH


class _Reader:
    """A table of pyarrow, whose columns are read in their roles."""

    def __init__(self, path: str, content: Any) -> None:
        self._path, self._content = path, content

    def error(self, text: str) -> UsageError:
        return UsageError("path", self._path, text)

    def _unfit(self, name: str, content: str, role: str, task: str = "") -> UsageError:
        """Return the error for a column without the content that its role, or the task, needs."""
        if task:
            allowed = f"must hold {content} for {{task}}"
            return UsageError(f"roles.{role}", name, allowed, task=("roles.task", task))
        if role:
            return UsageError(f"roles.{role}", name, f"must hold {content}")
        return self.error(f"column {name!r} must hold {content}")

    def _place(self, index: int) -> str:
        """Return where an example stands in the file, for errors."""
        path = Path(self._path)
        # The names of a .csv are its first record.
        return f"line {_line(path, index + 2)}" if path.suffix == ".csv" else f"row {index + 1}"

    def check_names(self, roles: Roles, *, is_csv: bool) -> list[str]:
        """Return the names of the columns; raise UsageError unless they fit the roles."""
        try:
            names = list(self._content.column_names)
        except UnicodeDecodeError:
            raise self.error("must be in UTF-8, its first line is not") from None
        if is_csv and names and all(map(_is_number, names)):
            text = "must begin with a line of the columns' names, it begins with"
            raise self.error(f"{text} {names[0]}")
        if is_csv and len(names) == 1 and set(names[0]) & set(";\t"):
            raise self.error(_SEPARATOR)
        named = {*roles.target, *roles.ignored, *(getattr(roles, role) for role in _OPTIONAL)}
        for number, name in enumerate(names, 1):
            if not name:
                text = "which a data frame's index has if it is written too"
                raise self.error(f"must name each column, column {number} has no name, {text}")
            if _INDEX.fullmatch(name) and name not in named:
                text = f"column {name!r} is a data frame's index; write the file with index=False, "
                text = _literal(text) + "or leave the column out by {ignored}"
                raise UsageError("path", self._path, text, ignored=("roles.ignored", (name,)))
            if names.index(name) < number - 1:
                raise self.error(f"must name each column differently, two are called {name!r}")
        self._check_present(roles, names)
        if self._content.num_rows == 0:
            raise self.error("must hold at least one example")
        return names

    def _check_present(self, roles: Roles, names: Sequence[str]) -> None:
        """Raise UsageError unless the columns of the roles are there."""
        needed = {name: "target" for name in roles.target}
        needed |= {name: "ignored" for name in roles.ignored}
        needed |= {getattr(roles, role): role for role in _OPTIONAL if getattr(roles, role)}
        for name, role in needed.items():
            if name in names:
                continue
            if name == role:  # the default name, which may be in another case
                for other in names:
                    if other.strip().lower() == name and other not in needed:
                        text = f"must be {name!r} to be read as such, or another name"
                        raise self.error(f"has a column {other!r}, {text}")
            if name == role == "target":
                raise UsageError(
                    "path",
                    self._path,
                    "must hold the columns target and those of features (another target by "
                    "{role}), or without a header those of Sentiment140; it has "
                    + _literal(_listed(names)),
                    role=("roles.target", ...),
                )
            if name != role:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]}? All: " if near else "it has "
                text = f"is no column of the table; {hint}{_listed(names)}"
                raise UsageError(f"roles.{role}", name, text)

    def same_features(self, found: Sequence[str], needed: Sequence[str]) -> list[str]:
        """Return the needed features; raise UsageError unless those that were found are these."""
        missing = [name for name in needed if name not in found]
        if missing:
            raise self.error(f"lacks the column {missing[0]!r}, must have those of training")
        unknown = [name for name in found if name not in needed]
        if unknown:
            text = f"must have those of training, {_listed(needed)}"
            raise self.error(f"has a column {unknown[0]!r}, {text}")
        return list(needed)

    def targets(self, roles: Roles, like: Dataset | None) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the targets as `Dataset.y`, and the names of their classes or columns."""
        kinds = [self._kind(name, "target") for name in roles.target]
        one = roles.target[0]
        task = roles.task if like is None else like.task
        if task == "auto":
            if len(kinds) > 1:
                task = "labels" if set(kinds) == {"truth"} else "values"
            elif kinds == ["number"]:
                numbers = self._numbers(one)
                whole = self._is_whole(one)
                few = len(np.unique(numbers)) <= MOST_CLASSES
                task = "classes" if whole and few else "values"
                if few and not whole and (numbers == np.rint(numbers)).all():
                    text = (
                        f"{self._path}: column {one!r} {FEW_WHOLE}; task=classes makes them classes"
                    )
                    warnings.warn(text, stacklevel=4)
            else:
                task = "classes"
        if task == "classes":
            if len(roles.target) > 1:
                raise UsageError("roles.target", roles.target, "must be one column for classes")
            if like is not None:
                return self._known_classes(one, like.classes), tuple(like.classes)
            return self.groups(one, "target", task)
        if task == "labels":
            labels = [self.truth(name, "target", task) for name in roles.target]
            return np.stack(labels, 1), roles.target
        others = {
            name: kind for name, kind in zip(roles.target, kinds, strict=True) if kind != "number"
        }
        if others and roles.task == "auto" and like is None:
            # Rather a text than a truth, which may stand beside other truths.
            wrong = min(others, key=lambda name: others[name] == "truth")
            raise self._unfit(wrong, "numbers, or true/false if all targets do", "target")
        for name in others:
            raise self._unfit(name, "numbers", "target", task)
        y = np.stack([self._float32(name) for name in roles.target], 1)
        return (y if len(roles.target) > 1 else y[:, 0]), roles.target

    def _known_classes(self, name: str, known: Sequence[str]) -> np.ndarray:
        """Return the numbers [M] int32 of a column's classes among the known ones."""
        if set(known) <= _TRUTH and self._kind(name) == "number":
            number, found = self._truth_groups(name)
        else:
            number, found = self.groups(name, "target", "classes")
        of = {each: index for index, each in enumerate(known)}
        # Whole numbers are read as texts here, and may be written as 1.0.
        index = np.array([of.get(each, of.get(each.removesuffix(".0"), -1)) for each in found])
        y = index[number].astype(np.int32)
        if (y < 0).any():
            text = f"has the class {found[number[np.argmin(y)]]}, must have those of training"
            raise self.error(f"column {name!r} {text}, {_listed(known)}")
        return y

    def groups(
        self, name: str, role: str = "", task: str = ""
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the numbers [M] int32 of a column's different values, and the values as texts.

        With a task, whole numbers may be in floating point.
        """
        if self._kind(name, role) != "number":
            return self._categories(name)
        numbers = self._numbers(name)
        if not self._is_whole(name):
            if not task or (numbers != np.rint(numbers)).any():
                raise self._unfit(name, "texts, true/false or whole numbers", role, task)
            numbers = numbers.astype(np.int64)
        values, number = np.unique(numbers, return_inverse=True)
        return number.astype(np.int32), tuple(map(str, values.tolist()))

    def truth(self, name: str, role: str = "", task: str = "") -> np.ndarray:
        """Return a column of true/false or of 0/1 as bool [M]."""
        kind = self._kind(name, role)
        if kind == "truth":
            return self._complete(name).to_numpy(zero_copy_only=False).astype(bool)
        numbers = self._numbers(name) if kind == "number" else np.array([2])
        if not np.isin(numbers, (0, 1)).all():
            raise self._unfit(name, "true/false or 0/1", role, task)
        return numbers.astype(bool)

    def _truth_groups(self, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return a column of true/false or of 0/1 as `groups` returns one of true/false."""
        return self.truth(name).astype(np.int32), ("false", "true")

    def feature(self, name: str, known: Column | None) -> tuple[np.ndarray, Column]:
        """Return a column, as numbers [M] float32 or as categories [M] int32, and its record.

        With a known column, categories are its own, and -1 stands for others.
        """
        is_number = self._kind(name) == "number"
        if is_number and (known is None or known.categories is None):
            return self._float32(name), Column(name)
        if known is not None and known.categories is None:
            raise self.error(f"column {name!r} must hold numbers, as in training")
        if known is not None and is_number and _is_truth(known):
            number, categories = self._truth_groups(name)
        else:
            number, categories = self.groups(name)
        if known is None:
            self._check_categories(name, number, categories)
            return number, Column(name, categories)
        assert known.categories is not None
        of = {category: index for index, category in enumerate(known.categories)}
        index = np.array([of.get(category, -1) for category in categories])[number]
        if len(index) and (index < 0).all():
            text = (
                f"holds no category of training, {_listed(known.categories)}, but "
                f"{_listed(categories)}; it is ignored"
            )
            warnings.warn(f"{self._path}: column {name!r} {text}", stacklevel=4)
        return index, known

    def _check_categories(self, name: str, number: np.ndarray, categories: Sequence[str]) -> None:
        """Raise UsageError for a column of numbers with a text among them, and for names."""
        are_numbers = np.array([_is_number(category) for category in categories])
        if are_numbers.sum() > max(_NUMBERS_AMONG_TEXTS, len(categories) / 2):
            row = int(np.argmin(are_numbers[number]))
            text = f"holds numbers, but {categories[number[row]]!r} in {self._place(row)}"
            raise self.error(f"column {name!r} {text}; must hold numbers alone")
        others = [each for each in categories if _OTHER_NUMBER.fullmatch(each)]
        if len(others) > len(categories) / 2:
            text = f"is read as {len(categories)} categories, such as {others[0]!r}; numbers have "
            text += "digits and a decimal point alone, as 1234.5"
            warnings.warn(f"{self._path}: column {name!r} {text}", stacklevel=4)
        if len(categories) > MOST_CATEGORIES:
            text = f"{len(categories)} different texts, must hold at most {MOST_CATEGORIES}"
            raise self._no_feature(name, text)

    def check_features(self, columns: Sequence[Column]) -> None:
        """Raise UsageError for two features of one name, such as a column "a=b" beside a text b."""
        of: dict[str, str] = {}
        for column in columns:
            for feature in column.features:
                if feature in of:
                    text = f"columns {of[feature]!r} and {column.name!r} make two features"
                    raise self.error(f"{text} {feature!r}; one must have another name")
                of[feature] = column.name

    def joined(self, blocks: Sequence[np.ndarray], columns: Sequence[Column]) -> np.ndarray:
        """Return the features [M, D] float32."""
        num_examples = len(blocks[0])
        widths = [len(column.features) for column in columns]
        num_features = sum(widths)
        what = f" for {num_features} features"
        checks.memory("path", self._path, 4 * num_examples * num_features, what=what)
        x = np.zeros((num_examples, num_features), np.float32)
        first = 0
        for block, column, width in zip(blocks, columns, widths, strict=True):
            if column.categories is None:
                x[:, first] = block
            else:
                rows = np.flatnonzero(block >= 0)
                x[rows, first + block[rows]] = 1
            first += width
        return x

    def _kind(self, name: str, role: str = "") -> str:
        """Return "number", "text" or "truth"."""
        import pyarrow as pa

        found = self._content.schema.field(name).type
        if pa.types.is_dictionary(found):
            found = found.value_type
        if pa.types.is_null(found):
            self._complete(name)  # raises, as there is a row
        if pa.types.is_boolean(found):
            return "truth"
        if pa.types.is_string(found) or pa.types.is_large_string(found):
            return "text"
        if pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_decimal(found):
            return "number"
        if pa.types.is_binary(found) or pa.types.is_large_binary(found):
            raise self.error(f"column {name!r} must hold texts in UTF-8")
        if role:
            raise self._unfit(name, f"numbers, texts or true/false, it holds {found}", role)
        raise self._no_feature(name, f"{found}, must hold numbers, texts or true/false")

    def _no_feature(self, name: str, text: str) -> UsageError:
        """Return the error for a column that cannot be a feature. text: what it holds."""
        allowed = _literal(f"column {name!r} holds {text}") + ", or be left out by {ignored}"
        return UsageError("path", self._path, allowed, ignored=("roles.ignored", (name,)))

    def _is_whole(self, name: str) -> bool:
        import pyarrow as pa

        found = self._content.schema.field(name).type
        return pa.types.is_integer(found.value_type if pa.types.is_dictionary(found) else found)

    def _complete(self, name: str) -> Any:
        """Return a column; raise UsageError if a value is missing."""
        column = self._content.column(name)
        if column.null_count:
            raise self._missing(name, column.is_null().to_numpy())
        return column

    def _missing(self, name: str, missing: np.ndarray) -> UsageError:
        place = self._place(int(np.argmax(missing)))
        text = f"column {name!r} has no value in {place}, must have one in each row"
        if self._path.endswith(".csv"):
            text += " (NA, N/A, null and nan mean none, unless quoted)"
        return self.error(text)

    def _numbers(self, name: str) -> np.ndarray:
        """Return a column of numbers [M]."""
        import pyarrow as pa

        column = self._complete(name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_decimal(column.type) or pa.types.is_float16(column.type):
            column = column.cast(pa.float64())
        numbers = column.to_numpy()
        if numbers.dtype.kind == "f" and np.isnan(numbers).any():
            raise self._missing(name, np.isnan(numbers))
        return numbers

    def _float32(self, name: str) -> np.ndarray:
        exact = self._numbers(name)
        with np.errstate(over="ignore"):  # too large numbers become infinite
            numbers = exact.astype(np.float32)
        if not np.isfinite(numbers).all():
            place = self._place(int(np.argmin(np.isfinite(numbers))))
            raise self.error(f"column {name!r} must be finite in float32, {place} is not")
        if is_rounded(exact, numbers):
            warnings.warn(f"{self._path}: column {name!r} {LARGE_WHOLE}", stacklevel=4)
        return numbers

    def _categories(self, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the numbers [M] int32 of a column's categories, and their names in order."""
        import pyarrow as pa

        column = self._complete(name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        encoded = column.dictionary_encode().combine_chunks()
        if isinstance(encoded, pa.ChunkedArray):  # of pyarrow before 21, unless there is one chunk
            encoded = encoded.chunk(0)
        values = encoded.dictionary.to_pylist()
        codes = encoded.indices.to_numpy()
        if None in values:
            raise self._missing(name, codes == values.index(None))
        if "" in values:
            raise self._missing(name, codes == values.index(""))
        order = sorted(range(len(values)), key=lambda index: values[index])
        rank = np.empty(len(values), np.int32)
        rank[order] = np.arange(len(values))
        names = [values[index] for index in order]
        texts = (str(value).lower() if isinstance(value, bool) else str(value) for value in names)
        return rank[codes], tuple(texts)


def is_rounded(exact: np.ndarray, numbers: np.ndarray) -> bool:
    """Return whether whole numbers are others in float32."""
    with np.errstate(invalid="ignore"):  # 2^63 as an integer
        return exact.dtype.kind in "iu" and bool((numbers.astype(exact.dtype) != exact).any())


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _literal(text: str) -> str:
    """Return a text for `UsageError.allowed`, where braces stand for other arguments."""
    return text.replace("{", "{{").replace("}", "}}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = (name if name.isprintable() else repr(name) for name in names[:_SHOWN])
    return ", ".join(shown) + more
