"""ERM against gradient descent in NumPy, in float64."""

import jax
import numpy as np
import optax

import linear_networks as linear
from fedjax_inv import local
from fedjax_inv.algorithms.erm import erm
from fedjax_inv.algorithms.fedavg import fedavg
from fedjax_inv.data import federation


def test_erm_is_gradient_descent_whose_momentum_lasts() -> None:
    with jax.enable_x64(True):
        pooled, alone = federation.pooled(linear.held()), ((0,),) * 4
        optimizer = optax.sgd(linear.RATE, linear.MOMENTUM)
        work = local.full_batch(optimizer, capacity=sum(linear.SIZES), num_steps=2)
        algorithm = erm(linear.MODEL, work)
        start, *_, end = linear.run(algorithm, pooled, alone)
        (examples,), w = linear.examples_of(pooled), linear.weights_of(start)
        moved = linear.trained(w, examples, num_steps=8)
        w = [a + d for a, d in zip(w, moved, strict=True)]
        linear.assert_weights(end, w)
        # FedAvg's client forgets it.
        *_, other = linear.run(fedavg(linear.MODEL, work), pooled, alone)
        assert np.abs(linear.weights_of(other)[0] - w[0]).max() > 1e-2
        got = algorithm.predict(end.server, (), pooled.data.x)
        np.testing.assert_allclose(got, np.asarray(pooled.data.x) @ w[0] @ w[1], rtol=1e-8)
        assert not algorithm.personal
