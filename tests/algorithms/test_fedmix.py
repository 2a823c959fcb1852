"""FedMix against its rule written in NumPy, in float64, on a linear body and head."""

from functools import partial
from itertools import product
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
import linear_networks as linear
from federations import assert_close
from fedjax_inv import devices, mean_examples, objectives, rounds
from fedjax_inv.algorithms import fedmix
from fedjax_inv.types import Algorithm, Array, Tree

SERVER_RATE, RATIO = 1.3, 0.3
Example = tuple[np.ndarray, np.ndarray]  # mean input [4], mean one-hot label [3]


def mean_of(examples: linear.Examples) -> Example:
    return examples[0].mean(0), np.eye(3)[examples[1]].mean(0)


def gradient(w: linear.Weights, examples: linear.Examples, mean: Example) -> linear.Weights:
    """Of the three terms, the chain rule by hand."""
    (body, head), (mean_x, mean_y) = w, mean
    u, y = (1 - RATIO) * examples[0], np.eye(3)[examples[1]]
    p = np.exp(u @ body @ head)
    p /= p.sum(1, keepdims=True)
    along = mean_x @ body @ head  # how mean_x moves the logits, of all examples alike
    # <grad_u R(u, y), mean_x> is the mean of (p - y) . along.
    slope = RATIO * (1 - RATIO)
    bent = p * along - p * (p @ along)[:, None]
    by_logits = ((1 - RATIO) * (p - y) + RATIO * (p - mean_y) + slope * bent) / len(y)
    by_along = slope * (p - y).mean(0)
    by_head = (u @ body).T @ by_logits + np.outer(mean_x @ body, by_along)
    return [u.T @ by_logits @ head.T + np.outer(mean_x, by_along @ head.T), by_head]


def trained(w: linear.Weights, examples: linear.Examples, means: list[Example]) -> linear.Weights:
    """The change by a step with each of the means."""
    left = iter(means)
    return linear.trained(
        w,
        examples,
        num_steps=len(means),
        change=lambda grads, now: gradient(now, examples, next(left)),
    )


def made(num_steps: int, **arguments: Any) -> Algorithm:
    work, server_optimizer = linear.work(num_steps), optax.sgd(SERVER_RATE)
    return fedmix.fedmix(linear.MODEL, work, server_optimizer=server_optimizer, **arguments)


def test_fedmix_is_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client sends its mean once, before it trains; the last client's mean is drawn."""

    def last(means: mean_examples.MeanExamples, key: Array, num: int) -> tuple[Tree, Array]:
        row = jnp.full(num, means.real.sum() - 1)
        return means.x[row], means.y[row]

    monkeypatch.setattr(mean_examples, "draw", last)
    with jax.enable_x64(True):
        held = linear.held()
        states = linear.run(made(linear.NUM_STEPS, ratio=RATIO), held)
        w, examples, sent = linear.weights_of(states[0]), linear.examples_of(held), set[int]()
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            sent |= set(clients)
            means = [mean_of(examples[max(sent)])] * linear.NUM_STEPS
            moved = [trained(w, examples[i], means) for i in clients]
            delta = linear.mean(moved, [linear.SIZES[i] for i in clients])
            w = [a + SERVER_RATE * d for a, d in zip(w, delta, strict=True)]
            linear.assert_weights(state, w)
            kept = state.server.side
            assert set(np.flatnonzero(kept.real[:, 0])) == sent
            for client in sent:
                for leaf, wanted in zip(kept, mean_of(examples[client]), strict=False):
                    np.testing.assert_allclose(leaf[client, 0], wanted, rtol=1e-6)
        assert sent == {0, 2, 3, 4}


def test_each_step_draws_any_of_the_means_that_there_are() -> None:
    """Of two steps of a client, all pairs of the means occur, and nothing else does."""
    with jax.enable_x64(True):
        held, algorithm = linear.held(), made(2, ratio=RATIO)
        examples = linear.examples_of(held)
        *_, state = linear.run(algorithm, held, [(0, 2, 4)])

        @jax.jit
        def end(key: Array) -> Array:
            cohort = federations.cohort([4])
            start = state._replace(key=key)
            after, _ = rounds.step(algorithm, start, cohort, held, axis=devices.chunked(1))
            return after.server.variables.params.head

        ends = np.array([end(key) for key in jax.random.split(jax.random.key(0), 150)])
        w = linear.weights_of(state)
        means = [mean_of(examples[client]) for client in (0, 2, 4)]
        expected = np.array(
            [
                w[1] + SERVER_RATE * trained(w, examples[4], list(pair))[1]
                for pair in product(means, repeat=2)
            ]
        )
        gaps = np.abs(ends[:, None] - expected).max((2, 3))  # [150, 9]
        # The means are summed in float32.
        assert (gaps.min(1) < 1e-6).all()
        assert set(gaps.argmin(1)) == set(range(9))


class Problem:
    """A batch, a mean example, and a network that is curved."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)

        def draw(*shape: int) -> Array:
            return jnp.asarray(rng.normal(size=shape))

        self.x, self.mean_x = draw(5, 2, 2), draw(2, 2)
        self.y = jnp.asarray(np.eye(3)[rng.integers(0, 3, 5)])
        self.mean_y = jnp.asarray([0.2, 0.5, 0.3])
        self.body, self.head = draw(4, 6), draw(6, 3)
        self.mask = jnp.asarray([True, True, False, True, True])
        self.calls = 0

    def loss(self, x: Array, y: Array) -> Array:
        self.calls += 1
        logits = jnp.tanh(x.reshape(len(x), 4) @ self.body) @ self.head
        return objectives.soft_cross_entropy(logits, y, self.mask)

    def mixed(self, ratio: float, **arguments: Any) -> Any:
        given = (self.x, self.y, self.mean_x, self.mean_y)
        return jax.jit(partial(fedmix.mixed_loss, self.loss, **arguments))(*given, ratio=ratio)

    def mixup(self, ratio: float) -> Array:
        """What it stands in for."""

        @jax.jit
        def of(ratio: Array) -> Array:
            x = (1 - ratio) * self.x + ratio * self.mean_x
            everywhere = jnp.broadcast_to(self.mean_y, self.y.shape)
            return (1 - ratio) * self.loss(x, self.y) + ratio * self.loss(x, everywhere)

        return of(ratio)


def test_it_is_mixup_up_to_the_square_of_the_ratio() -> None:
    with jax.enable_x64(True):
        problem = Problem()
        ratios = 0.02 / 2.0 ** np.arange(3)
        errors = [abs(problem.mixed(ratio) - problem.mixup(ratio)) for ratio in ratios]
        assert errors[0] > 1e-6
        np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 4, rtol=0.1)


def test_the_network_is_called_once_and_may_say_more() -> None:
    problem = Problem()

    def with_aux(x: Array, y: Array) -> tuple[Array, Array]:
        return problem.loss(x, y), x.sum()

    given = (problem.x, problem.y, problem.mean_x, problem.mean_y)
    value, aux = fedmix.mixed_loss(with_aux, *given, ratio=0.4, has_aux=True)
    assert problem.calls == 1
    chex.assert_shape((value, aux), ())
    assert_close(aux, 0.6 * problem.x.sum())
    assert_close(value, problem.mixed(0.4))
