"""FedIIR against its two exchanges in NumPy, in float64."""

import jax
import numpy as np
import optax
import pytest

import federations
import linear_networks as linear
from fedjax_inv import communication, rounds
from fedjax_inv.algorithms import fediir
from fedjax_inv.types import Variables

BATCH = 3  # of the mean gradient; 4, 7 and 5 leave a smaller one
SERVER_RATE, PENALTY, DECAY = 1.3, 0.8, 0.7


def penalised(w: linear.Weights, examples: linear.Examples, mean: np.ndarray) -> linear.Weights:
    """The gradient of R + penalty ||head's gradient - mean||^2, the chain rule by hand."""
    x, y = examples
    features = x @ w[0]
    p = np.exp(features @ w[1])
    p /= p.sum(1, keepdims=True)
    error = (p - np.eye(3)[y]) / len(y)
    apart = 2 * PENALTY * (features.T @ error - mean)  # how the penalty grows with the gradient
    along = features @ apart
    by_logits = error + (p * along - p * (p * along).sum(1, keepdims=True)) / len(y)
    return [x.T @ (by_logits @ w[1].T + error @ apart.T), features.T @ by_logits]


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_fediir_is_its_two_exchanges(weighting: str) -> None:
    with jax.enable_x64(True):
        held = linear.held()
        algorithm = fediir.fediir(
            linear.MODEL,
            linear.work(),
            penalty=PENALTY,
            decay=DECAY,
            gradient_batch_size=BATCH,
            server_optimizer=optax.sgd(SERVER_RATE),
            weighting=weighting,
        )
        states = linear.run(algorithm, held)
        w, examples, mean = linear.weights_of(states[0]), linear.examples_of(held), np.zeros((3, 3))
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            grads = [
                linear.gradient(w, tuple(part[at : at + BATCH] for part in examples[i]))[1]
                for i in clients
                for at in range(0, linear.SIZES[i], BATCH)
            ]
            mean = DECAY * mean + (1 - DECAY) * np.mean(grads, 0)
            moved = [
                linear.trained(
                    w,
                    examples[i],
                    change=lambda grads, now, i=i, mean=mean: penalised(now, examples[i], mean),
                )
                for i in clients
            ]
            counts = [linear.SIZES[i] if weighting == "size" else 1 for i in clients]
            w = [a + SERVER_RATE * d for a, d in zip(w, linear.mean(moved, counts), strict=True)]
            np.testing.assert_allclose(state.server.side, mean, rtol=1e-9, atol=1e-12)
            linear.assert_weights(state, w)
        assert np.abs(mean).max() > 1e-2


def test_what_travels() -> None:
    """The network down twice, as clients keep nothing; beside it the mean gradient, once."""
    algorithm = federations.build(
        "fediir", federations.Config(federations.normed, federations.steps)
    )
    federation = federations.federation()

    def start() -> tuple[Variables, rounds.State]:
        key = jax.random.key(0)
        variables = federations.initial(federations.normed(), key)
        return variables, rounds.init(algorithm, variables, federation, key)

    variables, state = jax.eval_shape(start)
    network, head = communication.size(variables), communication.size(variables.params.head)
    assert 0 < head < communication.size(variables.params) < network
    assert jax.tree.leaves(state.clients) == []
    assert rounds.traffic(algorithm, state, federation) == (
        communication.Traffic(down=network, up=head),
        communication.Traffic(down=network + head, up=network),
    )
