"""A random order of n examples, without an array of length n; and the ranks of scores.

In round r, x and its partner (K_r - x) mod n change places iff a hash of the larger of the two,
keyed by the round, has its top bit set. This is the swap-or-not shuffle of Hoang, Morris & Rogaway
2012, "An Enciphering Scheme Based on a Card Shuffle". Deviations: we need statistics, not secrecy,
so there are few rounds, and the hash is two keyed multiplications instead of a block cipher; K_r is
a word of 32 bits mod n, hence some shifts are likelier than others by 1 in floor(2^32 / n).
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from fedjax_inv import platforms, tree
from fedjax_inv.types import Array

# With ideal rounds and n <= 7, the chi-square distance of the distribution of all n! orders from
# the uniform one is at most 4e-10 after 24 rounds, but 4e-3 after 8. For large n, two examples keep
# their distance only if every round moves both or neither, which has probability 2^-24.
_ROUNDS = 24


class Permutation(NamedTuple):
    """A bijection of 0..n-1 for every n; stacked, it has one row for each epoch."""

    shift: Array  # [24] uint32, K before it is reduced mod n
    before: Array  # [24] uint32, key of the hash before its first multiplication
    after: Array  # [24] uint32, key of the hash after its first multiplication


def draw(key: Array) -> Permutation:
    """Draw a permutation uniformly, up to the deviations in the docstring of this module."""
    return Permutation(*jax.random.bits(key, (3, _ROUNDS), jnp.uint32))


def at(permutation: Permutation, position: Array, size: Array) -> Array:
    """Return the images [B] int32 of positions [B] under a permutation of 0..size-1 from `draw`.

    A position outside counts as the nearest one inside. All images are 0 if size [] is 0.
    """
    position = jnp.clip(position, 0, jnp.maximum(size, 1) - 1).astype(jnp.uint32)
    size = jnp.maximum(size, 1).astype(jnp.uint32)

    def swap_or_not(x: Array, constants: Permutation) -> tuple[Array, None]:
        shift, before, after = constants
        # The sum lies in 0..size-1, so partial sums may wrap around.
        partner = shift - x + jnp.where(x > shift, size, 0)
        # With one multiplication, the swaps of different pairs in a round would correlate.
        mixed = (jnp.maximum(x, partner) ^ before) * jnp.uint32(0x7FEB352D)
        mixed = (mixed ^ (mixed >> 15) ^ after) * jnp.uint32(0x846CA68B)
        return jnp.where(mixed >> 31 == 1, partner, x), None

    reduced = permutation._replace(shift=permutation.shift % size)
    # On a CPU a loop: XLA would fuse unrolled rounds into the gather that reads the examples, and
    # compute them again for every feature. On accelerators each turn of a loop is a launch.
    unroll = not platforms.on_cpu()
    image, _ = jax.lax.scan(swap_or_not, position, reduced, unroll=unroll)
    return image.astype(jnp.int32)


def ranks(scores: Array) -> Array:
    """Return the rank of each score in its row [B, F], from 0 for the lowest, int32.

    Among equal scores, as -0 and 0 are, the left one ranks lower.
    """
    chex.assert_rank(scores, 2)
    index = jnp.arange(scores.shape[1], dtype=jnp.int32)
    order = _as_integers(scores)
    if platforms.on_cpu():  # 4 to 15 times as fast as two of XLA's top_k, of 64 to 390 scores

        def count(rank: Array, at: Array) -> tuple[Array, None]:
            other = jax.lax.dynamic_slice_in_dim(order, at, 1, axis=1)
            return rank + (other < order + (at < index)), None  # an equal one to the left, too

        rank, _ = jax.lax.scan(count, jnp.zeros(scores.shape, jnp.int32), index, unroll=8)
        return rank
    if platforms.on_gpu():  # a sort of short rows is one kernel, a tenth of the work of counting
        places = jnp.broadcast_to(index, scores.shape)
        _, by_score = jax.lax.sort((order, places), num_keys=2)
        return jax.lax.sort((by_score, places), num_keys=1)[1]
    one, other = order[:, :, None], order[:, None, :]
    is_lower = (other < one) | ((other == one) & (index < index[:, None]))
    return is_lower.sum(-1, dtype=jnp.int32)


def _as_integers(numbers: Array) -> Array:
    """Integers in the order of floating-point numbers, and equal where they are, as -0 and 0."""
    numbers = tree.wide(jnp.asarray(numbers))  # NumPy's float64 would name another integer
    integer = jnp.dtype(f"int{8 * numbers.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(jnp.where(numbers == 0, 0, numbers), integer)
    # Of negative numbers larger bits mean smaller numbers.
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)
