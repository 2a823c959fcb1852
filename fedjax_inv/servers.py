"""The server half of most algorithms: an optax optimizer on the mean delta.

Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 1: the negative mean delta is the
server's gradient. sgd(1.0) is FedAvg, sgd(1.0, momentum) FedAvgM, adam FedAdam, yogi FedYogi.
"""

from typing import NamedTuple

import optax

from fedjax_inv import types
from fedjax_inv.types import Array, Tree


class Server(NamedTuple):
    """The global network, the server optimizer's state, and further state of a method."""

    variables: types.Variables
    opt_state: Tree
    side: Tree = ()


def init(
    optimizer: optax.GradientTransformation, variables: types.Variables, side: Tree = ()
) -> Server:
    """Return the server before the first round, with the network that training starts from."""
    return Server(variables, optimizer.init(variables.params), side)


def upload_of(trained: types.Variables, received: types.Variables) -> types.Variables:
    """Return what a client uploads: the change of its parameters, and its statistics.

    A delayed client's change of a variance, added to the variance of a newer network, could make
    that negative; a mean of variances cannot be negative.
    """
    return types.Variables(optax.tree.sub(trained.params, received.params), trained.stats)


def delta_of(server: Server, mean: types.Variables, weight: Array) -> types.Variables:
    """Return the change of the server's network by the mean of uploads, as `update` takes it.

    `mean` is that of what clients made by `upload_of`. Statistics stay as they are if `weight`, []
    the sum of the clients' weights, is 0.
    """
    change = optax.tree.sub(mean.stats, server.variables.stats)
    zeros = optax.tree.zeros_like(change)
    return types.Variables(mean.params, optax.tree.where(weight > 0, change, zeros))


def update(
    optimizer: optax.GradientTransformation, server: Server, mean_delta: types.Variables
) -> Server:
    """Return the server after one step along the mean delta.

    The gradient of the optimizer is the negative mean change of the parameters; the change of
    statistics is added.
    """
    gradient = optax.tree.scale(-1, mean_delta.params)
    updates, opt_state = optimizer.update(gradient, server.opt_state, server.variables.params)
    params = optax.apply_updates(server.variables.params, updates)
    stats = optax.tree.add(server.variables.stats, mean_delta.stats)
    return server._replace(variables=types.Variables(params, stats), opt_state=opt_state)
