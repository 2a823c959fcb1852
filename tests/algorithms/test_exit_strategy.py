"""The exit strategy against closed forms, and against the paper's rule in NumPy, in float64."""

from functools import cache, partial
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as tiny
from federations import assert_equal, plain
from fedjax_inv import devices, local, models, objectives, rounds, tree
from fedjax_inv.algorithms import exit_strategy, fedavg
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation as federations
from fedjax_inv.types import Algorithm, Array, Cohort, Federation, Model, Tree, Work

# The kernels.


def cut(vectors: Array) -> Tree:
    """Vectors [..., 6] as trees of odd shapes."""
    return {"a": vectors[..., :5].reshape(*vectors.shape[:-1], 5, 1), "b": vectors[..., 5]}


@jax.jit
def compiled(
    global_grad: Array, client_grads: Array, weights: Array, step_size: Array, smoothness: Array
) -> Array:
    grads = cut(global_grad), cut(client_grads)
    return exit_strategy.contribution(*grads, weights, step_size=step_size, smoothness=smoothness)


def contribution(
    global_grad: Any, client_grads: Any, weights: Any, step_size: Any = 1.0, smoothness: Any = 1.0
) -> np.ndarray:
    """The kernel's, of gradients [D] and [S, D]."""
    padded = [np.pad(g, [(0, 0)] * (np.ndim(g) - 1) + [(0, 6 - np.shape(g)[-1])])
              for g in (np.asarray(global_grad), np.asarray(client_grads))]  # fmt: skip
    return np.asarray(compiled(*padded, np.asarray(weights), step_size, smoothness))


def test_without_a_global_gradient_nobody_contributes() -> None:
    assert_equal(contribution(np.zeros(3), np.ones((2, 3)), [0.5, 0.5]), np.zeros(2, np.float32))


def test_without_the_second_step_size_the_smoothness_is_divided_by_it() -> None:
    """Eq. 15 to 17: step_size a_i (<g, g_i> - (L / 2) ||g_i||^2) / ||g||^2."""
    rng = np.random.default_rng(0)
    gradient, grads = rng.normal(size=5), rng.normal(size=(3, 5))
    weights, step_size, smoothness = np.array([0.2, 0.5, 0.3]), 0.05, 1.7
    expected = [
        step_size * a * (gradient @ own - smoothness / 2 * own @ own) / (gradient @ gradient)
        for a, own in zip(weights, grads, strict=True)
    ]
    found = contribution(gradient, grads, weights, step_size, smoothness / step_size)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@hypothesis.settings(max_examples=15)
@hypothesis.given(seed=st.integers(0, 2**16), num_clients=st.sampled_from([1, 3]))
def test_a_round_decreases_the_risk_by_the_contributions_at_least(
    seed: int, num_clients: int
) -> None:
    """The descent lemma, for whatever clients send; equal where they all send the same."""
    rng = np.random.default_rng(seed)
    root, target = rng.normal(size=(6, 6)), rng.normal(size=6)
    hessian = root @ root.T
    w, sent = rng.normal(size=6), rng.normal(size=(num_clients, 6))
    weights, step_size = rng.dirichlet(np.ones(num_clients)), rng.uniform(0.01, 1)

    def risk(w: np.ndarray) -> float:
        return (w - target) @ hessian @ (w - target) / 2

    g = hessian @ (w - target)
    top, vector = np.linalg.eigh(hessian)
    with jax.enable_x64(True):
        got = contribution(g, sent, weights, step_size, top[-1])
        decrease = risk(w) - risk(w - step_size * weights @ sent)
        assert decrease >= g @ g * got.sum() - 1e-9 * abs(decrease)
        # Along the steepest curvature, all of them alike: nothing is lost.
        same = np.tile(vector[:, -1], (num_clients, 1))
        got = contribution(g, same, weights, step_size, top[-1])
        decrease = risk(w) - risk(w - step_size * vector[:, -1])
        np.testing.assert_allclose(decrease, g @ g * got.sum(), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("spectrum", [[1.0, -2.5, 0.3, 0.0, 0.4, 0.5], [0.0] * 6])
def test_power_steps_reach_the_largest_eigenvalue_of_either_sign_from_below(
    spectrum: list[float],
) -> None:
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    matrix = basis @ np.diag(spectrum) @ basis.T
    with jax.enable_x64(True):
        direction, found = jnp.ones(6) / np.sqrt(6), []
        for _ in range(60):
            product = cut(jnp.asarray(matrix) @ direction)
            unit, estimate = exit_strategy.power_step(cut(direction), product)
            direction = jnp.concatenate([unit["a"].ravel(), unit["b"][None]])
            found.append(float(estimate))
    np.testing.assert_allclose(found[-1], np.abs(spectrum).max(), rtol=1e-6)
    assert found[0] <= found[-1]


# The wrapper.

SIZES = (9, 0, 4, 12, 3)
NUM_CLIENTS, DIMENSION, PHASE = len(SIZES), 3, 3
RATE, NUM_STEPS, STEP_SIZE = 0.1, 2, 0.2
MODEL = models.from_function(
    lambda key, x: {"w": jax.random.normal(key, (x.shape[1],))},
    lambda params, x: x @ params["w"],
)
PLANTED = 4
# Fusion may take sums in another order when there is something else to fuse them with.
UNFUSED = {"xla_disable_hlo_passes": "fusion,cpu-instruction-fusion"}


def squared(outputs: Array, y: Array, mask: Array) -> Array:
    return objectives.masked_mean((outputs - y) ** 2 / 2, mask)


def regression(*, planted: bool) -> Federation:
    """Clients that look for one vector, but for the planted one, which looks for the opposite."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(sum(SIZES), DIMENSION))
    y = x @ np.array([2.0, -1.0, 1.5]) + 0.1 * rng.normal(size=len(x))
    parts = np.split(np.arange(len(x)), np.cumsum(SIZES)[:-1])
    if planted:
        y[parts[PLANTED]] *= -1
    return federations.of_parts(federations.examples(x, y), parts)


class Written(NamedTuple):
    """What the naive loop has found after all rounds."""

    w: np.ndarray
    contributions: np.ndarray
    smoothness: float
    exits: set[int]


def naive(
    held: Federation,
    start: np.ndarray,
    direction: np.ndarray,
    schedule: Cohort,
    *,
    smoothness: float | None,
    threshold: float,
    share: float | None = None,
    displaced: bool = False,
) -> Written:
    x, y = np.asarray(held.data.x), np.asarray(held.data.y)
    rows = federations.parts_of(held)

    def gradient(client: int, w: np.ndarray) -> np.ndarray:
        a, b = x[rows[client]], y[rows[client]]
        return a.T @ (a @ w - b) / len(a)

    def hessian(client: int) -> np.ndarray:
        return x[rows[client]].T @ x[rows[client]] / len(rows[client])

    w, v, size, exited = start, direction, np.array(SIZES), set()
    begun, ended, measures = [], [], []
    curvature = 0.0
    for t in range(len(schedule.who)):
        sent = [
            (int(i), min(int(late), t))
            for i, is_present, late in zip(*(np.asarray(leaf)[t] for leaf in schedule), strict=True)
            if is_present and SIZES[i]
        ]
        begun.append(w)
        training = [(i, late) for i, late in sent if i not in exited]
        moved = []
        for i, late in training:
            local_w = begun[t - late]
            for _ in range(NUM_STEPS):
                local_w = local_w - RATE * gradient(i, local_w)
            moved.append(size[i] * (local_w - begun[t - late]))
        if training:
            w = w + np.sum(moved, 0) / sum(size[i] for i, _ in training)
        ended.append(w)
        if t < PHASE and sent:
            shares = {i: size[i] / sum(size[j] for j, _ in sent) for i, _ in sent}
            g = sum(share * gradient(i, w) for i, share in shares.items())
            product = sum(share * hessian(i) for i, share in shares.items()) @ v
            curvature = np.linalg.norm(product) if smoothness is None else smoothness
            v = product / np.linalg.norm(product)
            behind = {i: w - ended[t - d] if displaced else 0 for i, d in sent}
            measures.append(
                (t, g, [(i, behind[i] + STEP_SIZE * gradient(i, ended[t - d])) for i, d in sent])
            )
        if t == PHASE - 1:
            table = np.full((PHASE, NUM_CLIENTS), np.nan)
            for row, g, told in measures:
                for i, move in told:
                    part = size[i] / sum(size[j] for j, _ in told)
                    table[row, i] = part * (g @ move - curvature / 2 * move @ move) / (g @ g)
            sums = {i: np.nansum(c) for i, c in enumerate(table.T) if not np.isnan(c).all()}
            least = -np.inf if share is None else share * np.median(list(sums.values()))
            for i, total in sums.items():
                if np.nanmean(table[:, i]) < threshold or total < least:
                    exited.add(i)
    return Written(w, table, curvature, exited)


def work() -> Any:
    return local.full_batch(optax.sgd(RATE), capacity=max(SIZES), num_steps=NUM_STEPS)


def wrapped_fedavg(**settings: Any) -> Algorithm:
    phase = exit_strategy.Phase(STEP_SIZE, rounds=PHASE, loss=squared)._replace(**settings)
    return exit_strategy.wrap(fedavg.fedavg(MODEL, work(), loss=squared), phase)


def run(
    algorithm: Algorithm,
    held: Federation,
    schedule: Cohort,
    model: Model = MODEL,
    options: dict[str, Any] | None = None,
    history: int = 1,
) -> tuple[rounds.State, rounds.State, tuple[rounds.Report, ...]]:
    """(the state before, the state after, reports)."""

    @jax.jit
    def begin() -> rounds.State:
        variables = model.init(jax.random.key(0), held.data.x[:1])
        return rounds.init(algorithm, variables, held, jax.random.key(1), history=history)

    @partial(jax.jit, compiler_options=options)
    def go_on(state: rounds.State) -> tuple[rounds.State, tuple[rounds.Report, ...]]:
        return rounds.run(algorithm, state, schedule, held, axis=devices.chunked(2))

    before = begin()
    return plain((before, *go_on(before)))


def full(num_rounds: int, num_clients: int = NUM_CLIENTS) -> Cohort:
    who = np.tile(np.arange(num_clients, dtype=np.int32), (num_rounds, 1))
    return Cohort(who, np.ones(who.shape, bool), np.zeros_like(who))


def weights(params: Tree) -> np.ndarray:
    return np.asarray(params.head["w"])


CASES = [
    # One with delays and dropouts whose smoothness is estimated, one with what is given.
    (tiny.schedule(), True, {"smoothness": None, "threshold": 0.0}),
    (full(6), True, {"smoothness": 1.5, "threshold": 0.0}),
    (tiny.schedule(), False, {"smoothness": None, "threshold": -np.inf, "share": 0.9}),
    (tiny.schedule(), True, {"smoothness": None, "threshold": 0.0, "displaced": True}),
]


@pytest.mark.parametrize(
    ("schedule", "planted", "settings"),
    CASES,
    ids=["late", "given", "share", "displaced"],
)
def test_the_whole_is_the_naive_loop(
    schedule: Cohort, planted: bool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients of several batches, of which the last is smaller."""
    monkeypatch.setattr(exit_strategy, "_BATCH_SIZE", 5)
    with jax.enable_x64(True):
        held = regression(planted=planted)
        before, after, _ = run(wrapped_fedavg(**settings), held, schedule, history=tiny.HISTORY)
        start = before.server
        direction = start.assessment.direction
        expected = naive(
            held,
            weights(start.wrapped.variables.params),
            weights(direction) if direction else np.ones(DIMENSION),
            schedule,
            **settings,
        )
        found = exit_strategy.outcome(after.server)
        np.testing.assert_allclose(found.contributions, expected.contributions, rtol=1e-5)
        np.testing.assert_allclose(found.smoothness, expected.smoothness, rtol=1e-5)
        got = weights(after.server.wrapped.variables.params)
        np.testing.assert_allclose(got, expected.w, rtol=1e-6)
    assert set(np.flatnonzero(found.exits)) == expected.exits
    assert_equal(found.stays, ~found.exits)
    assert 0 < len(expected.exits) < 4
    known = ~np.isnan(found.mean)
    assert_equal(known, ~np.isnan(expected.contributions).all(0))
    assert not known[1]  # without examples
    np.testing.assert_allclose(
        found.mean[known], np.nanmean(expected.contributions[:, known], 0), rtol=1e-6
    )


@cache
def planted_run() -> tuple[rounds.State, rounds.State, tuple[rounds.Report, ...]]:
    return run(wrapped_fedavg(smoothness=1.5), regression(planted=True), full(9))


@pytest.mark.slow
def test_where_nobody_is_left_everything_stays_and_the_host_is_told() -> None:
    algorithm = wrapped_fedavg(smoothness=1.5, threshold=10.0)
    held = regression(planted=False)
    _, short, _ = run(algorithm, held, full(PHASE))
    before, long, reports = run(algorithm, held, full(PHASE + 2))
    assert_equal(long.server, short.server)
    assert not reports[0].present[PHASE:].any()
    with pytest.raises(UsageError, match="threshold"):
        exit_strategy.check_someone_stays(long.server)
    # Of several runs it is enough that one has nobody; before the first round nobody has left.
    runs = jax.tree.map(lambda *a: np.stack(a), planted_run()[1].server, long.server)
    with pytest.raises(UsageError, match="threshold"):
        exit_strategy.check_someone_stays(runs)
    assert exit_strategy.outcome(runs).contributions.shape == (2, PHASE, NUM_CLIENTS)
    assert_equal(exit_strategy.outcome(runs).exits[0], np.arange(NUM_CLIENTS) == PLANTED)
    exit_strategy.check_someone_stays(before.server)


@pytest.mark.slow
def test_where_nobody_leaves_the_network_is_the_algorithms_bit_for_bit() -> None:
    """Its minibatches are drawn, so its random numbers are as well."""
    model = tiny.softmax_regression()
    algorithm = fedavg.fedavg(model, tiny.steps(0.1))
    wrapped = exit_strategy.wrap(algorithm, exit_strategy.Phase(threshold=-np.inf, rounds=2))
    held = tiny.federation((4, 3, 1, 7, 5))
    schedule = tree.take(plain(tiny.schedule()), slice(1, 5))
    run_of = partial(run, held=held, schedule=schedule, model=model, options=UNFUSED, history=3)
    _, after, reports = run_of(wrapped)
    _, expected, expected_reports = run_of(algorithm)
    number = len(algorithm.exchanges)
    assert_equal(after.server.wrapped, expected.server)
    assert_equal(after.clients, expected.clients)
    assert_equal(reports[:number], expected_reports)
    assert len(reports) == number + 2
    assert wrapped.personal == algorithm.personal
    own, x = tree.take(after.clients, 0), held.data.x
    assert_equal(wrapped.predict(after.server, own, x), algorithm.predict(expected.server, own, x))
    measured = exit_strategy.outcome(after.server)
    assert measured.stays.all()
    assert np.nanmin(np.abs(measured.mean)) > 0


def test_a_wrapped_factory_may_be_ones_own_and_gets_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, Any]] = []

    def own(model: Model, work: Work, **arguments: Any) -> Algorithm:
        assert (model, work) == (MODEL, given)
        seen.append(arguments)
        return fedavg.fedavg(model, work)

    given, optimizer = work(), optax.adam(0.1)
    settings = {"loss": squared, "server_optimizer": optimizer, "weighting": "uniform"}
    exit_strategy.exit_strategy(MODEL, given, wrapped=own, **settings)
    monkeypatch.setitem(exit_strategy.WRAPPED, "fedipg", own)
    exit_strategy.exit_strategy(MODEL, given, wrapped="fedipg", penalty=0.3, **settings)
    assert seen == [settings, {**settings, "penalty": 0.3}]


def test_a_round_is_as_long_as_its_local_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_strategy, "wrap", lambda algorithm, phase: phase.step_size)
    size = jnp.array([5, 0, 1, 4])
    for train, numbers in (
        (work(), [NUM_STEPS, 0, NUM_STEPS, NUM_STEPS]),
        (local.steps(optax.sgd(RATE), batch_size=2, num_steps=4), [4, 0, 4, 4]),
        (local.epochs(optax.sgd(RATE), batch_size=2, num_epochs=3), [9, 0, 3, 6]),
    ):
        known: Any = train._replace(learning_rate=RATE)
        found: Any = exit_strategy.exit_strategy(MODEL, known, step_size=None)
        np.testing.assert_allclose(found(size), RATE * np.array(numbers), rtol=1e-6)


def test_no_share_of_a_negative_median_is_asked_for() -> None:
    """With a large curvature all contributions are negative, and the best has the least ratio."""
    algorithm = wrapped_fedavg(smoothness=80.0, threshold=-np.inf, share=0.8)
    _, after, _ = run(algorithm, regression(planted=False), full(PHASE))
    found = exit_strategy.outcome(after.server)
    measured = ~np.isnan(found.mean)
    assert (found.mean[measured] < 0).all()
    assert np.ptp(found.mean[measured]) > 0.5 * np.abs(np.median(found.mean[measured]))
    assert found.stays.all()
