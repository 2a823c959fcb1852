"""Copies of one original stay together in every split and domain; and the copies of the digits."""

import numpy as np
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv.data import environments, federation, simpson, sources, stains
from fedjax_inv.data.dataset import Dataset, Originals, check_dataset, originals

RNG = np.random.default_rng(0)
COPIES, ORIGINALS = 4, 60


def copied(*, test: bool = False) -> Dataset:
    """240 images, four copies of each of 60 originals, in no order."""
    original = RNG.permutation(np.repeat(np.arange(ORIGINALS), COPIES)).astype(np.int32)
    x = RNG.integers(1, 256, (len(original), 3, 3, 1), np.uint8)
    nowhere = np.zeros(len(original), np.int32)
    y, is_test = original % 2, (original % 5 == 0) & test
    return Dataset(x, y, ("a", "b"), nowhere, ("all",), is_test, original=original)


ENVIRONMENTS = {
    "none": lambda data: data,
    "rotated": lambda data: environments.rotated(data, [0, 30, 60], seed=1),
    "colored": lambda data: environments.colored(data, seed=1),
    "patched": lambda data: environments.patched(data, patch_size=1, seed=1),
    "combinations": lambda data: stains.combinations(data, colors=2, seed=1),
    "stained": lambda data: stains.stained(
        data, colors=2, agreements=(0.8, 0.9), domain_size=15, seed=1
    ),
    "simpson": lambda data: simpson.simpson(data, darker="a", lighter="b", seed=1),
}


@pytest.mark.parametrize("has_test", [False, True])
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_no_split_and_no_domain_separates_copies(environment, has_test):
    data = ENVIRONMENTS[environment](copied(test=has_test))
    check_dataset(data)
    places = {of: set(data.domain[data.original == of]) for of in np.unique(data.original)}
    assert {len(domains) for domains in places.values()} == {1}
    several = len(data.domains) > 1
    num_clients = len(data.domains) - 1 if several else 3
    split = federation.split(
        data,
        federation.examples(data.x, data.y),
        federation.partitioner("domain" if several else "iid", data, num_clients),
        held_out=data.domains[-1] if several else None,
        seed=2,
    )
    parts = [of for each in split[:3] for of in federation.parts_of(each)]
    assert all(len(part) for part in parts)
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows) == len(data.y)  # each example is somewhere, and once
    seen = np.concatenate([np.unique(data.original[part]) for part in parts])
    assert len(np.unique(seen)) == len(seen) == len(places)  # and all copies in one place


def test_the_first_examples_of_a_client_are_of_many_originals():
    data = copied()
    split = federation.split(
        data,
        federation.examples(data.x, data.y),
        federation.partitioner("iid", data, 1),
        held_out=None,
        seed=0,
    )
    for part in (split.train, split.test):
        (rows,) = federation.parts_of(part)
        assert len(np.unique(data.original[rows[:10]])) > 5


@pytest.mark.parametrize("field", ["domain", "test", "user"])
def test_copies_that_are_apart_already_are_refused(field):
    data = copied()
    data = data._replace(domains=("all", "more"), user=np.zeros(len(data.y), np.int32))
    values = getattr(data, field).copy()
    values[7] = True
    data = data._replace(**{field: values})
    with pytest.raises(UsageError, match=f"dataset.{field}"):
        federation.split(
            data,
            federation.examples(data.x, data.y),
            federation.partitioner("iid", data, 3),
            held_out=None,
            seed=0,
        )


def test_originals_by_hand():
    data = copied()
    some = data._replace(original=np.array([7, 3, 7, 9, 3, 7]), y=data.y[:6])
    found = originals(some)
    np.testing.assert_array_equal(found.rows, [0, 1, 3])
    np.testing.assert_array_equal(found.of, [0, 1, 0, 2, 1, 0])
    np.testing.assert_array_equal(found.copies(np.array([3, 0])), [3, 0, 2, 5])
    assert found.copies(np.zeros(0, int)).shape == (0,)
    alone = originals(some._replace(original=None))
    assert isinstance(alone, Originals)
    np.testing.assert_array_equal(alone.rows, np.arange(6))
    np.testing.assert_array_equal(alone.copies(np.array([4, 1])), [4, 1])


def test_moved_digits_are_nine_copies_of_each_digit():
    digits, moved = sources.load("digits"), sources.load("moved_digits")
    check_dataset(moved)
    assert moved.x.shape == (9 * 1797, 10, 10, 1)
    assert moved.classes == digits.classes
    np.testing.assert_array_equal(np.bincount(moved.original), np.full(1797, 9))
    np.testing.assert_array_equal(moved.y, digits.y[moved.original])
    canvas = np.zeros((10, 10), np.uint8)
    canvas[1:9, 1:9] = digits.x[5, ..., 0]
    expected = [np.roll(canvas, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    of_one = moved.x[moved.original == 5, ..., 0]
    np.testing.assert_array_equal(of_one, expected)
