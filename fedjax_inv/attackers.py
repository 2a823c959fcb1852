"""Clients that attack, for studies of robust rules: wrappers that change what they upload.

It is the change of their parameters; statistics (BatchNorm) stay as they are, as a variance below 0
would be seen at once. The only upload of the algorithm must be that of FedAvg, else there is a
UsageError.
Wrong labels are a partition's matter (`data.wrong_labels`).
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, keys, tree, types
from fedjax_inv.types import Array, Tree


def _changed(
    algorithm: types.Algorithm, who: Sequence[int], change: Callable[[Tree, Array], Tree]
) -> types.Algorithm:
    """Return `algorithm` whose clients `who` upload change(change of parameters, random key)."""
    exchange = averaging.sole_exchange(algorithm)
    attackers = jnp.asarray(who, jnp.int32)

    def init_server(setup: types.Setup) -> Tree:
        server = algorithm.init_server(setup)
        averaging.check_upload(exchange, server, stats=True)
        checks.integers("who", who, 0, setup.num_clients - 1)
        return server

    def client(visit: types.Visit) -> types.Reply:
        reply = exchange.client(visit)
        upload: averaging.Upload = reply.upload
        params = upload.delta.params
        wrong = change(params, keys.stream(visit.key, "attack"))
        attacks = (attackers == visit.shard.who).any()
        delta = upload.delta._replace(params=optax.tree.where(attacks, wrong, params))
        return reply._replace(upload=upload._replace(delta=delta))

    changed = exchange._replace(client=client)
    return algorithm._replace(init_server=init_server, exchanges=(changed,))


def sign_flip(
    algorithm: types.Algorithm, who: Sequence[int], *, factor: float = 1.0
) -> types.Algorithm:
    """Return `algorithm` whose clients `who` upload -factor x their change."""
    checks.positive("factor", factor)
    return _changed(algorithm, who, lambda params, key: tree.scaled(-factor, params))


def scaled_noise(
    algorithm: types.Algorithm, who: Sequence[int], *, factor: float = 10.0
) -> types.Algorithm:
    """Return `algorithm` whose clients `who` upload noise, `factor` x as long as their change."""
    checks.positive("factor", factor)

    def change(params: Tree, key: Array) -> Tree:
        drawn = optax.tree.random_like(key, params)
        ratio = optax.tree.norm(params) / optax.tree.norm(drawn)
        return tree.scaled(factor * ratio, drawn)

    return _changed(algorithm, who, change)
