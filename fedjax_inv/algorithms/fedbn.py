"""FedBN: FedAvg whose clients keep their normalisation layers to themselves.

    minimise  mean_i R_i(w, b_i)

over the shared w and the normalisation variables b_i (affine and statistics) of each client.
Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization"
(arXiv 2102.07623), Algorithm 1.

The paper leaves open, and we chose: before its first turn a client is served with the mean b_i of
the clients that attended the latest round, with the weights of their deltas; its training starts
from the initial b_i. Clients upload b_i for this mean alone, and `communication` counts it; FedBN
itself does not upload it. The server never sends b_i. Clients have equal weights, as in the
release; the paper has n_i / n.
"""

import collections
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, models, objectives, servers, tree, types
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Tree

FACTS = types.Facts(needs_norm=True)

Path = tuple[str, ...]  # of a variable, such as ("params", "body", "GroupNorm_0", "scale")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of a name such as GroupNorm_0
_NORM = re.compile(r"\w*norms?|ln|gn", re.IGNORECASE)


def in_norm(variables: types.Variables) -> Callable[[Path], bool]:
    """Return whether the variable at a path belongs to a normalisation layer of a network.

    Such a layer has statistics, whatever its name is. Or it has a scale, or a scale and a bias, and
    a word of its module path ends in "norm" or is "ln" or "gn", as in "GroupNorm_0" and "norm1".
    """
    kinds = models.Scaled, models.InUnits  # whose statistics lie a step deeper
    deeper = [half for half, of in variables.stats._asdict().items() if isinstance(of, kinds)]

    def layer(path: Path) -> Path:
        if path[0] == "stats" and path[1] in deeper:
            path = ("", *path[1:2], *path[3:]) if path[2] == "network" else ()
        return path[1:-1]

    paths = [tree.names(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables)]
    has_statistics = {layer(path) for path in paths if path[0] == "stats"} - {()}
    leaves = collections.defaultdict(set)
    for path in paths:
        leaves[layer(path)].add(path[-1])

    def is_norm(path: Path) -> bool:
        own = layer(path)
        is_named = any(_NORM.fullmatch(word) for name in own for word in _WORD.findall(name))
        is_like_one = {"scale"} <= leaves[own] <= {"scale", "bias"}
        return own in has_statistics or (is_named and is_like_one)

    return is_norm


def fedbn(
    model: types.Model,
    work: types.Work,
    *,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "uniform",
) -> types.Algorithm:
    """Return FedBN (Li et al. 2021, Algorithm 1). A client's own state is its local variables.

    Args:
      server_optimizer: the server's optimizer, on the mean delta of the shared parameters.
    """
    weight = aggregators.weight_of(weighting)
    grad_fn = averaging.gradient(model, loss)

    def local_part(variables: types.Variables) -> types.Variables:
        return tree.partition(variables, in_norm(variables))[0]

    def first(setup: types.Setup) -> types.Variables:
        own = local_part(setup.variables)
        if not jax.tree.leaves(own):
            text = "must have a layer with statistics, or one named as a norm, to stay with clients"
            raise UsageError("model", ..., f"{text}; fedbn would be fedavg")
        return own

    def start(visit: types.Visit) -> types.Local:
        return work.init(tree.combine(visit.own.variables, visit.message.variables))

    def serve(server: servers.Server, own: averaging.Own) -> types.Variables:
        return tree.combine(averaging.variables_of(own, server.side), server.variables)

    def mean_of(old: types.Variables, aggregated: Tree, delta: types.Variables) -> types.Variables:
        del delta
        mean, weight = aggregated
        return optax.tree.where(weight > 0, mean, old)

    algorithm = averaging.averaging(
        model,
        work,
        lambda visit: grad_fn,
        server_optimizer=server_optimizer,
        weighting=weighting,
        init_client=lambda server, who: averaging.Own(server.side, jnp.bool_(False)),
        start=start,
        remember=lambda visit, trained: averaging.Own(
            local_part(trained.local.variables), jnp.bool_(True)
        ),
        shared=lambda variables: tree.partition(variables, in_norm(variables))[1],
        serve=serve,
        # The mean over the clients of the latest round; before it the initial variables.
        side=averaging.SideState(
            init=first,
            send=lambda mean: (),
            upload=lambda visit, trained: (local_part(trained.local.variables), ()),
            aggregate=aggregators.combine(
                (aggregators.mean(weight), aggregators.weight_sum(weight))
            ),
            update=mean_of,
        ),
    )
    return algorithm._replace(network=lambda server: tree.combine(server.side, server.variables))
