"""Partitions: each example goes to one client, and each scheme keeps its promise."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fedjax_inv.data import partitions


def rng(seed=0):
    return np.random.default_rng(seed)


def assert_partition(parts, num_examples, num_clients):
    assert len(parts) == num_clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(num_examples))


@settings(deadline=None, max_examples=50)
@given(num_clients=st.integers(1, 30), extra=st.integers(0, 100), seed=st.integers(0, 99))
def test_iid(num_clients, extra, seed):
    parts = partitions.iid(num_clients + extra, num_clients, rng(seed))
    assert_partition(parts, num_clients + extra, num_clients)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_iid_is_shuffled():
    parts = partitions.iid(100, 2, rng())
    assert not np.array_equal(np.sort(parts[0]), np.arange(50))


def greedy_clients(sizes, num_clients):
    """The clients of each domain, one given at a time."""
    clients = [1] * len(sizes)
    while sum(clients) < num_clients:
        per_client = [size / count for size, count in zip(sizes, clients, strict=True)]
        clients[per_client.index(max(per_client))] += 1
    return clients


@settings(deadline=None, max_examples=50)
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


def test_by_domain_shuffles_before_it_slices():
    first, second = partitions.by_domain(np.zeros(100, int), 2, rng())
    assert not np.array_equal(np.sort(first), np.arange(50))
    assert len(second) == 50


def test_by_domain_needs_a_client_for_each_domain():
    with pytest.raises(ValueError, match=r"num_clients=2 .* number of domains, 3"):
        partitions.by_domain(np.array([0, 0, 1, 1, 2, 2]), 2, rng())


@settings(deadline=None, max_examples=50)
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


def test_dirichlet_default_min_size_is_the_number_of_classes():
    labels = np.arange(300) % 10
    sizes = [
        min(len(part) for part in partitions.dirichlet(labels, 10, 0.3, rng(seed)))
        for seed in range(20)
    ]
    assert min(sizes) >= 10


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
    for seed in range(20):
        parts = partitions.dirichlet(labels, 5, 0.05, rng(seed), min_size=0)
        assert max(len(part) for part in parts) < 1000 / 5 + 100


def test_dirichlet_shares_have_the_moments_of_the_distribution():
    # One class: nobody is full, so the shares are Dir(alpha): mean 1/C, variance (C-1)/C^2/(aC+1).
    shares = np.array(
        [
            [len(part) for part in partitions.dirichlet(np.zeros(1000), 4, 0.5, rng(s), min_size=0)]
            for s in range(2000)
        ]
    )
    shares = shares / 1000
    np.testing.assert_allclose(shares.mean(axis=0), 1 / 4, atol=0.03)
    np.testing.assert_allclose(shares.var(axis=0), 3 / 16 / (0.5 * 4 + 1), atol=0.01)


def test_dirichlet_shuffles_each_class():
    labels = np.repeat([0, 1], 500)
    first, _ = partitions.dirichlet(labels, 2, 1e8, rng())
    assert first[labels[first] == 0].max() > 300
    assert first[labels[first] == 1].max() > 800


def test_dirichlet_gives_up():
    labels = np.arange(1000) % 10
    with pytest.raises(ValueError, match="max_tries=3") as error:
        partitions.dirichlet(labels, 100, 1e-3, rng(), max_tries=3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"alpha": -1.0}, "alpha=-1.0"),
        ({"alpha": np.inf}, "alpha=inf"),
        ({"alpha": np.nan}, "alpha=nan"),
        ({"min_size": 26}, "min_size=26 must be in 0..25"),
        ({"min_size": -1}, "min_size=-1"),
    ],
)
def test_dirichlet_errors(kwargs, words):
    with pytest.raises(ValueError, match=words):
        partitions.dirichlet(np.arange(100) % 4, 4, **({"alpha": 1.0} | kwargs), rng=rng())


@pytest.mark.parametrize("num_clients", [0, -1, 7])
@pytest.mark.parametrize(
    "partition",
    [
        lambda num_clients: partitions.iid(6, num_clients, rng()),
        lambda num_clients: partitions.by_domain(np.zeros(6, int), num_clients, rng()),
        lambda num_clients: partitions.dirichlet(np.zeros(6, int), num_clients, 1.0, rng()),
    ],
)
def test_clients_are_at_least_one_and_at_most_the_examples(partition, num_clients):
    with pytest.raises(ValueError, match=f"num_clients={num_clients} must be in 1..6"):
        partition(num_clients)


def test_class_counts():
    counts = partitions.class_counts(
        np.array([0, 2, 2, 0, 1]), [np.array([0, 1, 2]), np.array([3, 4])], num_classes=4
    )
    np.testing.assert_array_equal(counts, [[1, 0, 2, 0], [1, 1, 0, 0]])
