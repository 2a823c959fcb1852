"""SCAFFOLD: local steps corrected by the difference of a client's gradient from the mean gradient.

    y <- y - rate (grad R_i(y) - c_i + c)
    c_i+ = c_i - c + (x - y) / (K rate) = the mean of the K gradients grad R_i(y)      (option II)
    c <- c + (1 / N) sum over the cohort of (c_i+ - c_i)

N counts the clients with examples. Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning" (arXiv 1910.06378), Algorithm 1. The identity in the second line
holds for the paper's plain SGD. We compute its right side, so that c_i is a mean of gradients under
any local optimizer.
"""

from typing import NamedTuple

import chex
import jax
import optax

from fedjax_inv import aggregators, averaging, objectives, tree, types
from fedjax_inv.parts import EVERYTHING, Part
from fedjax_inv.types import Array, Tree


class Control(NamedTuple):
    """The server's state beside the network."""

    variate: Tree  # c, of the shapes of the parameters that are corrected
    num_clients: Array  # [], N


def corrected_gradient(grads: Tree, own: Tree, mean: Tree) -> Tree:
    """Return grads - c_i + c, leaf by leaf, of trees of the same shapes."""
    chex.assert_trees_all_equal_shapes(grads, own, mean)
    return jax.tree.map(lambda g, c_i, c: g - c_i + c, grads, own, mean)


def scaffold(
    model: types.Model,
    work: types.Work,
    *,
    part: Part = EVERYTHING,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "uniform",
) -> types.Algorithm:
    """Return SCAFFOLD with option II; a client's own state is its control variate c_i, first 0.

    Args:
      part: the part of the parameters whose gradient is corrected, in Python only; the rest is
        FedAvg.
      server_optimizer: the server's optimizer, on the mean delta; sgd with the paper's eta_g.
      weighting: weights of clients, "uniform" (as in the paper) or "size", for the networks alone:
        the variates are summed over the cohort and divided by N. In Python also a function of
        `Slots`.
    """
    risk_gradient = averaging.gradient(model, loss)

    def gradient_from(visit: types.Visit) -> types.GradFn:
        def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
            step = risk_gradient(variables, batch, key)
            raw = part.get(step.grads)
            corrected = corrected_gradient(raw, visit.own, visit.message.side)
            return step._replace(grads=part.put(step.grads, corrected), average=raw)

        return grad_fn

    def init(setup: types.Setup) -> Control:
        zeros = optax.tree.zeros_like(part.get(setup.variables.params))
        return Control(zeros, setup.has_examples.sum().astype(float))

    def update(control: Control, change: Tree, delta: types.Variables) -> Control:
        del delta
        part_of_all = tree.scaled(1 / control.num_clients, change)
        return control._replace(variate=optax.tree.add(control.variate, part_of_all))

    return averaging.averaging(
        model,
        work,
        gradient_from,
        server_optimizer=server_optimizer,
        weighting=weighting,
        init_client=lambda server, who: optax.tree.zeros_like(server.side.variate),
        remember=lambda visit, trained: trained.average,
        side=averaging.SideState(
            init=init,
            send=lambda control: control.variate,
            upload=lambda visit, trained: optax.tree.sub(trained.average, visit.own),
            aggregate=aggregators.total(),
            update=update,
        ),
    )
