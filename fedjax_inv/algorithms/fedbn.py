"""FedBN: FedAvg whose clients keep their normalisation layers to themselves.

    minimise  sum_i (n_i / n) R_i(w, b_i)

over the shared w and the normalisation variables b_i of each client: affine and statistics.
Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization"
(arXiv 2102.07623), Algorithm 1. The paper says nothing of a client never seen: ours is served with
the mean b_i of the clients that attended the latest round, weighted as their deltas are. For that
mean alone clients upload b_i, and `wire` counts it; FedBN itself uploads none. Nobody is sent any.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

from fedjax_inv import models, servers
from fedjax_inv.algorithms import fedavg
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Exchange,
    Metrics,
    Model,
    Shard,
    Tree,
    Variables,
    Work,
)


class Server(NamedTuple):
    """The server: a tree of `Variables` cut in two by `partition`."""

    shared: servers.Server
    local: Variables  # mean over the clients of the latest attended round; at first the initial


class Upload(NamedTuple):
    """What a client sends."""

    delta: Variables  # of the shared variables
    local: Variables  # its own variables as they are


def in_norm(path: tuple[str, ...]) -> bool:
    """Whether a variable belongs to a normalisation layer: a module on its path says "norm"."""
    return any("norm" in part.lower() for part in path)


def partition(tree: Tree, is_local: Callable[[tuple[str, ...]], bool]) -> tuple[Tree, Tree]:
    """(local, shared): `tree` twice, each with None where a leaf is the other's.

    is_local: told a leaf's path, ("params", "body", "blocks_0", "BatchNorm_0", "scale") in a
    `Variables`.
    """

    def part(local: bool) -> Tree:
        def keep(path: tuple, leaf: Array) -> Array | None:
            names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
            return leaf if is_local(names) == local else None

        return jax.tree_util.tree_map_with_path(keep, tree)

    return part(True), part(False)


def combine(local: Tree, shared: Tree) -> Tree:
    """The tree that `partition` has cut in two."""
    return jax.tree.map(
        lambda ours, theirs: theirs if ours is None else ours,
        local,
        shared,
        is_leaf=lambda leaf: leaf is None,
    )


def fedbn(
    model: Model,
    work: Work,
    *,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str = "size",
    is_local: Callable[[tuple[str, ...]], bool] = in_norm,
) -> Algorithm:
    """FedBN (Li et al. 2021, Algorithm 1). A client's `own` are its local variables.

    weighting: "size" (n_i / n) or "uniform" over the clients that attend. is_local: which variables
    stay with their client, by path (see `partition`); where nothing is local, this is FedAvg. The
    server optimizer acts on shared parameters only.
    """
    aggregate = fedavg.weighting_of(weighting)

    def init_server(variables: Variables, key: Array) -> Server:
        del key
        local, shared = partition(variables, is_local)
        return Server(servers.init(server_optimizer, shared), local)

    def init_client(server: Server, who: Array) -> Variables:
        del who
        return server.local

    def broadcast(server: Server) -> Variables:
        return server.shared.variables

    def client(
        received: Variables, own: Variables, shard: Shard, key: Array
    ) -> tuple[Variables, Upload, Metrics]:
        start = work.init(combine(own, received))
        end, metrics = work.run(fedavg.gradient(model), start, shard, key)
        own, shared = partition(end.variables, is_local)
        return own, Upload(servers.delta(shared, received), own), metrics

    def update(server: Server, mean: Upload, cohort: Cohort) -> Server:
        del cohort
        return Server(servers.update(server_optimizer, server.shared, mean.delta), mean.local)

    def predict(server: Server, own: Variables, x: Tree) -> Array:
        return models.predict(model, combine(own, server.shared.variables), x)

    exchange = Exchange(broadcast, client, aggregate, update)
    return Algorithm(init_server, init_client, (exchange,), predict)
