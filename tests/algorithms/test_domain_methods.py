"""Methods that use the domains inside of clients, against loops over domains in NumPy, in float64.

Derivatives are by complex steps, which have no rounding of their own.
"""

import importlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

import linear_networks as linear
from federations import assert_same_bits, cohort
from fedjax_inv import algorithms, devices, domains, local, rounds
from fedjax_inv.algorithms import fedavg, fedipg, fish, fishr, group_dro, irm
from fedjax_inv.data.federation import parts_of
from fedjax_inv.types import Algorithm, Batch, Federation, Halves, Variables

D = 4  # the last has no examples
Rows = list[np.ndarray]  # of each domain that is in the batch
Penalty = Callable[[linear.Weights, linear.Examples, Rows], Any]


def held(num_domains: int = D - 1) -> Federation:
    """The ragged federation, with domains; clients lack some, or have one example of one."""
    federation = linear.held()
    domain = np.random.default_rng(1).integers(0, num_domains, sum(linear.SIZES))
    return federation._replace(data=federation.data._replace(domain=jax.numpy.asarray(domain)))


def rows_of(federation: Federation, least: int = 1) -> list[Rows]:
    """The rows, in each client's examples, of its domains with at least so many."""
    found = []
    for _, domain in linear.examples_of(
        federation._replace(data=federation.data._replace(y=federation.data.domain))
    ):
        each = [np.flatnonzero(domain == d) for d in range(D)]
        found.append([rows for rows in each if len(rows) >= least])
    return found


def derivative(of: Callable[[linear.Weights], Any], w: linear.Weights) -> linear.Weights:
    """The derivative of an analytic function by each weight."""
    found = [np.zeros_like(part) for part in w]
    for part, into in zip(range(len(w)), found, strict=True):
        for at in np.ndindex(into.shape):
            moved = [each.astype(complex) for each in w]
            moved[part][at] += 1e-30j
            into[at] = of(moved).imag / 1e-30
    return found


def _logits(w: linear.Weights, x: np.ndarray) -> np.ndarray:
    return x @ w[0] @ w[1]


def _risk(w: linear.Weights, x: np.ndarray, y: np.ndarray) -> Any:
    logits = _logits(w, x)
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y])


def _slope(w: linear.Weights, x: np.ndarray, y: np.ndarray) -> Any:
    """The derivative of the risk by the scale of the logits."""
    if not len(y):
        return 0.0
    logits = _logits(w, x)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return np.mean((shares * logits).sum(1) - logits[np.arange(len(y)), y])


def _irm(w: linear.Weights, examples: linear.Examples, domains: Rows) -> Any:
    x, y = examples
    return np.mean([_slope(w, x[rows], y[rows]) ** 2 for rows in domains])


def _irm_of_halves(w: linear.Weights, examples: linear.Examples, domains: Rows) -> Any:
    x, y = examples
    halves = [(rows[::2], rows[1::2]) for rows in domains]
    return np.mean([_slope(w, x[a], y[a]) * _slope(w, x[b], y[b]) for a, b in halves])


def _vrex(w: linear.Weights, examples: linear.Examples, domains: Rows) -> Any:
    x, y = examples
    risks = np.array([_risk(w, x[rows], y[rows]) for rows in domains])
    return np.mean((risks - risks.mean()) ** 2)


def _over_pairs(of: Callable[[np.ndarray, np.ndarray], Any], domains: Rows) -> Any:
    pairs = [of(a, b) for a, b in itertools.combinations(domains, 2)]
    return np.mean(pairs) if pairs else 0j


def _coral(w: linear.Weights, examples: linear.Examples, domains: Rows) -> Any:
    features = examples[0] @ w[0]

    def moments(rows: np.ndarray) -> tuple[Any, Any]:
        apart = features[rows] - features[rows].mean(0)
        return features[rows].mean(0), apart.T @ apart / (len(rows) - 1)

    def apart(a: np.ndarray, b: np.ndarray) -> Any:
        (mean, cov), (other_mean, other_cov) = moments(a), moments(b)
        return np.mean((mean - other_mean) ** 2) + np.mean((cov - other_cov) ** 2)

    return _over_pairs(apart, domains)


def _mmd(w: linear.Weights, examples: linear.Examples, domains: Rows) -> Any:
    features = examples[0] @ w[0]

    def kernel(a: np.ndarray, b: np.ndarray) -> Any:
        squares = [((features[i] - features[j]) ** 2).sum() for i in a for j in b]
        return np.mean([sum(np.exp(-(10.0**g) * s) for g in range(-3, 4)) for s in squares])

    return _over_pairs(lambda a, b: kernel(a, a) + kernel(b, b) - 2 * kernel(a, b), domains)


_LATE = {"warmup_rounds": 1}
# Name -> the settings, the penalty, and the least examples of a domain that counts.
PENALTIES: dict[str, tuple[str, dict[str, Any], Penalty, int]] = {
    "irm": ("irm", _LATE | {"penalty": 0.02}, _irm, 1),
    "irm-halves": ("irm", {"penalty": 0.02, "estimator": "halves"}, _irm_of_halves, 1),
    "vrex": ("vrex_domains", _LATE | {"penalty": 1.5, "scale_loss": True}, _vrex, 1),
    "coral": ("coral", _LATE | {"penalty": 0.01}, _coral, 2),
    "mmd": ("mmd", {"penalty": 0.5}, _mmd, 1),
}


def assert_rounds(
    algorithm: Algorithm,
    change: Callable[[int, int, linear.Examples], Callable[[Any, Any], linear.Weights]],
) -> None:
    """Rounds are those of clients that step along change(round, client, examples)."""
    federation = held()
    states = linear.run(algorithm, federation)
    w, examples = linear.weights_of(states[0]), linear.examples_of(federation)
    for number, (chosen, state) in enumerate(zip(linear.ATTEND, states[1:], strict=True)):
        clients = linear.present(chosen)
        moved = [
            linear.trained(w, examples[i], num_steps=2, change=change(number, i, examples[i]))
            for i in clients
        ]
        mean = linear.mean(moved, [linear.SIZES[i] for i in clients])
        w = [a + d for a, d in zip(w, mean, strict=True)]
        linear.assert_weights(state, w)


@pytest.mark.parametrize("name", PENALTIES)
def test_penalised_rounds_are_loops_over_domains(name: str) -> None:
    file, settings, penalty, least = PENALTIES[name]
    weight = settings["penalty"]
    factory = getattr(importlib.import_module(f"{algorithms.__name__}.{file}"), file)
    with jax.enable_x64(True):
        domains = rows_of(held(), least)
        assert {len(each) for each in domains} >= {0, 3}

        def change(number: int, client: int, examples: linear.Examples) -> Any:
            now = 0 if number < settings.get("warmup_rounds", 0) else weight

            def objective(w: linear.Weights) -> Any:
                more = penalty(w, examples, domains[client]) if domains[client] else 0
                whole = _risk(w, *examples) + now * more
                return whole / (max(1, now) if "scale_loss" in settings else 1)

            return lambda grads, w: derivative(objective, w)

        assert_rounds(factory(linear.MODEL, linear.work(2), num_domains=D, **settings), change)


def test_features_of_bfloat16_are_compared_in_float32() -> None:
    """Of a network whose body computes in less: a sum of 301 ones would be 300."""

    def encode(params: Any, *others: Any) -> Any:
        return jax.numpy.ones((301, 1), "bfloat16") * params.astype("bfloat16"), ()

    model = linear.MODEL._replace(
        encode=encode, decode=lambda params, stats, x, *others: (0 * x.astype("float32"), ())
    )
    gradient_from = domains.penalised(
        model,
        lambda outputs, y, mask: outputs.sum(),
        lambda features, outputs, batch, members: (members * features.T).sum(),
        *(1.0, 0, 1),
    )
    visit: Any = SimpleNamespace(round=0)
    ones = jax.numpy.ones(301)
    variables = Variables(Halves(jax.numpy.ones(()), jax.numpy.ones(())), Halves((), ()))
    batch = Batch(ones, ones, ones > 0, jax.numpy.zeros(301, int))
    step: Any = gradient_from(visit)
    assert float(step(variables, batch, jax.random.key(0)).metrics["penalty"]) == 301


def test_fishr_is_a_loop_over_domains_with_a_moving_average() -> None:
    penalty, ema = 0.1, 0.6
    with jax.enable_x64(True):
        domains = rows_of(held(), 2)
        kept = [[np.zeros(9) for _ in each] for each in domains]

        def variance(w: linear.Weights, examples: linear.Examples, rows: np.ndarray) -> Any:
            """Of the gradients by the head, example by example."""
            grads = []
            for x, y in zip(*(each[rows] for each in examples), strict=True):
                logits = x @ w[0] @ w[1]
                error = np.exp(logits) / np.exp(logits).sum() - np.eye(3)[y]
                grads.append(np.outer(x @ w[0], error).ravel())
            return np.mean((np.array(grads) - np.mean(grads, 0)) ** 2, 0)

        def change(number: int, client: int, examples: linear.Examples) -> Any:
            def objective(w: linear.Weights) -> Any:
                found = [
                    variance(w, examples, rows) + ema / (1 - ema) * old
                    for rows, old in zip(domains[client], kept[client], strict=True)
                ]
                more = np.mean((np.array(found) - np.mean(found, 0)) ** 2) if found else 0
                return _risk(w, *examples) + penalty * more

            def direction(grads: Any, w: linear.Weights) -> linear.Weights:
                found = derivative(objective, w)
                for at, rows in enumerate(domains[client]):
                    new = (1 - ema) * variance(w, examples, rows)
                    kept[client][at] = ema * kept[client][at] + new
                return found

            return direction

        assert_rounds(
            fishr.fishr(linear.MODEL, linear.work(2), num_domains=D, penalty=penalty, ema=ema),
            change,
        )


def test_group_dro_is_a_loop_over_domains() -> None:
    step_size = 0.7
    with jax.enable_x64(True):
        domains = rows_of(held())
        weights = [np.ones(len(each)) for each in domains]

        def change(number: int, client: int, examples: linear.Examples) -> Any:
            def direction(grads: Any, w: linear.Weights) -> linear.Weights:
                x, y = examples
                parts = [(x[rows], y[rows]) for rows in domains[client]]
                risks = np.array([linear.risk(w, each) for each in parts])
                weights[client] = weights[client] * np.exp(step_size * risks)
                return linear.mean([linear.gradient(w, each) for each in parts], weights[client])

            return direction

        assert_rounds(
            group_dro.group_dro(linear.MODEL, linear.work(2), num_domains=D, step_size=step_size),
            change,
        )
        assert max(each.max() / each.min() for each in weights if len(each)) > 2


def test_what_a_client_knows_of_domains_that_a_batch_lacks_stays() -> None:
    """Of a client with one example; the weights of group DRO are logarithms up to a number."""
    one, number = local.epochs(optax.sgd(linear.RATE), batch_size=1), 2
    with jax.enable_x64(True):
        federation, key = held(), jax.random.key(0)
        has = np.asarray(federation.data.domain)[parts_of(federation)[number][0]]
        lacks = np.arange(D) != has
        for algorithm in (
            group_dro.group_dro(linear.MODEL, one, num_domains=D, step_size=0.5),
            fishr.fishr(linear.MODEL, one, num_domains=D),
        ):
            variables = linear.MODEL.init(key, federation.data.x)
            start = rounds.init(algorithm, variables, federation, key)
            before = np.random.default_rng(2).normal(size=start.clients.shape)
            start = start._replace(clients=jax.numpy.asarray(before))
            after, _ = rounds.step(
                algorithm, start, cohort([number]), federation, axis=devices.vmapped()
            )
            change = np.asarray(after.clients - before)[number]
            np.testing.assert_allclose(np.ptp(change[lacks], 0), 0, atol=1e-12)
            risen = change[has] - change[lacks][0]
            assert (risen > 0).all() if risen.ndim == 0 else (risen == 0).all()


def test_fish_is_a_loop_over_domains_in_some_order() -> None:
    meta, inner = 0.4, 0.3
    with jax.enable_x64(True):
        federation = held()
        work = linear.work(1)
        algorithm = fish.fish(linear.MODEL, work, num_domains=D, meta_rate=meta, inner_rate=inner)
        start, end = linear.run(algorithm, federation, ((3,),))
        w, (x, y) = linear.weights_of(start), linear.examples_of(federation)[3]
        ends = []
        for order in itertools.permutations(rows_of(federation)[3]):
            now = w
            for rows in order:
                step = linear.gradient(now, (x[rows], y[rows]))
                now = [a - inner * g for a, g in zip(now, step, strict=True)]
            # The sum of the gradients is the way over the inner rate.
            far = [linear.RATE * meta * (b - a) / inner for a, b in zip(w, now, strict=True)]
            ends.append([a + b for a, b in zip(w, far, strict=True)])
        assert len(ends) == 6
        apart = [np.abs(each[0] - linear.weights_of(end)[0]).max() for each in ends]
        linear.assert_weights(end, ends[int(np.argmin(apart))])
        assert np.sort(apart)[1] > 1e-6


@pytest.mark.parametrize("name", ["irm", "vrex_domains", "coral", "mmd", "fishr"])
def test_without_a_penalty_it_is_fedavg(name: str) -> None:
    with jax.enable_x64(True):
        factory = getattr(importlib.import_module(f"{algorithms.__name__}.{name}"), name)
        found = linear.run(factory(linear.MODEL, linear.work(), num_domains=D, penalty=0.0), held())
        expected = linear.run(fedavg.fedavg(linear.MODEL, linear.work()), held())
        assert_same_bits(found[-1].server, expected[-1].server)


def test_with_one_domain_irm_is_fedipg_and_others_are_fedavg() -> None:
    with jax.enable_x64(True):
        alone, work = held(1), linear.work()
        how: dict[str, Any] = {"penalty": 0.02}
        found = linear.run(irm.irm(linear.MODEL, work, num_domains=1, **how), alone)
        expected = linear.run(
            fedipg.fedipg(linear.MODEL, work, penalty_on="classifier", **how), alone
        )
        linear.assert_weights(found[-1], linear.weights_of(expected[-1]))
        average = linear.weights_of(linear.run(fedavg.fedavg(linear.MODEL, work), alone)[-1])
        for algorithm in (
            group_dro.group_dro(linear.MODEL, work, num_domains=1),
            fish.fish(linear.MODEL, work, num_domains=2, meta_rate=1.0, inner_rate=0.1),
            fishr.fishr(linear.MODEL, work, num_domains=2),
        ):
            linear.assert_weights(linear.run(algorithm, alone)[-1], average)
