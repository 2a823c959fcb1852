import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from federations import assert_close, assert_equal
from fedjax_inv import aggregators, tree
from fedjax_inv.types import Aggregator, Array, Slots, Tree

COHORTS, S = 20, 5


def fresh(slots: Slots) -> Array:
    """Return a weight that falls with the delay; NaN for the delay of absent slots."""
    return jnp.where(slots.delay < 9, 0.5**slots.delay, jnp.nan)


MAKE: dict[str, Callable[[], Aggregator]] = {
    "by size": aggregators.mean,
    "uniform": lambda: aggregators.mean(aggregators.uniform),
    "fresh": lambda: aggregators.mean(fresh),
    "age": lambda: aggregators.mean(aggregators.by_age),
    "total": aggregators.total,
    "weights": lambda: aggregators.weight_sum(fresh),
    "count": aggregators.count,
    "stacked": aggregators.stacked,
    "tree": lambda: aggregators.combine({"a": aggregators.total(), "b": aggregators.stacked()}),
}
CUTS = (1, 4)  # where chunks of slots end; the last chunk is folded first


def cohorts(seed: int) -> tuple[Tree, Slots]:
    """Return uploads of many cohorts, zero if absent, and slots; nobody attends the last cohort."""
    rng = np.random.default_rng(seed)
    present = rng.random((COHORTS, S)) < 0.6
    present[-1] = False
    uploads = {
        "a": rng.normal(size=(COHORTS, S, 2, 3)) * present[..., None, None],
        "b": rng.normal(size=(COHORTS, S)) * present,
    }
    slots = Slots(
        np.tile(np.arange(S), (COHORTS, 1)),
        rng.permuted(np.tile(np.arange(1, 21), (COHORTS, 1)), axis=1)[:, :S],
        present,
        rng.integers(1, 9, (COHORTS, S)),
        np.where(present, rng.integers(0, 4, (COHORTS, S)), 9),
    )
    uploads = jax.tree.map(np.float32, uploads)
    return uploads, jax.tree.map(lambda a: a if a.dtype == bool else a.astype(np.int32), slots)


UPLOADS, SLOTS = cohorts(0)


@functools.cache
def folded(name: str, cuts: tuple[int, ...] = CUTS) -> tuple[Tree, Tree]:
    """Return the accumulator after the chunks and the aggregated upload of every cohort."""
    aggregator = MAKE[name]()

    def fold(uploads: Tree, slots: Slots) -> tuple[Tree, Tree]:
        accumulator = aggregator.init(tree.take(uploads, 0), S)
        for start, end in reversed(list(itertools.pairwise((0, *cuts, S)))):
            accumulator = aggregator.add(
                accumulator, *tree.take((uploads, slots), slice(start, end))
            )
        return accumulator, aggregator.finish(accumulator)

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(fold))(UPLOADS, SLOTS))


@pytest.mark.parametrize("name", ["by size", "uniform", "fresh", "age", "total"])
def test_means_and_total_follow_numpy(name: str) -> None:
    weights = {
        "by size": SLOTS.size,
        "uniform": np.ones((COHORTS, S)),
        "fresh": 0.5**SLOTS.delay,
        "age": 1 / np.sqrt(1.0 + SLOTS.delay),
        "total": np.ones((COHORTS, S)),
    }[name]
    weights = np.where(SLOTS.present, weights, 0).astype(np.float64)
    if name != "total":
        total = weights.sum(1, keepdims=True)
        weights = np.divide(weights, total, where=total > 0, out=np.zeros_like(weights))
    expected = jax.tree.map(lambda a: np.einsum("cs,cs...->c...", weights, a), UPLOADS)
    # If nobody attends, it is zeros.
    assert not weights[-1].any()
    expected = jax.tree.map(np.float32, expected)
    assert_close(folded(name)[1], expected, rtol=1e-5, atol=1e-6)


def test_whole_numbers_and_booleans_are_added_as_numbers() -> None:
    uploads = {"whole": jnp.array([200, 100, 250], jnp.uint8), "is": jnp.array([True, False, True])}
    ones = jnp.ones(3, jnp.int32)
    slots = Slots(jnp.arange(3), jnp.arange(3), ones > 0, jnp.array([1, 2, 1]), 0 * ones)

    def fold(aggregator: Aggregator) -> Tree:
        total = aggregator.init(tree.take(uploads, 0), 3)
        for start, end in itertools.pairwise((0, 1, 3)):
            added = aggregator.add(total, *tree.take((uploads, slots), slice(start, end)))
            assert [leaf.dtype for leaf in jax.tree.leaves(added)] == [
                leaf.dtype for leaf in jax.tree.leaves(total)
            ]
            total = added
        return jax.tree.map(float, aggregator.finish(total))

    assert fold(aggregators.mean()) == {"whole": 162.5, "is": 0.5}
    assert fold(aggregators.total()) == {"whole": 550, "is": 2}


def test_stacked_keeps_the_order_of_slots() -> None:
    stack = folded("stacked")[1]
    assert_equal(stack.values, UPLOADS)
    assert_equal(stack.present, SLOTS.present)
    assert_equal(stack.who, np.where(SLOTS.present, SLOTS.who, 0))
    assert_equal(stack.size, np.where(SLOTS.present, SLOTS.size, 0))


@pytest.mark.parametrize("name", MAKE)
def test_accumulators_of_disjoint_slots_add_up(name: str) -> None:
    """The law that lets devices fold their own slots."""
    aggregator = MAKE[name]()

    def both(uploads: Tree, slots: Slots) -> tuple[Tree, Tree]:
        zero = aggregator.init(tree.take(uploads, 0), S)
        parts = [tree.take((uploads, slots), part) for part in (slice(2), slice(2, None))]
        first, second = (aggregator.add(zero, *part) for part in parts)
        return zero, jax.tree.map(lambda a, b: (a + b).astype(a.dtype), first, second)

    zero, together = jax.jit(jax.vmap(both))(UPLOADS, SLOTS)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(zero))
    assert_close(together, folded(name, ())[0], rtol=1e-5, atol=1e-6)
