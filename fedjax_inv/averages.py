"""Averages of examples: clients send means of their inputs and labels, the server passes them on.

    x_bar = (1 / n) sum of x over a random chunk of n examples, y_bar that of their one-hot labels

What FedCFA and FedMix know of the clients that are not at hand. Two ways to combine them, by name:

- "pool": a chunk has a fixed number of examples, and the server keeps the rows of the round's
  clients side by side.
- "paper": a client of N examples cuts them into B chunks of floor(N / B), and the server makes B
  rows of the clients' rows by the same method (Jiang et al. 2025, "FedCFA", Eq. 3 and 4).

Rows are made anew in every round and replaced by those of the next. A row of a client without an
example in it is not real, and zeros; a "pool" row may be of few examples, in the extreme of one.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import aggregators, averaging, checks, local, models, permutation, tree
from fedjax_inv.checks import UsageError
from fedjax_inv.models.blocks import unit_range
from fedjax_inv.types import Array, Model, Setup, Shard, Trained, Tree, Visit

COMBINING = ("pool", "paper")


class Averages(NamedTuple):
    """Mean examples, the real ones first."""

    x: Tree  # [A, ...] mean inputs
    y: Array  # [A, K] mean one-hot labels
    real: Array  # [A] bool; the other rows are zeros


class Kept(NamedTuple):
    """What the server keeps."""

    averages: Averages
    seed: Array  # [] uint32, of the key that shuffles next


class _Sums(NamedTuple):
    x: Tree  # [A, ...]
    y: Array  # [A, K]
    size: Array  # [A] examples


def as_numbers(x: Tree) -> Array:
    """Inputs as they are averaged: 8-bit images in [0, 1], else as they are, in floating point.

    Raises ValueError for others: a mean of word numbers, or of what a picture is drawn from, means
    nothing to a network.
    """
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(x)):
        raise UsageError(
            "inputs: are a tree of arrays; must be one array, such as rendered images, to average"
        )
    numbers = unit_range(x)
    if not jnp.issubdtype(numbers.dtype, jnp.floating):
        raise UsageError(
            f"inputs: are {numbers.dtype}; must be 8-bit images or in floating point to average, "
            "or `inputs` must make such of them, as models.word_weights does of words"
        )
    return numbers


def _sums(x: Tree, y: Array, group: Array, rows: int) -> _Sums:
    """Sums over the examples of each group [N] in 0..rows - 1; others must be finite."""
    member = group == jnp.arange(rows)[:, None]

    def total(values: Array) -> Array:
        return jnp.tensordot(member.astype(values.dtype), values, 1, precision="highest")

    return _Sums(jax.tree.map(total, x), total(y), member.sum(1))


def _means(sums: _Sums) -> Averages:
    def mean(total: Array) -> Array:
        size = jnp.maximum(sums.size, 1).astype(total.dtype)
        return total / size.reshape(-1, *(1,) * (total.ndim - 1))

    return Averages(jax.tree.map(mean, sums.x), mean(sums.y), sums.size > 0)


def _split(x: Tree, y: Array, mask: Array, key: Array, rows: int, length: Array | int) -> Averages:
    """Means of the first `rows` chunks of `length` real examples each, in a random order."""
    rank = jnp.cumsum(mask) - 1
    place = permutation.at(permutation.draw(key), rank, mask.sum())
    group = jnp.where(mask & (place < rows * length), place // jnp.maximum(length, 1), rows)

    def cleared(leaf: Array) -> Array:
        return jnp.where(mask.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0)

    return _means(_sums(jax.tree.map(cleared, x), cleared(y), group, rows))


def chunk_means(x: Tree, y: Array, mask: Array, key: Array, chunk: int) -> Averages:
    """Means of random chunks of the real examples: (x [A, ...], y [A, K], real [A]).

    x: [N, ...] in floating point. y: [N, K], one-hot or mean labels. mask: [N] bool. A is
    ceil(N / chunk); of n real examples ceil(n / chunk) rows are real, the last of them the mean of
    what is left over. Raises ValueError for a chunk below 1.
    """
    checks.integer("chunk", chunk)
    return _split(x, y, mask, key, -(-mask.shape[0] // chunk), chunk)


def split_means(x: Tree, y: Array, mask: Array, key: Array, rows: int) -> Averages:
    """Means of `rows` random chunks of equal size: (x [A, ...], y [A, K], real [A]), A = rows.

    As `chunk_means`, but of n real examples each chunk has floor(n / rows), the rest is left out,
    and fewer than `rows` examples give no row (Eq. 4). Raises ValueError for rows below 1.
    """
    checks.integer("rows", rows)
    return _split(x, y, mask, key, rows, mask.sum() // rows)


def of_shard(
    shard: Shard,
    key: Array,
    *,
    num_classes: int,
    rows: int,
    length: Array | int,
    batch_size: int,
    inputs: Callable[[Tree], Tree] = as_numbers,
) -> Averages:
    """Means of the first `rows` chunks of `length` examples, of a client's in a random order.

    The last real row is the mean of what is left over. The examples that count are read batch by
    batch, so that memory is that of one batch.
    """
    used = jnp.minimum(shard.size, rows * length)
    order = permutation.draw(key)

    def of_batch(number: Array) -> _Sums:
        place = number * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        batch = local.take_batch(shard, permutation.at(order, place, shard.size), place < used)
        group = jnp.where(batch.mask, place // jnp.maximum(length, 1), rows)
        return _sums(inputs(batch.x), jax.nn.one_hot(batch.y, num_classes), group, rows)

    shapes = jax.eval_shape(of_batch, jnp.int32(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    sums = jax.lax.fori_loop(
        0, -(-used // batch_size), lambda i, sums: optax.tree.add(sums, of_batch(i)), zeros
    )
    return _means(sums)


def draw(averages: Averages, key: Array, num: int) -> tuple[Tree, Array]:
    """(x [num, ...], y [num, K]) of rows drawn with replacement; zeros where none is real."""
    row = jax.random.randint(key, (num,), 0, jnp.maximum(averages.real.sum(), 1))
    return tree.take((averages.x, averages.y), row)


def exchanged(
    model: Model,
    *,
    combining: str = "pool",
    rows: int = 16,
    chunk: int = 128,
    inputs: Callable[[Tree], Tree] = as_numbers,
) -> averaging.SideState:
    """The exchange of averages beside the network: a client's message holds `Averages`.

    Before the first round nothing of them is real. model: a classifier; its outputs tell K, and
    what it sees of stored inputs, as rendered images, is what is averaged.
    combining: "pool" or "paper". rows: of a client's averages, with "pool" at most so many, with
    "paper" exactly, the paper's B, or none of a client with fewer examples. chunk: with "pool" the
    examples of a row, else only how many are read at once. inputs: what of seen inputs
    [B, ...] is averaged; the model must take that too.

    With "pool" the server keeps rows for all C clients, C rows in all; they are in the order of
    clients, so that the order of slots decides nothing. Raises ValueError for an argument that is
    not allowed, and before the first round for inputs that cannot be averaged.
    """
    checks.one_of("combining", combining, COMBINING)
    checks.integer("rows", rows)
    checks.integer("chunk", chunk)
    pools = combining == "pool"

    def averaged(x: Tree) -> Tree:
        return inputs(model.see(x))

    def init(setup: Setup) -> Kept:
        x = jax.eval_shape(averaged, setup.sample)
        outputs = jax.eval_shape(
            lambda variables, x: models.predict(model, variables, x), setup.variables, setup.sample
        )
        num_rows = setup.num_clients * rows if pools else rows
        empty = Averages(
            jax.tree.map(lambda leaf: jnp.zeros((num_rows, *leaf.shape[1:]), leaf.dtype), x),
            jnp.zeros((num_rows, outputs.shape[-1])),
            jnp.zeros(num_rows, bool),
        )
        # Not a key, as checkpoints hold numbers.
        return Kept(empty, jax.random.bits(setup.key, dtype=jnp.uint32))

    def upload(visit: Visit, trained: Trained) -> Averages:
        del trained
        return of_shard(
            visit.shard,
            jax.random.fold_in(visit.key, 1),
            num_classes=visit.message.side.y.shape[1],
            rows=rows,
            length=chunk if pools else visit.shard.size // rows,
            batch_size=chunk,
            inputs=averaged,
        )

    def update(kept: Kept, sent: aggregators.Stack) -> Kept:
        key, shuffle = jax.random.split(jax.random.key(kept.seed))
        # By client, not by slot; who is absent sent nothing real, and stands last. By counting, as
        # a sort is slow on accelerators.
        who = jnp.where(sent.present, sent.who, np.iinfo(np.int32).max)
        is_before = who < who[:, None]
        index = jnp.arange(who.shape[0])
        is_before |= (who == who[:, None]) & (index < index[:, None])
        by_client = tree.put(optax.tree.zeros_like(sent.values), is_before.sum(1), sent.values)
        x, y, real = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), by_client)
        if pools:
            place = jnp.where(real, jnp.cumsum(real) - 1, kept.averages.real.shape[0])
            empty = optax.tree.zeros_like(kept.averages)
            averages = tree.put(empty, place, Averages(x, y, real))
        else:
            averages = split_means(x, y, real, shuffle, rows)
        return Kept(averages, jax.random.bits(key, dtype=jnp.uint32))

    return averaging.SideState(
        init=init,
        send=lambda kept: kept.averages,
        upload=upload,
        aggregate=aggregators.stacked(),
        update=update,
    )
