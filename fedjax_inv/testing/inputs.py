"""The tiny federation, the schedule, the network and the local training of the laws."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import checks, local, models
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation as federations
from fedjax_inv.types import Array, Batch, Cohort, Examples, Federation, Model, Shard, Work

NUM_CLASSES = 3
IMAGE = (6, 6, 1)
SIZES = (4, 0, 1, 7, 5)
NUM_CLIENTS = len(SIZES)
NO_EXAMPLE, ONE_EXAMPLE, POISONED = 1, 2, 3  # clients
HISTORY = 3  # broadcasts kept, as the longest delay is two rounds
_FREE = 4  # examples that no client has


def federation(
    sizes: Sequence[int] = SIZES, *, seed: int = 0, data: Examples | None = None
) -> Federation:
    """Return clients of these sizes, by default with 8-bit images of three classes.

    The brightness of an image depends on its class. No client has the last four examples, nor the
    last 8 rows of the order.

    Args:
      sizes: examples of each client.
      seed: the seed of the draw.
      data: other examples, at least sum(sizes) + 4, of which the first are taken.

    Raises:
      UsageError: for fewer examples.
    """
    rng, number = np.random.default_rng(seed), sum(sizes) + _FREE
    if data is None:
        y = rng.integers(0, NUM_CLASSES, number)
        x = rng.integers(0, 120, (number, *IMAGE)) + 60 * y[:, None, None, None]
        data = federations.examples(x.astype(np.uint8), y.astype(np.int32))
    checks.record("data", data, Examples)
    if min(len(leaf) for leaf in jax.tree.leaves(data)) < number:
        raise UsageError("data", ..., f"must hold at least {number} examples")
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf)[:number], data)
    parts = np.split(rng.permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    split = federations.of_parts(data, parts)
    return split._replace(order=jnp.concatenate([split.order, jnp.zeros(8, jnp.int32)]))


def in_floats(federation: Federation) -> Federation:
    """Return the federation with 8-bit inputs in floating point, which can hold a NaN."""

    def leaf(x: Array) -> Array:
        return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x

    x = jax.tree.map(leaf, federation.data.x)
    return federation._replace(data=federation.data._replace(x=x))


def relaid(federation: Federation) -> Federation:
    """Return the same clients in floats, with their rows in another order of clients, amid garbage.

    The shapes are those of `federation`. Examples and rows of no client hold NaN, infinities and
    labels that are no class.
    """
    federation = in_floats(federation)
    number = len(jax.tree.leaves(federation.data)[0])
    free = number - _FREE + np.arange(_FREE)

    rng = np.random.default_rng(1)
    order = rng.choice(free, len(federation.order)).astype(np.int32)
    start = np.zeros(federation.num_clients, np.int32)
    parts, at = federations.parts_of(federation), 1
    for client in rng.permutation(federation.num_clients):
        start[client] = at
        order[at : at + len(parts[client])] = parts[client]
        at += len(parts[client]) + 1
    data = jax.tree.map(lambda leaf: spoilt(leaf, free), federation.data)
    return Federation(data, jnp.asarray(order), jnp.asarray(start), federation.size)


def compact(federation: Federation, who: Sequence[int] | None = None) -> Federation:
    """Return the part of a federation for some clients, of the same shapes for any of them.

    Args:
      federation: the whole federation.
      who: the clients; by default all, whose rows stay where they are.
    """
    if who is None:
        return federation._replace(who=jnp.arange(federation.num_clients, dtype=jnp.int32))
    number, clients = len(federation.order), federation.num_clients
    part = federations.compact(federation, np.array(who), num_clients=clients, num_rows=number)
    rows = sum(SIZES[client] for client in who)
    length = len(jax.tree.leaves(federation.data)[0])
    data = jax.tree.map(lambda leaf: spoilt(leaf, np.arange(rows, number))[:length], part.data)
    return part._replace(data=data, order=jnp.minimum(part.order, length - 1))


def spoilt(leaf: Array, rows: np.ndarray) -> Array:
    """Return examples with NaN, infinities and labels that are no class in some rows."""
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    garbage = np.array([np.nan, np.inf, -np.inf, 1e30] if is_float else [0, 99, -7, 1])
    changed = np.array(leaf)
    changed[rows] = (
        np.resize(garbage, len(rows)).astype(leaf.dtype).reshape(-1, *[1] * (leaf.ndim - 1))
    )
    return jnp.asarray(changed)


def rows_of(federation: Federation, who: int) -> np.ndarray:
    """Return the rows of a client's examples."""
    return federations.parts_of(federation)[who]


def schedule() -> Cohort:
    """Return six rounds of five slots: other orders, dropouts, delays, a round without clients."""
    who = np.array(
        [
            [0, 1, 2, 3, 4],
            [4, 3, 2, 1, 0],
            [2, 0, 4, 3, 1],
            [1, 2, 4, 3, 0],
            [3, 4, 0, 2, 1],
            [0, 2, 1, 4, 3],
        ]
    )
    present = np.array(
        [
            [1, 1, 1, 0, 1],
            [1, 1, 0, 1, 0],
            [0, 0, 0, 0, 0],
            [0, 1, 1, 1, 1],
            [1, 1, 1, 0, 1],
            [1, 1, 1, 1, 1],
        ]
    )
    delay = np.array([0, 1, 2, 1, 0])[who]
    delay[4] = 2
    return Cohort(
        jnp.asarray(who, jnp.int32), jnp.asarray(present, bool), jnp.asarray(delay, jnp.int32)
    )


def cohort(who: Sequence[int] | np.ndarray, present: Sequence[bool] | None = None) -> Cohort:
    """Return one round's cohort without delays, by default with everyone present."""
    return Cohort(
        jnp.asarray(who, jnp.int32),
        jnp.ones(len(who), bool) if present is None else jnp.asarray(present, bool),
        jnp.zeros(len(who), jnp.int32),
    )


def rearranged(schedule: Cohort, seed: int) -> Cohort:
    """Return a schedule on the host with the slots of each round in another order."""
    shape = schedule.who.shape
    order = np.random.default_rng(seed).permuted(
        np.tile(np.arange(shape[1]), (shape[0], 1)), axis=1
    )
    assert (order != np.arange(shape[1])).any(1).all()
    return jax.tree.map(lambda a: np.take_along_axis(a, order, 1), schedule)


def with_empty_slots(schedule: Cohort) -> Cohort:
    """Return a schedule with two more slots, both empty: they name clients who may attend."""
    num_rounds = len(schedule.who)
    arrays: tuple[Any, ...] = (
        np.tile(np.array([3, 0], np.int32), (num_rounds, 1)),
        np.zeros((num_rounds, 2), bool),
        np.ones((num_rounds, 2), np.int32),
    )
    empty = Cohort(*arrays)
    together = jax.tree.map(lambda a, b: np.concatenate([a, b], 1), schedule, empty)
    return rearranged(together, 3)


def with_others_absent(schedule: Cohort) -> Cohort:
    """Return a schedule whose absent slots name other clients, with other delays."""
    who, present, delay = (np.asarray(leaf) for leaf in schedule)
    others: Any = np.where(present, who, (who + 1) % NUM_CLIENTS).astype(np.int32)
    other_delays: Any = np.where(present, delay, (delay + 1) % HISTORY).astype(np.int32)
    return schedule._replace(who=others, delay=other_delays)


class NormedHidden(nn.Module):
    """Dense, batch normalisation, tanh."""

    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        # Without a bias, which the norm would take away again.
        x = nn.Dense(self.width, use_bias=False)(x.reshape(x.shape[0], -1))
        # A large epsilon, so that rounding is not magnified.
        return jnp.tanh(models.BatchNorm(epsilon=0.1)(x, mask, train))


class NormedLinear(nn.Module):
    """Batch normalisation, then an affine map."""

    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        return nn.Dense(self.width)(models.BatchNorm(epsilon=0.1)(x, mask, train))


def network() -> Model:
    """Return the smallest network with statistics in both halves."""
    return models.from_blocks([NormedHidden(4), NormedLinear(NUM_CLASSES)], 1)


def epochs(learning_rate: float | Array) -> Work:
    """Return two epochs in batches of three, of which most are not full."""
    work = local.epochs(optax.sgd(learning_rate), batch_size=3, num_epochs=2, momentum=0.0)
    return work._replace(learning_rate=learning_rate)


@contextlib.contextmanager
def filled_otherwise(otherwise: Array) -> Iterator[None]:
    """Fill up the batches that are traced within with another real example of the client.

    These are all that `local.take_batch` makes: of the steps, and of `local.fold` and the like.

    Args:
      otherwise: [] bool; if false, batches are as they were.
    """
    take = local.take_batch

    def taken(shard: Shard, positions: Array, mask: Array) -> Batch:
        batch = take(shard, positions, mask)
        row = jnp.where(otherwise & ~mask, jnp.argmax(mask), jnp.arange(mask.shape[0]))
        x, y = jax.tree.map(lambda leaf: leaf[row], (batch.x, batch.y))
        return Batch(x, y, mask)

    local.take_batch = taken
    try:
        yield
    finally:
        local.take_batch = take
