import numpy as np
import optax

import federations
from federations import assert_close, assert_equal
from fedjax_inv import local, models, schedules
from fedjax_inv.algorithms.erm import erm
from fedjax_inv.algorithms.fedavg import fedavg
from test_fedavg import MODEL, examples, result, risk_gradient, start, weights

POOLED = federations.federation((17,))


def test_erm_is_gradient_descent_whose_momentum_lasts() -> None:
    def optimizer() -> optax.GradientTransformation:
        return optax.sgd(0.2, momentum=0.9)

    work = local.full_batch(optimizer(), capacity=17, num_steps=2)
    state = result(erm(MODEL, work), schedules.everyone(1, 4), POOLED)
    expected = weights(start())
    velocity = [np.zeros_like(w) for w in expected]
    for _ in range(8):
        grads = risk_gradient(expected, *examples(POOLED, 0))
        velocity = [0.9 * v + g for v, g in zip(velocity, grads, strict=True)]
        expected = tuple(w - 0.2 * v for w, v in zip(expected, velocity, strict=True))
    assert_close(weights(state.server.variables), expected)
    # FedAvg's client forgets it.
    forgetful = result(fedavg(MODEL, work), schedules.everyone(1, 4), POOLED)
    assert np.abs(weights(forgetful.server.variables)[0] - expected[0]).max() > 1e-2


def test_predicts_with_the_network() -> None:
    algorithm = erm(MODEL, local.full_batch(optax.sgd(0.1), capacity=17))
    server = result(algorithm, schedules.everyone(1, 1), POOLED).server
    x = POOLED.data.x
    got, expected = algorithm.predict(server, (), x), models.predict(MODEL, server.variables, x)
    assert_equal(got, expected)
    assert not algorithm.personal
