"""Averages of examples: clients send means of their inputs and labels, the server passes them on.

    x_bar = (1 / n) sum of x over a random chunk of n examples, y_bar the same of one-hot labels

In FedCFA and FedMix a client sees other clients' data only as these averages. A row is one mean
example. There are two ways to combine the rows of several clients:

- "pool": a chunk has a fixed number of examples, and the server keeps the rows of the round's
  clients side by side.
- "paper": a client with N examples cuts them into B chunks of floor(N / B), and the server combines
  the clients' rows into B rows in the same way (Jiang et al. 2025, "FedCFA", Eq. 3 and 4).

Each round replaces the rows of the last one. A row without an example is zeros and not real; a
"pool" row may be the mean of few examples, even of one.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import aggregators, averaging, checks, keys, local, models, permutation, tree, types
from fedjax_inv.checks import UsageError
from fedjax_inv.models.blocks import unit_range
from fedjax_inv.types import Array, Tree

COMBINING = ("pool", "paper")
_READ_AT_ONCE = 128  # examples, of a client
_MOST = 2**31 - 1  # examples that an int32 can count


class MeanExamples(NamedTuple):
    """Mean examples, the real ones first."""

    x: Tree  # [A, ...] mean inputs
    y: Array  # [A, K] mean targets, of one-hot classes
    real: Array  # [A] bool; the other rows are zeros


class Pool(NamedTuple):
    """The state of the server."""

    averages: MeanExamples
    seed: Array  # [] uint32, seed of the key for the next shuffle


class _Sums(NamedTuple):
    x: Tree  # [A, ...]
    y: Array  # [A, K]
    size: Array  # [A] examples


def as_numbers(x: Tree) -> Array:
    """Return inputs [B, ...] in floating point, for averaging: 8-bit images in [0, 1].

    Those of 16 bits become float32, as the sum of many would overflow or lose its last digits.
    """
    is_array = jax.tree_util.treedef_is_leaf(jax.tree.structure(x))
    if not is_array or not jnp.issubdtype(unit_range(x).dtype, jnp.floating):
        text = "are no images and no floating-point numbers, which alone have a mean"
        raise UsageError("inputs", ..., f"{text}; `mixable` must make such numbers of them")
    return tree.wide(unit_range(x))


def _sums(x: Tree, y: Array, group: Array, rows: int) -> _Sums:
    """Sums over the examples of each group [N] in 0..rows - 1; all examples must be finite."""
    member = group == jnp.arange(rows)[:, None]

    def total(values: Array) -> Array:
        return jnp.tensordot(member.astype(values.dtype), values, 1, precision="highest")

    return _Sums(jax.tree.map(total, x), total(y), member.sum(1))


def _means(sums: _Sums) -> MeanExamples:
    def mean(total: Array) -> Array:
        size = jnp.maximum(sums.size, 1).astype(total.dtype)
        return total / size.reshape(-1, *(1,) * (total.ndim - 1))

    return MeanExamples(jax.tree.map(mean, sums.x), mean(sums.y), sums.size > 0)


def _split(
    x: Tree, y: Array, mask: Array, key: Array, rows: int, length: Array | int
) -> MeanExamples:
    """Means of the first `rows` chunks of `length` real examples each, in a random order."""
    chex.assert_equal_shape_prefix([*jax.tree.leaves(x), y, mask], 1)
    chex.assert_rank([y, mask], [2, 1])
    chex.assert_type(jax.tree.leaves(x), float)
    rank = jnp.cumsum(mask) - 1
    place = permutation.at(permutation.draw(key), rank, mask.sum())
    group = jnp.where(mask & (place < rows * length), place // jnp.maximum(length, 1), rows)

    def cleared(leaf: Array) -> Array:
        return jnp.where(mask.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0)

    return _means(_sums(jax.tree.map(cleared, x), cleared(y), group, rows))


def chunk_means(x: Tree, y: Array, mask: Array, key: Array, chunk: int) -> MeanExamples:
    """Return means of random chunks of the real examples.

    Args:
      x: inputs [N, ...] in floating point.
      y: one-hot or mean labels [N, K].
      mask: [N] bool, which examples are real.
      key: the random key of the order.
      chunk: examples in a chunk.

    Returns:
      (x [A, ...], y [A, K], real [A]), A = ceil(N / chunk). With n real examples, ceil(n / chunk)
      rows are real, and the last of them is the mean of the remaining examples.
    """
    return _split(x, y, mask, key, -(-mask.shape[0] // chunk), chunk)


def split_means(x: Tree, y: Array, mask: Array, key: Array, rows: int) -> MeanExamples:
    """Return means of `rows` random chunks of equal size (Eq. 4); other arguments: `chunk_means`.

    Returns:
      (x [A, ...], y [A, K], real [A]), A = rows. Each chunk has floor(n / rows) of the n real
      examples, and the rest is left out; with fewer than `rows` examples no row is real.
    """
    return _split(x, y, mask, key, rows, mask.sum() // rows)


def columns(y: Array, num_columns: int) -> Array:
    """Return targets as numbers whose means make sense, [B, K] float32.

    They are classes [B], which become one-hot, labels or values [B, K], or values [B].
    """
    if jnp.issubdtype(y.dtype, jnp.integer):
        chex.assert_rank(y, 1)
        return jax.nn.one_hot(y, num_columns)
    y = y[:, None] if y.ndim == 1 else y
    chex.assert_shape(y, (None, num_columns))
    return y.astype(jnp.float32)


def of_shard(
    shard: types.Shard,
    key: Array,
    *,
    num_classes: int,
    rows: int,
    length: Array | int,
    batch_size: int,
    mixable: Callable[[Tree], Tree] = as_numbers,
) -> MeanExamples:
    """Return means of the first `rows` chunks of a client's examples, in a random order.

    They are (x [A, ...], y [A, K], real [A]), A = rows; the last real row is the mean of the
    remaining examples, of which only the first rows * length count. The examples are read in
    batches, so that memory is needed for one batch. `num_classes` is K, of classes, labels or
    values (`columns`); `length` [] are the examples in a chunk; `mixable` makes of stored inputs
    [B, ...] those to average.
    """
    most = rows * length if isinstance(length, Array) else min(rows * length, _MOST)
    used = jnp.minimum(shard.size, most)
    order = permutation.draw(key)

    def of_batch(number: Array) -> _Sums:
        place = number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        batch = local.take_batch(shard, permutation.at(order, place, shard.size), place < used)
        group = jnp.where(batch.mask, place // jnp.maximum(length, 1), rows)
        return _sums(mixable(batch.x), columns(batch.y, num_classes), group, rows)

    shapes = jax.eval_shape(of_batch, jnp.int32(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    sums = jax.lax.fori_loop(
        0, -(-used // batch_size), lambda i, sums: optax.tree.add(sums, of_batch(i)), zeros
    )
    return _means(sums)


def draw(averages: MeanExamples, key: Array, num: int) -> tuple[Tree, Array]:
    """Return (x [num, ...], y [num, K]) of rows drawn with replacement; zeros if none is real."""
    row = jax.random.randint(key, (num,), 0, jnp.maximum(averages.real.sum(), 1))
    return tree.take((averages.x, averages.y), row)


def side_state(
    model: types.Model,
    *,
    combining: str = "pool",
    rows: int = 16,
    chunk: int = 128,
    mixable: Callable[[Tree], Tree] = as_numbers,
) -> averaging.SideState:
    """Return the state and messages that exchange means: the server sends clients `MeanExamples`.

    Before the first round no row is real. With "pool" the server has room for `rows` rows of each
    of C clients. They lie in the order of clients, so that the order of slots does not matter.

    Args:
      model: a classifier; its outputs give K, and its preprocessed inputs are averaged.
      combining: "pool" or "paper".
      rows: rows that a client sends: with "pool" at most this number; with "paper" exactly this
        number (the paper's B), or none if the client has fewer examples.
      chunk: with "pool" the examples of a row; with "paper" the examples that are read at once.
      mixable: preprocessed inputs [B, ...] -> the inputs to average, which the model must accept.
    """
    checks.one_of("combining", combining, COMBINING)
    checks.integer("rows", rows)
    checks.integer("chunk", chunk)
    pools = combining == "pool"

    def averaged(x: Tree) -> Tree:
        return mixable(model.preprocess(x))

    def upload(visit: types.Visit, trained: types.Trained) -> MeanExamples:
        del trained
        return of_shard(
            visit.shard,
            keys.stream(visit.key, "mean examples"),
            num_classes=visit.message.side.y.shape[1],
            rows=rows,
            length=chunk if pools else visit.shard.size // rows,
            batch_size=min(chunk, _READ_AT_ONCE) if pools else chunk,
            mixable=averaged,
        )

    def update(pool: Pool, sent: aggregators.Stack, delta: types.Variables) -> Pool:
        del delta
        key, shuffle = jax.random.split(jax.random.key(pool.seed))
        sent_rows = _by_client(sent)
        if pools:
            averages = tree.compact(sent_rows, sent_rows.real, len(pool.averages.real))
        else:
            averages = split_means(*sent_rows, shuffle, rows)
        return Pool(averages, jax.random.bits(key, dtype=jnp.uint32))

    return averaging.SideState(
        init=lambda setup: _empty(
            setup, model, averaged, setup.num_clients * rows if pools else rows
        ),
        send=lambda pool: pool.averages,
        upload=upload,
        aggregate=aggregators.stacked(),
        update=update,
    )


def _empty(
    setup: types.Setup, model: types.Model, averaged: Callable[[Tree], Tree], num_rows: int
) -> Pool:
    """Return the state before the first round, with room for so many rows."""
    x = jax.eval_shape(averaged, setup.sample)
    outputs = jax.eval_shape(partial(models.predict, model), setup.variables, setup.sample)
    empty = MeanExamples(
        jax.tree.map(lambda leaf: jnp.zeros((num_rows, *leaf.shape[1:]), leaf.dtype), x),
        jnp.zeros((num_rows, outputs.shape[-1])),
        jnp.zeros(num_rows, bool),
    )
    # A seed instead of a key, as checkpoints store numbers.
    key = keys.stream(setup.key, "mean examples")
    return Pool(empty, jax.random.bits(key, dtype=jnp.uint32))


def _by_client(sent: aggregators.Stack) -> MeanExamples:
    """Return all rows, by client and not by slot; those of absent clients, not real, come last."""
    # By counting, as a sort is slow on accelerators.
    who = jnp.where(sent.present, sent.who, np.iinfo(np.int32).max)
    is_before = who < who[:, None]
    index = jnp.arange(who.shape[0])
    is_before |= (who == who[:, None]) & (index < index[:, None])
    by_client = tree.put(optax.tree.zeros_like(sent.values), is_before.sum(1), sent.values)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), by_client)
