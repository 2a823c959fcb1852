"""Federations from arrays or a data set: which client holds which examples for which purpose."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import partitions
from fedjax_inv.data.dataset import Dataset, Originals, check_classes, originals
from fedjax_inv.types import Array, Examples, Federation, Tree, Variables

BY_CLASS = ("dirichlet", "shards")  # partitions that need classes
# What is evaluated beside the test: a domain to select by, clients that training never sees, and
# the test of domains that train, where that of unseen domains is the test.
UNSEEN = ("unseen_domain", "unseen_clients", "known_domains")
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
    # Further examples that no client holds, by names of `UNSEEN`: each a federation of one client
    unseen: Mapping[str, Federation] = {}
    # The training client whose user or domain each example is of, -1 if none has it: of "test" [T]
    # and "known_domains", in their order, where it is known
    owners: Mapping[str, np.ndarray] = {}

    def replaced(self, of: Callable[[Federation], Federation]) -> "Split":
        """Return the split with each federation replaced by a function of it."""
        unseen = {name: of(each) for name, each in self.unseen.items()}
        train, valid, test = map(of, (self.train, self.valid, self.test))
        return self._replace(train=train, valid=valid, test=test, unseen=unseen)


class Splits(NamedTuple):
    """The examples of all clients, and how each seed deals them; what else differs by seed."""

    data: Examples
    of_seed: Mapping[int, Split]
    variables: Mapping[int, Variables] | None = None  # to start from; None: drawn by the seed
    # `models.Scaling` of the inputs by seed and domain left out ("": none); None: there is none
    scaling: Mapping[tuple[int, str], Any] | None = None
    source: np.ndarray | None = None  # of clients with wrong labels, as in `test_shards`
    num_classes: int = 0  # K, for evaluations by class; 0: the outputs of the network
    render: Callable[[Tree], Array] | None = None  # as in a `Dataset`


def examples(x: Tree, y: Tree, domain: Any = None) -> Examples:
    """Put M examples on the device, in their own dtype; labels [M] of integers become int32.

    x and y are arrays or trees of arrays, [M, ...], and `domain` [M] are the domains, if a method
    needs them. There is a UsageError for an integer that does not fit into 32 bits.
    """
    return on_device(examples_on_host(x, y, domain))


def examples_on_host(x: Tree, y: Tree, domain: Any = None) -> Examples:
    """Return M examples as `examples` does, but on the host; numbers of 32 bits are not copied.

    Arrays may be `np.memmap`s.
    """
    _check_examples(Examples(x, y, domain))

    def kept(leaf: Any) -> Any:
        return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)

    return jax.tree.map(kept, Examples(x, *jax.tree.map(_in_int32, (y, domain))))


def _check_examples(data: Examples) -> None:
    """Check that x and y have one length, and integers that JAX keeps as they are."""
    chex.assert_equal_shape_prefix(jax.tree.leaves(data), 1)
    for name, tree in data._asdict().items():
        for leaf in jax.tree.leaves(tree):
            is_wide = leaf.dtype.kind in "iu" and leaf.dtype.itemsize > 4 and leaf.size > 0
            if is_wide and not -(2**31) <= leaf.min() <= leaf.max() < 2**31:
                raise UsageError(name, leaf, "must hold integers of at most 32 bits")


def _in_int32(labels: Any) -> Any:
    """Labels in a type that also holds the number of classes, which 8 bits may not."""
    is_labels = np.ndim(labels) == 1 and labels.dtype.kind in "iu"
    return labels.astype(np.int32) if is_labels else labels


def on_device(data: Examples) -> Examples:
    """Return examples on the device; unlike jnp.asarray, without a program for each shape."""

    def leaf(array: Any) -> Array:
        if isinstance(array, jax.Array):
            return array
        return jax.device_put(np.asarray(array), may_alias=False)

    return jax.tree.map(leaf, data)


def of_parts(data: Examples, parts: Sequence[Any]) -> Federation:
    """Return the federation whose client c holds the rows parts[c] of the examples, in that order.

    Clients may share rows. There is a UsageError for rows that do not exist.
    """
    size = np.array([len(part) for part in parts])
    # Empty parts may have any dtype. The order has at least one row: JAX cannot gather from none.
    filled = [np.asarray(part) for part in parts if len(part)] or [np.zeros(1, np.int32)]
    order = np.concatenate(filled)
    num_examples = jax.tree.leaves(data)[0].shape[0]
    if order.dtype.kind not in "iu" or not 0 <= order.min() <= order.max() < num_examples:
        raise UsageError("parts", ..., f"must be rows of the examples, in 0..{num_examples - 1}")
    return _federation(data, order, np.cumsum(size) - size, size)


def _federation(data: Examples, *arrays: np.ndarray) -> Federation:
    """Return the federation of order, start and size."""
    # `jnp.asarray` would compile a program for each shape.
    return Federation(data, *(jax.device_put(np.asarray(array, np.int32)) for array in arrays))


def parts_of(federation: Federation) -> list[np.ndarray]:
    """Return the rows of each client, from which `of_parts` makes the federation."""
    order, start, size = (np.asarray(array) for array in federation[1:4])
    return [order[begin : begin + count] for begin, count in zip(start, size, strict=True)]


def rows_of(order: np.ndarray, start: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the rows [size.sum()] of c clients, one client after the other.

    order [L] are rows of the examples; the rows of a client are the next size [c] of its start [c].
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
    """Return (rows to deal [m], generator) -> one array of rows for each of num_clients clients.

    The name is "domain", "mixed", "iid", "dirichlet", "quantity", "shards" or "user", each a
    function of `data.partitions`, which explains the other arguments. By default `min_size`, the
    least examples of a client, is the number of classes, or 1 if the targets are no classes.
    """
    has_classes = dataset.task == "classes"

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
    rare: tuple[str, float] | None = None,
    validate: str | None = None,
    held_out_clients: float = 0.0,
) -> Split:
    """Hold out a test client, deal the other examples to clients, and hold out some of each.

    The test client holds the held-out domain, or else the official test split, or else a random
    part. Of a test split that tells which examples are of `known` domains, these are apart,
    `unseen["known_domains"]`, unless there are no others. The clients share the other examples
    outside the official test split (`dealt`). All examples lie in random order, so that a client's
    first ones are a sample. Copies of one original (`Dataset.original`) stay together: originals
    are dealt, and the partition sees the first copy.

    Args:
      dataset: M examples on the host.
      data: the same examples on the device, from `examples`, to which all federations refer.
      partition: deals rows to clients, as a `partitioner` does.
      held_out: the name of the domain that only the test client sees, or None.
      seed: the seed of the partition and of the other draws. If the domains were drawn, as by
        `environments.colored`, it must be another one than theirs: both begin with a permutation
        of the examples, and "iid" would deal each domain to a client of its own.
      validation: the part of each client's n examples that is held out for validation: at least one
        example if n >= 2, and never all. Of a data set that has validation examples for clients
        (`has_validation`) these are held out instead.
      test_fraction: the part of the examples for the test, where it is drawn at random.
      first_row: the row of `data` at which the data set begins, if `data` holds more.
      imbalance: above 1, classes have a long tail (`partitions.long_tail`) among the examples to
        deal, and no client holds the rest.
      rare: (the name of a domain, its share in (0, 1) of the examples to deal), for which surplus
        examples of it are left out.
      validate: the name of another domain that no client has, `unseen["unseen_domain"]`, or None.
        Examples that are `valid` in a domain without any to train on belong there, too, and those
        that are not `known`, where the data set tells.
      held_out_clients: the part of the clients, drawn, that do not train; all of their examples are
        `unseen["unseen_clients"]`. Their number is rounded, but at least 1 unless the part is 0.
    """
    if held_out is not None:
        checks.one_of("held_out", held_out, dataset.domains)
    if validate is not None:
        checks.one_of("validate", validate, [x for x in dataset.domains if x != held_out])
    rng = np.random.default_rng(seed)
    whole = originals(dataset)
    _check_together(dataset, whole)
    rows = whole.rows
    unseen: dict[str, np.ndarray] = {}
    is_unseen = np.isin(dataset.domain, _numbers(dataset, validate))
    is_held_out = np.isin(dataset.domain, _numbers(dataset, held_out))
    is_unseen |= ~(dataset.test | is_held_out | dealt(dataset, held_out, validate))
    if is_unseen.any():
        rows, unseen["unseen_domain"] = rows[~is_unseen[rows]], rows[is_unseen[rows]]
    is_known = _is_known(dataset, held_out, validate)[rows]
    rows, known = rows[~is_known], rows[is_known]
    is_test = _is_test(dataset, rows, held_out, test_fraction, rng)
    to_deal = rows[~is_test & ~dataset.test[rows]]
    if not is_test.any() or not len(to_deal):
        is_drawn = held_out is None and not dataset.test.any()
        text = f"leaves no examples to {'train on' if is_test.any() else 'test by'}"
        if is_drawn:
            raise UsageError("test_fraction", test_fraction, text)
        raise UsageError("held_out", held_out, text)
    if imbalance != 1:
        check_classes(dataset)
        labels = dataset.y[to_deal]
        num_classes = len(dataset.classes)
        to_deal = to_deal[partitions.long_tail(labels, num_classes, imbalance, rng)]
    if rare is not None:
        name, share = rare
        checks.one_of("rare", name, dataset.domains)
        is_rare = dataset.domain[to_deal] == dataset.domains.index(name)
        to_deal = to_deal[partitions.thinned(is_rare, share, rng)]
    parts = _checked(partition(to_deal, rng), to_deal)
    if held_out_clients:
        parts, apart = _drawn_apart(parts, held_out_clients, rng)
        unseen["unseen_clients"] = np.concatenate(apart)
    if len(known):
        unseen["known_domains"] = known
    train, valid, domain = [], [], []
    own_valid = dataset.valid if has_validation(dataset, held_out, validate) else None
    for part in parts:
        mine = rng.permutation(part)
        is_valid = np.arange(len(mine)) < validation_size(len(mine), validation)
        if own_valid is not None:
            is_valid = own_valid[mine]
        valid.append(_with_copies(mine[is_valid], whole, rng))
        train.append(_with_copies(mine[~is_valid], whole, rng))
        domains = np.unique(dataset.domain[mine])
        domain.append(domains[0] if len(domains) == 1 else -1)
    if not any(map(len, train)):
        raise UsageError("dataset.valid", ..., "leaves no client an example to train on")
    # The order of the test does not depend on the seed, and so neither do its first examples.
    of_test = np.random.default_rng(0)
    tested, *others = (
        _with_copies(of_test.permutation(each), whole, of_test)
        for each in (rows[is_test], *unseen.values())
    )
    index = -1 if held_out is None else dataset.domains.index(held_out)
    domains = np.array(domain, np.int32)
    test_domain = np.array([index], np.int32)
    roles = [train, valid, [tested], *([each] for each in others)]
    every = np.arange(len(dataset.y))
    trains, valids, test, *more = _in_one_order(data, roles, every, first_row)
    never_seen = dict(zip(unseen, more, strict=True))
    held = [np.concatenate(pair) for pair in zip(train, valid, strict=True)]
    have_owners = {} if held_out is not None else {"test": tested}
    if len(known):
        have_owners["known_domains"] = others[-1]
    owners = {}
    for name, of_owners in have_owners.items():
        if (owner := _owners(dataset, held, of_owners)) is not None:
            owners[name] = owner
    return Split(trains, valids, test, domains, test_domain, dataset.domains, never_seen, owners)


def _owners(dataset: Dataset, clients: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray | None:
    """Return the client that has the user of each row, or else its domain; -1 if there is none.

    None: several clients share the users, or the domains, of rows.
    """
    are_new = False  # whether all rows are of users, or of domains, that no client has
    known = [dataset.user] if len(dataset.domains) == 1 else [dataset.user, dataset.domain]
    for values in known:
        if values is None:
            continue
        own = [np.unique(values[held]) for held in clients]
        every = np.concatenate(own)
        is_known = np.isin(values[rows], every)
        is_apart = len(np.unique(every)) == len(every)
        are_new |= len(rows) > 0 and not is_known.any() and (is_apart or values is dataset.domain)
        if is_apart and is_known.any():
            order = np.argsort(every)
            at = np.minimum(np.searchsorted(every, values[rows], sorter=order), len(every) - 1)
            client = np.repeat(np.arange(len(own)), [len(each) for each in own])[order[at]]
            return np.where(is_known, client, -1)
    return np.full(len(rows), -1) if are_new else None


def dealt(dataset: Dataset, *held_out: str | None) -> np.ndarray:
    """Return which examples are for clients, [M] bool.

    They are not of the official test split, not for validation by an unseen domain, and of a domain
    that has examples to train on and is none of `held_out` (None: no domain).
    """
    free = ~dataset.test & ~np.isin(dataset.domain, _numbers(dataset, *held_out))
    if dataset.known is not None and dataset.valid is not None:
        free &= dataset.known | ~dataset.valid
    trains = free if dataset.valid is None else free & ~dataset.valid
    return free & np.isin(dataset.domain, dataset.domain[trains])


def has_validation(dataset: Dataset, *held_out: str | None) -> bool:
    """Return whether examples for clients are `valid`, so that none need be drawn for validation.

    `held_out` are domains that no client has, or None.
    """
    return dataset.valid is not None and bool((dataset.valid & dealt(dataset, *held_out)).any())


def _numbers(dataset: Dataset, *domains: str | None) -> list[int]:
    return [number for number, name in enumerate(dataset.domains) if name in domains]


def num_held_out(num_clients: int, share: float) -> int:
    """Return how many of the clients do not train: about `share` of them, at least 1 above 0."""
    return max(1, round(share * num_clients)) if share else 0


def _drawn_apart(
    parts: list[np.ndarray], share: float, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (the parts of the clients that train, those of the clients that are held out)."""
    count = num_held_out(len(parts), share)
    if count >= len(parts):
        text = f"leaves none of {len(parts)} clients to train; must be smaller"
        raise UsageError("held_out_clients", share, text)
    drawn = {*rng.permutation(len(parts))[:count].tolist()}
    kept = [part for client, part in enumerate(parts) if client not in drawn]
    return kept, [parts[client] for client in sorted(drawn)]


def _is_test(
    dataset: Dataset,
    rows: np.ndarray,
    held_out: str | None,
    test_fraction: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return which of the rows [N] are for the test, [N] bool."""
    if held_out is not None:
        return dataset.domain[rows] == dataset.domains.index(held_out)
    test = dataset.test[rows]
    if not test.any():
        num_test = max(1, round(test_fraction * len(rows)))
        test[rng.permutation(len(rows))[:num_test]] = True
    return test


def _is_known(dataset: Dataset, *held_out: str | None) -> np.ndarray:
    """Return which examples are the test of domains that train, [M] bool, beside another test.

    `held_out` are the domain that is the test and the one to select by, or None.
    """
    if dataset.known is None:
        return np.zeros(len(dataset.y), bool)
    trains = np.unique(dataset.domain[dealt(dataset, *held_out)])
    known = dataset.test & dataset.known & np.isin(dataset.domain, trains)
    is_alone = held_out[0] is None and not (dataset.test & ~known).any()
    return np.zeros_like(known) if is_alone else known


def _in_one_order(
    data: Examples, roles: Sequence[list[np.ndarray]], all_rows: np.ndarray, first_row: int = 0
) -> list[Federation]:
    """Return a federation of each list of clients' rows; all share one order of all rows.

    So all splits of the examples have equal shapes.
    """
    held = [rows for role in roles for rows in role]
    rest = np.setdiff1d(all_rows, np.concatenate(held))
    order = first_row + np.concatenate([*held, rest])
    sizes = np.array([len(rows) for rows in held])
    starts = np.cumsum(sizes) - sizes
    ends = np.cumsum([len(role) for role in roles])
    return [
        _federation(data, order, starts[end - len(role) : end], sizes[end - len(role) : end])
        for role, end in zip(roles, ends, strict=True)
    ]


def without(split: Split, domain: str) -> Split:
    """Return the split of a run that trains without a domain, by which it is tested; "": the same.

    No client trains on examples of the domain or is validated by them: all of them are the test.
    """
    if not domain:
        return split
    checks.one_of("left_out", domain, split.domains)
    if split.train.data.domain is None:
        raise UsageError("left_out", domain, "needs examples that have domains")
    index = split.domains.index(domain)
    domain_of = np.asarray(split.train.data.domain)
    train, valid = map(parts_of, (split.train, split.valid))
    dealt = np.concatenate([*train, *valid])
    # In random order, as the first ones may be watched.
    test = np.random.default_rng(0).permutation(dealt[domain_of[dealt] == index])
    kept = [[rows[domain_of[rows] != index] for rows in parts] for parts in (train, valid)]
    every = np.asarray(split.train.order)
    trains, valids, tested = _in_one_order(split.train.data, [*kept, [test]], every)
    alone = np.array([index], np.int32)
    return split._replace(train=trains, valid=valids, test=tested, test_domain=alone, owners={})


def _with_copies(rows: np.ndarray, whole: Originals, rng: np.random.Generator) -> np.ndarray:
    """Return rows and all other copies of their originals, in random order if there are any."""
    found = whole.copies(rows)
    return found if len(found) == len(rows) else rng.permutation(found)


def _check_together(dataset: Dataset, whole: Originals) -> None:
    """Raise UsageError if copies of one original differ in domain, test split or user."""
    for name in ("domain", "test", "user", "valid", "known"):
        field = getattr(dataset, name)
        if field is not None and (field != field[whole.rows][whole.of]).any():
            text = "must be the same for all copies of one original, or all examples of one group"
            raise UsageError(f"dataset.{name}", ..., text)


def _checked(dealt: Sequence[Any], to_deal: np.ndarray) -> list[np.ndarray]:
    """Return the rows of each client; raise UsageError for what is no partition."""
    parts = [np.asarray(rows, int) for rows in dealt]
    rows, times = np.unique(np.concatenate(parts), return_counts=True)
    wrong = rows[(times > 1) | ~np.isin(rows, to_deal)]
    if len(wrong):
        text = f"must deal rows that it is given, each to one client; it deals row {wrong[0]}"
        raise UsageError("partition", ..., text)
    return parts


def validation_size(size: int, validation: float) -> int:
    """Return how many of a client's n examples are held out for validation.

    About validation n: at least 1 if n >= 2 and validation > 0, and never all.
    """
    if validation == 0 or size < 2:
        return 0
    return min(max(1, round(validation * size)), size - 1)


def by_class(federation: Federation, num_classes: int) -> Federation:
    """Return the federation in which "client" k holds all examples of class k, in 0..K-1."""
    rows = np.concatenate(parts_of(federation))
    labels = np.asarray(federation.data.y)[rows]
    return of_parts(federation.data, [rows[labels == label] for label in range(num_classes)])


def test_shards(
    split: Split,
    num_classes: int,
    seed: int,
    *,
    source: np.ndarray | None = None,  # noqa: PT028 (no test)
) -> Federation:
    """Draw test examples for each training client, in the proportions of its classes.

    They are drawn by `partitions.shards_like`; clients may share rows. `source` is that of
    `wrong_labels.Mislabelled` if clients have wrong labels, as the right ones count.
    """
    data = split.test.data
    rng = np.random.default_rng(seed)
    labels = np.asarray(data.y)
    right = labels if source is None else labels[source]
    counts = partitions.class_counts(right, parts_of(split.train), num_classes)
    rows = np.concatenate(parts_of(split.test))
    return of_parts(
        data, [rows[part] for part in partitions.shards_like(labels[rows], counts, rng)]
    )


def mixes_domains(split: Split, *, pooled: bool) -> bool:
    """Return whether a client has several domains, or all clients together if they are pooled."""
    domain = np.asarray(split.train.data.domain)
    clients = parts_of(split.train)
    held = [np.concatenate(clients)] if pooled else clients
    return any(len(np.unique(domain[rows])) > 1 for rows in held)


def pooled(federation: Federation) -> Federation:
    """Return a federation of one client that holds all examples, for centralised training."""
    data, order, start, size = federation
    begin, count = np.asarray(start), np.asarray(size)
    if (begin[1:] == (begin + count)[:-1]).all():  # clients' rows follow each other already
        return Federation(data, order, start[:1], jnp.asarray([count.sum()], jnp.int32))
    return of_parts(data, [np.concatenate(parts_of(federation))])
