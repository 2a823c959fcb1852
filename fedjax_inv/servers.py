"""The server half of most algorithms: an optax optimizer on the mean delta.

Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 1: the negative mean delta is the
server's gradient. sgd(1.0) is FedAvg, sgd(1.0, momentum) FedAvgM, adam FedAdam, yogi FedYogi.
"""

from typing import NamedTuple

import optax

from fedjax_inv import checks
from fedjax_inv.types import Tree, Variables


class Server(NamedTuple):
    """The global network, the server optimizer's state, and further state of a method."""

    variables: Variables
    opt_state: Tree
    side: Tree = ()


def init(optimizer: optax.GradientTransformation, variables: Variables, side: Tree = ()) -> Server:
    """Return the server before the first round.

    Args:
      optimizer: the server optimizer.
      variables: the network that training starts from.
      side: further state of the method.

    Raises:
      UsageError: for arguments of other types.
    """
    checks.optimizer("optimizer", optimizer)
    checks.record("variables", variables, Variables)
    return Server(variables, optimizer.init(variables.params), side)


def update(
    optimizer: optax.GradientTransformation, server: Server, mean_delta: Variables
) -> Server:
    """Return the server after one step along the mean delta.

    Args:
      optimizer: the server optimizer, whose gradient is the negative mean delta of the parameters.
      server: the server before the step.
      mean_delta: the mean change of the clients' networks; the change of statistics is added.

    Raises:
      UsageError: for arguments of other types.
    """
    checks.optimizer("optimizer", optimizer)
    checks.record("server", server, Server)
    checks.record("mean_delta", mean_delta, Variables)
    gradient = optax.tree.scale(-1, mean_delta.params)
    updates, opt_state = optimizer.update(gradient, server.opt_state, server.variables.params)
    params = optax.apply_updates(server.variables.params, updates)
    stats = optax.tree.add(server.variables.stats, mean_delta.stats)
    return server._replace(variables=Variables(params, stats), opt_state=opt_state)
