from math import factorial, perm

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from fedjax_inv import permutation
from fedjax_inv.permutation import Permutation
from fedjax_inv.types import Array

# For each tail of a hundred chi-squares: a sound permutation fails for two of 10^6 seeds.
LEVEL = 1e-8


@jax.jit
def images(permutations: Permutation, positions: Array, size: Array) -> Array:
    return jax.vmap(permutation.at, (0, None, None))(permutations, positions, size)


@pytest.fixture(scope="module")
def drawn() -> Permutation:
    """Return 2^16 permutations."""
    return jax.jit(jax.vmap(permutation.draw))(jax.random.split(jax.random.key(0), 2**16))


def assert_uniform(outcomes: np.ndarray, possible: int) -> None:
    """Assert that each possible outcome (a number or a row) is drawn equally often."""
    rows = outcomes.reshape(len(outcomes), -1).astype(np.int64)
    counts = np.bincount(rows @ (1 + rows.max()) ** np.arange(rows.shape[1]))
    counts = counts[counts > 0]
    assert len(counts) == possible  # so many draws leave none out
    expected = counts.sum() / possible
    assert expected > 10
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), possible - 1
    assert chi2.sf(statistic, freedom) > LEVEL
    # More even than chance is wrong too; with few cells, an exact balance is no wonder.
    assert freedom < 20 or chi2.cdf(statistic, freedom) > LEVEL


def test_every_example_is_visited_once(drawn: Permutation) -> None:
    some, sizes = jax.tree.map(lambda leaf: leaf[:71], drawn), np.arange(71)
    image = np.asarray(jax.jit(jax.vmap(permutation.at, (0, None, 0)))(some, jnp.arange(71), sizes))
    for size in sizes:
        np.testing.assert_array_equal(np.sort(image[size, :size]), np.arange(size))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_few_examples_are_equally_likely(drawn: Permutation, size: int) -> None:
    order = np.asarray(images(drawn, jnp.arange(8), size))[:, :size]
    assert_uniform(order, factorial(size))


@pytest.mark.parametrize("size", [6, 7, 12, 30, 64, 70])
def test_examples_and_ordered_pairs_are_equally_likely(drawn: Permutation, size: int) -> None:
    # Neighbours, ends and the middle.
    position = jnp.array([0, 1, 2, 3, 4, size // 2, size - 2, size - 1])
    image = np.asarray(images(drawn, position, size))
    for column in image.T:
        assert_uniform(column, size)
    for first, second in [(0, 1), (0, 2), (0, 4), (1, 2), (0, 5), (0, 7), (6, 7)]:
        if position[first] != position[second]:
            assert_uniform(image[:, [first, second]], perm(size, 2))


@pytest.mark.parametrize("size", [0, 1, 2, 1_000_000, 2**31 - 1])
def test_images_lie_inside_whatever_the_position(drawn: Permutation, size: int) -> None:
    position = jnp.array([-(2**31), -1, size - 1, size, 2**31 - 1, 0, 1, size // 2])
    image = np.asarray(images(drawn, position, size))
    assert 0 <= image.min() <= image.max() <= max(size - 1, 0)
    if size > 2:
        assert image[:, 0].max() > size / 2  # spread over all of the range
        inside = image[:, [2, 5, 6, 7]]
        assert (np.diff(np.sort(inside), axis=1) > 0).all()
