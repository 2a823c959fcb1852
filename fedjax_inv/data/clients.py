"""The examples of clients as a user of `fit` has them, as splits for a program."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation as federations
from fedjax_inv.data.dataset import Dataset, check_dataset, for_texts, holds_finite, suspicions
from fedjax_inv.data.federation import Partition, Split, Splits
from fedjax_inv.types import Examples, Tree

_LARGE = 127  # above it, numbers of 8 bits may be pixels
_KINDS = {"truth values": np.bool_, "integers": jnp.integer, "floating point": jnp.floating}
_FORMS = "must be a list of (x, y) for each client (`data.clients.by_client`), or a Dataset"


class _Rows(NamedTuple):
    """Examples, and the rows of each client."""

    x: Tree
    y: Tree
    parts: list[np.ndarray]


def by_client(x: Tree, y: Tree, client: Any) -> _Rows:
    """Return inputs and targets [M, ...] of clients as `fit` takes them.

    `client` [M] are integers, the client of each example, in whose order clients are numbered.
    """
    x = _inputs_of(x, "x")
    y = arrays_of(y, "y")
    client = arrays_of(client, "client")
    if client.dtype.kind not in "iu" or lengths((x, y, client)) != {client.size} or not client.size:
        needed = f"must be integers [M], one for each example{for_texts('client', client)}"
        raise UsageError("client", client, needed)
    order = np.argsort(client, kind="stable")
    return _Rows(x, y, np.split(order, np.flatnonzero(np.diff(client[order])) + 1))


def of_arrays(clients: Any) -> tuple[Tree, Tree, list[np.ndarray]]:
    """Return (x [M, ...], y [M, ...], an array of rows for each client), on the host.

    Clients are a list of (x, y) for each, each [n, ...]; or what `by_client` returns.
    """
    x, y, parts = clients[:3] if isinstance(clients, _Rows) else _of_list(clients)
    _check_numbers(x, y)
    for text in suspicions("", x, y):
        warnings.warn(text, stacklevel=3)
    return x, y, parts


def _of_list(clients: Any) -> tuple[Tree, Tree, list[np.ndarray]]:
    """Join a list of (x, y)."""
    is_list = isinstance(clients, Sequence) and not isinstance(clients, str) and len(clients) > 0
    if not is_list or hasattr(clients[0], "dtype"):
        raise UsageError("clients", ..., _FORMS)
    pairs = [_pair(f"clients[{index}]", pair) for index, pair in enumerate(clients)]
    sizes = [len(jax.tree.leaves(pair)[0]) for pair in pairs]
    filled = {index: pairs[index] for index in np.flatnonzero(sizes)}  # others are of any type
    if not filled:
        raise UsageError("clients", ..., "must hold an example, all clients have none")
    needed = _form(next(iter(filled.values())))
    for index, pair in filled.items():
        if _form(pair) != needed:
            text = f"holds {_form(pair)}, must hold {needed} as the clients before"
            raise UsageError(f"clients[{index}]", ..., text)
    x, y = jax.tree.map(_joined, *filled.values())
    ends = np.cumsum(sizes)
    return x, y, np.split(np.arange(ends[-1]), ends[:-1])


def _pair(name: str, pair: Any) -> tuple[Tree, Tree]:
    """Return x and y of one length as arrays."""
    if not isinstance(pair, Sequence) or len(pair) != 2 or any(each is None for each in pair):
        raise UsageError(name, ..., _FORMS if name.startswith("clients") else "must be (x, y)")
    found = _inputs_of(pair[0], name), arrays_of(pair[1], name)
    sizes = lengths(found)
    if len(sizes) != 1 or -1 in sizes:
        raise UsageError(name, ..., f"must have x and y of one length, not {sorted(sizes)}")
    return found


def lengths(tree: Tree) -> set[int]:
    """Return the lengths of arrays, -1 for one without axes."""
    return {leaf.shape[0] if leaf.ndim else -1 for leaf in jax.tree.leaves(tree)}


def form(arrays: Tree, of: Callable[[Any], str]) -> Tree:
    """Return `of`, such as `kind`, and the shape of an example of each array [M, ...]."""
    return jax.tree.map(lambda leaf: f"{of(leaf)} {leaf.shape[1:]}", arrays)


def _form(pair: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    return form(pair[0], kind_of_inputs), form(pair[1], kind)


def kind_of_inputs(leaf: Any) -> str:
    """Return the kind of an array's numbers; uint8 is one of its own, as such inputs are scaled."""
    return "uint8" if leaf.dtype == np.uint8 else kind(leaf)


def kind(leaf: Any) -> str:
    """Return the kind of an array's numbers, such as "integers"."""
    return _kind(leaf.dtype)


@functools.cache
def _kind(dtype: Any) -> str:
    return next((k for k, of in _KINDS.items() if jnp.issubdtype(dtype, of)), str(dtype))


def arrays_of(arrays: Any, name: str) -> Any:
    """Return arrays of NumPy in the byte order of the machine; of a list of numbers one array.

    JAX would take a list for a tree, and takes no other byte order. There is a UsageError for lists
    of different lengths, and for masked values.
    """
    try:
        found = np.asarray(arrays) if isinstance(arrays, list) else arrays
    except ValueError:  # lists of different lengths
        raise UsageError(name, ..., "must have examples of one shape") from None

    def native(leaf: Any) -> np.ndarray:
        if hasattr(leaf, "iloc"):  # of pandas, whose columns and rows may have another order
            raise UsageError(name, ..., "must be arrays, as to_numpy() of a frame returns")
        if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
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


def _joined(*parts: np.ndarray) -> np.ndarray:
    """Return arrays one after the other; integers stay so, whatever their signs and sizes."""
    are_integers = all(jnp.issubdtype(part.dtype, jnp.integer) for part in parts)
    if are_integers and np.result_type(*parts).kind == "f":  # as of int64 and uint64
        parts = tuple(part.astype(np.int64) for part in parts)
    return np.concatenate(parts)


def _check_numbers(x: Tree, y: Tree, name: str = "") -> None:
    """Raise UsageError unless x and y hold finite numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path({"x": x, "y": y}):
        here = name or path[0].key + jax.tree_util.keystr(path[1:])
        if kind(leaf) not in _KINDS:
            remedy = for_texts(here, leaf) if here == "y" else ""
            raise UsageError(here, leaf, f"must hold numbers{remedy}")
        if not holds_finite(leaf):
            raise UsageError(here, leaf, "must be finite in float32")


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

    x and y [M, ...] are on the host, and `parts` are the rows of each client. `test` are further
    inputs and targets that no client holds. `validation` is the part of each client's examples that
    is held out for validation, as in `federation.validation_size`. Each client is a domain.
    """
    checks.real("validation", validation, 0, 1)
    num_train = len(jax.tree.leaves(y)[0])
    if test is not None:
        of_test = _pair("test", test)
        _check_numbers(*of_test, name="test")
        if _form(of_test) != _form((x, y)):
            text = f"holds {_form(of_test)}, must hold {_form((x, y))} as in training"
            raise UsageError("test", ..., text)
        x, y = jax.tree.map(_joined, (x, y), of_test)
    domain = np.full(len(jax.tree.leaves(y)[0]), -1, np.int32)  # of the test: none
    for client, part in enumerate(parts):
        domain[part] = client
    data = federations.examples_on_host(x, y, domain)
    test_rows = np.arange(num_train, len(domain))
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


def of_dataset(
    dataset: Dataset,
    *,
    partition: Partition | None = None,
    held_out: str | None = None,
    validation: float = 0.0,
    validate: str | None = None,
    held_out_clients: float = 0.0,
    partition_seed: int | None = None,
) -> Callable[[Sequence[int]], Splits]:
    """Return seeds -> the examples of a data set and its splits, as `fit` takes them.

    Args:
      dataset: a data set.
      partition: deals rows to clients. None: each user is a client, or each domain if users are
        not known.
      held_out: the name of the domain that is held out for the test, or None.
      validation: as in `federation.split`, whose seeds are larger by 2**31: they differ from
        the seeds with which the data set's domains may have been drawn. It must be 0 for a data set
        that has validation examples for clients, which are held out instead.
      validate: the name of another domain that no client has, to select by, or None.
      held_out_clients: the part of the clients, drawn, that training never sees.
      partition_seed: seeds who holds what in all runs; None: each run's own seed does.
    """
    check_dataset(dataset)
    checks.real("validation", validation, 0, 1)
    if validation and federations.has_validation(dataset, held_out, validate):
        text = "must be left out, as the data set has examples of clients that are `valid`"
        raise UsageError("validation", validation, text)
    checks.real("held_out_clients", held_out_clients, 0, 1)
    if partition is not None and not callable(partition):
        text = "must be a function, such as `federation.partitioner(name, dataset, num_clients)`"
        raise UsageError("partition", partition, text)
    checks.integer("partition_seed", partition_seed or 0, 0)
    x = arrays_of(dataset.x, "dataset.x")
    y = arrays_of(dataset.y, "dataset.y")
    for text in suspicions("dataset.", x, y):
        warnings.warn(text, stacklevel=3)
    data = federations.examples_on_host(x, y, dataset.domain)
    deal = partition or _by_user_or_domain(dataset, held_out, validate)

    split = functools.partial(
        federations.split,
        held_out=held_out,
        validation=validation,
        validate=validate,
        held_out_clients=held_out_clients,
    )

    def of_seeds(seeds: Sequence[int]) -> Splits:
        at = {seed: seed if partition_seed is None else partition_seed for seed in seeds}
        dealt = {each: split(dataset, data, deal, seed=each + 2**31) for each in {*at.values()}}
        return Splits(data, {seed: dealt[at[seed]] for seed in seeds}, render=dataset.render)

    return of_seeds


def _by_user_or_domain(dataset: Dataset, *held_out: str | None) -> Partition:
    """Return the partition in which each user, or else each domain, is a client.

    `held_out` are domains that no client has, or None.
    """
    present = federations.dealt(dataset, *held_out)
    of = dataset.domain if dataset.user is None else dataset.user
    users = np.unique(of[present])
    if len(users) < 2:
        what = "domain" if dataset.user is None else "user"
        text = f"must be given, as one {what} alone has examples outside the test"
        raise UsageError("partition", None, text)

    # A client's examples may all be drawn for the test.
    def partition(rows: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        del rng
        order = np.argsort(of[rows], kind="stable")
        return np.split(rows[order], np.searchsorted(of[rows][order], users[1:]))

    return partition
