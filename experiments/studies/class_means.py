"""The nearest class mean: clients send the sums of their features by class, and nobody trains.

    logit_k = m_k . x - |m_k|^2 / 2,  which is highest for the nearest m_k

m_k is the mean of the features of all clients' examples of class k (Mensink et al. 2013,
"Distance-Based Image Classification", IEEE TPAMI 35; for federations Legate et al. 2023, "Guiding
The Last Layer in Federated Learning with Pre-Trained Models", arXiv 2306.03937, with cosines).
"""

import jax
import jax.numpy as jnp

from fedjax_inv import aggregators, local, servers, types
from fedjax_inv.algorithms import fedavg, fedproto
from fedjax_inv.types import Array

_BATCH_SIZE = 128
_NEVER = -1e9  # the logit of a class of which no client has an example


def class_means(model: types.Model, work: types.Work) -> types.Algorithm:
    """The nearest class mean, for a network whose head is one dense layer."""
    algorithm = fedavg.fedavg(model, work)

    def client(visit: types.Visit) -> types.Reply:
        params, stats = visit.message.variables

        def sums(batch: types.Batch) -> tuple[Array, Array]:
            features, _ = model.encode(
                params.body, stats.body, batch.x, batch.mask, False, visit.key
            )
            (num_classes,) = (len(leaf) for leaf in jax.tree.leaves(params.head) if leaf.ndim == 1)
            return fedproto.prototypes(features, batch.y, batch.mask, num_classes)

        upload = local.fold(visit.shard, sums, batch_size=_BATCH_SIZE)
        return types.Reply(visit.own, upload, {})

    def update(
        server: servers.Server, total: tuple[Array, Array], cohort: types.Cohort
    ) -> servers.Server:
        del cohort
        sums, counts = total
        means = sums / jnp.maximum(counts, 1)[:, None]
        bias = jnp.where(counts > 0, -(means**2).sum(-1) / 2, _NEVER)
        params = server.variables.params
        # A dense layer has a kernel [D, K] and a bias [K].
        head = jax.tree.map(lambda leaf: bias if leaf.ndim == 1 else means.T, params.head)
        variables = server.variables._replace(params=params._replace(head=head))
        return server._replace(variables=variables)

    (exchange,) = algorithm.exchanges
    of_sums = exchange._replace(
        client=client, aggregate=aggregators.total(), update=update, blank=None
    )
    return algorithm._replace(exchanges=(of_sums,))
