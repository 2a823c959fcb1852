"""The protocol: records of arrays, and the contracts of the functions between them.

Axis letters in docstrings: C clients, S cohort slots, M examples in all, L rows of all clients,
B batch, D features, K classes, T rounds, H broadcasts kept.

A tree is any pytree of arrays. A field that is added to a record must have a default.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

Array = jax.Array
Tree = Any
Metrics = dict[str, Array]


# The data of a federation.


class Examples(NamedTuple):
    """All examples of a federation: one copy on the device, in their own dtype."""

    x: Tree  # [M, ...]; uint8 images stay uint8, the model scales them to [0, 1]
    y: Tree  # [M, ...] targets, such as those of `data.dataset.Dataset.y`
    domain: Array | None = None  # [M] int32 in 0..D-1; None unless a method or a score needs it


class Federation(NamedTuple):
    """The examples and their owners: client c has order[start[c] : start[c] + size[c]].

    Memory is O(L + C), for clients of any sizes. `data.federation.of_parts` builds a federation.
    """

    data: Examples
    order: Array  # [L] int32 into the M examples
    start: Array  # [C] int32 into order
    size: Array  # [C] int32, examples of each client

    @property
    def num_clients(self) -> int:
        """C."""
        return self.size.shape[0]


class Shard(NamedTuple):
    """One client's view of the federation: its rows are order[start : start + size]."""

    data: Examples  # shared, not stacked
    order: Array  # [L], shared
    start: Array  # []
    size: Array  # []
    who: Array  # [] int32, the client's number

    def rows(self, positions: Array, mask: Array) -> Array:
        """Return the rows of the client's examples at positions [B], 0..size-1, int32.

        Where the mask [B] is false, it is the row of the first example, so that padding repeats a
        real one: a NaN elsewhere would reach gradients as 0 x NaN.
        """
        return self.order[self.start + jnp.where(mask, positions, 0)]


class Batch(NamedTuple):
    """Examples of one step; where the mask is false, x and y repeat a real example."""

    # [B, ...] as it is stored, such as 8-bit images; `models.unit_range(model.preprocess(x))` is
    # what a model sees, in floats
    x: Tree
    y: Tree  # [B, ...]
    mask: Array  # [B] bool
    domain: Array | None = None  # [B] int32, as in `Examples`


class Cohort(NamedTuple):
    """The clients of one round, each at most once. A schedule is a cohort with a leading T axis."""

    who: Array  # [S] int32, the client in each slot
    present: Array  # [S] bool, false = empty slot or dropped out
    delay: Array  # [S] int32, rounds since the client last heard the server


# The network.


class Halves(NamedTuple):
    """The two halves of a network; the model decides where to cut."""

    body: Tree
    head: Tree


class Variables(NamedTuple):
    """The arrays of a network."""

    params: Halves  # changed by gradients
    stats: Halves  # changed by a training step without a gradient (BatchNorm)


# (key, x [B, ...]) -> new variables for inputs of the shape and dtype of x; B may be 1
Initialise = Callable[[Array, Tree], Variables]


class Apply(Protocol):
    """Runs one half of a network."""

    def __call__(
        self,
        params: Tree,
        stats: Tree,
        inputs: Tree,
        mask: Array,
        train: bool,
        key: Array | None = None,
        /,
    ) -> tuple[Array, Tree]:
        """Return (outputs [B, ...], the half's statistics after the inputs).

        Args:
          params: the half's parameters.
          stats: the half's statistics.
          inputs: [B, ...].
          mask: [B] bool, which are real; others may change neither the statistics nor real outputs.
          train: training mode, in which statistics move and dropout is active.
          key: the random key of training mode; if None, nothing may be drawn.
        """


class Model(NamedTuple):
    """A network cut in two: decode(encode(x)) are its outputs, logits [B, K] for classifiers."""

    init: Initialise
    encode: Apply
    decode: Apply
    # Such as rendering. Idempotent: `encode` accepts inputs before and after it.
    preprocess: Callable[[Tree], Tree] = lambda x: x
    # Preprocessed inputs -> inputs whose mean makes sense, which `encode` accepts. None: the same.
    mixable: Callable[[Tree], Tree] | None = None


class Loss(Protocol):
    """The objective of training, or a measure of an evaluation."""

    def __call__(self, outputs: Array, y: Tree, mask: Array, /) -> Array:
        """Return the mean loss over the real examples, []; 0 if none is real.

        The arguments are outputs [B, ...] of the network, targets [B, ...], and which examples are
        real, [B] bool. The loss of an example must not depend on the others of the batch.
        """


# A local step.


class Step(NamedTuple):
    """The result of a gradient function on a batch."""

    grads: Halves  # of the parameters
    stats: Halves  # the network's statistics after the batch
    metrics: Metrics  # scalars; their means over the steps are reported
    average: Tree = ()  # further values; the method gets their means over the steps
    carry: Tree = ()  # the new value of `Local.carry`


class GradFn(Protocol):
    """The direction of a local step; the optimizer decides the length."""

    def __call__(self, variables: Variables, batch: Batch, key: Array, /) -> Step:
        """Return a step from `variables` on a batch with at least one real example."""


class Local(NamedTuple):
    """The state of local training, carried from step to step."""

    variables: Variables
    opt_state: Tree
    carry: Tree = ()  # further state of a method


class LocalGradFn(Protocol):
    """A `GradFn` that sees the whole state of local training."""

    def __call__(self, local: Local, batch: Batch, key: Array, /) -> Step:
        """Return a step from `local`; its `carry` has the shapes of `local.carry`."""


class Trained(NamedTuple):
    """The result of local training."""

    local: Local
    num_steps: Array  # [] int32
    metrics: Metrics  # means over the steps; 0 without a step
    average: Tree  # mean over the steps of `Step.average`; 0 without a step


class Train(Protocol):
    """The loop of local training."""

    def __call__(self, grad_fn: Any, local: Local, shard: Shard, key: Array, /) -> Trained:
        """Train from `local` on a client's examples; without examples there is no step.

        `grad_fn` is a `GradFn`, in `Work.run_local` a `LocalGradFn`.
        """


ChangeOptimizer = Callable[[optax.GradientTransformation], optax.GradientTransformation]


class Work(NamedTuple):
    """Local training, built once: an algorithm changes the gradient, not the loop."""

    init: Callable[[Variables], Local]
    run: Train
    # (change of the optimizer) -> the same work with it, whose momentum, learning rate and number
    # of steps are then unknown; None: not possible
    with_optimizer: Callable[[ChangeOptimizer], "Work"] | None = None
    run_local: Train | None = None  # `run` for a `LocalGradFn`; None: not possible
    # Those of the local SGD, which an optax optimizer does not reveal; None: unknown.
    momentum: float | Array | None = None
    learning_rate: float | Array | None = None  # without a schedule inside of the optimizer
    # Numbers of examples -> local steps of a round, both of one shape. None: unknown.
    num_steps: Callable[[Array], Array] | None = None


# A round.


class Setup(NamedTuple):
    """All that a server may know before the first round."""

    variables: Variables  # a drawn network
    num_clients: int
    sample: Tree  # [1, ...] zeros of the shape of an input
    key: Array
    has_examples: Array  # [C] bool; a client without examples never attends
    mean_size: Array | float = 1.0  # [] examples of a client that has some


class Visit(NamedTuple):
    """One client's turn in one exchange: all that the client may look at."""

    message: Tree  # the server's broadcast of `delay` rounds ago
    own: Tree  # the client's own state, from its last turn
    shard: Shard
    round: Array  # [] int32, from 0
    delay: Array  # [] int32
    key: Array  # of this round, exchange and client
    undelayed_message: Tree = ()  # a second message of the server, never delayed


class Reply(NamedTuple):
    """The result of a client's turn."""

    own: Tree  # the client's new state, of the shapes of `Visit.own`
    upload: Tree
    metrics: Metrics  # scalars


class Slots(NamedTuple):
    """All that an aggregator may know of the uploads."""

    position: Array  # [S] int32, which slot of the cohort
    who: Array  # [S] int32
    present: Array  # [S] bool; an upload that is not present is all zeros
    size: Array  # [S] int32, examples of the client
    delay: Array  # [S] int32, rounds


class Aggregator(NamedTuple):
    """A monoid over uploads, so that a cohort can be folded chunk by chunk.

    `init` is all zeros, and the accumulators of disjoint sets of slots combine by addition. So each
    device can fold its own slots, and the results are summed.
    """

    init: Callable[[Tree, int], Tree]  # (one upload's shapes, S) -> accumulator
    add: Callable[[Tree, Tree, Slots], Tree]  # (accumulator, uploads, slots) -> accumulator
    finish: Callable[[Tree], Tree]  # accumulator -> aggregated


# server -> the message, the same for all clients; its bytes count as download
Broadcast = Callable[[Tree], Tree]
# visit -> reply: a client's turn, from the visit alone, as no client sees another's data; a pure
# function that is vmapped, scanned and sharded over clients
Client = Callable[[Visit], Reply]
# (server, result of the aggregator, clients that attended) -> the server after the exchange, which
# is discarded if no client attended, unless `Exchange.unattended`
Update = Callable[[Tree, Tree, Cohort], Tree]
# (server, client [], round [] from 0) -> whether a scheduled client takes part, [] bool, for
# example by the turns of a game
Attends = Callable[[Tree, Array, Array], Array | bool]


class Exchange(NamedTuple):
    """One round trip between the server and the clients."""

    broadcast: Broadcast
    client: Client
    aggregate: Aggregator  # of the whole upload; `aggregators.combine` joins those of its parts
    update: Update
    attends: Attends = lambda server, who, round: True
    broadcast_undelayed: Broadcast = lambda server: ()  # a second message, which is never delayed
    # server -> an upload of zeros, if a client's last one may stand in for a missing one
    blank: Callable[[Tree], Tree] | None = None
    unattended: bool = False  # whether `update` also acts if no client attended, on a sum of zeros


# setup -> the server before the first round, a tree of arrays whose shapes never change
InitServer = Callable[[Setup], Tree]
# (server, client []) -> the client's state before its first turn; any number if it was never seen
InitClient = Callable[[Tree, Array], Tree]
# (server, own state, inputs [B, ...]) -> outputs [B, ...] of the network that serves a client,
# logits [B, K] of classifiers; the own state is () unless the algorithm is personal
Predict = Callable[[Tree, Tree, Tree], Array]


class Algorithm(NamedTuple):
    """A federated algorithm."""

    init_server: InitServer
    init_client: InitClient
    exchanges: tuple[Exchange, ...]  # the round trips of one round, in order
    predict: Predict
    personal: bool = False  # whether each client is served with its own state
    # server -> the network of a client that was never seen; None: there is no single network
    network: Callable[[Tree], Variables] | None = None
    own_outputs: bool = False  # whether `predict` differs from `models.predict` of that network
    # (server, round [] from 0) -> the server after a round that somebody attended; None: the same
    after_round: Callable[[Tree, Array], Tree] | None = None


class Facts(NamedTuple):
    """Facts about an algorithm that its factory's signature does not show.

    The factory's module sets them as FACTS; without FACTS, these defaults hold.
    """

    pooled: bool = False  # trains on a federation of one client that has all examples
    needs_norm: bool = False  # is a different algorithm only for networks with normalisation
    needs_classes: bool = False  # is for targets that are classes alone
    # reads `Batch.domain`, which is None otherwise; its setting `num_domains` is D
    needs_domains: bool = False
    means_of_targets: bool = False  # its loss takes means of targets [B, K], of one-hot classes too
    precision: str = "default"  # of float32 products on GPUs and TPUs (`platforms.PRECISIONS`)
    infinite: tuple[str, ...] = ()  # settings for which infinity has a meaning
