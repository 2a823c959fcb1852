"""Your own algorithm: clients step along the sign of the gradient (signSGD).

python examples/own_algorithm.py
fedjax-inv train --algorithm=examples.own_algorithm:signs --set=weight_decay=0.01
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from fedjax_inv import averaging, devices, evaluation, local, models, rounds, schedules
from fedjax_inv.data import federation
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
    data = federation.examples((x / 16).astype(np.float32), y.astype(np.int32))
    train = federation.of_parts(data, np.array_split(np.arange(1500), 5))
    test = federation.of_parts(data, [np.arange(1500, len(y))])
    model = models.mlp(10)
    algorithm = signs(model, local.epochs(optax.sgd(0.005), batch_size=50))
    variables = model.init(jax.random.key(0), data.x[:1])
    state = rounds.init(algorithm, variables, train, jax.random.key(1))
    run = jax.jit(lambda *a: rounds.run(algorithm, *a, axis=devices.chunked(1))[0])
    state = run(state, schedules.everyone(num_clients=5, num_rounds=10), train)
    accuracy = float(evaluation.evaluate(algorithm, state, test, seen=False).score[0])
    print(f"held-out accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
