"""What methods say to the averaging family, on a toy, against a loop over clients in float64."""

from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
from examples.fednova import fednova
from federations import Config, assert_close, plain
from fedjax_inv import (
    aggregators,
    averaging,
    devices,
    local,
    models,
    objectives,
    rounds,
    servers,
    tree,
)
from fedjax_inv.data.federation import examples, of_parts
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Federation,
    GradFn,
    Halves,
    Local,
    Setup,
    Step,
    Trained,
    Tree,
    Variables,
    Visit,
)

SIZES = (4, 0, 2, 5)
NUM_CLIENTS = len(SIZES)
RATE, NUM_STEPS = 0.1, 2
ATTEND = ((0, 1, 3), (2,), (1,), (2, 3, 0))
WORK = local.full_batch(optax.sgd(RATE), capacity=max(SIZES), num_steps=NUM_STEPS, momentum=0.0)


def init(key: Array, x: Array) -> Tree:
    return {"w": jax.random.normal(key, x.shape[1:]), "b": jnp.float32(0.5)}


# Linear regression, whose outputs are [B, 1].
MODEL = models.from_function(init, lambda params, x: (x @ params["w"] + params["b"])[:, None])


def federation() -> Any:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(sum(SIZES), 3)), rng.normal(size=sum(SIZES))
    parts = np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])
    return of_parts(examples(x.astype(np.float32), y.astype(np.float32)), parts)


FEDERATION = federation()


def squared(outputs: Array, y: Array, mask: Array) -> Array:
    return objectives.masked_mean((outputs[:, 0] - y) ** 2, mask)


def slopes(
    w: np.ndarray, b: float, client: int, held: Federation = FEDERATION
) -> tuple[np.ndarray, float]:
    """The gradient of a client's squared error."""
    rows = federations.rows_of(held, client)
    x, y = (np.float64(leaf)[rows] for leaf in plain(held.data))
    error = 2 * (x @ w + b - y) / len(y)
    return x.T @ error, error.sum()


@cache
def first() -> Variables:
    return MODEL.init(jax.random.key(0), FEDERATION.data.x)


def run(algorithm: Algorithm, held: Federation = FEDERATION) -> list[rounds.State]:
    """The states after each round."""

    @jax.jit
    def step(state: rounds.State, present: Array) -> rounds.State:
        cohort = federations.cohort(list(range(NUM_CLIENTS)))._replace(present=present)
        return rounds.step(algorithm, state, cohort, held, axis=devices.chunked(1))[0]

    start = partial(rounds.init, algorithm, federation=held, key=jax.random.key(0))
    state, found = jax.jit(start)(first()), []
    for attend in ATTEND:
        state = step(state, np.isin(np.arange(NUM_CLIENTS), attend))
        found.append(plain(state))
    return found


def toy() -> Algorithm:
    """w is shared and b is each client's own; beside them travels a number that scales gradients.

    A client keeps how often it took part, too.
    """
    plain_gradient = averaging.gradient(MODEL, squared)

    def whole(w: Array, b: Array) -> Variables:
        return Variables(Halves({}, {"w": w, "b": b}), Halves({}, {}))

    def gradient_from(visit: Visit) -> GradFn:
        def grad_fn(variables: Variables, batch: Any, key: Array) -> Step:
            step = plain_gradient(variables, batch, key)
            grads = jax.tree.map(lambda g: visit.message.side * g, step.grads)
            return step._replace(grads=grads, average={"b": variables.params.head["b"]})

        return grad_fn

    def start(visit: Visit) -> Local:
        return WORK.init(whole(visit.message.variables.params.head["w"], visit.own["b"]))

    def remember(visit: Visit, trained: Trained) -> Tree:
        b = trained.local.variables.params.head["b"]
        return {"b": b, "turns": visit.own["turns"] + 1}

    def shared(variables: Variables) -> Variables:
        return Variables(Halves({}, {"w": variables.params.head["w"]}), variables.stats)

    def serve(server: servers.Server, own: Tree) -> Variables:
        return whole(server.variables.params.head["w"], own["b"])

    def keep(setup: Setup) -> Tree:
        scale, zero = jnp.float32(setup.num_clients), jnp.float32(0)
        return {"scale": scale, "seen": jnp.int32(0), "moved": zero}

    def update(kept: Tree, aggregated: Tree, delta: Variables) -> Tree:
        mean, number = aggregated
        norm = optax.tree.norm(delta.params)
        moved = kept["moved"] + norm
        return {"scale": kept["scale"] / 2 + mean, "seen": kept["seen"] + number, "moved": moved}

    return averaging.averaging(
        MODEL,
        WORK,
        gradient_from,
        server_optimizer=optax.sgd(0.5),
        weighting="size",
        init_client=lambda server, who: {"b": who / 10, "turns": jnp.int32(0)},
        start=start,
        remember=remember,
        shared=shared,
        serve=serve,
        side=averaging.SideState(
            init=keep,
            send=lambda kept: 1 + kept["scale"] / 8,
            upload=lambda visit, trained: (trained.average["b"], trained.num_steps),
            aggregate=aggregators.combine(
                (aggregators.mean(aggregators.uniform), aggregators.total())
            ),
            update=update,
        ),
    )


def test_each_part_is_used_where_it_is_said() -> None:
    algorithm = toy()
    w = np.float64(plain(first()).params.head["w"])
    own, turns = np.arange(NUM_CLIENTS) / 10, np.zeros(NUM_CLIENTS, int)
    scale, seen, length = float(NUM_CLIENTS), 0, 0.0
    for state, attend in zip(run(algorithm), ATTEND, strict=True):
        moved, sizes, means = [], [], []
        for client in attend:
            if SIZES[client] == 0:
                continue
            now, b, path = w, own[client], []
            for _ in range(NUM_STEPS):
                path.append(b)
                slope_w, slope_b = slopes(now, b, client)
                rate = RATE * (1 + scale / 8)
                now, b = now - rate * slope_w, b - rate * slope_b
            moved.append(now - w)
            sizes.append(SIZES[client])
            means.append(np.mean(path))
            own[client], turns[client] = b, turns[client] + 1
        if sizes:
            w = w + 0.5 * np.average(moved, 0, sizes)
            scale, seen = scale / 2 + np.mean(means), seen + NUM_STEPS * len(sizes)
            length += np.linalg.norm(np.average(moved, 0, sizes))
        assert_close(state.server.variables.params.head, {"w": np.float32(w)})
        side = {"scale": np.float32(scale), "seen": np.int32(seen), "moved": np.float32(length)}
        assert_close(state.server.side, side)
        assert_close(state.clients, {"b": np.float32(own), "turns": turns.astype(np.int32)})
    assert seen > 0
    assert algorithm.personal
    x = FEDERATION.data.x
    for client in range(NUM_CLIENTS):
        got = algorithm.predict(state.server, tree.take(state.clients, client), x)
        assert_close(got[:, 0], np.float32(np.float64(x) @ w + own[client]))


def test_by_default_nothing_is_kept_and_all_is_shared() -> None:
    algorithm = averaging.averaging(
        MODEL,
        WORK,
        lambda visit: averaging.gradient(MODEL, squared),
        server_optimizer=optax.sgd(1.0),
        weighting="uniform",
    )
    state = run(algorithm)[-1]
    assert not jax.tree.leaves((state.clients, state.server.side))
    assert not algorithm.personal
    (exchange,) = algorithm.exchanges
    message = exchange.broadcast(state.server)
    chex.assert_trees_all_equal_shapes(message, averaging.Message(first(), ()))
    got = algorithm.predict(state.server, (), FEDERATION.data.x)
    assert_close(got, models.predict(MODEL, state.server.variables, FEDERATION.data.x))


# Methods that scale the server's step, or clients by what the server knows.


def copies() -> Federation:
    """Clients whose examples are all alike, so that the order of batches does not matter."""
    x, y = plain(FEDERATION.data)
    starts = np.cumsum((0, *SIZES[:-1])) % len(y)
    rows = np.repeat(starts, SIZES)
    return FEDERATION._replace(data=examples(x[rows], y[rows]))


def test_a_method_may_scale_uploads_and_the_step_of_the_server() -> None:
    """FedNova's w += (sum p_i a_i) (sum p_i D_i / a_i); a_i counts the client's steps."""
    held, work = copies(), local.epochs(optax.sgd(RATE), batch_size=2, num_epochs=2)
    w, b = (np.float64(plain(first()).params.head[name]) for name in ("w", "b"))
    for state, attend in zip(run(fednova(MODEL, work, loss=squared), held), ATTEND, strict=True):
        moved, counts, sizes = [], [], []
        for client in attend:
            num_steps, now = 2 * -(-SIZES[client] // 2), np.append(w, b)
            for _ in range(num_steps):
                now = now - RATE * np.append(*slopes(now[:3], now[3], client, held))
            if num_steps:
                moved.append((now - np.append(w, b)) / num_steps)
                counts.append(num_steps)
                sizes.append(SIZES[client])
        if sizes:
            both = np.average(counts, weights=sizes) * np.average(moved, 0, sizes)
            w, b = w + both[:3], b + both[3]
        assert_close(state.server.variables.params.head, {"w": np.float32(w), "b": np.float32(b)})


def test_a_factor_of_the_delta_leaves_statistics_alone() -> None:
    """With a factor of 0 parameters stay, and statistics are those of FedAvg."""
    model, work = federations.small_normed(), federations.steps(0.1)
    federation, key = federations.federation(), jax.random.key(0)
    variables = federations.initial(model, key)

    def after(scale_delta: Any) -> Variables:
        algorithm = averaging.averaging(
            model,
            work,
            lambda visit: averaging.gradient(model),
            server_optimizer=optax.sgd(1.0),
            weighting="size",
            scale_delta=scale_delta,
        )
        state = rounds.init(algorithm, variables, federation, key, history=federations.HISTORY)
        axis, schedule = devices.chunked(1), federations.schedule()
        one = jax.tree.map(lambda leaf: leaf[:1], schedule)
        return rounds.run(algorithm, state, one, federation, axis=axis)[0].server.variables

    stays, moves = jax.jit(lambda: (after(lambda visit, trained: jnp.zeros(())), after(None)))()
    assert_close(stays.stats, moves.stats)
    assert_close(stays.params, variables.params)
    with pytest.raises(AssertionError):
        assert_close(moves.stats, variables.stats)


def one_client_a_round(who: list[int], present: list[int], delay: list[int]) -> Cohort:
    columns = (jnp.array(leaf)[:, None] for leaf in (who, np.array(present, bool), delay))
    return Cohort(*columns)


# One of `averaging`, and those with uploads of their own.
@pytest.mark.parametrize("name", ["fedavg", "afl"])
def test_statistics_do_not_depend_on_the_network_that_a_late_client_did_not_see(name: str) -> None:
    """A change of a variance, added to that of another network, could be below 0."""
    model, federation = federations.small_normed(), federations.federation()
    algorithm = federations.build(name, Config(lambda: model, federations.full_batch))

    @jax.jit
    def after(cohorts: Cohort) -> Halves:
        key = jax.random.key(0)
        start = federations.initial(model, key)
        state = rounds.init(algorithm, start, federation, key, history=federations.HISTORY)
        state, _ = rounds.run(algorithm, state, cohorts, federation, axis=devices.chunked(1))
        return state.server.variables.stats

    late = after(one_client_a_round([0, 3], [1, 1], [0, 1]))
    alone = after(one_client_a_round([0, 3], [0, 1], [0, 0]))
    assert_close(late, alone)
    with pytest.raises(AssertionError):
        assert_close(after(one_client_a_round([0, 3], [1, 0], [0, 0])), alone)


# What a method's author gets wrong: the error names the leaf, or the exchange.


def with_step(**changed: Any) -> Algorithm:
    gradient = averaging.gradient(MODEL, squared)

    def grad_fn(variables: Variables, batch: Any, key: Array) -> Step:
        return gradient(variables, batch, key)._replace(**changed)

    return family(lambda visit: grad_fn)


def family(gradient_from: Any = None, **hooks: Any) -> Algorithm:
    gradient = gradient_from or (lambda visit: averaging.gradient(MODEL, squared))
    given = {"server_optimizer": optax.sgd(1.0), "weighting": "size", **hooks}
    return averaging.averaging(MODEL, WORK, gradient, **given)


WRONG = {
    "grads/head/w": lambda: with_step(grads=Halves({}, {"w": jnp.zeros(()), "b": jnp.zeros(())})),
    "loss": lambda: with_step(metrics={"loss": jnp.zeros(3)}),
    "client": lambda: family(init_client=lambda server, who: 0, remember=lambda visit, _: 0.5),
    "update": lambda: family(side=averaging.SideState(update=lambda state, upload, delta: delta)),
}


@pytest.mark.parametrize("place", WRONG)
def test_a_wrong_shape_or_type_is_named_by_its_place(place: str) -> None:
    with pytest.raises(AssertionError, match=place):
        run(WRONG[place]())
