import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federations import assert_close, assert_equal
from fedjax_inv import aggregators, tree
from fedjax_inv.types import Aggregator, Slots, Tree

ALL = [aggregators.weighted_mean, aggregators.mean, aggregators.total, aggregators.stacked]


def cohort(rng: np.random.Generator, num_slots: int) -> tuple[Tree, Slots]:
    """Uploads of a cohort, zero where absent, and their slots."""
    present = rng.random(num_slots) < 0.6
    uploads = {
        "a": rng.normal(size=(num_slots, 2, 3)).astype(np.float32),
        "b": rng.normal(size=num_slots).astype(np.float32),
    }
    uploads["a"][~present], uploads["b"][~present] = 0, 0
    slots = Slots(
        np.arange(num_slots, dtype=np.int32),
        rng.permutation(20)[:num_slots].astype(np.int32),
        present,
        rng.integers(1, 9, num_slots).astype(np.int32),
    )
    return jax.tree.map(jnp.asarray, (uploads, slots))


def folded(aggregator: Aggregator, uploads: Tree, slots: Slots, cuts: list[int]) -> Tree:
    """The accumulator after chunks that end at `cuts`; the last slots come first."""
    num_slots = len(slots.who)
    accumulator = aggregator.init(tree.take(uploads, 0), num_slots)
    ends = sorted({0, num_slots, *(cut % num_slots for cut in cuts)})
    for start, end in reversed(list(itertools.pairwise(ends))):
        chunk = tree.take((uploads, slots), slice(start, end))
        accumulator = aggregator.add(accumulator, *chunk)
    return accumulator


cohorts = given(
    seed=st.integers(0, 999),
    num_slots=st.sampled_from([1, 5]),
    cuts=st.lists(st.integers(0, 4), max_size=3),
)


@cohorts
def test_means_and_total_follow_numpy(seed: int, num_slots: int, cuts: list[int]) -> None:
    uploads, slots = cohort(np.random.default_rng(seed), num_slots)
    present = np.asarray(slots.present, np.float64)
    for make, weights in (
        (aggregators.weighted_mean, present * slots.size / max(1, (present * slots.size).sum())),
        (aggregators.mean, present / max(1, present.sum())),
        (aggregators.total, present),
    ):
        aggregator = make()
        got = aggregator.finish(folded(aggregator, uploads, slots, cuts))
        expected = jax.tree.map(partial(np.einsum, "s,s...->...", weights), uploads)
        assert_close(got, expected, rtol=1e-5, atol=1e-6)


@cohorts
def test_stacked_keeps_the_order_of_slots(seed: int, num_slots: int, cuts: list[int]) -> None:
    uploads, slots = cohort(np.random.default_rng(seed), num_slots)
    # A slot that pads a chunk: zeros, position 0 included.
    padded = jax.tree.map(
        lambda a: jnp.pad(a, [(0, 1)] + [(0, 0)] * (a.ndim - 1)), (uploads, slots)
    )
    aggregator = aggregators.stacked()
    accumulator = folded(aggregator, uploads, slots, cuts)
    accumulator = aggregator.add(accumulator, *tree.take(padded, slice(num_slots, None)))
    stack = aggregator.finish(accumulator)
    assert_equal(stack.values, uploads)
    assert_equal(stack.present, slots.present)
    assert_equal(stack.who, jnp.where(slots.present, slots.who, 0))
    assert_equal(stack.size, jnp.where(slots.present, slots.size, 0))


@pytest.mark.parametrize("make", ALL)
@given(seed=st.integers(0, 999))
def test_accumulators_of_disjoint_slots_add_up(make: Callable[[], Aggregator], seed: int) -> None:
    """The law that lets devices fold their own slots."""
    rng, num_slots = np.random.default_rng(seed), 5
    uploads, slots = cohort(rng, num_slots)
    aggregator = make()
    zero = aggregator.init(tree.take(uploads, 0), num_slots)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(zero))
    cut = int(rng.integers(1, num_slots))
    parts = [tree.take((uploads, slots), part) for part in (slice(cut), slice(cut, None))]
    first, second = (aggregator.add(zero, *part) for part in parts)
    together = jax.tree.map(lambda a, b: (a + b).astype(a.dtype), first, second)
    assert_close(together, aggregator.add(zero, uploads, slots), rtol=1e-5, atol=1e-6)


def test_combine_takes_a_prefix_of_the_upload() -> None:
    uploads, slots = cohort(np.random.default_rng(0), 5)
    upload = {"mean": uploads, "rest": {"total": uploads["a"], "stack": uploads["b"]}}
    parts = {
        "mean": aggregators.weighted_mean(),
        "rest": {"total": aggregators.total(), "stack": aggregators.stacked()},
    }
    combined = aggregators.combine(parts)
    got = combined.finish(folded(combined, upload, slots, [2]))

    def alone(aggregator: Aggregator, uploads: Tree) -> Tree:
        return aggregator.finish(folded(aggregator, uploads, slots, [2]))

    assert_equal(got["mean"], alone(aggregators.weighted_mean(), uploads))
    assert_equal(got["rest"]["total"], alone(aggregators.total(), uploads["a"]))
    assert_equal(got["rest"]["stack"], alone(aggregators.stacked(), uploads["b"]))


@pytest.mark.parametrize("make", ALL)
def test_nobody_gives_zeros(make: Callable[[], Aggregator]) -> None:
    uploads, slots = cohort(np.random.default_rng(0), 4)
    uploads = jax.tree.map(jnp.zeros_like, uploads)
    slots = slots._replace(present=jnp.zeros(4, bool))
    aggregator = make()
    for leaf in jax.tree.leaves(aggregator.finish(folded(aggregator, uploads, slots, [2]))):
        np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))
