"""Training in one call: arrays and a network of your own, seeds and learning rates together.

python examples/front_door.py
"""

import flax.linen as nn
import numpy as np
import optax

from fedjax_inv import callbacks, fit, models, objectives, schedules
from fedjax_inv.algorithms import fedavg
from fedjax_inv.data import clients
from fedjax_inv.types import Array


class Network(nn.Module):
    """A network with BatchNorm and dropout."""

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        x = nn.relu(models.BatchNorm()(nn.Dense(16)(x), mask, train))
        return nn.Dense(2)(nn.Dropout(0.1, deterministic=not train)(x))


def hinge(outputs: Array, y: Array, mask: Array) -> Array:
    """Return the hinge loss of the difference of the two outputs."""
    return objectives.masked_mean(optax.hinge_loss(outputs[:, 1] - outputs[:, 0], 2 * y - 1), mask)


def main() -> np.ndarray:
    """Print and return each run's accuracy on examples that no client trains on."""
    # Two classes of points in the plane; each of eight clients shifts them a little further.
    rng = np.random.default_rng(0)
    client, y = np.arange(2400) % 8, rng.integers(0, 2, 2400)
    x = rng.normal(size=(2400, 2)) + 3 * y[:, None] + 0.2 * client[:, None]

    fitted = fit(
        fedavg.fedavg,
        models.from_flax(Network(), takes=("mask", "train")),
        clients.by_client(x[:2000], y[:2000], client[:2000]),
        rounds=30,
        grid={"learning_rate": [0.05, 0.2], "seed": range(3)},
        loss=hinge,
        # The last two clients need more rounds for an update.
        schedule=schedules.attending(slow=[1, 1, 1, 1, 1, 1, 2, 3]),
        validation=0.1,
        # It ends after five evaluations without a better validation score in any run.
        callbacks=[callbacks.Progress(), callbacks.Patience(5)],
    )
    scores = fitted.evaluate(x[2000:], y[2000:]).score
    for run, score in zip(fitted.runs, scores, strict=True):
        print(f"rate {run.hyper['learning_rate']}, seed {run.seed}: test accuracy {score:.3f}")
    return scores


if __name__ == "__main__":
    main()
