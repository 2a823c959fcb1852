"""Clients that attack, for studies of robust rules: wrappers that change what they upload.

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
    """Return `algorithm` whose clients `who` upload change(upload, random key)."""
    exchange = averaging.sole_exchange(algorithm)
    attackers = jnp.asarray(who, jnp.int32)

    def client(visit: types.Visit) -> types.Reply:
        reply = exchange.client(visit)
        wrong = change(reply.upload, keys.stream(visit.key, "attack"))
        attacks = (attackers == visit.shard.who).any()
        return reply._replace(upload=optax.tree.where(attacks, wrong, reply.upload))

    return algorithm._replace(exchanges=(exchange._replace(client=client),))


def sign_flip(
    algorithm: types.Algorithm, who: Sequence[int], *, factor: float = 1.0
) -> types.Algorithm:
    """Return `algorithm` whose clients `who` upload -factor x their change."""
    checks.positive("factor", factor)
    return _changed(algorithm, who, lambda upload, key: tree.scaled(-factor, upload))


def scaled_noise(
    algorithm: types.Algorithm, who: Sequence[int], *, factor: float = 10.0
) -> types.Algorithm:
    """Return `algorithm` whose clients `who` upload noise, `factor` x as long as their change."""
    checks.positive("factor", factor)

    def change(upload: Tree, key: Array) -> Tree:
        drawn = optax.tree.random_like(key, upload)
        ratio = optax.tree.norm(upload) / optax.tree.norm(drawn)
        return tree.scaled(factor * ratio, drawn)

    return _changed(algorithm, who, change)
