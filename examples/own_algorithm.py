"""Your own algorithm: clients step along the sign of the gradient (signSGD).

python examples/own_algorithm.py
fedjax-inv train --algorithm=examples.own_algorithm:signs --set=weight_decay=0.01
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from fedjax_inv import averaging, fit, models
from fedjax_inv.types import Algorithm, Array, Batch, GradFn, Model, Step, Variables, Visit, Work


def signs(model: Model, work: Work, *, weight_decay: float | Array = 0.0) -> Algorithm:
    """Return FedAvg with local steps along sign(gradient) + weight_decay * parameters."""
    risk_gradient = averaging.gradient(model)

    def gradient_from(visit: Visit) -> GradFn:
        del visit  # not needed here; it holds the message and the client's own state

        def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
            step = risk_gradient(variables, batch, key)
            grads = jax.tree.map(jnp.sign, step.grads)
            return step._replace(grads=optax.tree.add_scale(grads, weight_decay, variables.params))

        return grad_fn

    return averaging.averaging(
        model, work, gradient_from, server_optimizer=optax.sgd(1.0), weighting="size"
    )


def main() -> float:
    """Train on digits; print and return the accuracy on held-out digits."""
    x, y = load_digits(return_X_y=True)
    clients = [(x[rows] / 16, y[rows]) for rows in np.array_split(np.arange(1500), 5)]
    fitted = fit(signs, models.mlp(10), clients, rounds=10, learning_rate=0.005, batch_size=50)
    accuracy = float(fitted.evaluate(x[1500:] / 16, y[1500:]).score[0])
    print(f"held-out accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)  # two cores of a CPU share the clients
    main()
