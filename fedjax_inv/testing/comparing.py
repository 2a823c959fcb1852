"""Comparisons of trees of arrays, whose errors name the leaf that differs most."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv.types import Array, Tree


def plain(tree: Tree) -> Tree:
    """Return a tree on the host, with random keys as numbers."""

    def leaf(a: Array) -> np.ndarray:
        is_key = hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(a) if is_key else a)

    return jax.tree.map(leaf, tree)


def assert_equal(first: Tree, second: Tree) -> None:
    """Assert that two trees are equal bit for bit, except that 0 equals -0 and NaN equals NaN.

    Args:
      first: a tree of arrays.
      second: another one.

    Raises:
      AssertionError: if they differ.
    """
    assert_close(first, second, rtol=0, atol=0)


def assert_same_bits(first: Tree, second: Tree) -> None:
    """Assert that two trees are equal bit for bit: 0 is not -0, and a NaN equals itself.

    Args:
      first: a tree of arrays.
      second: another one.

    Raises:
      AssertionError: if they differ.
    """

    def bits(tree: Tree) -> Tree:
        return jax.tree.map(lambda a: np.frombuffer(a.tobytes(), np.uint8), plain(tree))

    assert_equal(first, second)  # which shows the difference
    assert_equal(bits(first), bits(second))


def assert_close(first: Tree, second: Tree, *, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    """Assert that two trees are equal up to sums taken in another order.

    In float32 the runs of this package's algorithms differ by rounding of 1e-9 to 4e-7 on the small
    federations of `check`, a hundredth of the default tolerances. A broken law (an ignored delay,
    another seed, a halved number) causes differences of 20 to 6,000 times the tolerances. So the
    defaults are far from both.

    If an algorithm fails: compare the largest difference with the same difference after the law is
    broken on purpose (let clients hear the newest broadcast, fold the slot into the key instead of
    the client). If they are a factor of 100 apart, the cause is rounding, which the configuration
    magnifies: by division by a small number (an epsilon of Adam or of a norm), or over many steps
    at a large rate. Tame the configuration first, with a larger epsilon or a smaller rate; then
    choose a tolerance in the geometric middle of the two. If they are of one size, the law is
    broken.

    Against a reference in float64, most of the difference is float32 itself: 1e-3 and 1e-4 for a
    few steps through a norm, else the defaults; a test that needs more precision runs under
    `jax.enable_x64`.

    Args:
      first: a tree of arrays.
      second: another one.
      rtol: the relative tolerance, of the values of `second`.
      atol: the absolute tolerance.

    Raises:
      AssertionError: if they differ.
    """
    first, second = plain(first), plain(second)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (first, second)]
    if structures[0] != structures[1]:
        raise AssertionError(f"the trees differ: {structures[0]} and {structures[1]}")
    worst, message = 0.0, ""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True
    ):
        name = jax.tree_util.keystr(path) or "the array"
        if a.shape != b.shape and a.ndim and b.ndim:
            raise AssertionError(f"{name} has shapes {a.shape} and {b.shape}")
        with np.errstate(invalid="ignore", over="ignore"):
            same = np.isclose(a, b, rtol, atol, equal_nan=True) if rtol or atol else _equal(a, b)
            if same.all():
                continue
            apart = np.where(same, 0, np.abs(a.astype(float) - b.astype(float)))
        apart = np.where(np.isfinite(apart), apart, np.inf)
        if not message or apart.max() > worst:
            place = np.unravel_index(apart.argmax(), apart.shape)
            values = (np.broadcast_to(array, apart.shape)[place] for array in (a, b))
            worst = float(apart.max())
            message = "{} differs by {:.3g} in {} of {} numbers: {:.6g} and {:.6g}".format(
                name, worst, (~same).sum(), same.size, *map(float, values)
            )
    if message:
        allowed = f" (allowed: {atol:g} + {rtol:g} of the value)" if rtol or atol else ""
        raise AssertionError(message + allowed)


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    both_nan = (a != a) & (b != b)
    return (a == b) | both_nan


def assert_finite(tree: Tree) -> None:
    """Assert that no leaf of a tree holds a NaN or an infinity; the error names the first."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(plain(tree)):
        if not np.isfinite(leaf).all():
            raise AssertionError(f"{jax.tree_util.keystr(path)} holds a NaN or an infinity")


def largest_difference(first: Tree, second: Tree) -> float:
    """Return the largest difference of two numbers at the same place of two trees."""
    leaves = zip(jax.tree.leaves(plain(first)), jax.tree.leaves(plain(second)), strict=True)
    return max(
        (float(np.abs(a.astype(float) - b.astype(float)).max(initial=0)) for a, b in leaves),
        default=0.0,
    )


def assert_same_shapes(name: str, before: Tree, after: Tree) -> None:
    """Assert that trees of arrays or shapes agree in structure, shapes and types.

    Args:
      name: what the trees are, for the error.
      before: a tree.
      after: another one.

    Raises:
      AssertionError: if they differ; it names the first leaf that does.
    """
    structures: list[Any] = [jax.tree.structure(each) for each in (before, after)]
    assert structures[0] == structures[1], f"{name} is {structures[1]}, must be {structures[0]}"
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        is_, must = (f"{each.dtype}{list(each.shape)}" for each in (new, old))
        assert is_ == must, f"{name}{jax.tree_util.keystr(path)} is {is_}, must be {must}"
