"""Partitions: which client holds which examples, as one array of rows for each of C clients.

Rows number the M examples to deal, from 0; each goes to exactly one client. Of the arguments,
`domain`, `user` and `labels` are integers [M], `num_clients` is C, and `rng` draws. There is a
UsageError if C clients cannot have as many examples as they must.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError

_ROUNDING = 1e-9  # of the number of examples that a client is due
_MOST_DRAWS = 1000
_LARGEST_ALPHA = 1e300  # far above it, draws overflow and are 0


def iid(num_examples: int, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal shuffled examples to clients whose sizes differ by at most one."""
    _check_num_clients(num_clients, num_examples)
    return np.array_split(rng.permutation(num_examples), num_clients)


def by_domain(domain: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Give each client a slice of one domain, in the order of the domains.

    Each domain gets one client, and every further client goes to the domain with the most examples
    per client. The sizes of a domain's clients differ by at most one. There must be as many clients
    as domains.
    """
    present, sizes = np.unique(domain, return_counts=True)
    _check_num_clients(num_clients, len(domain))
    if num_clients < len(present):
        raise UsageError(
            "num_clients", num_clients, f"must be at least {len(present)}, the number of domains"
        )
    parts: list[np.ndarray] = []
    for value, num_slices in zip(present, _clients_of_domains(sizes, num_clients), strict=True):
        parts += np.array_split(rng.permutation(np.flatnonzero(domain == value)), num_slices)
    return parts


def mixed(
    domain: np.ndarray, num_clients: int, mixing: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """Share every domain partly among the clients of that domain, and partly among all clients.

    The heterogeneous partitioning of Bai et al. 2024 ("Benchmarking Algorithms for Federated
    Domain Generalization", arXiv 2307.04942). C_d are the clients of domain d: with at least as
    many clients as domains, those of `by_domain`; with fewer, one client, where the largest domain
    comes first and each goes to the client with the fewest examples. Of the n_d examples of domain
    d, each client gets mixing n_d / C, and each in C_d gets (1 - mixing) n_d / |C_d| besides, both
    together rounded up or down. Clients that were due more so far are rounded up first, so that
    sizes are as balanced as those of whole domains or better. `mixing` is lambda in the paper: 0
    gives each client as few domains as possible, 1 gives all clients the same proportions.
    """
    present, sizes = np.unique(domain, return_counts=True)
    _check_num_clients(num_clients, len(domain))
    counts = _mixed_counts(sizes, num_clients, float(mixing))
    slices = [
        np.split(rng.permutation(np.flatnonzero(domain == value)), np.cumsum(count)[:-1])
        for value, count in zip(present, counts, strict=True)
    ]
    return [np.concatenate(client) for client in zip(*slices, strict=True)]


def _mixed_counts(sizes: np.ndarray, num_clients: int, mixing: float) -> np.ndarray:
    """How many examples of each domain each client gets, [D, C]. sizes: of the domains, [D]."""
    owners = np.zeros((len(sizes), num_clients))  # [D, C], 1 for the clients of a domain
    if num_clients >= len(sizes):
        owner = np.repeat(np.arange(len(sizes)), _clients_of_domains(sizes, num_clients))
        owners[owner, np.arange(num_clients)] = 1
    else:
        held = np.zeros(num_clients)
        for each in np.argsort(-sizes, kind="stable"):
            client = held.argmin()
            owners[each, client] = 1
            held[client] += sizes[each]
    shares = (1 - mixing) * owners / owners.sum(1, keepdims=True) + mixing / num_clients
    exact = shares * sizes[:, None]
    counts = np.floor(exact + _ROUNDING).astype(int)
    lacking = np.zeros(num_clients)  # what each client was due so far and did not get
    for count, due, size in zip(counts, exact, sizes, strict=True):
        fraction = due - count
        lacking += fraction
        # A client that is due a whole number, such as 0, gets no more.
        order = np.argsort(-np.where(fraction > _ROUNDING, lacking, -np.inf), kind="stable")
        more = order[: size - count.sum()]
        count[more] += 1
        lacking[more] -= 1
    return counts


def _clients_of_domains(sizes: np.ndarray, num_clients: int) -> np.ndarray:
    """How many clients each domain gets, [D]: one, and more for those with the most per client."""
    clients = np.ones(len(sizes), int)
    for _ in range(num_clients - len(sizes)):
        clients[np.argmax(sizes / clients)] += 1
    return clients


def by_user(user: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal whole users to clients: the largest first, each to the client with fewest examples."""
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
) -> list[np.ndarray]:
    """Share each class among the clients in proportions drawn from a Dirichlet distribution.

    The procedure of NIID-Bench (Li et al. 2022): class after class, clients that already hold M /
    num_clients examples get nothing, and the others share the shuffled class in proportions drawn
    from Dir(alpha), rounded by the largest remainders. This is repeated until every client holds
    `min_size` examples.

    A small alpha gives each client one class, a large one IID clients. By default min_size is the
    number of classes that occur.
    """
    num_examples = len(labels)
    class_sizes = np.unique(labels, return_counts=True)[1]
    min_size = len(class_sizes) if min_size is None else min_size
    counts = _drawn(
        lambda: _dirichlet_counts(class_sizes, num_clients, alpha, rng),
        num_examples,
        num_clients,
        alpha,
        min_size,
    )
    # Shuffled, then sorted by label: the rows of a class stand together in random order.
    rows = rng.permutation(num_examples)
    rows = rows[np.argsort(labels[rows], kind="stable")]
    owner = np.repeat(np.tile(np.arange(num_clients), len(class_sizes)), counts.ravel())
    return np.split(rows[np.argsort(owner, kind="stable")], np.cumsum(counts.sum(0))[:-1])


def _dirichlet_counts(
    class_sizes: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw how many examples of each class [K] each client gets, [K, C]."""
    counts = np.zeros((len(class_sizes), num_clients), int)
    sizes = np.zeros(num_clients, int)
    for row, size in zip(counts, class_sizes, strict=True):
        # Drawing for all clients, setting the others to 0 and renormalising would be the same
        # distribution, but might divide by 0.
        (open_clients,) = np.nonzero(sizes < class_sizes.sum() / num_clients)
        exact = rng.dirichlet(np.full(len(open_clients), alpha)) * size
        rounded = np.floor(exact).astype(int)
        # To cut at rounded sums, as NIID-Bench does, would leave the first client too small.
        order = np.argsort(rounded - exact, kind="stable")
        rounded[order[: size - rounded.sum()]] += 1
        row[open_clients] = rounded
        sizes += row
    return counts


def quantity(
    num_examples: int,
    num_clients: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    min_size: int = 1,
) -> list[np.ndarray]:
    """Deal shuffled examples to clients whose sizes are in proportions drawn from Dir(alpha).

    The quantity skew of NIID-Bench (Li et al. 2022): the proportions are drawn until every client
    holds `min_size` examples. A small alpha gives a few large clients, a large one equal sizes.
    """

    def draw() -> np.ndarray:
        shares = rng.dirichlet(np.full(num_clients, alpha))
        cuts = (np.cumsum(shares[:-1]) * num_examples).astype(int)
        return np.diff(cuts, prepend=0, append=num_examples)[None]

    (sizes,) = _drawn(draw, num_examples, num_clients, alpha, min_size)
    return np.split(rng.permutation(num_examples), np.cumsum(sizes)[:-1])


def _drawn(
    draw: Callable[[], np.ndarray], num_examples: int, num_clients: int, alpha: float, min_size: int
) -> np.ndarray:
    """Draw counts [..., C] until each client has enough; UsageError if that cannot be."""
    _check_num_clients(num_clients, num_examples)
    if not 0 < alpha <= _LARGEST_ALPHA:
        raise UsageError("alpha", alpha, f"must be above 0 and at most {_LARGEST_ALPHA}")
    shared = f": {num_examples} examples are shared by {num_clients} clients"
    checks.integer("min_size", min_size, 0, num_examples // num_clients, shared)
    for _ in range(_MOST_DRAWS):
        counts = draw()
        if counts.sum(0).min() >= min_size:
            return counts
    text = f"must be higher, or {{min_size}} or {{num_clients}} lower: {_MOST_DRAWS} draws left a "
    others = {"min_size": ("min_size", min_size), "num_clients": ("num_clients", num_clients)}
    raise UsageError("alpha", alpha, f"{text}client with fewer examples", **others)


def shards(
    labels: np.ndarray, num_clients: int, shards_per_client: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Sort examples by label, cut them into shards of one size, and deal some to each client.

    This is the partition of McMahan et al. 2017, Section 3, where a client gets two. The sizes
    of shards differ by at most one. A shard holds one class, or several if the border between
    classes lies inside.
    """
    num_examples = len(labels)
    _check_num_clients(num_clients, num_examples)
    most = num_examples // num_clients
    shared = f": {num_examples} examples are shared by {num_clients} clients"
    checks.integer("shards_per_client", shards_per_client, 1, most, shared)
    rows = rng.permutation(num_examples)
    rows = rows[np.argsort(labels[rows], kind="stable")]
    pieces = np.array_split(rows, num_clients * shards_per_client)
    shards_of = rng.permutation(len(pieces)).reshape(num_clients, shards_per_client)
    return [np.concatenate([pieces[shard] for shard in client]) for client in shards_of]


def long_tail(
    labels: np.ndarray, num_classes: int, imbalance: float, rng: np.random.Generator
) -> np.ndarray:
    """Return rows among which class k has n_max imbalance^(-k / (K - 1)) examples.

    n_max is the size of the largest class. A class that has fewer examples keeps all, and every
    class keeps at least one; which ones is drawn. So the first class has `imbalance` times the
    examples of the last one, as in Cui et al. 2019 ("Class-Balanced Loss Based on Effective Number
    of Samples"). An imbalance of 1 keeps all examples of classes of equal size. Rows are in
    increasing order.
    """
    sizes = np.bincount(labels, minlength=num_classes)
    exponent = np.arange(num_classes) / max(num_classes - 1, 1)
    profile = sizes.max() / float(imbalance) ** exponent
    # Rounded down, except where only a rounding error is missing to an integer.
    counts = np.minimum(sizes, np.maximum(np.floor(profile * (1 + 1e-12)), 1)).astype(int)
    rows = [
        rng.permutation(np.flatnonzero(labels == label))[:count]
        for label, count in enumerate(counts)
    ]
    return np.sort(np.concatenate(rows))


def thinned(is_rare: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Return rows of which a share in (0, 1) is rare, to the nearest; drawn, in increasing order.

    `is_rare` is bool [M]. There is a UsageError if more rows had to be rare than are.
    """
    there = int(is_rare.sum())
    count = round(share / (1 - share) * (len(is_rare) - there))
    if not 0 < count <= there:
        most = there / len(is_rare)
        raise UsageError("rare", share, f"must leave examples, and be at most {most:.3f}")
    kept = rng.permutation(np.flatnonzero(is_rare))[:count]
    return np.sort(np.concatenate([np.flatnonzero(~is_rare), kept]))


def shards_like(
    labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Draw rows for each client in the proportions of its classes; clients may share rows.

    A client with n of the N examples of all clients gets n M / N of the M rows, or as many as its
    proportions allow: at least one, but none if n is 0. They are drawn without replacement. Labels
    [M] are in 0..K-1, and counts [C, K] are how many examples of each class a client has.
    """
    num_classes = counts.shape[1]
    of_class = [np.flatnonzero(labels == label) for label in range(num_classes)]
    available = np.array([len(rows) for rows in of_class])
    lacking = (counts > 0).any(0) & (available == 0)
    if lacking.any():
        needed = f"an example of class {np.flatnonzero(lacking)[0]}, as clients have"
        raise UsageError("labels", ..., f"must have {needed}")
    share = len(labels) / max(counts.sum(), 1)
    parts = []
    for count in counts:
        is_held = count > 0
        quota = count * min(share, np.min(available[is_held] / count[is_held], initial=np.inf))
        size = np.floor(quota).astype(int)
        # The classes with the largest remainders are rounded up.
        missing = max(round(quota.sum()), int(is_held.any())) - size.sum()
        size[np.argsort(size - quota, kind="stable")[:missing]] += 1
        drawn = [rng.permutation(rows)[:num] for rows, num in zip(of_class, size, strict=True)]
        parts.append(rng.permutation(np.concatenate(drawn)))
    return parts


def class_counts(labels: np.ndarray, parts: Sequence[np.ndarray], num_classes: int) -> np.ndarray:
    """Count the examples of each class that each client holds, [C, K].

    Labels [M] are in 0..K-1, and parts are each client's rows.
    """
    return np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in parts])


def _check_num_clients(num_clients: int, num_examples: int) -> None:
    checks.integer("num_clients", num_clients, 1, num_examples, ", the number of examples")
