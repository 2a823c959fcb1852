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
import slow
from federations import assert_close
from fedjax_inv import averages, devices, local, objectives, rounds
from fedjax_inv.algorithms import fedavg, fedmix
from fedjax_inv.data import federation as federations_of
from fedjax_inv.types import Algorithm, Array, Cohort, Examples, Federation, Tree, Variables
from test_fediir import MODEL, SIZES, held, softmax

ATTEND = ((0, 2, 3), (1, 2, 4), (0, 1, 3, 4))
RATE, MOMENTUM, NUM_STEPS, SERVER_RATE, RATIO = 0.2, 0.9, 3, 1.3, 0.3
SLOTS = [3, 0, 4, 2, 1]
Weights = list[np.ndarray]  # body [4, 3], head [3, 3]
Example = tuple[np.ndarray, np.ndarray]  # mean input [4], mean one-hot label [3]


def examples(federation: Federation, client: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [N, 4] and one-hot labels [N, 3]."""
    rows = federations_of.parts_of(federation)[client]
    return np.asarray(federation.data.x)[rows], np.eye(3)[np.asarray(federation.data.y)[rows]]


def mean_of(federation: Federation, client: int) -> Example:
    x, y = examples(federation, client)
    return x.mean(0), y.mean(0)


def gradient(w: Weights, x: np.ndarray, y: np.ndarray, mean: Example) -> Weights:
    """Of the three terms, the chain rule by hand."""
    (body, head), (mean_x, mean_y) = w, mean
    u = (1 - RATIO) * x
    p = softmax(u @ body @ head)
    along = mean_x @ body @ head  # how mean_x moves the logits, of all examples alike
    # <grad_u R(u, y), mean_x> is the mean of (p - y) . along.
    slope = RATIO * (1 - RATIO)
    bent = p * along - p * (p @ along)[:, None]
    by_logits = ((1 - RATIO) * (p - y) + RATIO * (p - mean_y) + slope * bent) / len(y)
    by_along = slope * (p - y).mean(0)
    by_head = (u @ body).T @ by_logits + np.outer(mean_x @ body, by_along)
    return [u.T @ by_logits @ head.T + np.outer(mean_x, by_along @ head.T), by_head]


def trained(w: Weights, data: tuple[np.ndarray, np.ndarray], means: list[Example]) -> Weights:
    """After a step with each of the means."""
    velocity = [0.0, 0.0]
    for mean in means:
        grads = gradient(w, *data, mean)
        velocity = [MOMENTUM * v + g for v, g in zip(velocity, grads, strict=True)]
        w = [a - RATE * v for a, v in zip(w, velocity, strict=True)]
    return w


def reference(w: Weights, federation: Federation) -> list[Weights]:
    """The weights after each round, where the mean of the last client that has sent is mixed in."""
    sent: set[int] = set()
    found = []
    for cohort in ATTEND:
        here = [client for client in cohort if SIZES[client]]
        sent |= set(here)
        mean = mean_of(federation, max(sent))
        moved, sizes = [], []
        for client in here:
            mine = trained(w, examples(federation, client), [mean] * NUM_STEPS)
            moved.append([a - b for a, b in zip(mine, w, strict=True)])
            sizes.append(SIZES[client])
        steps = (np.average(moves, 0, sizes) for moves in zip(*moved, strict=True))
        w = [a + SERVER_RATE * step for a, step in zip(w, steps, strict=True)]
        found.append(w)
    return found


def made(num_steps: int, **arguments: Any) -> Algorithm:
    optimizer = optax.sgd(RATE, MOMENTUM)
    work = local.full_batch(optimizer, capacity=8, num_steps=num_steps)
    server_optimizer = optax.sgd(SERVER_RATE)
    return fedmix.fedmix(MODEL, work, server_optimizer=server_optimizer, **arguments)


def started(algorithm: Algorithm, federation: Federation) -> tuple[rounds.State, Weights]:
    variables = jax.jit(MODEL.init)(jax.random.key(0), federation.data.x)
    state = rounds.init(algorithm, variables, federation, jax.random.key(0))
    return state, [np.asarray(half) for half in variables.params]


def step(
    algorithm: Algorithm, state: rounds.State, present: Array, federation: Federation
) -> tuple[rounds.State, tuple[rounds.Report, ...]]:
    cohort = federations.cohort(SLOTS)._replace(present=jnp.asarray(present))
    return rounds.step(algorithm, state, cohort, federation, axis=devices.chunked(2))


def test_fedmix_is_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of other sizes and masks; each sends its mean once, before it trains."""

    def last(means: averages.Averages, key: Array, num: int) -> tuple[Tree, Array]:
        row = jnp.full(num, means.real.sum() - 1)
        return means.x[row], means.y[row]

    monkeypatch.setattr(averages, "draw", last)
    with jax.enable_x64(True):
        federation, algorithm = held(), made(NUM_STEPS, ratio=RATIO)
        state, w = started(algorithm, federation)
        one = jax.jit(lambda state, present: step(algorithm, state, present, federation))
        sent: set[int] = set()
        for cohort, expected in zip(ATTEND, reference(w, federation), strict=True):
            state, (collected, training) = one(state, np.isin(SLOTS, cohort))
            new = {client for client in cohort if SIZES[client]} - sent
            np.testing.assert_array_equal(collected.present, np.isin(SLOTS, list(new)))
            sent |= new
            for got, wanted in zip(state.server.variables.params, expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
            for client in range(len(SIZES)):
                kept = jax.tree.map(lambda leaf, client=client: leaf[client, 0], state.server.side)
                assert kept.real == (client in sent)
                if client in sent:
                    for leaf, wanted in zip(kept, mean_of(federation, client), strict=False):
                        np.testing.assert_allclose(leaf, wanted, rtol=1e-6)
        assert sent == {0, 2, 3, 4}
        assert set(training.metrics) == {"loss"}


def test_each_step_draws_any_of_the_means_that_there_are() -> None:
    """Of two steps of a client, all pairs of the means occur, and nothing else does."""
    with jax.enable_x64(True):
        federation, algorithm = held(), made(2, ratio=RATIO)
        state, _ = started(algorithm, federation)
        one = jax.jit(partial(step, algorithm))
        state, _ = one(state, np.isin(SLOTS, [0, 2, 4]), federation)

        def end(key: Array) -> np.ndarray:
            after, _ = one(state._replace(key=key), np.isin(SLOTS, [4]), federation)
            return np.asarray(after.server.variables.params.head)

        ends = np.array([end(key) for key in jax.random.split(jax.random.key(0), 150)])
        w = [np.asarray(half) for half in state.server.variables.params]
        means = [mean_of(federation, client) for client in (0, 2, 4)]
        expected = np.array(
            [
                w[1] + SERVER_RATE * (trained(w, examples(federation, 4), list(pair))[1] - w[1])
                for pair in product(means, repeat=2)
            ]
        )
        gaps = np.abs(ends[:, None] - expected).max((2, 3))  # [150, 9]
        # The means are summed in float32.
        assert (gaps.min(1) < 1e-6).all()
        assert set(gaps.argmin(1)) == set(range(9))


def test_of_several_means_each_is_of_equally_many() -> None:
    with jax.enable_x64(True):
        federation, algorithm = held(), made(1, rows=2)
        state, _ = started(algorithm, federation)
        state, _ = jax.jit(partial(step, algorithm))(state, np.ones(5, bool), federation)
        kept = state.server.side
        np.testing.assert_array_equal(kept.real, [[n > 0, n > 1] for n in SIZES])
        for client, n in enumerate(SIZES):
            x, y = examples(federation, client)
            counts = np.array([-(-n // 2), n // 2])
            for leaf, total in ((kept.x, x.sum(0)), (kept.y, y.sum(0))):
                np.testing.assert_allclose(counts @ np.asarray(leaf)[client], total, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("silent", slow.after(1, [False, True]), ids=["ratio", "silent"])
def test_without_mixing_it_is_fedavg(silent: bool) -> None:
    """And where there are no means yet: the first round of those that cannot send theirs."""
    model, federation = federations.small_normed(), federations.federation()
    # Without draws, which differ as FedMix's training is a second exchange.
    work, key = federations.full_batch(0.1), jax.random.key(0)

    def end(algorithm: Algorithm, schedule: Cohort) -> Variables:
        variables = federations.initial(model, key)
        state = rounds.init(algorithm, variables, federation, key, history=federations.HISTORY)
        state, _ = rounds.run(algorithm, state, schedule, federation, axis=devices.chunked(1))
        return state.server.variables

    @jax.jit
    def mixed(ratio: Array, schedule: Cohort) -> Variables:
        return end(fedmix.fedmix(model, work, ratio=ratio), schedule)

    @jax.jit
    def plain(schedule: Cohort) -> Variables:
        return end(fedavg.fedavg(model, work), schedule)

    @jax.jit
    def without_means(schedule: Cohort) -> Variables:
        mixing = fedmix.fedmix(model, work, ratio=0.4)
        first = mixing.exchanges[0]._replace(attends=lambda server, who, round: False)
        return end(mixing._replace(exchanges=(first, *mixing.exchanges[1:])), schedule)

    schedule = federations.schedule()
    expected = plain(schedule)
    if silent:
        assert_close(without_means(schedule), expected)
        return
    assert_close(mixed(0.0, schedule), expected)
    with pytest.raises(AssertionError):
        assert_close(mixed(0.4, schedule), expected)


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


def test_without_a_ratio_it_is_the_loss() -> None:
    problem = Problem()
    assert_close(problem.mixed(0.0), problem.loss(problem.x, problem.y), rtol=1e-6, atol=0.0)


def test_the_slope_is_that_of_the_loss_at_the_shrunk_inputs() -> None:
    """By central differences. It is a mean over the batch: of all examples twice it is the same."""
    with jax.enable_x64(True):
        problem, ratio, small = Problem(), 0.4, 1e-5
        u = (1 - ratio) * problem.x
        ahead, behind = (
            problem.loss(u + sign * small * problem.mean_x, problem.y) for sign in (1, -1)
        )
        expected = (1 - ratio) * problem.loss(u, problem.y)
        expected += ratio * problem.loss(u, jnp.broadcast_to(problem.mean_y, (5, 3)))
        expected += ratio * (1 - ratio) * (ahead - behind) / (2 * small)
        got = problem.mixed(ratio)
        np.testing.assert_allclose(got, expected, rtol=1e-8)
        problem.x, problem.y, problem.mask = (
            jnp.concatenate([leaf, leaf]) for leaf in (problem.x, problem.y, problem.mask)
        )
        np.testing.assert_allclose(problem.mixed(ratio), got, rtol=1e-12)


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


def test_inputs_in_half_precision_may_be_mixed_at_a_traced_ratio() -> None:
    x, mean_x = jnp.ones((2, 3), jnp.bfloat16), jnp.full(3, 2.0)
    y, mean_y = jnp.eye(2), jnp.array([0.5, 0.5])

    def loss(x: Array, y: Array) -> Array:
        return jnp.float32((x.sum(1, keepdims=True) * y).mean())

    found = jax.jit(partial(fedmix.mixed_loss, loss, x, y, mean_x, mean_y))(ratio=0.25)
    # (1 - r) R(x', y) + r R(x', mean y) + r (1 - r) R(mean x, y), R linear, x' = (1 - r) x
    expected = 0.75 * 0.75 * 1.5 + 0.25 * 0.75 * 1.5 + 0.25 * 0.75 * 3
    np.testing.assert_allclose(found, expected, rtol=1e-2)


@pytest.mark.parametrize(
    ("loss", "has_aux"),
    [
        (lambda x, y: (x.sum(), y.sum()), False),
        (lambda x, y: x.sum(1), False),
        (lambda x, y: (x.sum(1), ()), True),
    ],
)
def test_mixed_loss_refuses_a_loss_that_is_no_scalar(loss: Any, has_aux: bool) -> None:
    problem = Problem()
    given = (problem.x, problem.y, problem.mean_x, problem.mean_y)
    with pytest.raises(ValueError, match=r"^loss_fn: must return a scalar, or with has_aux=T"):
        fedmix.mixed_loss(loss, *given, ratio=0.4, has_aux=has_aux)


@pytest.mark.parametrize("which", ["mean_x", "mean_y"])
def test_mixed_loss_refuses_what_is_no_mean_example(which: str) -> None:
    problem = Problem()
    setattr(problem, which, getattr(problem, which)[:1])
    with pytest.raises(ValueError, match=rf"^{which}=float32 .*: must have the shape of one ex"):
        problem.mixed(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 1.5}, r"ratio=1.5: must be a finite number, in \[0, 1\]"),
        ({"rows": 0}, "rows=0: must be an integer of at least 1"),
        ({"weighting": "n"}, "weighting='n': must be one of size, uniform"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        fedmix.fedmix(MODEL, federations.steps(0.1), **arguments)


def test_tokens_have_no_mean() -> None:
    federation = held()
    tokens = jnp.zeros(federation.data.x.shape, jnp.int32)
    federation = federation._replace(data=Examples(tokens, federation.data.y))
    with pytest.raises(ValueError, match=r"^inputs: are int32; must be"):
        started(made(1), federation)
