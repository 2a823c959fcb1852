import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from federations import assert_close
from fedjax_inv import servers
from fedjax_inv.types import Halves, Variables

RNG = np.random.default_rng(0)
PARAMS = RNG.normal(size=(2, 3))
DELTAS = RNG.normal(size=(4, 2, 3))


def variables(params: np.ndarray, stats: float) -> Variables:
    return Variables(
        Halves({"w": jnp.asarray(params[0], jnp.float32)}, jnp.asarray(params[1], jnp.float32)),
        Halves({}, jnp.float32(stats)),
    )


def after(optimizer: optax.GradientTransformation) -> servers.Server:
    @jax.jit
    def updated() -> servers.Server:
        server = servers.init(optimizer, variables(PARAMS, 1.0), "beside")
        for i, delta in enumerate(DELTAS):
            server = servers.update(optimizer, server, variables(delta, 0.5 * i))
        assert server.side == "beside"  # the method's further state is left alone
        return server._replace(side=())

    return updated()


def momentum(rate: float, decay: float) -> np.ndarray:
    params, velocity = PARAMS.copy(), np.zeros_like(PARAMS)
    for delta in DELTAS:
        velocity = decay * velocity + delta
        params = params + rate * velocity
    return params


def adaptive(rate: float, b1: float, b2: float, eps: float, *, yogi: bool) -> np.ndarray:
    params, m, v = PARAMS.copy(), np.zeros_like(PARAMS), np.zeros_like(PARAMS)
    v += 1e-6 if yogi else 0
    m += 1e-6 if yogi else 0
    for t, delta in enumerate(DELTAS, 1):
        m = b1 * m + (1 - b1) * (-delta)
        square = delta**2
        v = v - (1 - b2) * np.sign(v - square) * square if yogi else b2 * v + (1 - b2) * square
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        params = params - rate * m_hat / (np.sqrt(v_hat) + eps)
    return params


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.sgd(1.0), PARAMS + DELTAS.sum(0)),
        (optax.sgd(0.5, momentum=0.9), momentum(0.5, 0.9)),
        (optax.adam(0.1, 0.9, 0.99, 1e-3), adaptive(0.1, 0.9, 0.99, 1e-3, yogi=False)),
        (optax.yogi(0.1, 0.9, 0.99, 1e-3), adaptive(0.1, 0.9, 0.99, 1e-3, yogi=True)),
    ],
    ids=["fedavg", "fedavgm", "fedadam", "fedyogi"],
)
def test_the_mean_delta_is_a_descent_direction(
    optimizer: optax.GradientTransformation, expected: np.ndarray
) -> None:
    server = after(optimizer)
    # Statistics move by the plain mean, whatever the optimizer.
    assert_close(server.variables, variables(expected, 1 + 0.5 + 1.0 + 1.5), atol=1e-5)
