"""The protocol: records of arrays, and the contracts of the functions between them.

Axis letters, used in every docstring:
  C clients, S cohort slots, M examples in all, L rows of all clients,
  B batch, D features, K classes, T rounds, H broadcasts kept.

A tree is any pytree of arrays. Records grow by a field with a default.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import optax

Array = jax.Array
Tree = Any
Metrics = dict[str, Array]


# Who holds what.


class Examples(NamedTuple):
    """All examples of a federation: one copy on the device, in its own dtype."""

    x: Tree  # [M, ...]; uint8 images stay uint8, the model scales them to [0, 1]
    y: Tree  # [M, ...] targets; of classifiers [M] int32 in 0..K-1


class Federation(NamedTuple):
    """Who holds which examples: client c those of order[start[c] : start[c] + size[c]].

    Clients may be of any sizes; memory is O(L + C). `data.federation.of_parts` makes one.
    """

    data: Examples
    order: Array  # [L] int32 into the M examples
    start: Array  # [C] int32 into order
    size: Array  # [C] int32, examples of each client

    @property
    def num_clients(self) -> int:
        """C."""
        return self.start.shape[0]


class Shard(NamedTuple):
    """What one client sees of the federation: its rows are order[start : start + size]."""

    data: Examples  # shared, not stacked
    order: Array  # [L], shared
    start: Array  # []
    size: Array  # []
    who: Array  # [] which client this is


class Batch(NamedTuple):
    """Examples of one step; where the mask is false, x and y repeat those of a real one."""

    x: Tree  # [B, ...]
    y: Tree  # [B, ...]
    mask: Array  # [B] bool


class Cohort(NamedTuple):
    """Who attends one exchange. A schedule is a cohort with a leading T axis."""

    who: Array  # [S] int32, the client in each slot
    present: Array  # [S] bool, false = empty slot or dropped out
    delay: Array  # [S] int32, rounds since the client last heard the server


# What a network is.


class Halves(NamedTuple):
    """The two halves of a network, cut where the model says."""

    body: Tree
    head: Tree


class Variables(NamedTuple):
    """What a network is made of."""

    params: Halves  # what gradients change
    stats: Halves  # what a training step changes without a gradient (BatchNorm)


class Initialise(Protocol):
    """Draws a network."""

    def __call__(self, key: Array, x: Tree, /) -> Variables:
        """x: a batch of inputs [B, ...] of the shape that the network is for; B may be 1."""


class Apply(Protocol):
    """Half of a network."""

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
        """The outputs [B, ...] of inputs [B, ...], and the half's statistics after them.

        mask: [B] bool, which inputs are real; the others must not matter to the real ones' outputs
        nor to the statistics. train: whether statistics move, and dropout drops, by `key`; without
        a key nothing may be drawn.
        """


def as_stored(x: Tree, /) -> Tree:
    """What a network sees that takes inputs as they are stored."""
    return x


class Model(NamedTuple):
    """A network cut in two: decode(encode(x)) are its outputs, logits [B, K] for classifiers."""

    init: Initialise
    encode: Apply
    decode: Apply
    # stored inputs -> what is made of them before all else, such as rendered images; encode takes
    # those too, and makes nothing more of them
    see: Callable[[Tree], Tree] = as_stored
    # seen inputs -> others that it takes too, and of which means are taken; None: seen ones
    inputs: Callable[[Tree], Tree] | None = None


class Loss(Protocol):
    """What training minimises, or an evaluation tells."""

    def __call__(self, outputs: Array, y: Tree, mask: Array, /) -> Array:
        """[], the mean over the real examples of outputs [B, ...] and y [B, ...], mask [B].

        What it makes of an example must not depend on the others of the batch; 0 without any.
        """


# What happens in a local step.


class Step(NamedTuple):
    """What a gradient function makes of a batch."""

    grads: Halves  # of the parameters
    stats: Halves  # after the batch
    metrics: Metrics  # of the step, scalars; reported as their mean over the steps
    average: Tree = ()  # what else the method wants the mean over the steps of
    carry: Tree = ()  # what `Local.carry` becomes


class GradFn(Protocol):
    """The direction of a local step; the optimizer decides how far."""

    def __call__(self, variables: Variables, batch: Batch, key: Array, /) -> Step:
        """A step from `variables` on `batch`, which holds at least one real example."""


class Local(NamedTuple):
    """What local training carries from step to step."""

    variables: Variables
    opt_state: Tree
    carry: Tree = ()  # what a method keeps from step to step beside them


class LocalGradFn(Protocol):
    """The direction of a local step that depends on more than where the network is."""

    def __call__(self, local: Local, batch: Batch, key: Array, /) -> Step:
        """A step from `local` on `batch`, which holds at least one real example."""


class Trained(NamedTuple):
    """What local training leaves."""

    local: Local
    num_steps: Array  # [] int32
    metrics: Metrics  # means over the steps; 0 without a step
    average: Tree  # mean over the steps of `Step.average`; 0 without a step


class Train(Protocol):
    """The loop of local training."""

    def __call__(self, grad_fn: GradFn, local: Local, shard: Shard, key: Array, /) -> Trained:
        """Trains from `local` on the shard; without examples there is no step."""


class TrainLocal(Protocol):
    """The loop of local training whose gradient sees all that it carries."""

    def __call__(self, grad_fn: LocalGradFn, local: Local, shard: Shard, key: Array, /) -> Trained:
        """As `Train`; each step's `carry` is the next one's, of the shapes of `local.carry`."""


ChangeOptimizer = Callable[[optax.GradientTransformation], optax.GradientTransformation]


class Work(NamedTuple):
    """Local training, built once and injected: an algorithm changes the gradient, not the loop."""

    init: Callable[[Variables], Local]
    run: Train
    # (what it makes of an optimizer) -> the same work with another one; None where there is none
    with_optimizer: Callable[[ChangeOptimizer], "Work"] | None = None
    run_local: TrainLocal | None = None  # the loop of `run`; None where there is no such one


# What happens in a round.


class Setup(NamedTuple):
    """What a server may know before the first round."""

    variables: Variables  # a drawn network
    num_clients: int
    sample: Tree  # [1, ...] zeros of the shape of an input
    key: Array


class Visit(NamedTuple):
    """One client's turn in one exchange: all that it may look at."""

    message: Tree  # what the server broadcast, `delay` rounds ago
    own: Tree  # what the client kept from its last turn
    shard: Shard
    round: Array  # [] int32, from 0
    delay: Array  # [] int32
    key: Array  # of this round, exchange and client
    undelayed_message: Tree = ()  # what the server broadcast beside the message, never delayed


class Reply(NamedTuple):
    """What a client's turn leaves behind."""

    own: Tree  # what it keeps, of the shapes of `Visit.own`
    upload: Tree
    metrics: Metrics  # scalars


class Slots(NamedTuple):
    """What an aggregator may know of the uploads that it is given."""

    position: Array  # [S] int32, which slot of the cohort
    who: Array  # [S] int32
    present: Array  # [S] bool; an upload that is not present is all zeros
    size: Array  # [S] int32, examples of the client
    delay: Array  # [S] int32, rounds


class Aggregator(NamedTuple):
    """A monoid over uploads, so that a cohort can be folded chunk by chunk.

    `init` is all zeros, and the accumulators of disjoint sets of slots combine by addition: that is
    what lets devices fold their own slots and sum.
    """

    init: Callable[[Tree, int], Tree]  # (one upload's shapes, S) -> accumulator
    add: Callable[[Tree, Tree, Slots], Tree]  # (accumulator, uploads, slots) -> accumulator
    finish: Callable[[Tree], Tree]  # accumulator -> aggregated


class Broadcast(Protocol):
    """What the server sends."""

    def __call__(self, server: Tree, /) -> Tree:
        """The message, the same for every client; `communication` counts its bytes as download."""


class Client(Protocol):
    """What a client does; a pure function that is vmapped, scanned and sharded over clients."""

    def __call__(self, visit: Visit, /) -> Reply:
        """Its turn. Nothing but `visit` may decide it, so that no client sees another's data."""


class Update(Protocol):
    """What the server makes of what came in."""

    def __call__(self, server: Tree, aggregated: Tree, cohort: Cohort, /) -> Tree:
        """The server after the exchange; not asked where nobody attended.

        aggregated: what the exchange's aggregator made of the uploads. cohort: those who attended.
        """


class Attends(Protocol):
    """Who of those that the schedule sends takes part: turns of a game, who has left."""

    def __call__(self, server: Tree, who: Array, round: Array, /) -> Array | bool:
        """[] bool, whether client `who` [] attends the exchange in `round` [], from 0."""


def always(server: Tree, who: Array, round: Array, /) -> bool:
    """An exchange that everybody attends whom the schedule sends."""
    del server, who, round
    return True


def nothing(server: Tree, /) -> Tree:
    """A broadcast of an exchange that sends nothing."""
    del server
    return ()


class Exchange(NamedTuple):
    """One round trip between the server and the clients."""

    broadcast: Broadcast
    client: Client
    aggregate: Tree  # an Aggregator, or a tree of them that is a prefix of the upload
    update: Update
    attends: Attends = always
    broadcast_undelayed: Broadcast = nothing  # the message that is never delayed
    # (server) -> an upload of zeros, where a client's last one may stand in for one that is missing
    blank: Callable[[Tree], Tree] | None = None


class InitServer(Protocol):
    """The server before the first round."""

    def __call__(self, setup: Setup, /) -> Tree:
        """A tree of arrays; its shapes never change."""


class InitClient(Protocol):
    """What a client keeps before its first turn, or one that was never seen."""

    def __call__(self, server: Tree, who: Array, /) -> Tree:
        """A tree of arrays. who: [], of a client never seen any number."""


class Predict(Protocol):
    """How a client is served."""

    def __call__(self, server: Tree, own: Tree, x: Tree, /) -> Array:
        """The outputs, logits [B, K] for classifiers, of x [B, ...].

        own: what the client keeps; () unless the algorithm is personal.
        """


class Algorithm(NamedTuple):
    """A federated algorithm."""

    init_server: InitServer
    init_client: InitClient
    exchanges: tuple[Exchange, ...]  # the round trips of one round, in order
    predict: Predict
    personal: bool = False  # whether clients are served by what they keep, each differently
    # server -> the single network that it serves; None: there is none
    network: Callable[[Tree], Variables] | None = None


class Facts(NamedTuple):
    """What the binaries need to know of an algorithm beyond its signature.

    A module with a factory says so by FACTS; without it, these defaults count.
    """

    pooled: bool = False  # trains on a federation of one client that holds every example
    needs_norm: bool = False  # is another algorithm for a network without normalisation layers
