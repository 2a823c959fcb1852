"""Federations: who holds which rows, what is held out, and the padding."""

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from fedjax_inv.data import federation, sources
from fedjax_inv.types import Federation


def make_dataset(num=120, num_domains=3, num_test=0) -> sources.Dataset:
    rows = np.arange(num)
    return sources.Dataset(
        np.broadcast_to((rows % 256).astype(np.uint8)[:, None, None, None], (num, 2, 2, 1)),
        (rows % 4).astype(np.int32),
        tuple("abcd"),
        (rows * 7 % num_domains).astype(np.int32),
        tuple(f"d{i}" for i in range(num_domains)),
        rows >= num - num_test,
    )


def clients(part: Federation) -> list[np.ndarray]:
    """The real rows of each client."""
    rows, mask = np.asarray(part.rows), np.asarray(part.mask)
    return [row[real] for row, real in zip(rows, mask, strict=True)]


def all_rows(part: Federation) -> np.ndarray:
    return np.concatenate(clients(part))


def split(dataset, name="iid", num_clients=4, **kwargs):
    return federation.split(
        dataset,
        federation.examples(dataset),
        federation.partitioner(name, dataset, num_clients, alpha=1.0),
        **({"held_out": None, "seed": 0} | kwargs),
    )


def test_examples_keep_their_type():
    dataset = make_dataset()
    data = federation.examples(dataset)
    assert data.x.dtype == jnp.uint8
    assert data.y.dtype == jnp.int32
    np.testing.assert_array_equal(data.x, dataset.x)
    np.testing.assert_array_equal(data.y, dataset.y)


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    multiple=st.sampled_from([1, 4, 8]),
)
def test_rows_and_mask(sizes, multiple):
    cuts = np.cumsum(sizes)
    parts = np.split(np.random.default_rng(0).permutation(cuts[-1]), cuts[:-1])
    rows, mask = federation.rows_and_mask(parts, multiple=multiple)
    assert rows.shape == mask.shape
    assert rows.dtype == jnp.int32
    assert mask.dtype == bool
    num_clients, width = rows.shape
    assert num_clients == len(sizes)
    assert width % multiple == 0
    assert max(*sizes, 1) <= width < max(*sizes, 1) + multiple
    assert (np.asarray(rows)[~np.asarray(mask)] == 0).all()
    for part, row, real in zip(parts, np.asarray(rows), np.asarray(mask), strict=True):
        np.testing.assert_array_equal(row[: len(part)], part)
        np.testing.assert_array_equal(real, np.arange(width) < len(part))


@pytest.mark.parametrize("name", ["domain", "iid", "dirichlet"])
@pytest.mark.parametrize("held_out", [None, "d1"])
@pytest.mark.parametrize("num_test", [0, 30])
def test_split_deals_every_row_to_one_place(name, held_out, num_test):
    dataset = make_dataset(num_test=num_test)
    result = split(dataset, name, held_out=held_out)
    train, valid, test = map(all_rows, (result.train, result.valid, result.test))
    dealt = np.concatenate([train, valid, test])
    assert len(np.unique(dealt)) == len(dealt)
    if held_out is None:
        assert len(dealt) == 120
        np.testing.assert_array_equal(result.test_domain, [-1])
        if num_test:
            np.testing.assert_array_equal(np.sort(test), np.flatnonzero(dataset.test))
        else:
            assert len(test) == 24  # a fifth
            assert set(test) != set(range(24))
            assert set(test) != set(range(96, 120))
    else:
        np.testing.assert_array_equal(np.sort(test), np.flatnonzero(dataset.domain == 1))
        others = (dataset.domain != 1) & ~dataset.test
        np.testing.assert_array_equal(
            np.sort(np.concatenate([train, valid])), np.flatnonzero(others)
        )
        np.testing.assert_array_equal(result.test_domain, [1])
    assert result.domains == dataset.domains
    assert result.train.data is result.valid.data is result.test.data


def test_split_names_the_domain_of_each_client():
    dataset = make_dataset()
    by_domain = split(dataset, "domain", 5, held_out="d0")
    assert sorted(set(by_domain.domain)) == [1, 2]
    for domain, *held in zip(
        by_domain.domain, clients(by_domain.train), clients(by_domain.valid), strict=True
    ):
        assert (dataset.domain[np.concatenate(held)] == domain).all()
    np.testing.assert_array_equal(split(dataset, "iid", 3).domain, [-1, -1, -1])
    np.testing.assert_array_equal(split(make_dataset(num_domains=1), "iid", 3).domain, [0, 0, 0])


@pytest.mark.parametrize(
    ("size", "validation", "expected"),
    [
        (100, 0.1, 10),
        (14, 0.1, 1),
        (16, 0.1, 2),
        (2, 0.1, 1),
        (1, 0.1, 0),
        (0, 0.1, 0),
        (2, 0.99, 1),
        (10, 0.99, 9),
        (10, 0.0, 0),
    ],
)
def test_validation_part_of_a_client(size, validation, expected):
    dataset = make_dataset(num_test=20)

    def partition(rows, rng):
        return [rows[:size], rows[size:]]

    result = federation.split(
        dataset,
        federation.examples(dataset),
        partition,
        held_out=None,
        seed=0,
        validation=validation,
    )
    assert len(clients(result.valid)[0]) == expected
    assert len(clients(result.train)[0]) == size - expected
    assert result.valid.rows.shape[1] > 0


def test_validation_rows_are_drawn_at_random():
    dataset = make_dataset(num_test=20)
    result = federation.split(
        dataset,
        federation.examples(dataset),
        lambda rows, rng: [rows],
        held_out=None,
        seed=0,
        validation=0.5,
    )
    assert set(all_rows(result.valid)) not in (set(range(50)), set(range(50, 100)))


def test_split_follows_its_seed():
    dataset = make_dataset()
    first, same, other = (split(dataset, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.train.rows, same.train.rows)
    assert (np.asarray(first.train.rows) != np.asarray(other.train.rows)).any()
    assert (np.asarray(first.test.rows) != np.asarray(other.test.rows)).any()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"held_out": "d9"}, "held_out='d9' must be a domain: one of d0, d1, d2"),
        ({"validation": 1.0}, "validation=1.0"),
        ({"validation": -0.1}, "validation=-0.1"),
        ({"test_fraction": 0.0}, "test_fraction=0.0"),
        ({"test_fraction": 1.0}, "test_fraction=1.0"),
        ({"num_clients": 97}, "num_clients=97 must be in 1..96"),
        ({"name": "shards"}, "name='shards' must be one of domain, iid, dirichlet"),
    ],
)
def test_split_errors(kwargs, words):
    with pytest.raises(ValueError, match=words):
        split(make_dataset(), **kwargs)


def test_the_only_domain_cannot_be_held_out():
    with pytest.raises(ValueError, match="leaves no examples"):
        split(make_dataset(num_domains=1), held_out="d0")


def test_partitioner_passes_alpha_and_min_size():
    dataset = make_dataset(num=2000)
    rows = np.arange(100, 1100)

    def classes_held(alpha):
        deal = federation.partitioner("dirichlet", dataset, 4, alpha=alpha, min_size=0)
        parts = deal(rows, np.random.default_rng(0))
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), rows)
        return [len(np.unique(dataset.y[part])) for part in parts]

    assert classes_held(1e6) == [4] * 4
    assert classes_held(1e-6) == [1] * 4
    with pytest.raises(ValueError, match="min_size=251"):
        federation.partitioner("dirichlet", dataset, 4, min_size=251)(
            rows, np.random.default_rng(0)
        )


def test_pooled():
    result = split(make_dataset(), num_clients=7)
    (rows,) = clients(federation.pooled(result.train))
    np.testing.assert_array_equal(np.sort(rows), np.sort(all_rows(result.train)))
    assert federation.pooled(result.train).data is result.train.data


def test_stack():
    dataset = make_dataset()
    data = federation.examples(dataset)
    iid = federation.partitioner("iid", dataset, 4)
    skewed = federation.partitioner("dirichlet", dataset, 4, alpha=0.3)
    splits = [
        federation.split(dataset, data, iid, held_out="d0", seed=0),
        federation.split(dataset, data, skewed, held_out="d1", seed=1),
        federation.split(dataset, data, skewed, held_out=None, seed=2),
    ]
    widths = [each.train.rows.shape[1] for each in splits]
    assert len(set(widths)) > 1  # or the padding is not tested
    stacked = federation.stack(splits)
    assert stacked.train.data is data
    assert stacked.train.rows.shape == (3, 4, max(widths))
    np.testing.assert_array_equal(stacked.test_domain, [[0], [1], [-1]])
    for index, each in enumerate(splits):
        np.testing.assert_array_equal(stacked.domain[index], each.domain)
        for part in ("train", "valid", "test"):
            whole, one = getattr(stacked, part), getattr(each, part)
            taken = Federation(data, whole.rows[index], whole.mask[index])
            for left, right in zip(clients(taken), clients(one), strict=True):
                np.testing.assert_array_equal(left, right)


def test_stack_errors():
    dataset = make_dataset()
    with pytest.raises(ValueError, match="share one `data`"):
        federation.stack([split(dataset), split(dataset)])
    data = federation.examples(dataset)
    splits = [
        federation.split(
            dataset, data, federation.partitioner("iid", dataset, count), held_out=None, seed=0
        )
        for count in (2, 3)
    ]
    with pytest.raises(ValueError, match=r"one number of clients, not \[2, 3\]"):
        federation.stack(splits)
