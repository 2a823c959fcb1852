"""FedProto: clients' features stay near the prototype of their class, a mean over all clients.

    minimise  CE(f(x), y) + penalty mean of ||e(x) - P_y||^2 / D
    P_k <- the mean, over the clients with class k, of their own means of e(x) for it

e is the body, with D outputs. A client computes its means in its last pass over its examples, while
it trains. A class without a prototype has no second term, such as all classes in the first round.

Tan et al. 2022, "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI; arXiv
2105.00243), Algorithm 1, with the mean squared distance and the unweighted mean over clients of its
official release. There each client has a network of its own; here networks are averaged too, unless
share_weights is false. The paper leaves open, and we chose: the last prototype of a class stays
while no client sends one (the release drops it); where a number of steps ends within a pass, the
means are of its part.
"""

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, local, objectives, tree, types
from fedjax_inv.types import Array, Tree

FACTS = types.Facts(needs_classes=True)


def prototypes(features: Array, y: Array, mask: Array, num_classes: int) -> tuple[Array, Array]:
    """Return (the sum of the features of each class [K, D], its number of examples [K]).

    Args:
      features: [N, D].
      y: labels [N]; an example whose label is not in 0..K-1 counts for no class.
      mask: [N] bool, which examples are real.
      num_classes: K.
    """
    chex.assert_rank(features, 2)
    chex.assert_shape([y, mask], features.shape[:1])
    is_of = (y[:, None] == jnp.arange(num_classes)) & mask[:, None]
    real = tree.wide(jnp.where(mask[:, None], features, 0))  # bfloat16 cannot count to 300
    sums = jnp.matmul(is_of.T.astype(real.dtype), real, precision="highest")
    return sums, is_of.sum(0).astype(real.dtype)


class Prototypes(NamedTuple):
    """The prototypes, which the server sends beside the network."""

    mean: Array  # [K, D]
    known: Array  # [K] bool, whether the class has a prototype


def distances(features: Array, y: Array, known: Prototypes) -> Array:
    """Return the mean squared distance of features from their class's prototype, [B].

    Args:
      features: [B, D].
      y: labels [B].
      known: the prototypes, as arrays of JAX (those of NumPy raise IndexError for a label of K or
        more); the distance is 0 for a class without one, and for a label that is no class.
    """
    chex.assert_equal_shape_suffix([features, known.mean], 1)
    chex.assert_shape(y, features.shape[:1])
    is_known = known.known[y] & (y >= 0) & (y < len(known.known))
    squares = ((features - known.mean[y]) ** 2).mean(-1)
    return jnp.where(is_known, squares, 0)


class _State(NamedTuple):
    """The server's state beside the network."""

    prototypes: Prototypes
    initial: Tree  # the network that clients start with if they have their own; otherwise ()


class _Pass(NamedTuple):
    """A client's state during a pass over its examples."""

    sums: Array  # [K, D]
    counts: Array  # [K]
    size: Array  # [] int32, examples since the start of the pass


class _Sent(NamedTuple):
    """The upload of a client beside its network; the server sums the uploads."""

    mean: Array  # [K, D] zeros for a class that the client does not have
    holds: Array  # [K] 1 for a class that the client has, else 0


def _gradient(
    model: types.Model, loss: types.Loss, penalty: float | Array, visit: types.Visit
) -> types.LocalGradFn:
    """The gradient of a client's local steps, which also count the prototypes of its last pass."""
    known: Prototypes = visit.message.side

    def grad_fn(at: types.Local, batch: types.Batch, key: Array) -> types.Step:
        stats, mask = at.variables.stats, batch.mask

        def objective(
            params: types.Halves,
        ) -> tuple[Array, tuple[Array, Array, types.Halves, Array]]:
            body_key, head_key = jax.random.split(key)  # as `models.apply` does
            features, body = model.encode(params.body, stats.body, batch.x, mask, True, body_key)
            outputs, head = model.decode(params.head, stats.head, features, mask, True, head_key)
            value = loss(outputs, batch.y, mask)
            features = averaging.embedding(features)
            distance = objectives.masked_mean(distances(features, batch.y, known), mask)
            return value + penalty * distance, (value, distance, types.Halves(body, head), features)

        grads, (value, distance, after, features) = jax.grad(objective, has_aux=True)(
            at.variables.params
        )
        begins = at.carry.size >= visit.shard.size
        old = jax.tree.map(lambda leaf: jnp.where(begins, 0, leaf), at.carry)
        new = *prototypes(features, batch.y, mask, len(known.mean)), mask.sum(dtype=jnp.int32)
        carry = jax.tree.map(jnp.add, old, _Pass(*new))
        return types.Step(grads, after, {"loss": value, "distance": distance}, carry=carry)

    return grad_fn


def _side_state(model: types.Model, *, share_weights: bool) -> averaging.SideState:
    """The prototypes beside the network."""

    def init(setup: types.Setup) -> _State:
        features, outputs = averaging.output_shapes(model, setup)
        features = jax.eval_shape(lambda f: tree.wide(averaging.embedding(f)), features)
        num_classes = outputs.shape[-1]
        mean = jnp.zeros((num_classes, features.shape[-1]), features.dtype)
        none = Prototypes(mean, jnp.zeros(num_classes, bool))
        return _State(none, () if share_weights else setup.variables)

    def upload(visit: types.Visit, trained: types.Trained) -> _Sent:
        sums, counts, _ = trained.local.carry
        return _Sent(sums / jnp.maximum(counts, 1)[:, None], (counts > 0).astype(sums.dtype))

    def update(state: _State, total: _Sent, delta: types.Variables) -> _State:
        del delta
        old, is_new = state.prototypes, total.holds > 0
        mean = total.mean / jnp.maximum(total.holds, 1)[:, None]
        new = Prototypes(jnp.where(is_new[:, None], mean, old.mean), old.known | is_new)
        return state._replace(prototypes=new)

    return averaging.SideState(
        init, lambda state: state.prototypes, upload, aggregators.total(), update
    )


def fedproto(
    model: types.Model,
    work: types.Work,
    *,
    penalty: float | Array = 1.0,
    share_weights: bool = True,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "size",
) -> types.Algorithm:
    """Return FedProto; the features are the body's outputs, averaged over positions.

    It reports both terms, the second one without its weight as "distance".

    Args:
      penalty: weight of the distance, the paper's lambda; 0 with share_weights is FedAvg.
      share_weights: whether networks are averaged. If not, as in the paper, each client keeps its
        own network, from a common start, and a client that never trained is served with the initial
        network; server_optimizer and weighting then have no effect.
      weighting: weights of clients in the mean of networks, "size" or "uniform"; in Python also a
        function of `Slots`.
    """
    checks.real("penalty", penalty)

    def start(visit: types.Visit) -> types.Local:
        mean = visit.message.side.mean
        none = _Pass(jnp.zeros_like(mean), jnp.zeros(len(mean), mean.dtype), jnp.int32(0))
        variables = visit.message.variables if share_weights else visit.own
        return work.init(variables)._replace(carry=none)

    family = partial(
        averaging.averaging,
        model,
        local.seeing_local(work),
        partial(_gradient, model, loss, penalty),
        server_optimizer=server_optimizer,
        weighting=weighting,
        start=start,
        side=_side_state(model, share_weights=share_weights),
    )
    if share_weights:
        return family()
    algorithm = family(
        init_client=lambda server, who: server.side.initial,
        remember=lambda visit, trained: trained.local.variables,
        shared=lambda variables: types.Variables(types.Halves((), ()), types.Halves((), ())),
        serve=lambda server, own: own,
    )
    return algorithm._replace(network=lambda server: server.side.initial)
