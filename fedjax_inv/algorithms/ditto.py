"""Ditto: FedAvg, beside which each client trains a network of its own that stays near the global.

    v_i = argmin  R_i(v) + (proximal / 2) ||v - w||^2,  w = FedAvg's network

Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization" (ICML; arXiv
2012.04221), Algorithm 1.

The paper leaves open, and we chose: all v_i start as the initial global network; in a round a
client first trains w, then v_i with as many local steps and the same optimizer, which starts anew,
on minibatches drawn anew. w starts from the network that the client received; v_i starts from its
last value and is drawn to that network. v_i has statistics (BatchNorm) of its own. Before its
first turn a client is served with w. The mean of clients is simple, as in the release, whose
commands have a proximal of 1.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, objectives, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.algorithms import fedprox
from fedjax_inv.types import Array


def ditto(
    model: types.Model,
    work: types.Work,
    *,
    proximal: float | Array = 0.1,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "uniform",
) -> types.Algorithm:
    """Return Ditto (Li et al. 2021, Algorithm 1). A client's own state is its own network v_i.

    It reports the risk of the own network in its local steps as "personal_loss".

    Args:
      work: local training, of the global network and of the client's own.
      proximal: weight of the proximal term, the paper's lambda; 0: the own networks are trained on
        the client's examples alone.
    """
    checks.real("proximal", proximal)
    risk_gradient = averaging.gradient(model, loss)
    training = averaging.averaging(
        model,
        work,
        lambda visit: risk_gradient,
        server_optimizer=server_optimizer,
        weighting=weighting,
        init_client=lambda server, who: averaging.Own(server.variables, jnp.bool_(False)),
        serve=lambda server, own: averaging.variables_of(own, server.variables),
    )
    (exchange,) = training.exchanges

    near_gradient = fedprox.proximal_gradients(risk_gradient, proximal)

    def client(visit: types.Visit) -> types.Reply:
        reply = exchange.client(visit)
        start = work.init(visit.own.variables)
        own_key = jax.random.fold_in(visit.key, 2)  # 0 and 1 are in the training of w
        own = work.run(near_gradient(visit), start, visit.shard, own_key)
        metrics = {**reply.metrics, "personal_loss": own.metrics["loss"]}
        return types.Reply(
            averaging.Own(own.local.variables, jnp.bool_(True)), reply.upload, metrics
        )

    return training._replace(exchanges=(exchange._replace(client=client),))
