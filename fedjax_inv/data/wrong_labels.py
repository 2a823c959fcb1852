"""Wrong labels at some clients: a label is replaced by another class, drawn uniformly.

Clients share one copy of the examples, and which clients are wrong differs from split to split. So
the right examples stay as they are, copies of those with wrong labels stand behind them, and the
clients whose labels are wrong refer to the copies.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import Split
from fedjax_inv.types import Examples


class Mislabelled(NamedTuple):
    """Splits in which some clients have wrong labels."""

    splits: list[Split]  # they share their data, L rows
    source: np.ndarray  # [L] the row of the given data that each row is, or is a copy of


def replaced(
    labels: np.ndarray, num_classes: int, share: float, rng: np.random.Generator
) -> np.ndarray:
    """Replace each label with a probability by another class, drawn uniformly.

    With the same state of the generator, a larger share also replaces all that a smaller one does,
    by the same classes.

    labels [M] are integers in 0..num_classes-1; `share` is the probability.
    """
    is_wrong = rng.random(len(labels)) < share
    others = (labels + rng.integers(1, num_classes, len(labels))) % num_classes
    return np.where(is_wrong, others, labels).astype(labels.dtype)


def at_clients(
    splits: Sequence[Split], num_classes: int, *, share: float, part: float, seeds: Sequence[int]
) -> Mislabelled:
    """Give some clients of each split wrong labels, in training and validation.

    The labels of the test are right. Who holds which example does not change. Which labels would be
    wrong depends on the seed alone, and so does the order in which clients become wrong: the same
    clients and labels stay wrong as `share` and `part` grow. Labels are drawn for each example,
    also for each copy of one original.

    The splits are those of runs on the same examples, each with a seed of its own. `share` is the
    probability that a label of such a client is replaced by another class, and `part` the part of
    clients with wrong labels, above 0; their number is rounded. The splits that are returned share
    new data: the same examples, then copies with wrong labels.
    """
    data = splits[0].train.data
    labels = np.asarray(data.y)
    copies: dict[tuple[int, int], _Copies] = {}  # by seed and first row: of one draw of the data
    orders = []
    end = len(labels)
    for split, seed in zip(splits, seeds, strict=True):
        of_clients, of_labels = np.random.SeedSequence(seed).spawn(2)
        clients = _drawn_clients(len(split.domain), part, of_clients)
        order = np.asarray(split.train.order)
        rows = np.sort(order)
        key = seed, int(rows[0])
        if key not in copies:
            wrong = replaced(labels[rows], num_classes, share, np.random.default_rng(of_labels))
            is_wrong = wrong != labels[rows]
            copies[key] = _Copies(rows[is_wrong], wrong[is_wrong], end)
            end += is_wrong.sum()
        orders.append(_referring(order, split, clients, copies[key]))
    source = np.concatenate([np.arange(len(labels)), *(each.rows for each in copies.values())])
    labels = np.concatenate([labels, *(each.labels for each in copies.values())])
    data = _extended(data, source, labels)
    found = [_on(split, data, order) for split, order in zip(splits, orders, strict=True)]
    return Mislabelled(found, source)


class _Copies(NamedTuple):
    """Copies of examples with wrong labels, which stand in a row."""

    rows: np.ndarray  # [W] of the examples, ascending
    labels: np.ndarray  # [W]
    first: int  # the row of the first copy


def _drawn_clients(num_clients: int, part: float, seed: np.random.SeedSequence) -> np.ndarray:
    count = int(np.floor(part * num_clients + 0.5))
    if count == 0:
        raise UsageError("part", part, f"is none of {num_clients} clients, must be at least one")
    return np.sort(np.random.default_rng(seed).permutation(num_clients)[:count])


def _referring(order: np.ndarray, split: Split, clients: np.ndarray, copies: _Copies) -> np.ndarray:
    """The order of rows in which these clients refer to the copies."""
    order = order.copy()
    if len(copies.rows) == 0:
        return order
    for federation in (split.train, split.valid):
        start = np.asarray(federation.start)
        size = np.asarray(federation.size)
        for client in clients:
            own = order[start[client] : start[client] + size[client]]  # a view
            at = np.minimum(np.searchsorted(copies.rows, own), len(copies.rows) - 1)
            own[:] = np.where(copies.rows[at] == own, copies.first + at, own)
    return order


def _extended(data: Examples, source: np.ndarray, labels: np.ndarray) -> Examples:
    """The examples in the rows `source` with other labels, on the host if they are there."""
    more = source[len(data.y) :]

    def with_copies(leaf: Any) -> Any:
        rows = np.asarray(leaf)
        whole = np.concatenate([rows, rows[more]])
        return whole if isinstance(leaf, np.ndarray) else jax.device_put(whole)

    y = labels if isinstance(data.y, np.ndarray) else jax.device_put(labels)
    return jax.tree.map(with_copies, data._replace(y=()))._replace(y=y)


def _on(split: Split, data: Examples, order: np.ndarray) -> Split:
    """The split with other data, in another order."""
    on_device = jax.device_put(order)
    return split.replaced(lambda each: each._replace(data=data, order=on_device))
