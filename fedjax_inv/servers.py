"""The server half of most algorithms: an optax optimizer on the mean delta.

Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 1: the negative mean delta is the
server's gradient. sgd(1.0) is FedAvg, sgd(1.0, momentum) FedAvgM, adam FedAdam, yogi FedYogi.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv.types import Tree, Variables


class Server(NamedTuple):
    """The global network and the server optimizer's state."""

    variables: Variables
    opt_state: Tree


def init(optimizer: optax.GradientTransformation, variables: Variables) -> Server:
    """The server before the first round."""
    return Server(variables, optimizer.init(variables.params))


def update(
    optimizer: optax.GradientTransformation, server: Server, mean_delta: Variables
) -> Server:
    """One server step along `mean_delta`; statistics move by their plain mean delta."""
    gradient = jax.tree.map(jnp.negative, mean_delta.params)
    updates, opt_state = optimizer.update(gradient, server.opt_state, server.variables.params)
    params = optax.apply_updates(server.variables.params, updates)
    stats = jax.tree.map(jnp.add, server.variables.stats, mean_delta.stats)
    return Server(Variables(params, stats), opt_state)


def delta(new: Variables, old: Variables) -> Variables:
    """What a client uploads: how far local training moved each variable."""
    return jax.tree.map(jnp.subtract, new, old)
