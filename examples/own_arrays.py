"""Your own arrays and the layers below `fit`: FedAvg with three seeds in one program.

python examples/own_arrays.py
"""

import jax
import numpy as np
import optax

from fedjax_inv import devices, evaluation, local, models, rounds, schedules
from fedjax_inv.algorithms import fedavg
from fedjax_inv.data import federation


def main() -> np.ndarray:
    """Print and return each seed's accuracy on examples that no client trains on."""
    # Two classes of points in the plane; each of eight clients shifts them a little further.
    rng = np.random.default_rng(0)
    rows, y = np.arange(2400), rng.integers(0, 2, 2400)
    x = rng.normal(size=(2400, 2)) + 3 * y[:, None] + 0.2 * (rows % 8)[:, None]

    data = federation.examples(x.astype(np.float32), y.astype(np.int32))
    train = federation.of_parts(data, [rows[(rows < 2000) & (rows % 8 == c)] for c in range(8)])
    test = federation.of_parts(data, [rows[rows >= 2000]])

    model = models.mlp(2, widths=(16,))
    work = local.epochs(optax.sgd(0.1), batch_size=20)
    algorithm = fedavg.fedavg(model, work)
    schedule = schedules.sampled(jax.random.key(0), num_clients=8, cohort=4, num_rounds=10)

    @jax.jit
    @jax.vmap
    def accuracy(seed: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        state = rounds.init(algorithm, model.init(key, data.x[:1]), train, key)
        state, _ = rounds.run(algorithm, state, schedule, train, axis=devices.chunked(1))
        return evaluation.evaluate(algorithm, state, test, seen=False).score[0]

    accuracies = np.asarray(accuracy(np.arange(3)))
    print("test accuracy of each seed:", accuracies.round(3))
    return accuracies


if __name__ == "__main__":
    main()
