"""The protocol: records of pure functions and of arrays.

Axis letters, used in every docstring:
  C clients, S cohort slots, M examples in all, N examples of the largest client,
  B batch, D features, K classes, T rounds, H broadcasts kept.

A tree is any pytree of arrays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Array = jax.Array
Tree = Any
Metrics = dict[str, Array]


class Examples(NamedTuple):
    """All examples of a federation: one copy on the device, in its own dtype."""

    x: Tree  # [M, ...]; uint8 images stay uint8, the model scales them to [0, 1]
    y: Array  # [M] int32


class Federation(NamedTuple):
    """Who holds which examples. Ragged clients are padded with rows whose mask is false."""

    data: Examples
    rows: Array  # [C, N] int32 into the M examples
    mask: Array  # [C, N] bool, true where the row is real


class Shard(NamedTuple):
    """What one client sees of the federation."""

    data: Examples  # shared, not stacked
    rows: Array  # [N]
    mask: Array  # [N]
    who: Array  # [] which client this is


class Batch(NamedTuple):
    """Examples of one step; where the mask is false, x and y are arbitrary."""

    x: Tree  # [B, ...]
    y: Array  # [B]
    mask: Array  # [B] bool


class Cohort(NamedTuple):
    """Who attends one exchange. A schedule is a cohort with a leading T axis."""

    who: Array  # [S] int32, the client in each slot
    present: Array  # [S] bool, false = empty slot or dropped out
    delay: Array  # [S] int32, rounds since the client last heard the server


class Slots(NamedTuple):
    """What an aggregator may know of the uploads that it is given."""

    position: Array  # [S] int32, which slot of the cohort
    who: Array  # [S] int32
    present: Array  # [S] bool; an upload that is not present is all zeros
    size: Array  # [S] int32, examples of the client


class Aggregator(NamedTuple):
    """A monoid over uploads, so that a cohort can be folded chunk by chunk.

    `init` is all zeros, and the accumulators of disjoint sets of slots combine by addition: that is
    what lets devices fold their own slots and sum.
    """

    init: Callable[[Tree, int], Tree]  # (one upload's shapes, S) -> accumulator
    add: Callable[[Tree, Tree, Slots], Tree]  # (accumulator, uploads, slots) -> accumulator
    finish: Callable[[Tree], Tree]  # accumulator -> aggregated


def always(round_index: Array) -> Array | bool:
    """An exchange of every round."""
    del round_index
    return True


class Exchange(NamedTuple):
    """One round trip between the server and the clients."""

    broadcast: Callable[[Tree], Tree]  # server -> message
    # (message, own, shard, key) -> (own, upload, metrics); sees nothing of another client
    client: Callable[[Tree, Tree, Shard, Array], tuple[Tree, Tree, Metrics]]
    aggregate: Tree  # an Aggregator, or a tree of them that is a prefix of the upload
    update: Callable[[Tree, Tree, Cohort], Tree]  # (server, aggregated, cohort) -> server
    # (round, counted from 0) -> whether it takes place; where not, nobody attends it
    takes_place: Callable[[Array], Array | bool] = always


class Algorithm(NamedTuple):
    """A federated algorithm."""

    init_server: Callable[[Tree, Array], Tree]  # (variables, key) -> server
    # (server, who) -> own, of a client that has not taken part yet or was never seen
    init_client: Callable[[Tree, Array], Tree]
    exchanges: tuple[Exchange, ...]  # the round trips of one round, in order
    predict: Callable[[Tree, Tree, Tree], Array]  # (server, own, x [B, ...]) -> logits [B, K]


class Halves(NamedTuple):
    """The two halves of a network, cut where the model says."""

    body: Tree
    head: Tree


class Variables(NamedTuple):
    """What a network is made of."""

    params: Halves  # what gradients change
    stats: Halves  # what a training step changes without a gradient (BatchNorm)


class Model(NamedTuple):
    """A network cut in two halves of the same signature.

    `encode` and `decode` map (params, stats, inputs [B, ...], mask [B], train) of their half to
    (outputs [B, ...], stats). The mask says which examples are real.
    """

    init: Callable[[Array, Tree], Variables]  # (key, x [B, ...]) -> variables
    encode: Callable[[Tree, Tree, Tree, Array, bool], tuple[Array, Tree]]
    decode: Callable[[Tree, Tree, Array, Array, bool], tuple[Array, Tree]]


class Local(NamedTuple):
    """What local training carries from step to step."""

    variables: Variables
    opt_state: Tree


# (variables, batch, key) -> (gradient of variables.params, stats, metrics of the step)
GradFn = Callable[[Variables, Batch, Array], tuple[Halves, Halves, Metrics]]


class Work(NamedTuple):
    """Local training, built once and injected: an algorithm changes the gradient, not the loop."""

    init: Callable[[Variables], Local]
    # (grad_fn, local, shard, key) -> (local, metrics averaged over the steps)
    run: Callable[[GradFn, Local, Shard, Array], tuple[Local, Metrics]]
