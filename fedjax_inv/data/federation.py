"""Federations built from arrays or a data set: who trains on what, and what is held out."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import partitions
from fedjax_inv.data.dataset import Dataset, check_dataset
from fedjax_inv.types import Examples, Federation, Tree

# (rows to deal [m], generator) -> one array of rows per client
Partition = Callable[[np.ndarray, np.random.Generator], list[np.ndarray]]


class Split(NamedTuple):
    """The federations of one run, which share one copy of the examples and one order of them."""

    train: Federation  # C clients
    valid: Federation  # the same C clients, other examples
    test: Federation  # one client, of examples that none of the others holds
    domain: np.ndarray  # [C] int32, the domain of a training client, -1 if it holds several
    test_domain: np.ndarray  # [1] int32, the held-out domain, -1 if none is
    domains: tuple[str, ...]


def examples(x: Tree, y: Tree) -> Examples:
    """Puts M examples on the device, in their own dtype; x and y are arrays or trees, [M, ...].

    Raises ValueError if they are of different lengths, or hold none.
    """
    lengths = {np.shape(leaf)[0] if np.ndim(leaf) else 0 for leaf in jax.tree.leaves((x, y))}
    if len(lengths) != 1 or 0 in lengths:
        raise UsageError(f"x and y have lengths {sorted(lengths)}: must be of one, above 0")
    return Examples(jax.tree.map(jnp.asarray, x), jax.tree.map(jnp.asarray, y))


def of_parts(data: Examples, parts: Sequence[np.ndarray]) -> Federation:
    """The federation whose client c holds the rows parts[c] of the examples, in that order.

    Clients may share rows. Raises ValueError for no client, and for rows that are none.
    """
    if not parts:
        raise UsageError("parts=[]: must hold an array of rows for at least one client")
    size = np.array([len(part) for part in parts])
    # Without the empty ones, which may be of any type; one row at least, as nothing can be gathered
    # from none.
    held = [np.asarray(part) for part in parts if len(part)] or [np.zeros(1, np.int32)]
    order = np.concatenate(held)
    if order.size and order.dtype.kind not in "iu":
        raise UsageError(f"parts: hold {order.dtype}, must hold integers, rows of the examples")
    return _federation(data, order, np.cumsum(size) - size, size)


def _federation(
    data: Examples, order: np.ndarray, start: np.ndarray, size: np.ndarray
) -> Federation:
    held: tuple[Any, ...] = (order, start, size)
    checks.federation(Federation(data, *held))  # before what is too large for int32 wraps
    return Federation(data, *(jnp.asarray(array, jnp.int32) for array in held))


def parts_of(federation: Federation) -> list[np.ndarray]:
    """The rows of each client: what `of_parts` makes a federation of."""
    order, start, size = (np.asarray(array) for array in federation[1:])
    return [order[begin : begin + count] for begin, count in zip(start, size, strict=True)]


def partitioner(
    name: str,
    dataset: Dataset,
    num_clients: int,
    *,
    alpha: float = 0.5,
    min_size: int | None = None,
    shards_per_client: int = 2,
) -> Partition:
    """Makes a partition of the examples by name: "domain", "iid", "dirichlet", "quantity", "shards"
    or "user".

    alpha, min_size: those of `partitions.dirichlet`, and of "quantity", whose min_size is by
    default the number of classes, too. shards_per_client: of "shards". Raises ValueError for an
    unknown name, and for "user" where the data set does not tell users.
    """
    dealers: dict[str, Partition] = {
        "domain": lambda rows, rng: partitions.by_domain(dataset.domain[rows], num_clients, rng),
        "iid": lambda rows, rng: partitions.iid(len(rows), num_clients, rng),
        "dirichlet": lambda rows, rng: partitions.dirichlet(
            dataset.y[rows], num_clients, alpha, rng, min_size=min_size
        ),
        "quantity": lambda rows, rng: partitions.quantity(
            len(rows),
            num_clients,
            alpha,
            rng,
            min_size=len(np.unique(dataset.y[rows])) if min_size is None else min_size,
        ),
        "shards": lambda rows, rng: partitions.shards(
            dataset.y[rows], num_clients, shards_per_client, rng
        ),
    }
    user = dataset.user
    if user is not None:
        dealers["user"] = lambda rows, rng: partitions.by_user(user[rows], num_clients, rng)
    elif name == "user":
        raise UsageError(f"{name=}: needs data that tell whose each example is, these do not")
    checks.one_of("name", name, dealers)
    return lambda rows, rng: [rows[part] for part in dealers[name](rows, rng)]


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
    """Holds out a test client, deals the other examples to clients, and holds out some of each.

    With a held-out domain, the test client holds all of it, and the clients share the examples of
    the other domains that are not in the official test split. Without one, the test client holds
    the official test split, or a random part of the examples if the data set has none. Every
    client's examples, and the test's, lie in random order: the first of them are a sample.

    dataset: M examples on the host. data: the same on the device, from `examples`; every federation
    refers to it. first_row: where they begin in data that hold more. partition: deals rows to
    clients, as one made by `partitioner`. held_out: the name of the domain that only the test
    client sees, or None. seed: of the partition and of what is
    held out at random. validation: the part of each client's n examples that is held out for
    validation, at least one if n >= 2, and never all. test_fraction: the part that is held out for
    the test where it is drawn at random. imbalance: if above 1, a part of the examples to deal is
    drawn in which classes have a long tail (`partitions.long_tail`), and nobody holds the others.
    Raises ValueError if an argument is out of its range, or the partition cannot be made or deals
    an example twice.
    """
    check_dataset(dataset)
    checks.number("validation", validation, "at least 0 and below 1", lambda part: 0 <= part < 1)
    checks.fraction("test_fraction", test_fraction)
    checks.integer("first_row", first_row, 0)
    if held_out is not None:
        checks.one_of("held_out", held_out, dataset.domains)
    rng = np.random.default_rng(seed)
    num_examples = len(dataset.y)
    if held_out is not None:
        is_test = dataset.domain == dataset.domains.index(held_out)
    elif dataset.test.any():
        is_test = dataset.test
    else:
        is_test = np.zeros(num_examples, bool)
        num_test = max(1, round(test_fraction * num_examples))
        is_test[rng.permutation(num_examples)[:num_test]] = True
    to_deal = np.flatnonzero(~is_test & ~dataset.test)
    if len(to_deal) == 0:
        raise UsageError(f"held_out={held_out!r}: leaves no examples to train on")
    if imbalance != 1:
        labels, num_classes = dataset.y[to_deal], len(dataset.classes)
        to_deal = to_deal[partitions.long_tail(labels, num_classes, imbalance, rng)]
    parts = partition(to_deal, rng)
    _check_disjoint(parts, to_deal)
    train, valid, domain = [], [], []
    for part in parts:
        rows = rng.permutation(part)
        size = _validation_size(len(rows), validation)
        valid.append(rows[:size])
        train.append(rows[size:])
        held = np.unique(dataset.domain[rows])
        domain.append(held[0] if len(held) == 1 else -1)
    # All have the same test order, so that its first examples are the same for every seed.
    test = [np.random.default_rng(0).permutation(np.flatnonzero(is_test))]
    # One order of all M examples serves the three, so that their shapes are those of every split.
    rest = np.setdiff1d(np.arange(num_examples), np.concatenate([*parts, *test]))
    order = first_row + np.concatenate([*train, *valid, *test, rest])
    sizes = np.array([len(rows) for rows in (*train, *valid, *test)])
    ends = np.cumsum(sizes)

    def those(first: int, last: int) -> Federation:
        return _federation(data, order, (ends - sizes)[first:last], sizes[first:last])

    num_clients = len(parts)
    return Split(
        those(0, num_clients),
        those(num_clients, 2 * num_clients),
        those(2 * num_clients, 2 * num_clients + 1),
        np.array(domain, np.int32),
        np.array([-1 if held_out is None else dataset.domains.index(held_out)], np.int32),
        dataset.domains,
    )


def _check_disjoint(parts: Sequence[np.ndarray], to_deal: np.ndarray) -> None:
    if not parts:
        raise UsageError("partition: deals to no client, must to at least one")
    rows, times = np.unique(np.concatenate(parts), return_counts=True)
    if times.max(initial=1) > 1:
        raise UsageError(f"partition: deals row {rows[times > 1][0]} twice, must once")
    strangers = np.setdiff1d(rows, to_deal)
    if len(strangers):
        raise UsageError(f"partition: deals row {strangers[0]}, which it was not given")


def _validation_size(size: int, validation: float) -> int:
    if validation == 0 or size < 2:
        return 0
    return min(max(1, round(validation * size)), size - 1)


def by_class(federation: Federation, num_classes: int) -> Federation:
    """The federation in which "client" k holds all examples of class k, in 0..K-1.

    Raises ValueError for labels that are none of these.
    """
    rows = np.concatenate(parts_of(federation))
    labels = np.asarray(federation.data.y)[rows]
    labels = checks.integers("labels", labels, 0, num_classes - 1, may_be_empty=True)
    return of_parts(federation.data, [rows[labels == label] for label in range(num_classes)])


def test_shards(split: Split, num_classes: int, seed: int) -> Federation:
    """Test examples for each training client, in the proportions of its classes.

    As `partitions.shards_like` draws them, with a seed; it says what it raises.
    """
    data, rng = split.test.data, np.random.default_rng(seed)
    labels = np.asarray(data.y)
    counts = partitions.class_counts(labels, parts_of(split.train), num_classes)
    rows = np.concatenate(parts_of(split.test))
    return of_parts(
        data, [rows[part] for part in partitions.shards_like(labels[rows], counts, rng)]
    )


def pooled(federation: Federation) -> Federation:
    """Makes one client that holds the examples of all, for centralised training."""
    data, order, start, size = federation
    begin, count = np.asarray(start), np.asarray(size)
    if (begin[1:] == (begin + count)[:-1]).all():  # they lie one after the other already
        return Federation(data, order, start[:1], jnp.asarray([count.sum()], jnp.int32))
    return of_parts(data, [np.concatenate(parts_of(federation))])


def stack(splits: Sequence[Split]) -> Split:
    """Stacks R splits of one data set, so that R runs can be vmapped: order [R, M], start [R, C].

    The data are shared, not stacked. Raises ValueError if the splits do not share their data, or
    their numbers of clients.
    """
    first = splits[0]
    if any(each.train.data is not first.train.data for each in splits):
        raise UsageError("splits must share one `data`")
    num_clients = {len(each.domain) for each in splits}
    if len(num_clients) > 1:
        raise UsageError(f"splits must have one number of clients, not {sorted(num_clients)}")

    def stacked(federations: Sequence[Federation]) -> Federation:
        held = zip(*(each[1:] for each in federations), strict=True)
        return Federation(federations[0].data, *(jnp.asarray(np.stack(leaves)) for leaves in held))

    return Split(
        stacked([each.train for each in splits]),
        stacked([each.valid for each in splits]),
        stacked([each.test for each in splits]),
        np.stack([each.domain for each in splits]),
        np.stack([each.test_domain for each in splits]),
        first.domains,
    )
