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

import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, objectives, servers, tree, types
from fedjax_inv.types import Tree

FACTS = types.Facts(needs_norm=True)


def in_norm(path: tuple[str, ...]) -> bool:
    """Return whether a variable belongs to a normalisation layer.

    Args:
      path: the names of modules down to the variable; "norm" in a name marks such a layer.
    """
    return any("norm" in part.lower() for part in path)


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
        return tree.partition(variables, in_norm)[0]

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
        shared=lambda variables: tree.partition(variables, in_norm)[1],
        serve=serve,
        # The mean over the clients of the latest round; before it the initial variables.
        side=averaging.SideState(
            init=lambda setup: local_part(setup.variables),
            send=lambda mean: (),
            upload=lambda visit, trained: (local_part(trained.local.variables), ()),
            aggregate=aggregators.combine(
                (aggregators.mean(weight), aggregators.weight_sum(weight))
            ),
            update=mean_of,
        ),
    )
    return algorithm._replace(network=lambda server: tree.combine(server.side, server.variables))
