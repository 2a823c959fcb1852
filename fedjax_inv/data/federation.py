"""Federations from arrays or a data set: which client holds which examples for which purpose."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import partitions
from fedjax_inv.data.dataset import Dataset, Originals, check_dataset, originals
from fedjax_inv.types import Array, Examples, Federation, Tree

BY_CLASS = ("dirichlet", "shards")  # partitions that need classes
# (rows to deal [m], generator) -> one array of rows per client
Partition = Callable[[np.ndarray, np.random.Generator], list[np.ndarray]]


class Split(NamedTuple):
    """The federations of one run, which share one copy of the examples and one order of them."""

    train: Federation  # C clients
    valid: Federation  # the same C clients, other examples
    test: Federation  # one client, of examples that no other client holds
    domain: np.ndarray  # [C] int32, the domain of a training client, -1 if it holds several
    test_domain: np.ndarray  # [1] int32, the held-out domain, -1 for none
    domains: tuple[str, ...]


def examples(x: Tree, y: Tree) -> Examples:
    """Put M examples on the device, in their own dtype; labels [M] of integers become int32.

    Args:
      x: inputs: an array or a tree of arrays, [M, ...].
      y: targets: an array or a tree of arrays, [M, ...].

    Returns:
      The examples.

    Raises:
      UsageError: if x and y have different lengths, or no example, for an integer that does not
        fit into 32 bits, and for what is no array, such as nested lists.
    """
    for name, leaf in (("x", x), ("y", y)):
        for part in jax.tree.leaves(leaf):
            if not hasattr(part, "dtype"):
                found = f"holds a value of type {type(part).__name__}"
                raise UsageError(name, ..., f"{found}, must be an array or a tree of arrays")
            checks.array(name, part)
            if isinstance(part, np.ndarray) and part.dtype.kind in "iu" and part.dtype.itemsize > 4:
                checks.integers(name, part, -(2**31), 2**31 - 1, ndim=None, may_be_empty=True)
    lengths = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves((x, y))}
    if len(lengths) != 1 or 0 in lengths:
        raise UsageError(
            "y", ..., f"must be as long as x, above 0; their lengths are {sorted(lengths)}"
        )
    return jax.tree.map(_on_device, Examples(x, jax.tree.map(_in_int32, y)))


def _in_int32(labels: Any) -> Any:
    """Labels in a type that also holds the number of classes, which 8 bits may not."""
    is_labels = np.ndim(labels) == 1 and np.issubdtype(labels.dtype, np.integer)
    return labels.astype(np.int32) if is_labels else labels


def _on_device(leaf: Any) -> Array:
    """An array on the device; unlike jnp.asarray, without a program for each shape."""
    if isinstance(leaf, jax.Array):
        return leaf
    return jax.device_put(np.asarray(leaf), may_alias=False)


def examples_on_host(x: Tree, y: Tree) -> Examples:
    """Return M examples as `examples` does, but on the host and without a copy.

    Args:
      x: as in `examples`; arrays may be `np.memmap`s.
      y: likewise.

    Raises:
      UsageError: as `examples` does, and for numbers of more than 32 bits in x.
    """
    y = jax.tree.map(lambda leaf: _in_int32(_in_32_bits("y", np.asarray(leaf))), y)
    data = Examples(x, y)
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        checks.array("x", leaf)
        if leaf.dtype.itemsize > 4:
            name = "x" + jax.tree_util.keystr(path)
            raise UsageError(name, leaf, "must have numbers of at most 32 bits")
    lengths = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(data)}
    if len(lengths) != 1 or 0 in lengths:
        text = f"must be as long as x, above 0; their lengths are {sorted(lengths)}"
        raise UsageError("y", ..., text)
    return data


def _in_32_bits(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array in the type that JAX gives it."""
    if array.dtype.kind in "iu" and array.dtype.itemsize > 4:
        checks.integers(name, array, -(2**31), 2**31 - 1, ndim=None, may_be_empty=True)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def of_parts(data: Examples, parts: Sequence[np.ndarray]) -> Federation:
    """Return the federation whose client c holds the rows parts[c] of the examples, in that order.

    Args:
      data: the examples, from `examples`.
      parts: for each client, an array of rows; clients may share rows.

    Raises:
      UsageError: for no client, and for rows that do not exist.
    """
    checks.record("data", data, Examples)
    if isinstance(parts, str) or not hasattr(parts, "__len__") or not len(parts):
        raise UsageError("parts", parts, "must hold an array of rows for at least one client")
    for client, part in enumerate(parts):
        if np.ndim(part) != 1:
            raise UsageError(f"parts[{client}]", part, "must be rows of the examples, [n]")
    size = np.array([len(part) for part in parts])
    # Empty parts may have any dtype. The order has at least one row: JAX cannot gather from none.
    filled = [np.asarray(part) for part in parts if len(part)] or [np.zeros(1, np.int32)]
    order = np.concatenate(filled)
    if order.size and order.dtype.kind not in "iu":
        raise UsageError(
            "parts", ..., f"hold {order.dtype}, must hold integers, rows of the examples"
        )
    for leaf in jax.tree.leaves(data):
        checks.array("data", leaf)
        if leaf.shape and order.size and not 0 <= order.min() <= order.max() < leaf.shape[0]:
            for client, part in enumerate(parts):
                checks.integers(f"parts[{client}]", part, 0, leaf.shape[0] - 1, may_be_empty=True)
    return _federation(data, order, np.cumsum(size) - size, size)


def _federation(
    data: Examples, order: np.ndarray, start: np.ndarray, size: np.ndarray
) -> Federation:
    arrays: tuple[Any, ...] = (order, start, size)
    checks.federation(Federation(data, *arrays))  # before the conversion to int32, which may wrap
    # `jnp.asarray` would compile a program for each shape.
    return Federation(data, *(jax.device_put(np.asarray(array, np.int32)) for array in arrays))


def parts_of(federation: Federation) -> list[np.ndarray]:
    """Return the rows of each client, from which `of_parts` makes the federation."""
    checks.federation(federation)
    order, start, size = (np.asarray(array) for array in federation[1:4])
    return [order[begin : begin + count] for begin, count in zip(start, size, strict=True)]


def rows_of(order: np.ndarray, start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the rows of clients, one client after the other.

    Args:
      order: [L] rows of the examples.
      start: [c] where each client's rows begin in `order`.
      size: [c] how many rows each client has.

    Returns:
      [size.sum()] rows.
    """
    first = np.cumsum(size) - size
    return order[np.repeat(start - first, size) + np.arange(size.sum())]


def partitioner(
    name: str,
    dataset: Dataset,
    num_clients: int,
    *,
    alpha: float = 0.5,
    min_size: int | None = None,
    shards_per_client: int = 2,
    mixing: float = 0.1,
) -> Partition:
    """Return a partition by name.

    Args:
      name: "domain", "mixed", "iid", "dirichlet", "quantity", "shards" or "user", each a function
        of `data.partitions`.
      dataset: the examples to deal.
      num_clients: C, how many clients share the examples.
      alpha: the concentration, for "dirichlet" and "quantity".
      min_size: the least examples of a client, for "dirichlet" and "quantity"; by default the
        number of classes, or 1 if the targets are no classes.
      shards_per_client: the number of shards of each client, for "shards".
      mixing: how far domains are mixed, for "mixed": from 0, a domain a client, to 1, all alike.

    Returns:
      (rows to deal [m], generator) -> one array of rows per client.

    Raises:
      UsageError: for an unknown name, for "user" if the data set has no users, and for "dirichlet"
        and "shards" if the targets are no classes.
    """
    checks.record("dataset", dataset, Dataset)
    has_classes = dataset.task == "classes"
    checks.integer("num_clients", num_clients)

    def least(rows: np.ndarray) -> int:
        if min_size is not None:
            return min_size
        return len(np.unique(dataset.y[rows])) if has_classes else 1

    by_name: dict[str, Partition] = {
        "domain": lambda rows, rng: partitions.by_domain(dataset.domain[rows], num_clients, rng),
        "mixed": lambda rows, rng: partitions.mixed(dataset.domain[rows], num_clients, mixing, rng),
        "iid": lambda rows, rng: partitions.iid(len(rows), num_clients, rng),
        "dirichlet": lambda rows, rng: partitions.dirichlet(
            dataset.y[rows], num_clients, alpha, rng, min_size=min_size
        ),
        "quantity": lambda rows, rng: partitions.quantity(
            len(rows), num_clients, alpha, rng, min_size=least(rows)
        ),
        "shards": lambda rows, rng: partitions.shards(
            dataset.y[rows], num_clients, shards_per_client, rng
        ),
    }
    user = dataset.user
    if user is not None:
        by_name["user"] = lambda rows, rng: partitions.by_user(user[rows], num_clients, rng)
    checks.record("name", name, str)
    if user is None and name == "user":
        text = "needs data with users, these have none; a table or an .npz has them in client"
        raise UsageError("name", name, text)
    checks.one_of("name", name, by_name)
    if name in BY_CLASS and not has_classes:
        raise UsageError("name", name, f"needs data with classes, these have {dataset.task}")
    return lambda rows, rng: [rows[part] for part in by_name[name](rows, rng)]


def split(
    dataset: Dataset,
    data: Examples,
    partition: Partition,
    *,
    held_out: str | None,
    seed: int,
    validation: float = 0.1,
    test_fraction: float = 0.2,
    first_row: int = 0,
    imbalance: float = 1.0,
) -> Split:
    """Hold out a test client, deal the other examples to clients, and hold out some of each.

    With a held-out domain, the test client holds all of it, and the clients share the examples of
    the other domains outside the official test split. Without one, the test client holds the
    official test split, or a random part of the examples if the data set has none. The examples of
    every client, the test's included, lie in random order, so that the first ones are a sample.
    Copies of one original (`Dataset.original`) stay together: what is dealt and held out are the
    originals, with all their copies, and the partition sees the first copy of each.

    Args:
      dataset: M examples on the host.
      data: the same examples on the device, from `examples`, to which all federations refer.
      partition: deals rows to clients, as a `partitioner` does.
      held_out: the name of the domain that only the test client sees, or None.
      seed: the seed of the partition and of the other random draws, at least 0. If the data set's
        domains were drawn, as by `environments.colored`, it must be another seed than theirs: both
        begin with a permutation of the examples, and a partition such as "iid" would deal each
        domain to a client of its own.
      validation: the part of each client's n examples that is held out for validation: at least one
        example if n >= 2, and never all.
      test_fraction: the part of the examples that is held out for the test, where the test is drawn
        at random.
      first_row: the row of `data` at which the data set begins, if `data` holds more.
      imbalance: above 1, classes have a long tail (`partitions.long_tail`) among the examples to
        deal, and no client holds the rest.

    Returns:
      The federations of training, validation and test.

    Raises:
      UsageError: if an argument is out of range, if `data` holds other examples than the data set
        from first_row on, by their shapes or targets, if the partition is not possible, if it
        deals an example twice, or if copies of one original lie in several domains or splits.
    """
    check_dataset(dataset)
    checks.record("data", data, Examples)
    checks.function("partition", partition)
    checks.integer("seed", seed, 0)
    checks.number("validation", validation, "at least 0 and below 1", lambda part: 0 <= part < 1)
    checks.fraction("test_fraction", test_fraction)
    checks.integer("first_row", first_row, 0)
    _check_same_examples(dataset, data, first_row)
    if held_out is not None:
        checks.one_of("held_out", held_out, dataset.domains)
    rng = np.random.default_rng(seed)
    whole = originals(dataset)
    _check_together(dataset, whole)
    every, test = whole.rows, dataset.test[whole.rows]
    if held_out is not None:
        is_test = dataset.domain[every] == dataset.domains.index(held_out)
    elif test.any():
        is_test = test
    else:
        is_test = np.zeros(len(every), bool)
        num_test = max(1, round(test_fraction * len(every)))
        is_test[rng.permutation(len(every))[:num_test]] = True
    to_deal = every[~is_test & ~test]
    if not is_test.any():
        raise UsageError("held_out", held_out, "must be a domain with examples, it has none")
    if len(to_deal) == 0:
        if held_out is None and not test.any():
            raise UsageError("test_fraction", test_fraction, "leaves no examples to train on")
        if test.all():
            text = "leaves no examples to train on, as all are in the test split"
            raise UsageError("held_out", held_out, text)
        raise UsageError("held_out", held_out, "leaves no examples to train on")
    checks.number("imbalance", imbalance, "of at least 1", lambda factor: factor >= 1)
    if imbalance != 1:
        check_dataset(dataset, "classes")
        labels, num_classes = dataset.y[to_deal], len(dataset.classes)
        to_deal = to_deal[partitions.long_tail(labels, num_classes, imbalance, rng)]
    parts = _checked(partition(to_deal, rng), to_deal)
    train, valid, domain = [], [], []
    for part in parts:
        rows = rng.permutation(part)
        size = validation_size(len(rows), validation)
        valid.append(_with_copies(rows[:size], whole, rng))
        train.append(_with_copies(rows[size:], whole, rng))
        domains = np.unique(dataset.domain[rows])
        domain.append(domains[0] if len(domains) == 1 else -1)
    # The order of the test does not depend on the seed, and so neither do its first examples.
    of_test = np.random.default_rng(0)
    tested = _with_copies(of_test.permutation(every[is_test]), whole, of_test)
    held = [*train, *valid, tested]
    # The three federations share one order of all M examples, so that all splits have equal shapes.
    rest = np.setdiff1d(np.arange(len(dataset.y)), np.concatenate(held))
    order = first_row + np.concatenate([*held, rest])
    sizes = np.array([len(rows) for rows in held])
    ends = np.cumsum(sizes)

    def clients(first: int, last: int) -> Federation:
        return _federation(data, order, (ends - sizes)[first:last], sizes[first:last])

    num_clients = len(parts)
    return Split(
        clients(0, num_clients),
        clients(num_clients, 2 * num_clients),
        clients(2 * num_clients, 2 * num_clients + 1),
        np.array(domain, np.int32),
        np.array([-1 if held_out is None else dataset.domains.index(held_out)], np.int32),
        dataset.domains,
    )


def _with_copies(rows: np.ndarray, whole: Originals, rng: np.random.Generator) -> np.ndarray:
    """Return rows and all other copies of their originals, in random order if there are any."""
    found = whole.copies(rows)
    return found if len(found) == len(rows) else rng.permutation(found)


def _check_together(dataset: Dataset, whole: Originals) -> None:
    """Raise UsageError if copies of one original differ in domain, test split or user."""
    for name in ("domain", "test", "user"):
        field = getattr(dataset, name)
        if field is not None and (field != field[whole.rows][whole.of]).any():
            raise UsageError(
                f"dataset.{name}", ..., "must be the same for all copies of one original"
            )


def _check_same_examples(dataset: Dataset, data: Examples, first_row: int) -> None:
    """Raise UsageError unless `data` holds the data set's shapes and targets from first_row on."""

    def shapes(tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf.shape[1:], tree)

    needed, found = (shapes((each.x, each.y)) for each in (dataset, data))
    if found != needed:
        raise UsageError("data", ..., f"has examples of shapes {found}, must be {needed}")
    last_row = first_row + len(dataset.y)
    targets = np.asarray(data.y)[first_row:last_row]
    if len(targets) < len(dataset.y):
        raise UsageError(
            "data",
            ...,
            f"has {len(data.y)} examples, must have those of the data set, "
            f"the rows {first_row}..{last_row - 1}",
        )
    other = np.argwhere(targets != np.asarray(dataset.y))
    if len(other):
        at = tuple(other[0].tolist())
        place = [first_row + at[0], *at[1:]]
        raise UsageError(
            f"data.y{place}", targets[at], f"must be the target in the data set, {dataset.y[at]}"
        )


def _checked(dealt: Sequence[Any], to_deal: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each client, as integers; raise UsageError for what is no partition."""
    if not hasattr(dealt, "__len__"):
        raise UsageError("partition", ..., "must return a list with the rows of each client")
    if len(dealt) == 0:
        raise UsageError("partition", ..., "deals to no client, must deal to at least one")
    parts = []
    for client, rows in enumerate(dealt):
        rows = np.zeros(0, int) if np.shape(rows) == (0,) else rows
        parts.append(checks.integers(f"partition[{client}]", rows, may_be_empty=True))
    rows, times = np.unique(np.concatenate(parts), return_counts=True)
    if times.max(initial=1) > 1:
        raise UsageError(
            "partition", ..., f"deals row {rows[times > 1][0]} twice, must deal it once"
        )
    strangers = np.setdiff1d(rows, to_deal)
    if len(strangers):
        raise UsageError(
            "partition", ..., f"deals row {strangers[0]}, which is not among those to deal"
        )
    return parts


def validation_size(size: int, validation: float) -> int:
    """Return how many of a client's examples are held out for validation.

    Args:
      size: n, how many examples the client has.
      validation: the part to hold out, at least 0 and below 1.

    Returns:
      About validation n: at least 1 if n >= 2 and validation > 0, and never all.
    """
    if validation == 0 or size < 2:
        return 0
    return min(max(1, round(validation * size)), size - 1)


def by_class(federation: Federation, num_classes: int) -> Federation:
    """Return the federation in which "client" k holds all examples of class k, in 0..K-1.

    Args:
      federation: any federation; the clients share its rows.
      num_classes: K.

    Raises:
      UsageError: for labels out of range.
    """
    checks.integer("num_classes", num_classes)
    rows = np.concatenate(parts_of(federation))
    labels = np.asarray(federation.data.y)[rows]
    labels = checks.integers("labels", labels, 0, num_classes - 1, may_be_empty=True)
    return of_parts(federation.data, [rows[labels == label] for label in range(num_classes)])


def test_shards(
    split: Split,
    num_classes: int,
    seed: int,
    *,
    source: np.ndarray | None = None,  # noqa: PT028 (no test)
) -> Federation:
    """Draw test examples for each training client, in the proportions of its classes.

    Args:
      split: the federations of a run.
      num_classes: K.
      seed: the seed of the draw, by `partitions.shards_like`.
      source: `wrong_labels.Mislabelled.source` if clients have wrong labels, [M]; the right ones
        count.

    Returns:
      A federation of C clients that may share rows.

    Raises:
      UsageError: as `partitions.shards_like` does.
    """
    checks.record("split", split, Split)
    checks.integer("num_classes", num_classes)
    checks.integer("seed", seed, 0)
    data, rng = split.test.data, np.random.default_rng(seed)
    labels = np.asarray(data.y)
    right = labels if source is None else labels[source]
    counts = partitions.class_counts(right, parts_of(split.train), num_classes)
    rows = np.concatenate(parts_of(split.test))
    return of_parts(
        data, [rows[part] for part in partitions.shards_like(labels[rows], counts, rng)]
    )


def pooled(federation: Federation) -> Federation:
    """Return a federation of one client that holds all examples, for centralised training."""
    checks.federation(federation)
    data, order, start, size = federation
    begin, count = np.asarray(start), np.asarray(size)
    if (begin[1:] == (begin + count)[:-1]).all():  # clients' rows follow each other already
        return Federation(data, order, start[:1], jnp.asarray([count.sum()], jnp.int32))
    return of_parts(data, [np.concatenate(parts_of(federation))])


def stack(splits: Sequence[Split]) -> Split:
    """Stack R splits of one data set, so that R runs can be vmapped.

    Args:
      splits: the splits, which share their data.

    Returns:
      One split whose arrays have a leading axis of R, such as order [R, M] and start [R, C]; the
      data are shared, not stacked.

    Raises:
      UsageError: for no split, and if the splits do not share their data or have different numbers
        of clients.
    """
    checks.record("splits", splits, Sequence)
    if not splits:
        raise UsageError("splits", splits, "must hold at least one")
    for each in splits:
        checks.record("splits", each, Split)
    first = splits[0]
    if any(each.train.data is not first.train.data for each in splits):
        raise UsageError("splits", ..., "must share one `data`")
    num_clients = {len(each.domain) for each in splits}
    if len(num_clients) > 1:
        raise UsageError(
            "splits", ..., f"must have one number of clients, not {sorted(num_clients)}"
        )

    def stacked(federations: Sequence[Federation]) -> Federation:
        arrays = zip(*(each[1:4] for each in federations), strict=True)
        stacks = (jax.device_put(np.stack(each)) for each in arrays)
        return Federation(federations[0].data, *stacks)

    return Split(
        stacked([each.train for each in splits]),
        stacked([each.valid for each in splits]),
        stacked([each.test for each in splits]),
        np.stack([each.domain for each in splits]),
        np.stack([each.test_domain for each in splits]),
        first.domains,
    )
