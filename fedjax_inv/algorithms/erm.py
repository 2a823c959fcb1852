"""Empirical risk minimisation on pooled data: the centralised baseline.

    minimise  R(w) = (1 / n) sum over all examples

Run it on `data.federation.pooled`: a federation of one client. Unlike FedAvg's clients, that one
keeps its optimizer's state (momentum) from round to round, as ordinary training does.
"""

import jax
import jax.numpy as jnp

from fedjax_inv import aggregators, models, servers
from fedjax_inv.algorithms import fedavg
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Exchange,
    Local,
    Metrics,
    Model,
    Shard,
    Tree,
    Variables,
    Work,
)


def erm(model: Model, work: Work) -> Algorithm:
    """Ordinary training, written as a federation of one client. The server is its network."""

    def init_server(variables: Variables, key: Array) -> Variables:
        del key
        return variables

    def init_client(variables: Variables, who: Array) -> Tree:
        del who
        return work.init(variables).opt_state

    def client(
        variables: Variables, opt_state: Tree, shard: Shard, key: Array
    ) -> tuple[Tree, Variables, Metrics]:
        local = Local(variables, opt_state)
        local, metrics = work.run(fedavg.gradient(model), local, shard, key)
        return local.opt_state, servers.delta(local.variables, variables), metrics

    def update(variables: Variables, delta: Variables, cohort: Cohort) -> Variables:
        del cohort
        return jax.tree.map(jnp.add, variables, delta)

    def predict(variables: Variables, opt_state: Tree, x: Tree) -> Array:
        del opt_state
        return models.predict(model, variables, x)

    exchange = Exchange(lambda variables: variables, client, aggregators.mean(), update)
    return Algorithm(init_server, init_client, (exchange,), predict)
