"""FedNova against normalised averaging in NumPy, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
import linear_networks as linear
import slow
from federations import assert_close
from fedjax_inv import devices, local, rounds
from fedjax_inv.algorithms import fedavg, fednova
from fedjax_inv.types import Algorithm

PROXIMAL = 0.4


def counts(num_steps: int, *, proximal: float) -> float:
    """The sum of the factors of the gradients, each followed alone through the local steps."""
    total = 0.0
    for first in range(num_steps):
        velocity = moved = 0.0
        for turn in range(num_steps):
            direction = (turn == first) - linear.RATE * proximal * moved
            velocity = linear.MOMENTUM * velocity + direction
            moved += velocity
        total += moved
    return total


@pytest.mark.parametrize("proximal", slow.after(1, [PROXIMAL, 0.0, 3.5 / linear.RATE]))
def test_fednova_is_the_papers(proximal: float) -> None:
    """Clients take one step for each batch of three examples, here all of the same example.

    With the largest proximal term some counts of steps are negative.
    """
    with jax.enable_x64(True):
        held = linear.held()
        first = held.start[np.arange(len(linear.SIZES))]
        order = np.repeat(
            np.asarray(held.order)[np.minimum(first, len(held.order) - 1)], linear.SIZES
        )
        held = held._replace(order=order)  # each client repeats its first example
        optimizer = optax.sgd(linear.RATE, linear.MOMENTUM)
        work = local.epochs(optimizer, batch_size=3, num_epochs=2, momentum=linear.MOMENTUM)
        work = work._replace(learning_rate=linear.RATE)
        states = linear.run(fednova.fednova(linear.MODEL, work, proximal=proximal), held)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            clients = linear.present(cohort)
            steps = [2 * -(-linear.SIZES[i] // 3) for i in clients]
            assert len(set(steps)) > 1
            a = [counts(k, proximal=proximal) for k in steps]
            received = w

            def change(grads: Any, now: Any, received: Any = received) -> list[np.ndarray]:
                return [
                    g + proximal * (b - c) for g, b, c in zip(grads, now, received, strict=True)
                ]

            moved = [
                [
                    part / count
                    for part in linear.trained(w, examples[i], num_steps=k, change=change)
                ]
                for i, k, count in zip(clients, steps, a, strict=True)
            ]
            p = np.array([linear.SIZES[i] for i in clients]) / sum(linear.SIZES[i] for i in clients)
            w = [b + p @ a * d for b, d in zip(w, linear.mean(moved, p), strict=True)]
            linear.assert_weights(state, w)


def test_the_number_of_steps_has_a_closed_form() -> None:
    k, rho, shrinkage = 7, 0.9, 0.3
    assert float(fednova.effective_steps(k)) == k
    assert float(fednova.effective_steps(np.uint8(k))) == k
    assert float(fednova.effective_steps(0, rho)) == 0
    with_momentum = (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)
    np.testing.assert_allclose(fednova.effective_steps(k, rho), with_momentum, rtol=1e-5)
    with_proximal = (1 - (1 - shrinkage) ** k) / shrinkage
    found = fednova.effective_steps(k, shrinkage=shrinkage)
    np.testing.assert_allclose(found, with_proximal, rtol=1e-5)


@pytest.mark.slow
def test_where_all_take_as_many_steps_it_is_fedavg() -> None:
    """With statistics and a proximal term of 0; with other numbers of steps it is not."""
    model, federation = federations.small_normed(), federations.federation()
    key = jax.random.key(0)
    variables = federations.initial(model, key)

    def end(algorithm: Algorithm) -> Any:
        state = rounds.init(algorithm, variables, federation, key, history=federations.HISTORY)
        axis, schedule = devices.chunked(1), federations.schedule()
        return rounds.run(algorithm, state, schedule, federation, axis=axis)[0].server.variables

    for work, is_same in ((federations.steps(0.1), True), (federations.epochs(0.1), False)):
        ends = jax.jit(
            lambda work=work: [end(f(model, work)) for f in (fednova.fednova, fedavg.fedavg)]
        )
        got, expected = ends()
        if is_same:
            assert_close(got, expected)
        else:
            with pytest.raises(AssertionError):
                assert_close(got.params, expected.params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"proximal": -1.0}, "proximal=-1.0: must be a finite number, at least 0"),
        ({"step_size": -0.1}, "step_size=-0.1: must be a finite number, at least 0"),
        (
            {"proximal": 0.1},
            "step_size=None: must be a number, or `work` must record its `learning_rate`",
        ),
        (
            {"work": local.steps(optax.adam(0.1), batch_size=2, num_steps=1)},
            "optimizer: must be sgd without Nesterov momentum and weight decay; in Python `work` "
            "must record its `momentum`, which is 0 for plain sgd",
        ),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        fednova.fednova(linear.MODEL, **{"work": linear.work(), **arguments})


@pytest.mark.parametrize(
    ("num_steps", "line"),
    [
        (-1, "num_steps=-1: must be a finite number, at least 0"),
        (2.5, "num_steps=2.5: must be an integer"),
        (jnp.arange(2), "num_steps: is of type .*, must be an integer"),
    ],
)
def test_a_number_of_steps_is_an_integer(num_steps: Any, line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}$"):
        fednova.effective_steps(num_steps)
