import jax
import jax.numpy as jnp
import numpy as np
import pytest

from federations import assert_equal
from fedjax_inv import platforms, tree


def a_tree(rng: np.random.Generator, length: int) -> dict:
    return {
        "a": rng.normal(size=(length, 2, 3)).astype(np.float32),
        "b": (rng.integers(0, 9, length).astype(np.int32),),
    }


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("length", [1, 3, 4])
def test_take_and_put_follow_numpy(length: int, platform: str) -> None:
    rng, put = np.random.default_rng(length), jax.jit(lambda *args: tree.put(*args))
    for _ in range(10):
        old, new = a_tree(rng, length), a_tree(rng, 3)
        # An index one past the end, and one far beyond, write nothing.
        index = rng.permutation(np.concatenate([rng.permutation(length)[:2], [length, 99]])[:3])
        values = tree.take(new, slice(len(index)))
        expected = jax.tree.map(np.array, old)
        for i, at in enumerate(index):
            if at < length:
                expected["a"][at], expected["b"][0][at] = values["a"][i], values["b"][0][i]
        with platforms.traced_for(platform):
            got = put(old, index, values)
        assert_equal(got, expected)
        assert_equal(tree.take(got, 0), {"a": expected["a"][0], "b": (expected["b"][0][0],)})
    assert tree.put((), index, ()) == ()


@pytest.mark.parametrize("length", [1, 4])
def test_weighted_sum_is_a_loop(length: int) -> None:
    rng, weighted_sum = np.random.default_rng(length), jax.jit(tree.weighted_sum)
    for _ in range(10):
        values, weights = a_tree(rng, length), rng.integers(0, 5, length)
        got = weighted_sum(values, weights)
        for leaf, summed in zip(jax.tree.leaves(values), jax.tree.leaves(got), strict=True):
            terms = (w * v.astype(np.float64) for w, v in zip(weights, leaf, strict=True))
            np.testing.assert_allclose(summed, sum(terms), rtol=1e-5, atol=1e-5)
            assert summed.dtype == jnp.float32


def test_a_weighted_sum_of_whole_numbers_and_booleans_is_no_whole_number() -> None:
    values = {"whole": jnp.array([200, 250], jnp.uint8), "is": jnp.array([True, False])}
    got = tree.weighted_sum(values, jnp.array([0.25, 0.75]))
    assert jax.tree.map(float, got) == {"whole": 237.5, "is": 0.25}


def test_all_finite() -> None:
    all_finite = jax.jit(tree.all_finite)
    good = {"a": np.ones((2, 3), np.float32), "b": np.ones(2, np.int32)}
    assert all_finite(good)
    for bad in (np.nan, np.inf, -np.inf):
        a = good["a"].copy()
        a[1, 2] = bad
        # Beside another leaf of its shape, before it and behind it.
        for where in ("a", "0", "z"):
            assert not all_finite({**good, where: a})
    assert tree.all_finite({})


def test_a_part_of_a_tree_is_replaced() -> None:
    whole = {"a": 1.0, "b": (2.0, 3.0), "c": 4.0}
    put = tree.replacing(lambda one: (one["c"], one["b"][0]), whole)
    assert put((5.0, 6.0)) == {"a": 1.0, "b": (6.0, 3.0), "c": 5.0}


def test_real_rows_come_first_in_their_order() -> None:
    rows = {"x": jnp.arange(1, 5.0), "y": jnp.ones((4, 2))}
    real = jnp.array([False, True, False, True])
    for size in (2, 3, 6):
        got = tree.compact(rows, real, size)
        np.testing.assert_array_equal(got["x"], [2, 4, 0, 0, 0, 0][:size])
        np.testing.assert_array_equal(got["y"].sum(1), [2, 2, 0, 0, 0, 0][:size])
