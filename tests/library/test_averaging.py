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
import slow
from examples.fednova import fednova
from federations import Config, assert_close, plain
from fedjax_inv import (
    aggregators,
    algorithms,
    averaging,
    devices,
    local,
    models,
    objectives,
    rounds,
    servers,
    tree,
)
from fedjax_inv.algorithms import fedavg
from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import examples, of_parts
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Federation,
    GradFn,
    Halves,
    Local,
    Loss,
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


def test_the_loss_is_an_argument() -> None:
    """FedAvg of linear regression, whose targets are no classes."""
    head = plain(first()).params.head
    w, b = np.float64(head["w"]), float(head["b"])
    for state, attend in zip(run(fedavg.fedavg(MODEL, WORK, loss=squared)), ATTEND, strict=True):
        moved, sizes = [], [SIZES[client] for client in attend]
        for client in attend:
            now_w, now_b = w, b
            for _ in range(NUM_STEPS if SIZES[client] else 0):
                slope_w, slope_b = slopes(now_w, now_b, client)
                now_w, now_b = now_w - RATE * slope_w, now_b - RATE * slope_b
            moved.append((now_w - w, now_b - b))
        if sum(sizes):
            w = w + np.average([move[0] for move in moved], 0, sizes)
            b = b + np.average([move[1] for move in moved], 0, sizes)
        assert_close(state.server.variables.params.head, {"w": np.float32(w), "b": np.float32(b)})


# which mix labels, or look at classes
FOR_CLASSIFIERS = {"fedcfa", "fedmix", "cafe", "fedproto", "fedsr"}


@pytest.mark.parametrize("name", sorted({*algorithms.LISTED} - FOR_CLASSIFIERS))
def test_every_other_algorithm_takes_a_loss(name: str) -> None:
    """Cross-entropy anywhere would refuse targets that are no classes."""

    def step(config: Config, loss: Loss) -> Any:
        config = config._replace(model=lambda: MODEL, work=lambda rate: WORK)
        algorithm, variables = federations.build(name, config, loss=loss), first()

        def trace() -> Any:
            state = rounds.init(algorithm, variables, FEDERATION, jax.random.key(0))
            cohort = federations.cohort(list(range(NUM_CLIENTS)))
            return rounds.step(algorithm, state, cohort, FEDERATION, axis=devices.chunked(1))

        return jax.eval_shape(trace)

    for config in federations.TABLE[name]:
        step(config, squared)
        with pytest.raises(ValueError, match=r"labels=float32 \(\d,\): must be integers"):
            step(config, objectives.cross_entropy)


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
            aggregate=(aggregators.mean(aggregators.uniform), aggregators.total()),
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


ALPHA = 0.5


def feddyn() -> Algorithm:
    """FedDyn: w = mean w_i - h / alpha, h <- h - alpha / N sum D_i, g_i <- g_i - alpha D_i."""
    risk_gradient = averaging.gradient(MODEL, squared)

    def gradient_from(visit: Visit) -> GradFn:
        received = visit.message.variables.params

        def grad_fn(variables: Variables, batch: Any, key: Array) -> Step:
            step = risk_gradient(variables, batch, key)
            pulled = optax.tree.sub(optax.tree.sub(variables.params, received), visit.own)
            return step._replace(grads=optax.tree.add_scale(step.grads, ALPHA, pulled))

        return grad_fn

    def remember(visit: Visit, trained: Trained) -> Tree:
        """g_i / alpha."""
        moved = optax.tree.sub(trained.local.variables.params, visit.message.variables.params)
        return optax.tree.sub(visit.own, moved)

    def update(side: Tree, count: Array, delta: Variables) -> Tree:
        change = -count / side["clients"]
        return side | {"h": optax.tree.add_scale(side["h"], change, delta.params)}

    def server_delta(side: Tree, delta: Variables, count: Array) -> Variables:
        return delta._replace(params=optax.tree.sub(delta.params, side["h"]))

    def zeros(variables: Variables) -> Tree:
        return optax.tree.zeros_like(variables.params)

    return averaging.averaging(
        MODEL,
        WORK,
        gradient_from,
        server_optimizer=optax.sgd(1.0),
        weighting="uniform",
        init_client=lambda server, who: zeros(server.variables),
        remember=remember,
        server_delta=server_delta,
        side=averaging.SideState(  # h / alpha
            init=lambda setup: {"h": zeros(setup.variables), "clients": setup.num_clients},
            send=lambda side: (),
            upload=lambda visit, trained: jnp.float32(1),
            aggregate=aggregators.total(),
            update=update,
        ),
    )


def test_a_method_may_see_the_mean_delta_on_the_server() -> None:
    w, b = (np.float64(plain(first()).params.head[name]) for name in ("w", "b"))
    g, h = np.zeros((NUM_CLIENTS, 4)), np.zeros(4)
    for state, attend in zip(run(feddyn()), ATTEND, strict=True):
        start, ends = np.append(w, b), []
        for client in attend:
            if SIZES[client] == 0:
                continue
            now = start
            for _ in range(NUM_STEPS):
                slope = np.append(*slopes(now[:3], now[3], client))
                now = now - RATE * (slope - g[client] + ALPHA * (now - start))
            g[client] -= ALPHA * (now - start)
            ends.append(now)
        if ends:
            h = h - ALPHA / NUM_CLIENTS * (np.array(ends) - start).sum(0)
            after = np.mean(ends, 0) - h / ALPHA
            w, b = after[:3], after[3]
        assert_close(state.server.variables.params.head, {"w": np.float32(w), "b": np.float32(b)})
        assert_close(state.server.side["h"].head["w"], np.float32(h[:3] / ALPHA))


def agnostic() -> Algorithm:
    """Agnostic federated learning: w moves by sum q_i D_i, q climbs the risks on the simplex."""
    risk_gradient = averaging.gradient(MODEL, squared)

    def upload(visit: Visit, trained: Trained) -> tuple[Array, Array]:
        is_mine = jax.nn.one_hot(visit.shard.who, len(visit.message.side))
        return is_mine * trained.metrics["loss"], jnp.float32(1)

    return averaging.averaging(
        MODEL,
        local.full_batch(optax.sgd(RATE), capacity=max(SIZES)),
        lambda visit: risk_gradient,
        server_optimizer=optax.sgd(1.0),
        weighting="uniform",
        scale_delta=lambda visit, trained: visit.message.side[visit.shard.who],
        server_delta=lambda mixture, delta, sums: optax.tree.scale(sums[1], delta),
        side=averaging.SideState(
            init=lambda setup: jnp.ones(setup.num_clients) / setup.num_clients,
            send=lambda mixture: mixture,
            upload=upload,
            aggregate=aggregators.total(),
            update=lambda mixture, sums, delta: optax.projections.projection_simplex(
                mixture + ALPHA * sums[0]
            ),
        ),
    )


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
@pytest.mark.parametrize(
    "name", slow.after(2, ["fedavg", "fednova", "afl", "feddg_ga", "fedgma", "qfedavg"])
)
def test_statistics_do_not_depend_on_the_network_that_a_late_client_did_not_see(name: str) -> None:
    """A change of a variance, added to that of another network, could be below 0."""
    model, federation = federations.small_normed(), federations.federation()
    more = {"step_size": 0.1} if name == "qfedavg" else {}
    algorithm = federations.build(name, Config(lambda: model, federations.full_batch, more))

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


def test_clients_may_be_weighted_by_what_the_server_keeps() -> None:
    w, b = (np.float64(plain(first()).params.head[name]) for name in ("w", "b"))
    mixture = np.ones(NUM_CLIENTS) / NUM_CLIENTS
    for state, attend in zip(run(agnostic()), ATTEND, strict=True):
        risks, moved = np.zeros(NUM_CLIENTS), np.zeros(4)
        for client in attend:
            if SIZES[client] == 0:
                continue
            moved -= mixture[client] * RATE * np.append(*slopes(w, b, client))
            rows = federations.rows_of(FEDERATION, client)
            x, y = (np.float64(leaf)[rows] for leaf in plain(FEDERATION.data))
            risks[client] = np.mean((x @ w + b - y) ** 2)
        if risks.any():
            climbed = np.sort(mixture + ALPHA * risks)[::-1]
            tops = (np.cumsum(climbed) - 1) / np.arange(1, NUM_CLIENTS + 1)
            shift = tops[np.flatnonzero(climbed > tops)[-1]]
            mixture = np.maximum(mixture + ALPHA * risks - shift, 0)
            w, b = w + moved[:3], b + moved[3]
        assert_close(state.server.variables.params.head, {"w": np.float32(w), "b": np.float32(b)})
        assert_close(state.server.side, np.float32(mixture))
    assert mixture.std() > 0.1


# Mistakes in what a method says.

SQUARED = averaging.gradient(MODEL, squared)


def spoiled(**said: Any) -> Algorithm:
    """FedAvg with something else said."""
    usual: dict[str, Any] = dict(server_optimizer=optax.sgd(1.0), weighting="size")
    gradient_from = said.pop("gradient_from", lambda visit: SQUARED)
    return averaging.averaging(MODEL, WORK, gradient_from, **(usual | said))


@pytest.mark.parametrize(
    ("name", "wrong", "line"),
    [
        ("gradient_from", SQUARED, "must take visit (missing a required argument: 'batch')"),
        ("start", lambda: None, "must take visit (too many positional arguments)"),
        ("init_client", lambda who: (), "must take server and who (too many positional arguments)"),
        ("remember", lambda visit: (), "must take visit and trained (too many"),
        ("shared", lambda: (), "must take variables (too many"),
        ("serve", lambda server: server, "must take server and own (too many"),
        ("scale_delta", lambda visit: 1.0, "must take visit and trained (too many"),
        ("server_delta", lambda side, delta: delta, "must take side and delta and aggregated (too"),
        ("side.init", lambda: (), "must take setup (too many"),
        ("side.send", lambda: (), "must take state (too many"),
        ("side.upload", lambda visit: (), "must take visit and trained (too many"),
        ("side.update", lambda side, up: side, "must take state and aggregated and delta (too"),
        ("side.aggregate", aggregators.mean, "is of type function, must be an Aggregator"),
    ],
)
def test_functions_that_take_other_arguments_are_refused(name: str, wrong: Any, line: str) -> None:
    side, _, field = name.partition(".")
    with pytest.raises(UsageError) as error:
        spoiled(**{side: averaging.NOTHING._replace(**{field: wrong}) if field else wrong})
    assert str(error.value).startswith(f"{name}: {line}")


def stepping(change: Any) -> Any:
    """gradient_from whose steps are changed."""
    return lambda visit: lambda *at: change(SQUARED(*at))


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            {"gradient_from": stepping(lambda step: step.grads)},
            "the result of the gradient: is of type Halves, must be a Step",
        ),
        (
            {"gradient_from": stepping(lambda step: step._replace(grads={"w": jnp.zeros(3)}))},
            "the gradient: returns nothing at .head['b'], must return float32[], as the parameters",
        ),
        (
            {
                "gradient_from": stepping(
                    lambda step: step._replace(grads=jax.tree.map(jnp.atleast_2d, step.grads))
                )
            },
            "the gradient: returns float32[1,1] at .head['b'], must return float32[], as the param",
        ),
        (
            {"gradient_from": stepping(lambda step: step._replace(metrics=step.metrics["loss"]))},
            "the metrics of a Step: is of type ",
        ),
        (
            {"gradient_from": stepping(lambda step: step._replace(stats=Halves((), {"n": 1.0})))},
            "the stats of a Step: returns float32[] at .head['n'], must return nothing, as the net",
        ),
        (
            {"gradient_from": stepping(lambda step: step._replace(carry=jnp.zeros(2)))},
            "the carry of a Step: returns float32[2], must return nothing, as `Local.carry` is",
        ),
        (
            {"side": averaging.NOTHING._replace(update=lambda side, up, delta: (delta.params,))},
            "side.update: returns float32[] at [0].head['b'], must return nothing, as side.init do",
        ),
        (
            {"side": averaging.NOTHING._replace(upload=lambda visit, trained: jnp.ones(()))},
            "side.aggregate: must be an aggregator, or a tree of them that is a prefix of the up",
        ),
        (
            {"scale_delta": lambda visit, trained: jnp.ones(3)},
            "the result of scale_delta: has shape (3,), must be a scalar",
        ),
        (
            {"scale_delta": lambda visit, trained: {"a": 1.0}},
            "the result of scale_delta: has type dict, must be a scalar",
        ),
        (
            {"server_delta": lambda side, delta, aggregated: delta.params},
            "the result of server_delta: is of type Halves, must be a Variables",
        ),
    ],
)
def test_results_of_other_kinds_are_refused(said: dict[str, Any], line: str) -> None:
    algorithm = spoiled(**said)
    state = rounds.init(algorithm, first(), FEDERATION, jax.random.key(0))
    with pytest.raises(UsageError) as error:
        rounds.step(algorithm, state, federations.cohort([0]), FEDERATION, axis=devices.vmapped())
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_a_network_that_serves_must_be_variables() -> None:
    algorithm = spoiled(serve=lambda server, own: server.variables.params)
    state = rounds.init(algorithm, first(), FEDERATION, jax.random.key(0))
    with pytest.raises(UsageError, match=r"^the result of serve: is of type Halves, must be a Var"):
        algorithm.predict(state.server, (), FEDERATION.data.x)


def test_the_embedding_of_a_network_without_a_body_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^model: its body puts out {'a': \(2, 3\)}, must put out one"
    ):
        averaging.embedding({"a": jnp.ones((2, 3))})
