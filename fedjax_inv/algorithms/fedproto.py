"""FedProto: clients' features stay near the prototype of their class, the mean over all clients.

    minimise  CE(f(x), y) + penalty mean of ||e(x) - P_y||^2 / D
    P_k <- the mean, over the clients that hold class k, of their own mean of e(x) for it

e is the body, with D outputs. A client takes its means in its last pass over its examples, as it
trains. A class that has no prototype yet has no second term, so the first round is without it.

Tan et al. 2022, "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI; arXiv
2105.00243), Algorithm 1, with the mean squared distance and the unweighted mean over clients of its
official release. There each client keeps its network to itself; here networks are averaged too,
unless told not to. Ours: of a class that nobody sends in a round, the last prototype stays.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, local, models, objectives
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Halves,
    Local,
    Loss,
    Model,
    Setup,
    Step,
    Trained,
    Tree,
    Variables,
    Visit,
    Work,
)


def prototypes(features: Array, y: Array, mask: Array, num_classes: int) -> tuple[Array, Array]:
    """(the sum of the features of each class [K, D], how many examples it has [K]).

    features: [N, D]. y: [N] labels. mask: [N] bool, which examples are real.
    """
    is_of = (y[:, None] == jnp.arange(num_classes)) & mask[:, None]
    real = jnp.where(mask[:, None], features, 0)
    sums = jnp.matmul(is_of.T.astype(real.dtype), real, precision="highest")
    return sums, is_of.sum(0).astype(real.dtype)


class Prototypes(NamedTuple):
    """What the server sends beside the network."""

    mean: Array  # [K, D]
    known: Array  # [K] bool, whether a class has one


class _Sent(NamedTuple):
    """What a client sends beside its network; the server adds them up."""

    mean: Array  # [K, D] zeros of a class that it does not hold
    holds: Array  # [K] 1 of a class that it holds, or 0


class _Kept(NamedTuple):
    prototypes: Prototypes
    initial: Tree  # the network that clients start with, where they keep theirs; otherwise ()


class _Pass(NamedTuple):
    """What a client carries from step to step of a pass over its examples."""

    sums: Array  # [K, D]
    counts: Array  # [K]
    seen: Array  # [] examples since the pass began


def distances(features: Array, y: Array, known: Prototypes) -> Array:
    """The mean squared distance of features [B, D] from their class's prototype, 0 without; [B]."""
    squares = ((features - known.mean[y]) ** 2).mean(-1)
    return jnp.where(known.known[y], squares, 0)


def fedproto(
    model: Model,
    work: Work,
    *,
    penalty: float | Array = 1.0,
    share_weights: bool = True,
    loss: Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "size",
) -> Algorithm:
    """FedProto; the features are the body's, averaged over positions.

    penalty: the paper's lambda; 0 is FedAvg. share_weights: whether networks are averaged. If not,
    as in the paper, a client keeps its own, that all start alike, and one that never trained is
    served with the initial network. weighting: of networks, as in FedAvg ("size" or "uniform").
    Reports both terms, the second unweighted as "distance". Raises ValueError for a negative
    penalty, and for local training that cannot carry anything from step to step.
    """
    checks.real("penalty", penalty)
    train_local = local.seeing_local(work)

    def train(visit: Visit) -> Trained:
        known: Prototypes = visit.message.side
        num_classes = known.mean.shape[0]

        def grad_fn(at: Local, batch: Batch, key: Array) -> Step:
            stats = at.variables.stats

            def objective(params: Halves) -> tuple[Array, tuple[Array, Array, Halves, Array]]:
                body_key, head_key = jax.random.split(key)  # as `models.apply` does
                features, body = model.encode(
                    params.body, stats.body, batch.x, batch.mask, True, body_key
                )
                outputs, head = model.decode(
                    params.head, stats.head, features, batch.mask, True, head_key
                )
                value = loss(outputs, batch.y, batch.mask)
                features = averaging.embedding(features)
                squares = distances(features, batch.y, known)
                distance = objectives.masked_mean(squares, batch.mask)
                after = Halves(body, head)
                return value + penalty * distance, (value, distance, after, features)

            grads, (value, distance, after, features) = jax.grad(objective, has_aux=True)(
                at.variables.params
            )
            begins = at.carry.seen >= visit.shard.size
            old = jax.tree.map(lambda leaf: jnp.where(begins, 0, leaf), at.carry)
            sums, counts = prototypes(features, batch.y, batch.mask, num_classes)
            carry = _Pass(old.sums + sums, old.counts + counts, old.seen + batch.mask.sum())
            return Step(grads, after, {"loss": value, "distance": distance}, carry=carry)

        none = _Pass(
            jnp.zeros_like(known.mean), jnp.zeros(num_classes, known.mean.dtype), jnp.int32(0)
        )
        start = work.init(visit.message.variables if share_weights else visit.own)
        return train_local(grad_fn, start._replace(carry=none), visit.shard, visit.key)

    def init(setup: Setup) -> _Kept:
        params, stats = setup.variables

        def shapes(x: Tree) -> tuple[Array, Array]:
            real = jnp.ones(jax.tree.leaves(x)[0].shape[0], bool)
            features, _ = model.encode(params.body, stats.body, x, real, False)
            return averaging.embedding(features), models.predict(model, setup.variables, x)

        features, outputs = jax.eval_shape(shapes, setup.sample)
        num_classes, width = outputs.shape[-1], features.shape[-1]
        none = Prototypes(
            jnp.zeros((num_classes, width), features.dtype), jnp.zeros(num_classes, bool)
        )
        return _Kept(none, () if share_weights else setup.variables)

    def upload(visit: Visit, trained: Trained) -> _Sent:
        sums, counts, _ = trained.local.carry
        return _Sent(sums / jnp.maximum(counts, 1)[:, None], (counts > 0).astype(sums.dtype))

    def update(kept: _Kept, total: _Sent) -> _Kept:
        old, is_held = kept.prototypes, total.holds > 0
        mean = total.mean / jnp.maximum(total.holds, 1)[:, None]
        new = Prototypes(jnp.where(is_held[:, None], mean, old.mean), old.known | is_held)
        return kept._replace(prototypes=new)

    side = averaging.SideState(
        init=init,
        send=lambda kept: kept.prototypes,
        upload=upload,
        aggregate=aggregators.total(),
        update=update,
    )
    if share_weights:
        return averaging.averaging_of(
            model, train, server_optimizer=server_optimizer, weighting=weighting, side=side
        )
    return averaging.averaging_of(
        model,
        train,
        server_optimizer=server_optimizer,
        weighting=weighting,
        init_client=lambda server, who: server.side.initial,
        remember=lambda visit, trained: trained.local.variables,
        shared=lambda variables: Variables(Halves((), ()), Halves((), ())),
        serve=lambda server, own: own,
        side=side,
    )
