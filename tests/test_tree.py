import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federations import assert_equal
from fedjax_inv import tree


def a_tree(rng: np.random.Generator, length: int) -> dict:
    return {
        "a": jnp.asarray(rng.normal(size=(length, 2, 3)), jnp.float32),
        "b": (jnp.asarray(rng.integers(0, 9, length), jnp.int32),),
    }


@given(seed=st.integers(0, 99), length=st.sampled_from([1, 4]))
def test_take_and_put_follow_numpy(seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    old, new = a_tree(rng, length), a_tree(rng, 3)
    # Past the end: written nowhere.
    index = np.concatenate([rng.permutation(length)[:2], [length]])[:3]
    values = tree.take(new, slice(len(index)))
    expected = jax.tree.map(np.array, old)
    for i, at in enumerate(index):
        if at < length:
            expected["a"][at], expected["b"][0][at] = values["a"][i], values["b"][0][i]
    got = tree.put(old, jnp.asarray(index), values)
    assert_equal(got, expected)
    assert_equal(tree.take(got, 0), jax.tree.map(lambda leaf: leaf[0], expected))


@pytest.mark.parametrize("leading", [(), (4,)])
def test_select_broadcasts_over_trailing_axes(leading: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    first, second = a_tree(rng, 4), a_tree(rng, 4)
    for condition in (rng.random(leading) < 0.5, np.ones(leading, bool), np.zeros(leading, bool)):
        got = tree.select(jnp.asarray(condition), first, second)
        for a, b, c in zip(*map(jax.tree.leaves, (first, second, got)), strict=True):
            expected = [
                x if flag else y
                for flag, x, y in zip(np.broadcast_to(condition, 4), a, b, strict=True)
            ]
            assert_equal(c, jnp.stack(expected))


@given(seed=st.integers(0, 99), length=st.sampled_from([1, 4]))
def test_weighted_sum_is_a_loop(seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    values, weights = a_tree(rng, length), rng.integers(0, 5, length)
    got = tree.weighted_sum(values, jnp.asarray(weights))
    for leaf, summed in zip(jax.tree.leaves(values), jax.tree.leaves(got), strict=True):
        expected = sum(w * np.asarray(v, np.float64) for w, v in zip(weights, leaf, strict=True))
        np.testing.assert_allclose(summed, expected, rtol=1e-5, atol=1e-5)
        assert summed.dtype == leaf.dtype


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite(bad: float) -> None:
    good = {"a": jnp.ones((2, 3)), "b": jnp.ones(2, jnp.int32)}
    assert tree.all_finite(good)
    assert not tree.all_finite({**good, "a": good["a"].at[1, 2].set(bad)})
    assert tree.all_finite({})
