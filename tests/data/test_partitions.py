"""Partitions: each example goes to one client, and each scheme keeps its promise."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedjax_inv.data import partitions


def rng(seed=0):
    return np.random.default_rng(seed)


def assert_partition(parts, num_examples, num_clients):
    assert len(parts) == num_clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(num_examples))


@given(num_clients=st.integers(1, 30), extra=st.integers(0, 100), seed=st.integers(0, 99))
def test_iid(num_clients, extra, seed):
    parts = partitions.iid(num_clients + extra, num_clients, rng(seed))
    assert_partition(parts, num_clients + extra, num_clients)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


ONE_CLASS = np.zeros(100, int)


@pytest.mark.parametrize(
    "deal",
    [
        lambda rng: partitions.iid(100, 2, rng),
        lambda rng: partitions.by_domain(ONE_CLASS, 2, rng),
        lambda rng: partitions.mixed(ONE_CLASS, 2, 0.5, rng),
        lambda rng: partitions.dirichlet(ONE_CLASS, 2, 1e300, rng),
        lambda rng: partitions.quantity(100, 2, 1e300, rng),
        lambda rng: partitions.shards(ONE_CLASS, 2, 1, rng),
    ],
)
def test_examples_are_shuffled_by_the_generator(deal):
    first, again, other = (sorted(deal(rng(seed))[0]) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(first) == 50
    assert list(range(50)) not in (first, other)


def greedy_clients(sizes, num_clients):
    """The clients of each domain, one given at a time."""
    clients = [1] * len(sizes)
    while sum(clients) < num_clients:
        per_client = [size / count for size, count in zip(sizes, clients, strict=True)]
        clients[per_client.index(max(per_client))] += 1
    return clients


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_by_domain(sizes, fraction, seed):
    num_clients = len(sizes) + round(fraction * (sum(sizes) - len(sizes)))
    names = np.arange(len(sizes)) * 3 + 1  # domains need not be 0, 1, ...
    domain = rng(seed).permutation(np.repeat(names, sizes))
    parts = partitions.by_domain(domain, num_clients, rng(seed))
    assert_partition(parts, sum(sizes), num_clients)
    assert all(len(part) for part in parts)
    assert all(len(np.unique(domain[part])) == 1 for part in parts)
    owners = np.array([domain[part[0]] for part in parts])
    clients = [int((owners == name).sum()) for name in names]
    assert clients == greedy_clients(sizes, num_clients)
    for name in names:
        held = [len(part) for part, owner in zip(parts, owners, strict=True) if owner == name]
        assert max(held) - min(held) <= 1


DOMAINS = st.lists(st.integers(1, 40), min_size=1, max_size=7)  # their sizes


def mixed(sizes, num_clients, mixing, seed=0):
    """How many examples of each domain [D] each client gets, [C, D]."""
    domain = rng(seed).permutation(np.repeat(np.arange(len(sizes)) * 3 - 4, sizes))
    parts = partitions.mixed(domain, num_clients, mixing, rng(seed))
    assert_partition(parts, sum(sizes), num_clients)
    names = np.unique(domain)
    return np.array([[(domain[part] == name).sum() for name in names] for part in parts])


def owners(sizes, num_clients):
    """Which client belongs to which domain, [C, D], by loops."""
    owned = np.zeros((num_clients, len(sizes)))
    if num_clients >= len(sizes):
        client = 0
        for each, count in enumerate(greedy_clients(sizes, num_clients)):
            owned[client : client + count, each] = 1
            client += count
        return owned
    held = [0] * num_clients
    for each in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        client = held.index(min(held))
        owned[client, each] = 1
        held[client] += sizes[each]
    return owned


@given(sizes=DOMAINS, fraction=st.floats(0, 1), mixing=st.floats(0, 1), seed=st.integers(0, 99))
def test_mixed_is_between_whole_domains_and_equal_shares(sizes, fraction, mixing, seed):
    num_clients = 1 + round(fraction * (min(30, sum(sizes)) - 1))
    counts = mixed(sizes, num_clients, mixing, seed)
    owned = owners(sizes, num_clients)
    whole, equal = owned / owned.sum(0) * sizes, np.ones(owned.shape) / num_clients * sizes
    exact = (1 - mixing) * whole + mixing * equal
    assert np.abs(counts - exact).max() < 1 + 1e-6
    # A client is as large as it should be, up to rounding, and never empty.
    assert np.abs(counts.sum(1) - exact.sum(1)).max() < 2
    assert counts.sum(1).min() > 0


@pytest.mark.parametrize(
    ("sizes", "num_clients", "mixing"), [([8, 9, 11, 10], 6, 0.3), ([4, 29, 10], 7, 0.7)]
)
def test_a_client_that_is_due_a_whole_number_gets_it(sizes, num_clients, mixing):
    """Although its share of a domain is less by the rounding of 64 bits."""
    owned = owners(sizes, num_clients)
    exact = ((1 - mixing) * owned / owned.sum(0) + mixing / num_clients) * sizes
    counts, whole = mixed(sizes, num_clients, mixing), np.abs(exact - exact.round()) < 1e-9
    assert (exact < exact.round())[whole].any()
    np.testing.assert_array_equal(counts[whole], exact.round()[whole])


@given(
    num_classes=st.integers(1, 6),
    num_clients=st.integers(1, 8),
    alpha=st.sampled_from([0.3, 1.0, 10.0, 1e6]),
    min_size=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_dirichlet(num_classes, num_clients, alpha, min_size, seed):
    labels = rng(seed).integers(0, num_classes, 200) * 2  # labels need not be 0, 1, ...
    parts = partitions.dirichlet(labels, num_clients, alpha, rng(seed), min_size=min_size)
    assert_partition(parts, 200, num_clients)
    assert min(len(part) for part in parts) >= min_size


def test_dirichlet_with_a_large_alpha_is_iid():
    labels = np.arange(10_000) % 10
    counts = partitions.class_counts(
        labels, partitions.dirichlet(labels, 5, 1e8, rng()), num_classes=10
    )
    np.testing.assert_allclose(counts, 200, atol=1)


@pytest.mark.parametrize("alpha", [1e-12, 1e-300])
def test_dirichlet_with_a_small_alpha_gives_each_class_to_one_client(alpha):
    labels = np.arange(10_000) % 10
    parts = partitions.dirichlet(labels, 5, alpha, rng(), min_size=0)
    counts = partitions.class_counts(labels, parts, num_classes=10)
    np.testing.assert_array_equal(counts.max(axis=0), 1000)
    # A client is full after two classes, so each gets exactly two.
    np.testing.assert_array_equal((counts > 0).sum(axis=1), 2)


def test_dirichlet_gives_nothing_to_a_full_client():
    # Where a class begins, an open client holds less than its share: it exceeds it by one class.
    labels = np.arange(1000) % 10
    for seed in range(8):
        parts = partitions.dirichlet(labels, 5, 0.05, rng(seed), min_size=0)
        assert max(len(part) for part in parts) < 1000 / 5 + 100


def test_dirichlet_shares_have_the_moments_of_the_distribution():
    # One class: nobody is full, so the shares are Dir(alpha): mean 1/C, variance (C-1)/C^2/(aC+1).
    labels, generator = np.zeros(200, int), rng()
    parts = [partitions.dirichlet(labels, 4, 0.5, generator, min_size=0) for _ in range(1000)]
    shares = np.array([[len(rows) for rows in clients] for clients in parts]) / 200
    variance = 3 / 16 / (0.5 * 4 + 1)
    # Six standard deviations; the kurtosis of a share, which is Beta(1/2, 3/2), is 3.
    np.testing.assert_allclose(shares.mean(axis=0), 1 / 4, atol=6 * np.sqrt(variance / 1000))
    np.testing.assert_allclose(shares.var(axis=0), variance, atol=6 * variance * np.sqrt(2 / 1000))


def test_dirichlet_gives_up():
    labels = np.arange(1000) % 10
    with pytest.raises(ValueError, match="alpha"):
        partitions.dirichlet(labels, 100, 1e-3, rng())


def test_dirichlet_gives_every_client_its_share():
    """Although a client's share of a class is half an example."""
    labels = np.repeat(np.arange(60), 10)
    drawn = [partitions.dirichlet(labels, 20, 1e6, rng(seed), min_size=0) for seed in range(20)]
    sizes = np.mean([[len(part) for part in parts] for parts in drawn], 0)
    np.testing.assert_allclose(sizes, 30, atol=3)


def test_class_counts():
    parts = [np.array([0, 1, 2]), np.zeros(0, int), np.array([3, 4])]
    counts = partitions.class_counts(np.array([0, 2, 2, 0, 1]), parts, num_classes=4)
    np.testing.assert_array_equal(counts, [[1, 0, 2, 0], [0] * 4, [1, 1, 0, 0]])


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_by_user(sizes, fraction, seed):
    num_clients = 1 + round(fraction * (len(sizes) - 1))
    names = np.arange(len(sizes)) * 3 + 1
    user = rng(seed).permutation(np.repeat(names, sizes))
    parts = partitions.by_user(user, num_clients, rng(seed))
    assert_partition(parts, sum(sizes), num_clients)
    held = [set(user[part]) for part in parts]
    assert sum(map(len, held)) == len(sizes)  # nobody is with two clients
    assert all(held)
    # No client is larger than the smallest by more than one of its users, whichever that is.
    smallest = min(map(len, parts))
    for part, users in zip(parts, held, strict=True):
        least = min((user == name).sum() for name in users)
        assert len(part) - least <= smallest


@given(
    num_classes=st.integers(1, 12),
    most=st.integers(1, 60),
    imbalance=st.sampled_from([1, 1.7, 10, 50, 100]),
    seed=st.integers(0, 99),
)
def test_a_long_tail_is_its_profile(num_classes, most, imbalance, seed):
    labels = rng(seed).permutation(np.repeat(np.arange(num_classes), most))
    rows = partitions.long_tail(labels, num_classes, imbalance, rng(seed))
    assert (np.diff(rows) > 0).all()
    counts = np.bincount(labels[rows], minlength=num_classes)
    for label, count in enumerate(counts):
        exact = most * imbalance ** (-label / max(num_classes - 1, 1))
        assert count == max(1, int(exact + 1e-9))


def test_a_long_tail_of_classes_of_other_sizes_is_drawn():
    labels = np.repeat([0, 1, 2, 3], [8, 100, 0, 40])
    kept = [partitions.long_tail(labels, 4, 8, rng(seed)) for seed in (0, 0, 1)]
    assert np.bincount(labels[kept[0]], minlength=4).tolist() == [8, 50, 0, 12]
    np.testing.assert_array_equal(kept[0], kept[1])
    assert set(kept[0]) != set(kept[2])
    np.testing.assert_array_equal(partitions.long_tail(np.arange(5), 5, 1.0, rng()), np.arange(5))


@given(
    counts=st.lists(st.lists(st.integers(0, 200), min_size=4, max_size=4), min_size=1, max_size=6),
    each=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_shards_have_the_proportions_of_clients(counts, each, seed):
    labels = rng(seed).permutation(np.repeat(np.arange(4), each))
    parts = partitions.shards_like(labels, np.array(counts), rng(seed))
    assert len(parts) == len(counts)
    for mine, rows in zip(np.array(counts), parts, strict=True):
        assert len(set(rows)) == len(rows)
        got = np.bincount(labels[rows], minlength=4)
        if not mine.any():
            assert not got.any()
            continue
        assert got.sum() >= 1
        # No class is more than one example from its share of what was drawn.
        total = min(len(labels) / np.sum(counts), np.min(each / mine[mine > 0]))
        assert (np.abs(got - total * mine) <= 1).all()
        # Those are rounded up that lose most by being rounded down.
        rest, is_up = total * mine % 1, got > total * mine
        assert np.min(rest[is_up], initial=1) >= np.max(rest[~is_up], initial=0) - 1e-9
        assert abs(got.sum() - max(total * mine.sum(), 1)) <= 1


@pytest.mark.parametrize("alpha", [0.3, 5.0])
@pytest.mark.parametrize("min_size", [0, 3])
def test_quantity_deals_every_row_once_in_sizes_that_are_drawn(alpha, min_size):
    parts = partitions.quantity(200, 6, alpha, np.random.default_rng(1), min_size=min_size)
    sizes = [len(part) for part in parts]
    assert sorted(np.concatenate(parts)) == list(range(200))
    assert len(parts) == 6
    assert min(sizes) >= min_size


def test_quantity_has_the_moments_of_the_distribution():
    """Var(q_c) = (1/C) (1 - 1/C) / (C alpha + 1)."""
    rng, alpha = np.random.default_rng(0), 0.7
    drawn = [
        [len(part) for part in partitions.quantity(1000, 4, alpha, rng, min_size=0)]
        for _ in range(2000)
    ]
    shares = np.array(drawn) / 1000
    np.testing.assert_allclose(shares.mean(0), 0.25, atol=0.02)
    np.testing.assert_allclose(shares.var(0), 0.25 * 0.75 / (4 * alpha + 1), rtol=0.1)


@pytest.mark.parametrize(("num_clients", "each"), [(5, 2), (7, 3), (1, 4), (60, 1)])
def test_shards_deal_every_row_once_in_pieces_of_sorted_labels(num_clients, each):
    labels = np.random.default_rng(3).integers(0, 4, 61) - 1
    parts = partitions.shards(labels, num_clients, each, np.random.default_rng(0))
    assert sorted(np.concatenate(parts)) == list(range(61))
    # A naive cut of the sorted labels: each client holds the labels of `each` of the pieces.
    pieces = [list(piece) for piece in np.array_split(np.sort(labels), num_clients * each)]
    assert {len(piece) for piece in pieces} <= {61 // len(pieces), 61 // len(pieces) + 1}
    for part in parts:
        held = list(labels[part])
        while held:
            piece = next(piece for piece in pieces if held[: len(piece)] == piece)
            pieces.remove(piece)
            held = held[len(piece) :]
    assert not pieces
