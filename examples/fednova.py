"""FedNova (Wang et al. 2020, arXiv 2007.07481) as an algorithm of your own, and its check.

A client divides the change of its parameters by its number tau of local steps of plain SGD. The
server multiplies the mean by the mean tau. So clients with more steps do not count for more.

python examples/fednova.py; python -m fedjax_inv.laws examples.fednova:fednova
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from fedjax_inv import aggregators, averaging, devices, evaluation, local, models, rounds, schedules
from fedjax_inv.data import federation
from fedjax_inv.objectives import cross_entropy
from fedjax_inv.types import Algorithm, Array, Loss, Model, Trained, Visit, Work


def fednova(model: Model, work: Work, *, loss: Loss = cross_entropy) -> Algorithm:
    """Return FedNova for local training by plain SGD."""
    risk_gradient = averaging.gradient(model, loss)

    def steps(visit: Visit, trained: Trained) -> Array:
        return jnp.maximum(trained.num_steps, 1).astype(jnp.float32)

    return averaging.averaging(
        model,
        work,
        lambda visit: risk_gradient,
        server_optimizer=optax.sgd(1.0),
        weighting="size",
        scale_delta=lambda visit, trained: 1 / steps(visit, trained),
        server_delta=lambda side, delta, tau: delta._replace(
            params=optax.tree.scale(tau, delta.params)
        ),
        side=averaging.SideState(upload=steps, aggregate=aggregators.mean()),
    )


def main() -> float:
    """Train on digits, with clients of 60 to 660 examples; return the held-out accuracy."""
    x, y = load_digits(return_X_y=True)
    data = federation.examples((x / 16).astype(np.float32), y.astype(np.int32))
    train = federation.of_parts(data, np.split(np.arange(1500), [60, 180, 480, 840]))
    model = models.mlp(10)
    algorithm = fednova(model, local.epochs(optax.sgd(0.1), batch_size=20))
    state = rounds.init(algorithm, model.init(jax.random.key(0), x[:1]), train, jax.random.key(1))
    run = jax.jit(lambda *a: rounds.run(algorithm, *a, axis=devices.chunked(1))[0])
    state = run(state, schedules.everyone(num_clients=5, num_rounds=10), train)
    test = federation.of_parts(data, [np.arange(1500, len(y))])
    accuracy = float(evaluation.evaluate(algorithm, state, test, seen=False).score[0])
    print(f"held-out accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
