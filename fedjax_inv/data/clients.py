"""The examples of clients in the forms that a user has them, as splits for a program."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation as federations
from fedjax_inv.data.dataset import Dataset, check_dataset
from fedjax_inv.data.federation import Partition, Split
from fedjax_inv.types import Examples, Federation, Tree

_LARGE = 127  # above it, numbers of 8 bits may be pixels
_KINDS = {"truth values": np.bool_, "integers": jnp.integer, "floating point": jnp.floating}


def of_arrays(
    data: Any, y: Tree | None = None, client: Any = None
) -> tuple[Tree, Tree, list[np.ndarray]]:
    """Return examples on the host, and the rows of each client.

    Args:
      data: a list of (x, y) for each client, each [n, ...]; or a `Federation`; or x [M, ...], with
        y and client.
      y: targets [M, ...].
      client: [M] integers, the client of each example; clients are numbered in the order of these.

    Returns:
      (x [M, ...], y [M, ...], an array of rows for each client).

    Raises:
      UsageError: for another form, for clients whose examples have different shapes or kinds of
        numbers, and for x or y that holds NaN or infinity.
    """
    if y is not None:
        if client is None:
            raise UsageError("client", None, "must be the client of each example, beside y")
        check_rows("y", data, y)
        check_rows("client", data, client)
        client = arrays_of(client, "client")
        if texts := checks.for_texts("client", client):
            raise UsageError("client", client, f"must be integers{texts}")
        checks.integers("client", client, 0)
        x, parts = data, _rows_of(client)
    elif client is not None:
        raise UsageError("y", None, "must be given beside client")
    elif isinstance(data, Federation):
        x, y = jax.device_get((data.data.x, data.data.y))
        parts = federations.parts_of(data)
    else:
        x, y, parts = _joined(data)
    x, y = _inputs_of(x, "x"), arrays_of(y, "y")
    _check(x, y, client)
    return x, y, parts


def check_rows(name: str, x: Any, other: Any, inputs: str = "x") -> None:
    """Raise UsageError if two objects of pandas have other row labels.

    Args:
      name: the name of `other`, for the error.
      x: inputs.
      other: what must have a row for each of them.
      inputs: the name of `x`.
    """
    rows: Any = getattr(x, "index", None)
    others: Any = getattr(other, "index", None)
    if not (hasattr(rows, "equals") and hasattr(others, "equals")):
        return
    if not rows.equals(others):
        text = f"has other row labels than {inputs}, must have the same"
        remedy = f"pass {name}.loc[{inputs}.index], or both by to_numpy()"
        raise UsageError(name, ..., f"{text}; {remedy}")


def columns_of(data: Any) -> list[str]:
    """Return the names of the columns of a frame of pandas, or of the first in a list of (x, y).

    Other inputs have none: [].
    """
    if isinstance(data, Sequence) and not isinstance(data, str):
        firsts = [columns_of(pair[0]) for pair in data if isinstance(pair, Sequence) and pair]
        return next(filter(None, firsts), [])
    return [*map(str, getattr(data, "columns", ()))]


def check_columns(name: str, x: Any, needed: Sequence[str], place: str = "training") -> None:
    """Raise UsageError if two frames of pandas have not the same columns in one order."""
    found = columns_of(x)
    if found and needed and found != [*needed]:
        text = f"has the columns {', '.join(found)}, must have {', '.join(needed)}, as in {place}"
        raise UsageError(name, ..., text)


def arrays_of(arrays: Any, name: str) -> Any:
    """Return arrays of NumPy in the byte order of the machine; of a list of numbers one array.

    JAX would take a list for a tree, and takes no other byte order.

    Args:
      arrays: an array, what NumPy makes one of, a list of numbers, or a tree of arrays.
      name: the argument's name.

    Raises:
      UsageError: for lists of different lengths, and for masked values.
    """
    try:
        found = np.asarray(arrays) if isinstance(arrays, list) else arrays
    except ValueError:  # lists of different lengths
        raise UsageError(name, ..., "must have examples of one shape") from None

    def native(leaf: Any) -> np.ndarray:
        if np.ma.is_masked(leaf):
            text = "has masked values, must have none; `filled` of the array replaces them"
            raise UsageError(name, ..., text)
        array = np.asarray(leaf)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    return jax.tree.map(native, found)


def widened(leaf: np.ndarray) -> np.ndarray:
    """Return uint8 of two axes as int32, and other arrays as they are.

    Features of 8 bits are numbers, as in a file; networks scale uint8, as if it were an image.
    """
    return leaf.astype(np.int32) if leaf.dtype == np.uint8 and leaf.ndim == 2 else leaf


def _inputs_of(x: Any, name: str) -> Any:
    """Return the `widened` arrays of inputs; warn if they may be pixels."""
    arrays = arrays_of(x, name)
    for leaf in jax.tree.leaves(arrays):
        if leaf.dtype == np.uint8 and leaf.ndim == 2 and leaf.max(initial=0) > _LARGE:
            text = f"{name}: uint8 of two axes are features, whose numbers, up to {leaf.max()}, are"
            warnings.warn(f"{text} not scaled; divide pixels by 255", stacklevel=3)
    return jax.tree.map(widened, arrays)


def _joined_arrays(*parts: np.ndarray) -> np.ndarray:
    """Return arrays one after the other; integers stay so, whatever their signs and sizes."""
    if all(jnp.issubdtype(part.dtype, jnp.integer) for part in parts):
        both = np.result_type(*parts)
        if both.kind == "f":  # of int64 and uint64 NumPy makes float64
            parts = tuple(part.astype(np.int64) for part in parts)
    return np.concatenate(parts)


def kind_of_inputs(leaf: Any) -> str:
    """Return the kind of an array's numbers; uint8 is one of its own, as such inputs are scaled."""
    return "uint8" if leaf.dtype == np.uint8 else kind(leaf)


def kind(leaf: Any) -> str:
    """Return the kind of an array's numbers, such as "integers"."""
    return next((k for k, of in _KINDS.items() if jnp.issubdtype(leaf.dtype, of)), str(leaf.dtype))


def _kinds(x: Tree, y: Tree) -> tuple[Tree, Tree]:
    """Return the kinds of inputs and targets."""
    return jax.tree.map(kind_of_inputs, x), jax.tree.map(kind, y)


def _rows_of(client: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(client, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(client[order])) + 1)


def _joined(data: Any) -> tuple[Tree, Tree, list[np.ndarray]]:
    """Join a list of (x, y)."""
    allowed = "must be a list of (x, y) for each client, a Dataset or a Federation; or x, with y "
    allowed += "and client"
    if not isinstance(data, Sequence) or isinstance(data, str) or not data:
        if hasattr(data, "dtype"):
            raise UsageError("data", data, allowed)
        remedy = "; of a dict pass [*data.values()]" * isinstance(data, Mapping)
        raise UsageError("data", ..., f"is of type {type(data).__name__}, {allowed}{remedy}")
    if isinstance(data, tuple) and len(data) == 2 and hasattr(data[0], "dtype"):
        raise UsageError("data", ..., f"is one (x, y), {allowed}; of one client pass [(x, y)]")
    first, first_kinds, pairs, columns = None, None, [], columns_of(data)
    for index, pair in enumerate(data):
        if not isinstance(pair, Sequence) or len(pair) != 2 or any(each is None for each in pair):
            raise UsageError(f"data[{index}]", ..., allowed)
        name = f"data[{index}]"
        check_columns(name, pair[0], columns, "data[0]")
        check_rows(f"{name}[1]", pair[0], pair[1], f"{name}[0]")
        pair = _inputs_of(pair[0], name), arrays_of(pair[1], name)
        lengths = {leaf.shape[0] if leaf.ndim else -1 for leaf in jax.tree.leaves(pair)}
        if len(lengths) != 1 or -1 in lengths:
            raise UsageError(f"data[{index}]", ..., f"x and y have lengths {sorted(lengths)}")
        shapes = jax.tree.map(lambda leaf: leaf.shape[1:], pair)
        first = shapes if first is None else first
        if shapes != first:
            found = f"has examples of shapes {shapes}"
            raise UsageError(f"data[{index}]", ..., f"{found}, must be {first} as in data[0]")
        pairs.append(pair)
        if 0 in lengths:
            continue  # nothing, of any type
        kinds = _kinds(*pair)
        first_kinds = kinds if first_kinds is None else first_kinds
        if kinds != first_kinds:
            text = f"holds {kinds}, must hold {first_kinds} as the clients before"
            raise UsageError(f"data[{index}]", ..., text)
    filled = [pair for pair in pairs if len(jax.tree.leaves(pair)[0])]
    if not filled:
        raise UsageError("data", ..., "must hold an example, all clients have none")
    x, y = jax.tree.map(_joined_arrays, *filled)
    ends = np.cumsum([len(jax.tree.leaves(pair)[0]) for pair in pairs])
    return x, y, np.split(np.arange(ends[-1]), ends[:-1])


def _check(x: Tree, y: Tree, client: Any = None) -> None:
    named = {"x": x, "y": y} | ({} if client is None else {"client": client})
    lengths = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(named)}
    if lengths == {0}:
        raise UsageError("data", ..., f"{' and '.join(named)} must hold examples, there are none")
    if len(lengths) != 1 or 0 in lengths:
        found = ", ".join(f"{k} {np.shape(jax.tree.leaves(v)[0])}" for k, v in named.items())
        raise UsageError("data", ..., f"{' and '.join(named)} must be of one length, not {found}")
    for path, leaf in jax.tree_util.tree_leaves_with_path({"x": x, "y": y}):
        name = path[0].key + jax.tree_util.keystr(path[1:])
        if kind(leaf) not in _KINDS:
            remedy = checks.for_texts(name, leaf) if name == "y" else ""
            raise UsageError(name, leaf, f"must hold numbers{remedy}")
        if not checks.holds_finite(leaf):
            raise UsageError(name, leaf, "must be finite in float32")


def splits_of_arrays(
    x: Tree,
    y: Tree,
    parts: Sequence[np.ndarray],
    *,
    test: tuple[Tree, Tree] | None,
    validation: float,
    seeds: Sequence[int],
) -> tuple[Examples, dict[int, Split]]:
    """Return the examples, and a split of each client's examples for each seed.

    Args:
      x: inputs on the host [M, ...].
      y: targets on the host [M, ...].
      parts: the rows of each client.
      test: further inputs and targets, which no client holds; None for no test.
      validation: the part of each client's n examples that is held out for validation: at least one
        example if n >= 2 and validation > 0, and never all.
      seeds: the seeds of the draws of validation examples.

    Returns:
      (the examples, splits by seed).

    Raises:
      UsageError: for a validation outside of [0, 1), for one above 0 if clients share rows, and for
        a test of other shapes or kinds of numbers.
    """
    checks.number("validation", validation, "at least 0 and below 1", lambda part: 0 <= part < 1)
    rows = np.concatenate(parts)
    if validation > 0 and len(np.unique(rows)) < len(rows):
        text = "must be 0, as clients share examples: one might train on another's for validation"
        raise UsageError("validation", validation, text)
    num_train = len(jax.tree.leaves(y)[0])
    if test is not None:
        x, y = _with_test(x, y, test)
    data = federations.examples(x, y)
    test_rows = np.arange(num_train, len(jax.tree.leaves(y)[0]))
    splits = {}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        train, valid = [], []
        for part in parts:
            size = federations.validation_size(len(part), validation)
            rows = rng.permutation(part) if size else np.asarray(part)
            valid.append(rows[:size])
            train.append(rows[size:])
        splits[seed] = Split(
            federations.of_parts(data, train),
            federations.of_parts(data, valid),
            federations.of_parts(data, [test_rows]),
            np.full(len(parts), -1, np.int32),
            np.array([-1], np.int32),
            ("all",),
        )
    return data, splits


def _with_test(x: Tree, y: Tree, test: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """Append test examples."""
    if not isinstance(test, Sequence) or len(test) != 2:
        raise UsageError("test", ..., "must be inputs and targets, (x, y)")
    check_rows("test[1]", test[0], test[1], "test[0]")
    test_x, test_y = _inputs_of(test[0], "test"), arrays_of(test[1], "test")
    try:
        _check(test_x, test_y)
    except UsageError as error:
        raise UsageError("test", ..., str(error)) from None
    found, needed = (
        jax.tree.map(lambda leaf: leaf.shape[1:], pair) for pair in ((test_x, test_y), (x, y))
    )
    if found != needed:
        raise UsageError("test", ..., f"has examples of shapes {found}, must be {needed}")
    found, needed = _kinds(test_x, test_y), _kinds(x, y)
    if found != needed:
        raise UsageError("test", ..., f"holds {found}, must hold {needed} as in training")
    return jax.tree.map(_joined_arrays, (x, y), (test_x, test_y))


def splits_of_dataset(
    dataset: Dataset,
    *,
    partition: Partition | None,
    held_out: str | None,
    validation: float,
    seeds: Sequence[int],
) -> tuple[Examples, Mapping[int, Split]]:
    """Return the examples of a data set, and its split for each seed by `federation.split`.

    Args:
      dataset: a data set.
      partition: deals rows to clients. None: each user is a client, or each domain if users are
        not known.
      held_out: the name of the domain that is held out for the test, or None.
      validation: as in `federation.split`.
      seeds: the seeds of the splits. Those of `federation.split` are larger by 2**31, so that they
        differ from the seeds with which the data set's domains may have been drawn.

    Returns:
      (the examples, splits by seed).

    Raises:
      UsageError: as `federation.split` does, and if there is neither a partition nor users nor a
        second domain.
    """
    check_dataset(dataset)
    x, y = arrays_of(dataset.x, "dataset.x"), arrays_of(dataset.y, "dataset.y")
    if partition is None:
        present = np.ones(len(dataset.y), bool)
        if held_out in dataset.domains:
            present = dataset.domain != dataset.domains.index(str(held_out))
        of = dataset.domain if dataset.user is None else dataset.user
        users = np.unique(of[present & ~dataset.test])
        if len(users) < 2:
            what = "domain" if dataset.user is None else "user"
            text = f"must be given, as one {what} alone has examples outside the test"
            raise UsageError("partition", None, text)

        # A client's examples may all be drawn for the test.
        def partition(rows: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
            del rng
            order = np.argsort(of[rows], kind="stable")
            ends = np.searchsorted(of[rows][order], users[1:])
            return np.split(rows[order], ends)

    data = federations.examples(x, y)
    return data, {
        seed: federations.split(
            dataset,
            data,
            partition,
            held_out=held_out,
            seed=seed + 2**31,
            validation=validation,
        )
        for seed in seeds
    }
