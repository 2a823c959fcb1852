"""The identities of the game, with the kernels alone and through the engine."""

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import federations
from federations import NUM_CLASSES, assert_close, assert_equal, plain
from fedjax_inv import (
    devices,
    local,
    models,
    objectives,
    rounds,
    schedules,
    tree,
)
from fedjax_inv.algorithms import fl_games
from fedjax_inv.data import federation as federations_of
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Examples,
    Federation,
    Halves,
    Model,
    Reply,
    Tree,
    Variables,
    Visit,
    Work,
)

KEY = jax.random.key(0)
SIZES = (11, 6, 4)
PLAYERS = len(SIZES)
FEDERATION = federations.federation(SIZES)
SOFTMAX = federations.softmax_regression()


# A predictor with statistics on the raw input: the body is empty.
FIXED = federations.normed_head()
# A learned representation with statistics, and a predictor.
LEARNED = federations.normed_body()


def full_batch(optimizer: optax.GradientTransformation, num_steps: int = 1) -> Work:
    return local.full_batch(optimizer, capacity=max(SIZES), num_steps=num_steps)


@cache
def game(
    model: Model,
    optimizer: Callable[[float], optax.GradientTransformation] = optax.adam,
    **options: Any,
) -> Algorithm:
    return fl_games.fl_games(model, full_batch(optimizer(1e-2)), **options)


@cache
def start(algorithm: Algorithm, model: Model) -> rounds.State:
    """The state before the first round."""

    @jax.jit
    def init() -> rounds.State:
        variables = federations.initial(model, KEY)
        return rounds.init(algorithm, variables, FEDERATION, KEY)

    return init()


@partial(jax.jit, static_argnums=0)
def step(
    algorithm: Algorithm, state: rounds.State, cohort: Cohort, federation: Federation
) -> rounds.State:
    return rounds.step(algorithm, state, cohort, federation, axis=devices.chunked(1))[0]


def attended_by(*players: int) -> Cohort:
    everyone = list(range(PLAYERS))
    return federations.cohort(everyone, [player in players for player in everyone])


EVERYONE = attended_by(*range(PLAYERS))


@cache
def states(algorithm: Algorithm, model: Model, num_rounds: int) -> list[rounds.State]:
    """Before each round and after the last; everyone is sent."""
    found = [start(algorithm, model)]
    for _ in range(num_rounds):
        found.append(step(algorithm, found[-1], EVERYONE, FEDERATION))
    return found


def same(first: Tree, second: Tree) -> bool:
    pairs = zip(jax.tree.leaves(plain(first)), jax.tree.leaves(plain(second)), strict=True)
    return all((a == b).all() for a, b in pairs)


def of(game_: fl_games.Game, player: int) -> Tree:
    """What a player plays and remembers."""
    return tree.take(plain((game_.table.players, game_.table.memory, game_.table.moves)), player)


response_logits = jax.jit(fl_games.response_logits, static_argnames="memory_mix")


@given(
    num_opponents=st.integers(0, 3),
    depth=st.integers(0, 3),
    mix=st.sampled_from(fl_games.MEMORY_MIXES),
    seed=st.integers(0, 99),
)
def test_response_logits_are_the_written_sums(
    num_opponents: int, depth: int, mix: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    own, opponents = rng.normal(size=(2, 3)), rng.normal(size=(num_opponents, 2, 3))
    memory = rng.normal(size=(num_opponents, depth, 2, 3))
    sizes = rng.integers(0, depth + 1, num_opponents)
    actual = response_logits(
        *(jnp.asarray(a, jnp.float32) for a in (own, opponents, memory)),
        jnp.asarray(sizes, jnp.int32),
        memory_mix=mix,
    )
    expected = written_sums(own, opponents, memory, sizes, mix)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    # Those that do not play are left out, whatever they hold.
    plays = rng.random(num_opponents) < 0.6
    opponents[~plays] = np.nan
    actual = response_logits(
        *(jnp.asarray(a, jnp.float32) for a in (own, opponents, memory)),
        jnp.asarray(sizes, jnp.int32),
        memory_mix=mix,
        plays=jnp.asarray(plays),
    )
    expected = written_sums(own, opponents[plays], memory[plays], sizes[plays], mix)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mix", fl_games.MEMORY_MIXES)
def test_the_scale_of_the_release_is_half_of_the_sum(mix: str) -> None:
    rng = np.random.default_rng(0)
    own, opponents = rng.normal(size=(2, 3)), rng.normal(size=(4, 2, 3))
    mean = fl_games.response_logits(own, opponents, memory_mix=mix)
    half = fl_games.response_logits(own, opponents, None, memory_mix=mix, output_scale=0.5)
    np.testing.assert_allclose(mean, (own + opponents.sum(0)) / 5, rtol=1e-5)
    np.testing.assert_allclose(half, (own + opponents.sum(0)) / 2, rtol=1e-5)
    algorithm = game(SOFTMAX)
    state, x = start(algorithm, SOFTMAX), FEDERATION.data.x[:4]
    mean = algorithm.predict(state.server, (), x)
    half = game(SOFTMAX, output_scale=0.5).predict(state.server, (), x)
    np.testing.assert_allclose(half, PLAYERS / 2 * mean, rtol=1e-5)


def written_sums(own: np.ndarray, opponents: Any, memory: Any, sizes: Any, mix: str) -> np.ndarray:
    """Eq. 1 and 2, opponent after opponent."""
    total, terms = own.copy(), 1.0
    for current, past, size in zip(opponents, memory, sizes, strict=True):
        recent = past[:size].mean(0) if size else None
        if mix == "per_opponent":
            total += current if size == 0 else (current + recent) / 2
            terms += 1
        else:
            total += current + (0 if size == 0 else recent)
            terms += 1 + (mix == "normalised" and size > 0)
    return total / terms


def visit_of(message: Tree, own: Tree, who: int) -> Visit:
    shard = federations.shard_of(FEDERATION, who)
    return Visit(message, own, shard, jnp.int32(0), jnp.int32(0), KEY)


def turn_of(
    algorithm: Algorithm, index: int, state: rounds.State, who: int, game_: fl_games.Game
) -> Reply:
    """A client's turn in an exchange of a game."""
    exchange = algorithm.exchanges[index]
    turn = jax.jit(
        lambda game_, own: exchange.client(visit_of(exchange.broadcast(game_), own, who))
    )
    return turn(game_, tree.take(state.clients, who))


@pytest.mark.parametrize(
    ("mix", "depth", "moves"),
    [
        *((mix, 2, (5, 1, 3)) for mix in fl_games.MEMORY_MIXES),  # one remembers 1, the other 2
        ("per_opponent", 0, (5, 1, 3)),
    ],
)
def test_a_player_answers_the_others_along_its_own_gradient(
    mix: str, depth: int, moves: tuple[int, ...]
) -> None:
    """Identities 3 and 4, against a step of softmax regression in float64: what others play and
    have played counts as a constant. Where nobody remembers, the game is the plain one.
    """
    algorithm = game(SOFTMAX, optax.sgd, memory=depth, memory_mix=mix)
    state = start(algorithm, SOFTMAX)
    rng = np.random.default_rng(0)
    played = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
        (state.server.table.players, state.server.table.memory),
    )
    players, memory = played
    done = {"players": players, "memory": memory, "moves": jnp.array(moves, jnp.int32)}
    now = state.server._replace(table=state.server.table._replace(**done))
    who, others = 0, [1, 2]
    reply = turn_of(algorithm, 0, state, who, now)

    rows = federations.rows_of(FEDERATION, who)
    x = np.asarray(FEDERATION.data.x, np.float64)[rows].reshape(len(rows), -1) / 255
    targets = np.eye(NUM_CLASSES)[np.asarray(FEDERATION.data.y)[rows]]

    def logits(predictor: fl_games.Predictor, *place: int) -> np.ndarray:
        dense = predictor.params["blocks_0"]["Dense_0"]
        return x @ np.float64(dense["kernel"][place]) + np.float64(dense["bias"][place])

    sizes = [min(moves[q], depth) for q in others]
    past = [np.array([logits(memory, q, h) for h in range(depth)]) for q in others]
    together = (logits(players, who), [logits(players, q) for q in others], past)
    mixed = written_sums(*together, sizes, mix)
    if not any(sizes):
        np.testing.assert_allclose(mixed, (together[0] + sum(together[1])) / PLAYERS)
    # The own logits' share of the mixture, by which the chain rule multiplies.
    share = (written_sums(together[0] + 1, *together[1:], sizes, mix) - mixed).mean()
    probability = np.exp(mixed) / np.exp(mixed).sum(1, keepdims=True)
    error = share * (probability - targets) / len(rows)
    before, after = (
        predictor.params["blocks_0"]["Dense_0"]
        for predictor in (tree.take(players, who), reply.upload)
    )
    assert_close((after["kernel"] - before["kernel"]) / -1e-2, x.T @ error, rtol=1e-3)
    assert_close((after["bias"] - before["bias"]) / -1e-2, error.sum(0), rtol=1e-3)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("play", fl_games.PLAYS)
def test_who_moves_when(play: str, learned: bool) -> None:
    """phi before each cycle of moves; a cycle is one round, or one of each player."""
    algorithm = game(LEARNED, play=play, learned=learned)
    state = start(algorithm, LEARNED)
    *phi, players = algorithm.exchanges
    assert len(phi) == learned
    cycle = [{0, 1, 2}] if play == "parallel" else [{0}, {1}, {2}]
    expected = ([set()] if learned else []) + cycle
    for index in range(3 * len(expected)):

        def present(exchange: Any, index: int = index) -> set[int]:
            attends = partial(exchange.attends, state.server, round=jnp.int32(index))
            return {who for who in range(PLAYERS) if attends(jnp.int32(who))}

        now = expected[index % len(expected)]
        assert present(players) == now
        for exchange in phi:
            assert present(exchange) == (set() if now else {0, 1, 2})


def test_in_a_sequential_round_only_one_player_moves() -> None:
    """Identity 2; and it alone counts a move, round after round in turn."""
    seen = states(game(FIXED, play="sequential", memory=2), FIXED, 2 * PLAYERS)
    for index, (before, after) in enumerate(itertools.pairwise(seen)):
        for player in range(PLAYERS):
            pair = of(before.server, player), of(after.server, player)
            assert same(*pair) == (player != index % PLAYERS)
    np.testing.assert_array_equal(seen[-1].server.table.moves, 2)


def test_parallel_players_answer_the_same_actions() -> None:
    """A parallel round is what each would play alone, from the same state."""
    algorithm = game(FIXED, memory=2)
    before, together = states(algorithm, FIXED, 5)[1:3]
    for player in range(PLAYERS):
        alone = step(algorithm, before, attended_by(player), FEDERATION)
        for other in range(PLAYERS):
            moved = together if other == player else before
            assert_close(of(alone.server, other), of(moved.server, other))
        assert not same(of(alone.server, player), of(before.server, player))


def test_the_memory_holds_the_last_actions_and_the_oldest_goes() -> None:
    seen = [state.server for state in states(game(FIXED, memory=2), FIXED, 5)]
    for index, game_ in enumerate(seen):
        np.testing.assert_array_equal(game_.table.moves, index)
    # A player enters right after its update. Move 4 stands where 0 and 2 stood, 3 where 1 stood.
    expected = jax.tree.map(
        lambda *a: np.stack(a, 1), *(plain(seen[n].table.players) for n in (5, 4))
    )
    assert_equal(seen[5].table.memory, expected)


def risk(body: Tree, game_: fl_games.Game, x: Array, y: Array) -> tuple[Array, Tree]:
    """(a client's loss under the ensemble, the body's statistics), without the algorithm."""
    mask = jnp.ones(len(y), bool)
    features, stats = LEARNED.encode(body, game_.table.body.stats, x, mask, True)
    heads = [tree.take(game_.table.players.params, k) for k in range(PLAYERS)]
    logits = sum(LEARNED.decode(head, {}, features, mask, False)[0] for head in heads) / PLAYERS
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean(), stats


risk_gradient = jax.jit(jax.grad(risk, has_aux=True))


def body_gradient(game_: fl_games.Game, who: int, batch_size: int) -> Tree:
    """The mean over a client's examples of (phi's gradient, statistics), batch after batch."""
    x, y = plain(FEDERATION.data[:2])
    rows = federations.rows_of(FEDERATION, who)
    parts = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    found = [
        plain(risk_gradient(game_.table.body.params, game_, x[part], y[part])) for part in parts
    ]
    shares = [len(part) / len(rows) for part in parts]
    return jax.tree.map(
        lambda *leaves: sum(s * leaf for s, leaf in zip(shares, leaves, strict=True)), *found
    )


@pytest.mark.parametrize(
    ("fast", "batch_size"),
    # 11 examples: five batches of 2 and one of 1, or a single one.
    [(True, 2), (False, 16)],
)
def test_phi_follows_the_mean_over_a_clients_examples(fast: bool, batch_size: int) -> None:
    """Where the last batch is smaller, its examples count no more than the others."""
    algorithm = game(LEARNED, learned=True, body_batch_size=batch_size, fast=fast)
    state = start(algorithm, LEARNED)
    upload = turn_of(algorithm, 0, state, 0, state.server).upload
    grads, stats = body_gradient(state.server, 0, batch_size)
    assert_close((upload.params, upload.stats), (grads, stats), atol=1e-6)
    if batch_size == 2:  # else the test would not tell
        whole, _ = body_gradient(state.server, 0, 16)
        differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), grads, whole)
        assert max(jax.tree.leaves(differences)) > 1e-3


@cache
def with_sgd() -> Algorithm:
    return game(
        LEARNED, learned=True, body_optimizer=optax.sgd, body_learning_rate=0.5, body_batch_size=16
    )


def test_phi_steps_along_the_mean_weighted_by_size() -> None:
    """With the optimizer that is given."""
    before, after = (state.server for state in states(with_sgd(), LEARNED, 2)[:2])
    parts = [body_gradient(before, who, 16) for who in range(PLAYERS)]
    shares = np.array(SIZES) / sum(SIZES)
    grads, stats = jax.tree.map(
        lambda *leaves: sum(s * leaf for s, leaf in zip(shares, leaves, strict=True)), *parts
    )
    expected = jax.tree.map(lambda w, g: w - 0.5 * g, plain(before.table.body.params), grads)
    assert_close(after.table.body, fl_games.Predictor(expected, stats))
    assert not same(after.table.body.params, before.table.body.params)


def test_prediction_is_the_mean_of_the_players_logits() -> None:
    algorithm = game(LEARNED, learned=True)
    game_ = start(algorithm, LEARNED).server
    x = FEDERATION.data.x

    @jax.jit
    def logits(player: int) -> Array:
        head = tree.take(game_.table.players, player)
        halves = zip(game_.table.body, head, strict=True)
        variables = Variables(*(Halves(*half) for half in halves))
        return models.predict(LEARNED, variables, x)

    expected = sum(logits(player) for player in range(PLAYERS)) / PLAYERS
    assert_close(jax.jit(algorithm.predict)(game_, (), x), expected)


@pytest.mark.parametrize("play", fl_games.PLAYS)
def test_best_responses_to_a_quadratic_risk(play: str) -> None:
    """Two players with the risk (mean action - b)^2; their best response is 2 b - the other's.

    The slope in one's own action is (mean - b), so a step of size 2 is the best response. In turn
    they reach an equilibrium: all actions of mean b are ones (Ahuja et al. 2021). At once each
    moves as if the other stood still, and the mean swings around b.
    """
    model = models.from_function(
        lambda key, x: {"w": jax.random.normal(key, (1,))}, lambda params, x: x * params["w"]
    )

    def squared(outputs: Array, y: Array, mask: Array) -> Array:
        return objectives.masked_mean((outputs[:, 0] - y) ** 2, mask)

    b, each = 0.7, jnp.arange(2, dtype=jnp.int32)
    examples = Examples(jnp.ones((2, 1)), jnp.full(2, b))
    federation = Federation(examples, each, each, jnp.ones(2, jnp.int32))
    work = local.full_batch(optax.sgd(2.0), capacity=1)
    algorithm = fl_games.fl_games(model, work, play=play, loss=squared)
    state = rounds.init(algorithm, model.init(KEY, examples.x), federation, KEY)
    path = []
    for _ in range(5):
        path.append(np.asarray(state.server.table.players.params["w"][:, 0]))
        state = step(algorithm, state, federations.cohort([0, 1]), federation)
    first, *rest = path
    assert abs(first.mean() - b) > 0.1
    if play == "sequential":
        expected = [[2 * b - first[1], first[1]]] * 4
    else:
        expected = [2 * b - first[::-1], first] * 2
    np.testing.assert_allclose(rest, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", [0, 2])
def test_scanned_best_responses_are_the_games(depth: int) -> None:
    """Sequential play of softmax regressions on plain arrays, with Adam, equals the engine."""
    num_turns, num_steps, size = 7, 2, 5
    rng = np.random.default_rng(0)
    x = rng.normal(size=(PLAYERS, size, 4)).astype(np.float32)
    y = rng.integers(0, 3, (PLAYERS, size)).astype(np.int32)
    optimizer = optax.adam(0.1)
    model = models.from_function(
        lambda key, x: {"w": jax.random.normal(key, (4, 3))}, lambda params, x: x @ params["w"]
    )
    work = local.full_batch(optimizer, capacity=size, num_steps=num_steps)
    algorithm = fl_games.fl_games(model, work, play="sequential", memory=depth)
    examples = federations_of.examples(x.reshape(-1, 4), y.reshape(-1))
    held = federations_of.of_parts(examples, np.split(np.arange(PLAYERS * size), PLAYERS))
    state = rounds.init(algorithm, model.init(KEY, x[0]), held, KEY)
    first: Any = state.server.table.players.params["w"]
    attend = schedules.everyone(PLAYERS, num_turns)
    last, _ = rounds.run(algorithm, state, attend, held, axis=devices.chunked(1))

    def turn(state: Tree, number: Array) -> tuple[Tree, None]:
        actions, opt_states, memory, moves = state
        player = number % PLAYERS
        others = (player + 1 + jnp.arange(PLAYERS - 1)) % PLAYERS
        action, opt_state = fl_games.best_response(
            lambda action: jnp.asarray(x)[player] @ action,
            actions[player],
            tree.take(opt_states, player),
            actions[others],
            jnp.asarray(y)[player],
            jnp.ones(size, bool),
            optimizer=optimizer,
            num_steps=num_steps,
            memory=memory[others] if depth else None,
            memory_size=jnp.minimum(moves[others], depth),
        )
        if depth:
            memory = memory.at[player, moves[player] % depth].set(action)
        opt_states = tree.put(opt_states, player, opt_state)
        return (actions.at[player].set(action), opt_states, memory, moves.at[player].add(1)), None

    memory = jnp.zeros((PLAYERS, depth, 4, 3))
    start = first, jax.vmap(optimizer.init)(first), memory, jnp.zeros(PLAYERS, jnp.int32)
    (actions, *_), _ = jax.lax.scan(turn, start, jnp.arange(num_turns))
    np.testing.assert_allclose(actions, last.server.table.players.params["w"], rtol=1e-5, atol=1e-6)
    assert np.abs(actions - first).max() > 0.1
