"""Empirical risk minimisation on pooled data: the centralised baseline.

    minimise  R(w) = (1 / n) sum of the losses of all n examples

Run it on `data.federation.pooled`: a federation of one client. Unlike FedAvg's clients, this client
keeps its optimizer's state (momentum) from round to round, as in ordinary training.
"""

import optax

from fedjax_inv import averaging, objectives, types

FACTS = types.Facts(pooled=True)


def erm(
    model: types.Model, work: types.Work, *, loss: types.Loss = objectives.cross_entropy
) -> types.Algorithm:
    """Return ordinary training, as a federation of one client."""
    grad_fn = averaging.gradient(model, loss)
    return averaging.averaging(
        model,
        work,
        lambda visit: grad_fn,
        server_optimizer=optax.sgd(1.0),
        weighting="uniform",
        init_client=lambda server, who: work.init(server.variables).opt_state,
        start=lambda visit: types.Local(visit.message.variables, visit.own),
        remember=lambda visit, trained: trained.local.opt_state,
    )
