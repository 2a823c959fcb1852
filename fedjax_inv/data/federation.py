"""Federations built from a data set: who trains on what, and what is held out."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv.data import partitions
from fedjax_inv.data.sources import Dataset
from fedjax_inv.types import Array, Examples, Federation

# (rows to deal [m], generator) -> one array of rows per client
Partition = Callable[[np.ndarray, np.random.Generator], list[np.ndarray]]


class Split(NamedTuple):
    """The federations of one run, which share one copy of the examples."""

    train: Federation  # C clients
    valid: Federation  # the same C clients, other examples
    test: Federation  # one client, of examples that none of the others holds
    domain: np.ndarray  # [C] int32, the domain of a training client, -1 if it holds several
    test_domain: np.ndarray  # [1] int32, the held-out domain, -1 if none is
    domains: tuple[str, ...]


def examples(dataset: Dataset) -> Examples:
    """Puts the examples on the device, in their own dtype."""
    return Examples(jax.tree.map(jnp.asarray, dataset.x), jnp.asarray(dataset.y))


def rows_and_mask(parts: Sequence[np.ndarray], *, multiple: int = 8) -> tuple[Array, Array]:
    """Stacks the rows of the clients into rows [C, N] int32 and mask [C, N] bool.

    N is the size of the largest client rounded up to a multiple, so that federations of nearly
    equal sizes share one compiled program. Padding points at row 0.
    """
    sizes = np.array([len(part) for part in parts])
    width = multiple * max(1, -(-sizes.max() // multiple))
    mask = np.arange(width) < sizes[:, None]
    rows = np.zeros(mask.shape, np.int32)
    rows[mask] = np.concatenate(parts)
    return jnp.asarray(rows), jnp.asarray(mask)


def partitioner(
    name: str,
    dataset: Dataset,
    num_clients: int,
    *,
    alpha: float = 0.5,
    min_size: int | None = None,
) -> Partition:
    """Makes a partition of the examples by name: "domain", "iid" or "dirichlet".

    `alpha` and `min_size` are those of `partitions.dirichlet`.

    Raises:
      ValueError: if the name is unknown.
    """
    dealers: dict[str, Partition] = {
        "domain": lambda rows, rng: partitions.by_domain(dataset.domain[rows], num_clients, rng),
        "iid": lambda rows, rng: partitions.iid(len(rows), num_clients, rng),
        "dirichlet": lambda rows, rng: partitions.dirichlet(
            dataset.y[rows], num_clients, alpha, rng, min_size=min_size
        ),
    }
    if name not in dealers:
        raise ValueError(f"partition {name=} must be one of {', '.join(dealers)}")
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
) -> Split:
    """Holds out a test client, deals the other examples to clients, and holds out some of each.

    With a held-out domain, the test client holds all of it, and the clients share the examples of
    the other domains that are not in the official test split. Without one, the test client holds
    the official test split, or a random part of the examples if the data set has none.

    Args:
      dataset: M examples on the host.
      data: the same examples on the device, from `examples`; every federation refers to it.
      partition: deals rows to clients, as one made by `partitioner`.
      held_out: the name of the domain that only the test client sees, or None.
      seed: of the partition and of what is held out at random.
      validation: the part of each client's n examples that is held out for validation: at least one
        if n >= 2, and never all.
      test_fraction: the part that is held out for the test where it is drawn at random.

    Raises:
      ValueError: if an argument is out of its range, or the partition cannot be made.
    """
    if not 0 <= validation < 1:
        raise ValueError(f"{validation=} must be in [0, 1)")
    if not 0 < test_fraction < 1:
        raise ValueError(f"{test_fraction=} must be in (0, 1)")
    if held_out is not None and held_out not in dataset.domains:
        raise ValueError(f"{held_out=} must be a domain: one of {', '.join(dataset.domains)}")
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
        raise ValueError(f"{held_out=} leaves no examples to train on")
    train, valid, domain = [], [], []
    for rows in partition(to_deal, rng):
        rows = rng.permutation(rows)
        size = _validation_size(len(rows), validation)
        valid.append(rows[:size])
        train.append(rows[size:])
        held = np.unique(dataset.domain[rows])
        domain.append(held[0] if len(held) == 1 else -1)
    return Split(
        Federation(data, *rows_and_mask(train)),
        Federation(data, *rows_and_mask(valid)),
        Federation(data, *rows_and_mask([np.flatnonzero(is_test)])),
        np.array(domain, np.int32),
        np.array([-1 if held_out is None else dataset.domains.index(held_out)], np.int32),
        dataset.domains,
    )


def _validation_size(size: int, validation: float) -> int:
    if validation == 0 or size < 2:
        return 0
    return min(max(1, round(validation * size)), size - 1)


def pooled(federation: Federation) -> Federation:
    """Makes one client that holds the examples of all, for centralised training."""
    rows = np.asarray(federation.rows)[np.asarray(federation.mask)]
    return Federation(federation.data, *rows_and_mask([rows]))


def stack(splits: Sequence[Split]) -> Split:
    """Stacks R splits of one data set, so that R runs can be vmapped: rows and mask [R, C, N].

    The data are shared, not stacked; N is the largest of the splits.

    Raises:
      ValueError: if the splits do not share their data, or their numbers of clients.
    """
    first = splits[0]
    if any(each.train.data is not first.train.data for each in splits):
        raise ValueError("splits must share one `data`")
    num_clients = {len(each.domain) for each in splits}
    if len(num_clients) > 1:
        raise ValueError(f"splits must have one number of clients, not {sorted(num_clients)}")
    return Split(
        _stack([each.train for each in splits]),
        _stack([each.valid for each in splits]),
        _stack([each.test for each in splits]),
        np.stack([each.domain for each in splits]),
        np.stack([each.test_domain for each in splits]),
        first.domains,
    )


def _stack(federations: Sequence[Federation]) -> Federation:
    width = max(each.rows.shape[1] for each in federations)

    def padded(array: Array) -> Array:
        return jnp.pad(array, ((0, 0), (0, width - array.shape[1])))

    return Federation(
        federations[0].data,
        jnp.stack([padded(each.rows) for each in federations]),
        jnp.stack([padded(each.mask) for each in federations]),
    )
