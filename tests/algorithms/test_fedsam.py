"""FedSAM against a loop over clients in NumPy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np

import federations
import linear_networks as linear
from federations import assert_close, assert_equal
from fedjax_inv import averaging, devices, rounds
from fedjax_inv.algorithms.fedavg import fedavg
from fedjax_inv.algorithms.fedsam import ascended, at_ascended, fedsam
from fedjax_inv.types import Algorithm, Batch

RHO = 0.4


def test_fedsam_is_a_loop_over_clients() -> None:
    with jax.enable_x64(True):
        held = linear.held()
        states = linear.run(fedsam(linear.MODEL, linear.work(), rho=RHO), held)
        w, examples = linear.weights_of(states[0]), linear.examples_of(held)
        for cohort, state in zip(linear.ATTEND, states[1:], strict=True):
            moved, clients = [], linear.present(cohort)
            for i in clients:

                def change(grads: linear.Weights, now: linear.Weights, i: int = i) -> list:
                    norm = np.sqrt(sum((g**2).sum() for g in grads))
                    worst = [a + RHO * g / norm for a, g in zip(now, grads, strict=True)]
                    return linear.gradient(worst, examples[i])

                moved.append(linear.trained(w, examples[i], change=change))
            mean = linear.mean(moved, [linear.SIZES[i] for i in clients])
            w = [a + d for a, d in zip(w, mean, strict=True)]
            linear.assert_weights(state, w)


def test_no_gradient_ascends_nothing() -> None:
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}
    assert_equal(ascended(params, jax.tree.map(jnp.zeros_like, params), RHO), params)
    up = ascended(params, {"a": jnp.array([3.0, 0.0]), "b": jnp.array(-4.0)}, 10.0)
    assert_close(up, {"a": np.array([7.0, -2.0]), "b": np.array(-5.0)})


def test_without_rho_it_is_fedavg() -> None:
    model, work, federation = (
        federations.normed(),
        federations.epochs(0.1),
        federations.federation(),
    )

    def last(algorithm: Algorithm) -> rounds.State:
        @jax.jit
        def play() -> rounds.State:
            variables = federations.initial(model, jax.random.key(0))
            state = rounds.init(algorithm, variables, federation, jax.random.key(1))
            axis, cohorts = devices.vmapped(), federations.schedule()
            return rounds.run(algorithm, state, cohorts, federation, axis=axis)[0]

        return play()

    federations.assert_same_bits(
        last(fedsam(model, work, rho=0.0)).server, last(fedavg(model, work)).server
    )


def test_the_first_pass_moves_the_statistics() -> None:
    model, (x, y, _) = federations.normed(), federations.federation().data
    variables = federations.initial(model, jax.random.key(0))
    batch, plain = Batch(x, y, jnp.ones(len(y), bool)), averaging.gradient(model)

    @jax.jit
    def both() -> list:
        key = jax.random.key(1)
        return [of(variables, batch, key) for of in (plain, at_ascended(plain, RHO))]

    first, worst = both()
    assert_close(worst.stats, first.stats)
    assert_close(worst.metrics, first.metrics)
    assert (
        np.abs(
            worst.grads.head["blocks_0"]["Dense_0"]["kernel"]
            - first.grads.head["blocks_0"]["Dense_0"]["kernel"]
        ).max()
        > 1e-3
    )
