"""Partitions: which client holds which examples, as one array of rows per client.

Rows count the examples that are partitioned, from 0; each goes to exactly one client.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError

_LARGEST_ALPHA = 1e300  # far above, draws from the distribution overflow and are 0


def iid(num_examples: int, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deals shuffled examples to clients whose sizes differ by at most one.

    Raises ValueError for less than one example or client, and for more clients than examples.
    """
    checks.integer("num_examples", num_examples, 1)
    _check_num_clients(num_clients, num_examples)
    return np.array_split(rng.permutation(num_examples), num_clients)


def by_domain(domain: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Gives each client a slice of one domain, in the order of the domains.

    Each domain gets one client, and every further client goes to the domain with the most examples
    per client. The clients of a domain have sizes that differ by at most one.

    domain: [M] integers. num_clients: at least the number of domains. rng: shuffles the examples of
    a domain before it is sliced. Raises ValueError for domains that are not integers, for more
    clients than examples, and for fewer than domains.
    """
    domain = checks.integers("domain", domain)
    present, sizes = np.unique(domain, return_counts=True)
    _check_num_clients(num_clients, len(domain))
    if num_clients < len(present):
        raise UsageError(
            f"num_clients={num_clients}: must be at least {len(present)}, the number of domains"
        )
    clients = np.ones(len(present), int)
    for _ in range(num_clients - len(present)):
        clients[np.argmax(sizes / clients)] += 1
    parts: list[np.ndarray] = []
    for value, num_slices in zip(present, clients, strict=True):
        parts += np.array_split(rng.permutation(np.flatnonzero(domain == value)), num_slices)
    return parts


def by_user(user: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deals whole users to clients: the largest first, each to the client with fewest examples.

    user: [M] integers. num_clients: at most the number of users; with as many, each client is a
    user. rng: of the order among users of a size. Raises ValueError for users that are not
    integers, and for more clients than users.
    """
    user = checks.integers("user", user)
    present, owner, sizes = np.unique(user, return_inverse=True, return_counts=True)
    checks.integer("num_clients", num_clients, 1, len(present), ", the number of users")
    shuffled = rng.permutation(len(present))
    lightest = [(0, client) for client in range(num_clients)]  # a heap of sizes
    client_of = np.empty(len(present), int)
    for each in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        size, client_of[each] = lightest[0]
        heapq.heapreplace(lightest, (size + int(sizes[each]), int(client_of[each])))
    client = client_of[owner]
    rows = np.argsort(client, kind="stable")
    return np.split(rows, np.searchsorted(client[rows], np.arange(1, num_clients)))


def dirichlet(
    labels: np.ndarray,
    num_clients: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    min_size: int | None = None,
    max_tries: int = 1000,
) -> list[np.ndarray]:
    """Draws, for each class, how it is shared among the clients from a Dirichlet distribution.

    The procedure of NIID-Bench (Li et al. 2022): class after class, clients that already hold
    M / num_clients examples get nothing, the others share the shuffled class in proportions drawn
    from Dir(alpha); all is repeated until every client holds `min_size` examples.

    labels: [M] integers, at least 0.
    num_clients: at most M / min_size.
    alpha: concentration; small is one class per client, large is IID.
    rng: of the proportions and the shuffles.
    min_size: examples of the smallest client; by default the number of classes that occur.
    max_tries: how often the proportions are drawn before giving up.

    Raises ValueError for arguments out of range, and if no try gave every client enough examples.
    """
    labels = checks.integers("labels", labels, 0)
    num_examples = len(labels)
    _check_num_clients(num_clients, num_examples)
    class_sizes = np.unique(labels, return_counts=True)[1]
    min_size = len(class_sizes) if min_size is None else min_size
    _check_drawn(num_examples, num_clients, alpha, min_size, max_tries)
    for _ in range(max_tries):
        counts = _dirichlet_counts(class_sizes, num_clients, alpha, rng)
        sizes = counts.sum(axis=0)
        if sizes.min() >= min_size:
            break
    else:
        raise _gave_up(num_clients, alpha, min_size, max_tries)
    # Shuffled, then sorted by label: the rows of a class stand together in random order.
    rows = rng.permutation(num_examples)
    rows = rows[np.argsort(labels[rows], kind="stable")]
    owner = np.repeat(np.tile(np.arange(num_clients), len(class_sizes)), counts.ravel())
    return np.split(rows[np.argsort(owner, kind="stable")], np.cumsum(sizes)[:-1])


def _dirichlet_counts(
    class_sizes: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """How many examples of each class [K] each client gets: [K, C]."""
    counts = np.zeros((len(class_sizes), num_clients), int)
    sizes = np.zeros(num_clients, int)
    for row, size in zip(counts, class_sizes, strict=True):
        # Dir(alpha) over all clients, with a few set to 0 and the rest renormalised, is Dir(alpha)
        # over the rest; drawn so, there is no division by a sum that may be 0.
        (open_clients,) = np.nonzero(sizes < class_sizes.sum() / num_clients)
        shares = rng.dirichlet(np.full(len(open_clients), alpha))
        cuts = (np.cumsum(shares[:-1]) * size).astype(int)
        row[open_clients] = np.diff(cuts, prepend=0, append=size)
        sizes += row
    return counts


def quantity(
    num_examples: int,
    num_clients: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    min_size: int = 1,
    max_tries: int = 1000,
) -> list[np.ndarray]:
    """Deals shuffled examples to clients whose sizes are in proportions drawn from Dir(alpha).

    The quantity skew of NIID-Bench (Li et al. 2022): the proportions are drawn until every client
    holds `min_size` examples.

    num_clients: at most num_examples / min_size. alpha: concentration; small is a few large
    clients, large is equal sizes. rng: of the proportions and the shuffle. max_tries: how often the
    proportions are drawn before giving up. Raises ValueError for arguments out of range, and if no
    try gave every client enough examples.
    """
    checks.integer("num_examples", num_examples, 1)
    _check_num_clients(num_clients, num_examples)
    _check_drawn(num_examples, num_clients, alpha, min_size, max_tries)
    for _ in range(max_tries):
        shares = rng.dirichlet(np.full(num_clients, alpha))
        cuts = (np.cumsum(shares[:-1]) * num_examples).astype(int)
        if np.diff(cuts, prepend=0, append=num_examples).min() >= min_size:
            return np.split(rng.permutation(num_examples), cuts)
    raise _gave_up(num_clients, alpha, min_size, max_tries)


def shards(
    labels: np.ndarray, num_clients: int, shards_per_client: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Sorts examples by label, cuts them into shards of one size, and deals so many to each client.

    As McMahan et al. 2017, Section 3, who deal two. The sizes of shards differ by at most one. A
    shard holds one class, or several where their ends fall into it.

    labels: [M] integers. rng: shuffles the examples of a class, and deals the shards. Raises
    ValueError for labels that are not integers, and for less than an example for each shard.
    """
    labels = checks.integers("labels", labels)
    num_examples = len(labels)
    _check_num_clients(num_clients, num_examples)
    most = num_examples // num_clients
    shared = f": {num_examples} examples are shared by {num_clients} clients"
    checks.integer("shards_per_client", shards_per_client, 1, most, shared)
    rows = rng.permutation(num_examples)
    rows = rows[np.argsort(labels[rows], kind="stable")]
    pieces = np.array_split(rows, num_clients * shards_per_client)
    dealt = rng.permutation(len(pieces)).reshape(num_clients, shards_per_client)
    return [np.concatenate([pieces[index] for index in mine]) for mine in dealt]


def long_tail(
    labels: np.ndarray, num_classes: int, imbalance: float, rng: np.random.Generator
) -> np.ndarray:
    """Rows of a part of the examples in which class k has n_max imbalance^(-k / (K - 1)), in order.

    n_max: the examples of the largest class; a class keeps what it has where that is less, and at
    least one. Which are kept is drawn. So the first class has `imbalance` times the last one's, the
    profile of Cui et al. 2019 ("Class-Balanced Loss Based on Effective Number of Samples").

    labels: [M] integers in 0..num_classes-1. imbalance: at least 1, which keeps all of classes of
    one size. Raises ValueError for other labels, and for an imbalance below 1.
    """
    checks.integer("num_classes", num_classes, 1)
    checks.number("imbalance", imbalance, "of at least 1", lambda factor: factor >= 1)
    labels = checks.integers("labels", labels, 0, num_classes - 1)
    sizes = np.bincount(labels, minlength=num_classes)
    exponent = np.arange(num_classes) / max(num_classes - 1, 1)
    profile = sizes.max() / float(imbalance) ** exponent
    # Rounded down, but not what only a floating point number is below.
    kept = np.minimum(sizes, np.maximum(np.floor(profile * (1 + 1e-12)), 1)).astype(int)
    rows = [
        rng.permutation(np.flatnonzero(labels == label))[:count] for label, count in enumerate(kept)
    ]
    return np.sort(np.concatenate(rows))


def shards_like(
    labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """For each client, rows whose classes have the proportions of its own; clients may share rows.

    A client of n examples gets n M / N of the M rows, N the examples of all clients, or as many as
    its proportions allow, at least one, and none if n is 0. Its rows are drawn without replacement.

    labels: [M] integers in 0..K-1. counts: [C, K] how many examples of each class a client has.
    Raises ValueError for other labels or counts, and for a class of a client's that has no row.
    """
    counts = checks.integers("counts", counts, 0, ndim=2)
    num_classes = counts.shape[1]
    labels = checks.integers("labels", labels, 0, num_classes - 1)
    of_class = [np.flatnonzero(labels == label) for label in range(num_classes)]
    available = np.array([len(rows) for rows in of_class])
    lacking = (counts > 0).any(0) & (available == 0)
    if lacking.any():
        raise UsageError(f"labels: have no example of class {np.flatnonzero(lacking)[0]}")
    share = len(labels) / max(counts.sum(), 1)
    parts = []
    for mine in counts:
        held = mine > 0
        quota = mine * min(share, np.min(available[held] / mine[held], initial=np.inf))
        size = np.floor(quota).astype(int)
        # The largest remainders make up for what is rounded down.
        missing = max(round(quota.sum()), int(held.any())) - size.sum()
        size[np.argsort(size - quota, kind="stable")[:missing]] += 1
        drawn = [rng.permutation(rows)[:count] for rows, count in zip(of_class, size, strict=True)]
        parts.append(rng.permutation(np.concatenate(drawn)))
    return parts


def class_counts(labels: np.ndarray, parts: Sequence[np.ndarray], num_classes: int) -> np.ndarray:
    """Counts the examples of each class that each client holds: [C, K].

    labels: [M] integers in 0..num_classes-1. parts: for each client, the rows that it holds, in
    0..M-1. Raises ValueError for other labels or rows, and if there is no client.
    """
    checks.integer("num_classes", num_classes, 1)
    labels = checks.integers("labels", labels, 0, num_classes - 1)
    if len(parts) == 0:
        raise UsageError(f"parts={parts}: must hold the rows of at least one client")
    last = len(labels) - 1
    held = [
        checks.integers(f"parts[{client}]", rows, 0, last, may_be_empty=True)
        for client, rows in enumerate(parts)
    ]
    return np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in held])


def _check_num_clients(num_clients: int, num_examples: int) -> None:
    checks.integer("num_clients", num_clients, 1, num_examples, ", the number of examples")


def _check_drawn(
    num_examples: int, num_clients: int, alpha: float, min_size: int, max_tries: int
) -> None:
    checks.number(
        "alpha", alpha, f"above 0 and at most {_LARGEST_ALPHA}", lambda a: 0 < a <= _LARGEST_ALPHA
    )
    checks.integer("max_tries", max_tries, 1)
    shared = f": {num_examples} examples are shared by {num_clients} clients"
    checks.integer("min_size", min_size, 0, num_examples // num_clients, shared)


def _gave_up(num_clients: int, alpha: float, min_size: int, max_tries: int) -> UsageError:
    return UsageError(
        f"alpha={alpha}: must be higher, or min_size={min_size} or num_clients={num_clients} "
        f"lower: max_tries={max_tries} left a client with fewer examples"
    )
