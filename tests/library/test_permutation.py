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
CLIENTS, EPOCHS = 2**15, 2


@jax.jit
def images(permutations: Permutation, positions: Array, size: Array) -> Array:
    return jax.vmap(permutation.at, (0, None, None))(permutations, positions, size)


def federation(seed: int, clients: int, epochs: int) -> Permutation:
    """Draw permutations [clients, epochs, ...] with keys as in local training."""

    def of_client(client: Array) -> Permutation:
        key = jax.random.fold_in(jax.random.key(seed), client)
        keys = jax.vmap(lambda epoch: jax.random.fold_in(key, epoch))(jnp.arange(epochs))
        return jax.vmap(permutation.draw)(keys)

    return jax.jit(jax.vmap(of_client))(jnp.arange(clients))


@pytest.fixture(scope="module")
def drawn() -> Permutation:
    """Return permutations [CLIENTS * EPOCHS, ...]; the epochs of a client are adjacent."""
    draws = federation(0, CLIENTS, EPOCHS)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), draws)


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


def test_every_epoch_visits_each_example_once() -> None:
    sizes = np.arange(71)
    in_epochs = jax.vmap(permutation.at, (0, None, None))
    in_clients = jax.jit(jax.vmap(in_epochs, (0, None, 0)))
    image = np.asarray(in_clients(federation(1, len(sizes), 3), jnp.arange(71), sizes))
    for size in sizes:
        in_order = np.tile(np.arange(size), (3, 1))
        np.testing.assert_array_equal(np.sort(image[size, :, :size]), in_order)


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
