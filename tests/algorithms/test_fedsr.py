"""FedSR against NumPy in float64: its closed forms by quadrature, its rounds by differences."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings

import federations
import linear_networks as linear
from fedjax_inv import devices, local, rounds
from fedjax_inv.algorithms import fedavg, fedsr
from fedjax_inv.types import Algorithm, Array, Halves

L2R, CMI = 0.3, 0.2
RATE, NUM_STEPS, CAPACITY = 0.1, 2, 8
WORK = local.full_batch(optax.sgd(RATE), capacity=CAPACITY, num_steps=NUM_STEPS)
NAMES = ("kernel", "bias", "mean", "raw_deviation")
Weights = dict[str, np.ndarray]


# The closed forms.


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999))
def test_both_terms_are_expectations(seed: int) -> None:
    """Gauss-Hermite quadrature is exact for polynomials."""
    rng = np.random.default_rng(seed)
    mean, to_mean = rng.normal(size=(2, 4, 3, 2))
    deviation, to_deviation = rng.uniform(0.2, 3, size=(2, 4, 3, 2))
    nodes, weights = np.polynomial.hermite_e.hermegauss(4)
    z = mean[..., None] + deviation[..., None] * nodes

    def log_density(mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
        scaled = (z - mean[..., None]) / deviation[..., None]
        return -(scaled**2) / 2 - np.log(deviation)[..., None]

    def expected(values: np.ndarray) -> np.ndarray:
        return (values @ weights).sum((1, 2)) / weights.sum()

    ratio = log_density(mean, deviation) - log_density(to_mean, to_deviation)
    found = fedsr.divergence(*map(jnp.asarray, (mean, deviation, to_mean, to_deviation)))
    np.testing.assert_allclose(found, expected(ratio), rtol=1e-4, atol=1e-5)
    norm = fedsr.squared_norm(jnp.asarray(mean), jnp.asarray(deviation))
    np.testing.assert_allclose(norm, expected(z**2), rtol=1e-5)
    same = fedsr.divergence(*map(jnp.asarray, (mean, deviation, mean, deviation)))
    np.testing.assert_allclose(same, 0, atol=1e-6)


# Rounds.


def softplus(raw: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, raw) + 1e-6


def terms(w: Weights, x: np.ndarray, y: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The risk, E||z||^2 and KL, each a mean over the examples."""
    mean = x @ w["body"]
    deviation = softplus(mean @ w["kernel"] + w["bias"])
    logits = (mean + deviation * noise) @ w["head"]
    risk = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    m, s = w["mean"][y], softplus(w["raw_deviation"][y])
    kl = np.log(s / deviation) + (deviation**2 + (mean - m) ** 2) / (2 * s**2) - 0.5
    return np.array([risk.mean(), (mean**2 + deviation**2).sum(1).mean(), kl.sum(1).mean()])


def gradient(w: Weights, *batch: np.ndarray) -> Weights:
    """By central differences."""
    factors, size = np.array([1, L2R, CMI]), 1e-5
    found = {name: np.zeros_like(value) for name, value in w.items()}
    for name, value in w.items():
        for place in np.ndindex(value.shape):
            sides = [value.copy(), value.copy()]
            sides[0][place] += size
            sides[1][place] -= size
            up, down = (terms(w | {name: side}, *batch) for side in sides)
            found[name][place] = factors @ (up - down) / (2 * size)
    return found


def weights_of(state: rounds.State) -> Weights:
    body, head = state.server.variables.params
    extra = {name: head["gaussians"][name] for name in NAMES if "gaussians" in head}
    return jax.tree.map(np.asarray, {"body": body, "head": head["w"], **extra})


def build(weights: dict[str, Any]) -> Algorithm:
    """FedSR with these weights of its terms, or FedAvg without any."""
    if not weights:
        return fedavg.fedavg(linear.NAMED, WORK)
    return fedsr.fedsr(linear.NAMED, WORK, weighting="size", **weights)


@jax.jit
def start(weights: dict[str, Any]) -> rounds.State:
    held, key = linear.held(), jax.random.key(0)
    return rounds.init(build(weights), linear.NAMED.init(key, held.data.x), held, key)


@jax.jit
def play(weights: dict[str, Any], state: rounds.State, present: Array) -> Any:
    cohort = federations.cohort(linear.SLOTS)._replace(present=present)
    return rounds.step(build(weights), state, cohort, linear.held(), axis=devices.chunked(2))


def run(
    weights: dict[str, float],
    change: Callable[[rounds.State], rounds.State] = lambda state: state,
) -> tuple[list[rounds.State], list[tuple[rounds.Report, ...]]]:
    """The states before the first round and after each, and the reports."""
    states, reports = [change(start(weights))], []
    for cohort in linear.ATTEND:
        state, report = play(weights, states[-1], jnp.asarray(np.isin(linear.SLOTS, cohort)))
        states.append(state)
        reports.append(report)
    return states, reports


def noise_of(state: rounds.State, who: int, step: int) -> np.ndarray:
    """The draw of a local step for a whole batch, the same with more examples in the batch."""
    visit = jax.random.fold_in(jax.random.fold_in(state.key, state.round), 0)
    steps = jax.random.split(jax.random.fold_in(visit, who))[1]
    key = jax.random.split(jax.random.fold_in(steps, step), 3)[2]
    return np.asarray(jax.random.normal(key, (CAPACITY, 3)))


def test_fedsr_is_its_formula() -> None:
    """Clients of one to seven examples in batches of eight, and one without any."""
    with jax.enable_x64(True):
        states, reports = run({"l2r": L2R, "cmi": CMI})
        examples = linear.examples_of(linear.held())
        w = first = weights_of(states[0])
        np.testing.assert_array_equal(w["mean"], np.zeros((3, 3)))
        np.testing.assert_array_equal(w["raw_deviation"], np.ones((3, 3)))
        for t, cohort in enumerate(linear.ATTEND):
            clients, ends = linear.present(cohort), []
            for who in clients:
                x, y = examples[who]
                now, found = w, np.zeros(3)
                for step in range(NUM_STEPS):
                    batch = x, y, noise_of(states[t], who, step)[: len(y)]
                    found += terms(now, *batch) / NUM_STEPS
                    slope = gradient(now, *batch)
                    now = {name: now[name] - RATE * slope[name] for name in now}
                ends.append(now)
                reported = reports[t][0].metrics
                place = linear.SLOTS.index(who)
                metrics = [reported[name][place] for name in ("loss", "squared_norm", "divergence")]
                np.testing.assert_allclose(metrics, found, rtol=1e-8)
            sizes = [linear.SIZES[who] for who in clients]
            w = {n: np.average([end[n] for end in ends], axis=0, weights=sizes) for n in w}
            for name, value in weights_of(states[t + 1]).items():
                np.testing.assert_allclose(value, w[name], rtol=1e-7, atol=1e-9, err_msg=name)
        assert all(np.abs(w[name] - first[name]).max() > 1e-3 for name in w)
        x = jnp.asarray(np.concatenate([x for x, _ in examples]))
        expected = np.asarray(x) @ w["body"] @ w["head"]  # the mean representation
        got = fedsr.fedsr(linear.NAMED, WORK).predict(states[-1].server, (), x)
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_without_deviation_and_terms_it_is_fedavg() -> None:
    def certain(state: rounds.State) -> rounds.State:
        body, head = state.server.variables.params
        gaussians = head["gaussians"]
        never = {"kernel": 0 * gaussians["kernel"], "bias": gaussians["bias"] - 1e3}
        params = Halves(body, {**head, "gaussians": gaussians | never})
        variables = state.server.variables._replace(params=params)
        return state._replace(server=state.server._replace(variables=variables))

    none = {"l2r": 0.0, "cmi": 0.0}
    with jax.enable_x64(True):
        expected = weights_of(run({})[0][-1])
        got, random = (weights_of(run(none, *change)[0][-1]) for change in ([certain], []))
        for name in ("body", "head"):
            np.testing.assert_allclose(got[name], expected[name], atol=1e-5)
            assert np.abs(random[name] - expected[name]).max() > 1e-2
