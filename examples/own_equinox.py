"""A network of Equinox, which this project does not need otherwise: pip install equinox.

python examples/own_equinox.py
"""

from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

from fedjax_inv import devices, evaluation, local, models, rounds, schedules
from fedjax_inv.algorithms import fedavg
from fedjax_inv.data import federation
from fedjax_inv.types import Array, Model, Tree


def from_equinox(build: Callable[[Array], eqx.Module]) -> Model:
    """Return the model of a function from a random key to a module of one example."""
    _, static = eqx.partition(build(jax.random.key(0)), eqx.is_inexact_array)

    def init(key: Array, x: Tree) -> Tree:
        return eqx.filter(build(key), eqx.is_inexact_array)

    def apply(params: Tree, x: Tree) -> Array:
        return jax.vmap(eqx.combine(params, static))(x)

    return models.from_function(init, apply)


def main() -> float:
    """Train by FedAvg on scikit-learn's digits; print and return the accuracy."""
    x, y = load_digits(return_X_y=True)
    data = federation.examples((x / 16).astype(np.float32), y.astype(np.int32))
    train = federation.of_parts(data, np.array_split(np.arange(1500), 5))
    test = federation.of_parts(data, [np.arange(1500, len(y))])
    model = from_equinox(lambda key: eqx.nn.MLP(64, 10, width_size=64, depth=1, key=key))
    algorithm = fedavg.fedavg(model, local.epochs(optax.sgd(0.5), batch_size=50))
    variables = model.init(jax.random.key(0), data.x[:1])
    state = rounds.init(algorithm, variables, train, jax.random.key(1))
    run = jax.jit(lambda *a: rounds.run(algorithm, *a, axis=devices.chunked(1))[0])
    state = run(state, schedules.everyone(num_clients=5, num_rounds=10), train)
    accuracy = float(evaluation.evaluate(algorithm, state, test, seen=False).score[0])
    print(f"Equinox: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
