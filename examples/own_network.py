"""Your own networks: a flax module with dropout, and two plain functions.

python examples/own_network.py
"""

import flax.linen as nn
import jax
import numpy as np
from sklearn.datasets import load_digits

from fedjax_inv import fit, models
from fedjax_inv.algorithms import fedipg
from fedjax_inv.types import Array


class Network(nn.Module):
    """A flax module with dropout."""

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


def init(key: Array, x: Array) -> Array:
    """Return the parameters of a linear classifier."""
    return 0.1 * jax.random.normal(key, (x.shape[1], 10))


def linear(kernel: Array, x: Array) -> Array:
    """Return the logits of the linear classifier."""
    return x @ kernel


def main() -> list[float]:
    """Train both by FedIPG on scikit-learn's digits; print and return their accuracies."""
    x, y = load_digits(return_X_y=True)
    clients = [(x[rows] / 16, y[rows]) for rows in np.array_split(np.arange(1500), 5)]
    accuracies = []
    for model in (
        models.from_flax(Network(), takes=("train",)),
        models.from_function(init, linear),
    ):
        fitted = fit(fedipg.fedipg, model, clients, rounds=10, learning_rate=0.5, batch_size=50)
        accuracies.append(float(fitted.evaluate(x[1500:] / 16, y[1500:]).score[0]))
    print("flax module: {:.3f}, plain functions: {:.3f}".format(*accuracies))
    return accuracies


if __name__ == "__main__":
    main()
