"""Your own networks: a flax module with dropout, and two plain functions.

python examples/own_network.py
"""

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

from fedjax_inv import devices, evaluation, local, models, rounds, schedules
from fedjax_inv.algorithms import fedipg
from fedjax_inv.data import federation
from fedjax_inv.types import Array, Model


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
    data = federation.examples((x / 16).astype(np.float32), y.astype(np.int32))
    train = federation.of_parts(data, np.array_split(np.arange(1500), 5))
    test = federation.of_parts(data, [np.arange(1500, len(y))])

    def accuracy(model: Model) -> float:
        algorithm = fedipg.fedipg(model, local.epochs(optax.sgd(0.5), batch_size=50))
        variables = model.init(jax.random.key(0), data.x[:1])
        state = rounds.init(algorithm, variables, train, jax.random.key(1))
        run = jax.jit(lambda *a: rounds.run(algorithm, *a, axis=devices.chunked(1))[0])
        state = run(state, schedules.everyone(num_clients=5, num_rounds=10), train)
        return float(evaluation.evaluate(algorithm, state, test, seen=False).score[0])

    own = (models.from_flax(Network(), takes=("train",)), models.from_function(init, linear))
    accuracies = [accuracy(model) for model in own]
    print("flax module: {:.3f}, plain functions: {:.3f}".format(*accuracies))
    return accuracies


if __name__ == "__main__":
    main()
