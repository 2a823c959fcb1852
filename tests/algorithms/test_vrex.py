"""V-REx against the gradient of its objective, and against its two exchanges in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import linear_networks as linear
from fedjax_inv import objectives
from fedjax_inv.algorithms import vrex

BETA = 0.5


def test_vrex_is_fedavg_with_factors() -> None:
    """Some factors are negative, and clients that do not attend do not count in the mean."""
    with jax.enable_x64(True):
        held = linear.held()
        algorithm = vrex.vrex(linear.MODEL, linear.work(2), beta=BETA, loss_batch_size=3)
        states = linear.run(algorithm, held)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        smallest = np.inf
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            risks = np.array([linear.risk(w, examples[i]) for i in clients])
            factors = 1 + 2 * BETA * (risks - risks.mean())
            smallest = min(smallest, factors.min())
            moved = [
                linear.trained(
                    w,
                    examples[i],
                    num_steps=2,
                    change=lambda grads, now, f=f: [f * g for g in grads],
                )
                for i, f in zip(clients, factors, strict=True)
            ]
            w = [a + d for a, d in zip(w, linear.mean(moved, np.ones(len(moved))), strict=True)]
            linear.assert_weights(state, w)
        assert smallest < 0


def test_the_variance_counts_after_the_warm_up_and_may_be_divided_by_its_weight() -> None:
    beta = 8.0
    with jax.enable_x64(True):
        held, everyone = linear.held(), [range(len(linear.SIZES))] * 2
        late = vrex.vrex(linear.MODEL, linear.work(1), beta=beta, warmup_rounds=1, scale_loss=True)
        _, first, second = linear.run(late, held, everyone)
        examples = [each for each in linear.examples_of(held) if len(each[1])]

        def expected(w: Any, of: float) -> Any:
            risks = np.array([linear.risk(w, each) for each in examples])
            factors = (1 + 2 * of * (risks - risks.mean())) / max(1, of)
            moved = [
                linear.trained(
                    w, each, num_steps=1, change=lambda grads, now, f=f: [f * g for g in grads]
                )
                for each, f in zip(examples, factors, strict=True)
            ]
            return [a + d for a, d in zip(w, linear.mean(moved, np.ones(len(moved))), strict=True)]

        start = linear.weights_of(linear.run(late, held, [])[0])
        linear.assert_weights(first, expected(start, 0.0))
        linear.assert_weights(second, expected(linear.weights_of(first), beta))


def test_a_client_without_a_loss_steps_along_its_risk_alone() -> None:
    """The loss of the first exchange, in batches of three, is NaN and dropped."""
    beta = 4.0

    def loss(outputs: Any, y: Any, mask: Any) -> Any:
        return objectives.cross_entropy(outputs, y, mask) * (jnp.nan if len(y) == 3 else 1)

    with jax.enable_x64(True):
        held, everyone = linear.held(), [range(len(linear.SIZES))]
        settings: dict[str, Any] = {"beta": beta, "scale_loss": True, "loss_batch_size": 3}
        scaled = vrex.vrex(linear.MODEL, linear.work(1), loss=loss, **settings)
        start, end = linear.run(scaled, held, everyone, drop_nonfinite=True)
        w, examples = linear.weights_of(start), linear.examples_of(held)
        moved = [linear.trained(w, each, num_steps=1) for each in examples if len(each[1])]
        mean = linear.mean(moved, np.ones(len(moved)))
        linear.assert_weights(end, [a + d / beta for a, d in zip(w, mean, strict=True)])


def test_one_full_step_descends_mean_and_variance() -> None:
    """By the derivative of mean R + beta Var R."""
    with jax.enable_x64(True):
        held, everyone = linear.held(), [range(len(linear.SIZES))]
        start, end = linear.run(vrex.vrex(linear.MODEL, linear.work(1), beta=BETA), held, everyone)
        examples = [each for each in linear.examples_of(held) if len(each[1])]

        def objective(params: Any) -> Any:
            risks = [
                -jax.nn.log_softmax(x @ params[0] @ params[1])[jnp.arange(len(y)), y].mean()
                for x, y in examples
            ]
            return jnp.mean(jnp.stack(risks)) + BETA * jnp.var(jnp.stack(risks))

        w = linear.weights_of(start)
        pairs = zip(w, jax.jit(jax.grad(objective))(w), strict=True)
        linear.assert_weights(end, [a - linear.RATE * np.asarray(g) for a, g in pairs])
