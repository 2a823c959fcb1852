"""The identities of the game, with the kernels alone and through the engine."""

import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import federations
from federations import NUM_CLASSES, assert_close, assert_equal, plain
from fedjax_inv import clients, local, models, rounds, schedules, tree
from fedjax_inv.algorithms import fedavg, fl_games
from fedjax_inv.types import Halves, Shard, Variables

KEY = jax.random.key(0)
SIZES = (4, 6, 5)
PLAYERS = len(SIZES)


class Elu(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, mask, train):
        return nn.elu(nn.Dense(self.width)(x.reshape(x.shape[0], -1)))


def fixed():
    """A predictor on the raw input: the body is empty."""
    return models.from_blocks([Elu(4), federations.Linear(NUM_CLASSES)], 0)


def variable():
    """A learned representation and a predictor."""
    return models.from_blocks([Elu(5), Elu(4), federations.Linear(NUM_CLASSES)], 1)


def game(model, work, num_players=PLAYERS, **options):
    sample = jnp.zeros((1, *federations.IMAGE), jnp.uint8)
    return fl_games.fl_games(model, work, num_players=num_players, sample=sample, **options)


def adam(num_steps=1):
    return local.steps(optax.adam(1e-2), batch_size=3, num_steps=num_steps)


# Bit for bit means by arithmetic: the compiler may fuse two programs in different ways.
UNFUSED = {"xla_disable_hlo_passes": "fusion,cpu-instruction-fusion"}


def play(algorithm, schedule, sizes=SIZES, state=None, model=None):
    federation = federations.federation(sizes)
    if state is None:
        variables = federations.initial(model, KEY)
        state = rounds.init(algorithm, variables, KEY, len(sizes))
    run = jax.jit(
        lambda *a: rounds.run(algorithm, *a, axis=clients.chunked(1)), compiler_options=UNFUSED
    )
    return run(state, schedule, federation)


@given(
    num_opponents=st.integers(0, 3),
    depth=st.integers(0, 3),
    mix=st.sampled_from(fl_games.MEMORY_MIXES),
    seed=st.integers(0, 99),
)
def test_response_logits_are_the_written_sums(num_opponents, depth, mix, seed):
    rng = np.random.default_rng(seed)
    own, opponents = rng.normal(size=(2, 3)), rng.normal(size=(num_opponents, 2, 3))
    memory = rng.normal(size=(num_opponents, depth, 2, 3))
    sizes = rng.integers(0, depth + 1, num_opponents)
    total, terms = own.copy(), 1.0
    for current, past, size in zip(opponents, memory, sizes, strict=True):
        recent = past[:size].mean(0) if size else None
        if mix == "per_opponent":
            total += current if size == 0 else (current + recent) / 2
            terms += 1
        else:
            total += current + (0 if size == 0 else recent)
            terms += 1 + (mix == "normalised" and size > 0)
    actual = fl_games.response_logits(
        *(jnp.asarray(a, jnp.float32) for a in (own, opponents, memory)),
        jnp.asarray(sizes, jnp.int32),
        memory_mix=mix,
    )
    np.testing.assert_allclose(actual, total / terms, rtol=1e-5, atol=1e-6)


def test_what_was_never_played_may_hold_anything():
    own, opponents = jnp.ones((2, 3)), jnp.ones((1, 2, 3))
    memory = jnp.stack([jnp.ones((1, 2, 3)), jnp.full((1, 2, 3), jnp.nan)], 1)
    logits = fl_games.response_logits(own, opponents, memory, 1, memory_mix="literal")
    np.testing.assert_allclose(logits, 3 / 2)


@pytest.mark.parametrize("mix", fl_games.MEMORY_MIXES)
def test_opponents_and_memory_get_no_gradient(mix):
    """Identity 3, of the whole local step: the game as a function of who plays what."""
    model, work = fixed(), local.full_batch(optax.sgd(0.1))
    algorithm = game(model, work, memory=2, memory_mix=mix)
    state = rounds.init(algorithm, federations.initial(model, KEY), KEY, PLAYERS)
    federation = federations.federation(SIZES)
    shard = federations_shard(federation, 0)

    def moved(players, memory):
        now = state.server._replace(players=players, memory=memory, moves=jnp.full(3, 2))
        own = tree.take(state.clients, 0)
        _, played, _ = algorithm.exchanges[0].client(now, own, shard, KEY)
        return played.params

    # What the others play moves player 0's answer, but its own step follows its own gradient only:
    # the answer is the same as that of plain gradient descent with the others' logits as constants.
    features = federation.data.x[federation.rows[0]] / 255
    mask, labels = federation.mask[0], federation.data.y[federation.rows[0]]

    def decode(predictor):
        return model.decode(predictor, {}, features, mask, False)[0]

    players = state.server.players.params
    theirs = jnp.stack([decode(tree.take(players, q)) for q in (1, 2)])
    past = jnp.stack([theirs * 0.5, theirs * 2], 1)

    def risk(head):
        logits = fl_games.response_logits(decode(head), theirs, past, 2, memory_mix=mix)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.where(mask, losses, 0).sum() / mask.sum()

    head = tree.take(players, 0)
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, head, jax.grad(risk)(head))
    # The last layer scales logits: halves and doubles of it are halves and doubles of the logits.
    scaled = [scale_last(players, scale) for scale in (0.5, 2.0)]
    memory = fl_games.Predictor(jax.tree.map(lambda *a: jnp.stack(a, 1), *scaled), {})
    actual = moved(state.server.players, memory)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)


def same(a, b):
    return bool(jax.tree.all(jax.tree.map(lambda x, y: jnp.array_equal(x, y), a, b)))


def scale_last(params, scale):
    last = sorted(params)[-1]
    return {**params, last: jax.tree.map(lambda a: a * scale, params[last])}


def federations_shard(federation, who):
    return Shard(federation.data, federation.rows[who], federation.mask[who], jnp.int32(who))


def test_one_player_is_ordinary_training():
    """Identity 1, bit for bit."""
    model, work, sizes = fixed(), adam(num_steps=2), (7,)
    algorithm = game(model, work, 1)
    start = rounds.init(algorithm, federations.initial(model, KEY), KEY, 1)
    head = tree.take(start.server.players.params, 0)
    state, _ = play(algorithm, schedules.everyone(1, 3), sizes, jax.tree.map(jnp.copy, start))

    def alone(local_state, key):
        shard = federations_shard(federations.federation(sizes), 0)
        return work.run(fedavg.gradient(model), local_state, shard, key)[0]

    variables = Variables(Halves({}, head), Halves({}, {}))
    current = work.init(variables)
    for index in range(3):
        key = start.key
        for part in (index, 0, 0):  # round, exchange, client
            key = jax.random.fold_in(key, part)
        current = jax.jit(alone, compiler_options=UNFUSED)(current, key)
    assert_equal(tree.take(state.server.players.params, 0), current.variables.params.head)


def test_in_a_sequential_round_only_one_player_moves():
    algorithm = game(fixed(), adam(), memory=2)
    before, _ = play(algorithm, schedules.everyone(PLAYERS, 2), model=fixed())
    for mover in range(PLAYERS):
        schedule = federations.cohort([mover])
        schedule = jax.tree.map(lambda a: a[None], schedule)
        after, _ = play(algorithm, schedule, state=jax.tree.map(jnp.copy, before))
        for player in range(PLAYERS):
            old, new = (
                tree.take((s.server.players, s.server.memory), player) for s in (before, after)
            )
            if player == mover:
                assert not same(old, new)
            else:
                assert_equal(plain(old), plain(new))


def test_parallel_players_answer_the_same_actions():
    """A parallel round is what each would play alone, from the same state."""
    algorithm = game(fixed(), adam(), memory=1)
    before, _ = play(algorithm, schedules.everyone(PLAYERS, 1), model=fixed())
    together, _ = play(
        algorithm, schedules.everyone(PLAYERS, 1), state=jax.tree.map(jnp.copy, before)
    )
    for player in range(PLAYERS):
        schedule = jax.tree.map(lambda a: a[None], federations.cohort([player]))
        alone, _ = play(algorithm, schedule, state=jax.tree.map(jnp.copy, before))
        assert_close(
            tree.take(together.server.players, player), tree.take(alone.server.players, player)
        )


def test_without_memory_smooth_is_plain():
    model = fixed()
    results = []
    for mix in fl_games.MEMORY_MIXES:
        algorithm = game(model, adam(), memory=0, memory_mix=mix)
        state, _ = play(algorithm, schedules.everyone(PLAYERS, 3), model=model)
        results.append(state.server.players)
    assert_close(results[0], results[1])
    assert_close(results[0], results[2])


def test_the_memory_holds_the_last_actions_and_the_oldest_goes():
    algorithm, model = game(fixed(), adam(), memory=3), fixed()
    variables = federations.initial(model, KEY)
    state = rounds.init(algorithm, variables, KEY, PLAYERS)
    played = []
    for index in range(5):
        np.testing.assert_array_equal(state.server.moves, index)
        state, _ = play(algorithm, schedules.everyone(PLAYERS, 1), state=state)
        played.append(jax.tree.map(jnp.copy, state.server.players))
    # Moves 3 and 4 stand where 0 and 1 stood.
    expected = jax.tree.map(lambda *a: jnp.stack(a, 1), *(played[n] for n in (3, 4, 2)))
    assert_equal(state.server.memory, expected)


def test_a_player_that_does_not_move_remembers_what_it_did():
    algorithm, model = game(fixed(), adam(), memory=2), fixed()
    variables = federations.initial(model, KEY)
    state = rounds.init(algorithm, variables, KEY, PLAYERS)
    state, _ = play(algorithm, schedules.everyone(PLAYERS, 3), state=state)
    before = jax.tree.map(jnp.copy, state.server)
    state, _ = play(algorithm, schedules.turns(PLAYERS, 1, together=False), state=state)
    (mover,) = np.nonzero(np.asarray(state.server.moves != before.moves))[0]
    for player in set(range(PLAYERS)) - {mover}:
        assert_equal(tree.take(state.server.memory, player), tree.take(before.memory, player))
    # The mover's third move stood in place 0, its fourth is in place 1, where the second was.
    mine = tree.take(state.server.memory, mover)
    assert_equal(tree.take(mine, 0), tree.take(tree.take(before.memory, mover), 0))
    assert_equal(tree.take(mine, 1), tree.take(state.server.players, mover))


def test_representation_and_predictors_take_turns():
    model = variable()
    algorithm = game(model, adam(), learned=True, body_batch_size=3)
    start = rounds.init(algorithm, federations.initial(model, KEY), KEY, PLAYERS)
    states = [start]
    for _ in range(4):
        state, _ = play(
            algorithm,
            schedules.everyone(PLAYERS, 1),
            state=jax.tree.map(jnp.copy, states[-1]),
        )
        states.append(state)
    for index, (a, b) in enumerate(itertools.pairwise(states)):
        assert same(a.server.body, b.server.body) == (index % 2 == 1)
        assert same(a.server.players, b.server.players) == (index % 2 == 0)


def test_fast_with_one_batch_is_plain():
    """Identity 6, for clients whose examples fit into a batch."""
    model = variable()
    states = [
        play(
            game(model, adam(), learned=True, body_batch_size=8, fast=fast),
            schedules.everyone(PLAYERS, 4),
            model=model,
        )[0]
        for fast in (False, True)
    ]
    assert_close(states[0].server, states[1].server)


def test_fast_follows_the_gradient_of_all_local_examples():
    model = variable()
    key = jax.random.key(3)
    federation = federations.federation(SIZES)
    algorithm = game(
        model, adam(), learned=True, body_batch_size=2, body_learning_rate=1e-3, fast=True
    )
    state = rounds.init(algorithm, federations.initial(model, KEY), key, PLAYERS)
    game_now = state.server
    shard = federations_shard(federation, 0)  # 4 examples: two whole batches
    _, upload, _ = algorithm.exchanges[0].client(game_now, (), shard, key)

    def risk(body):
        x, y = federation.data.x[shard.rows], federation.data.y[shard.rows]
        features, _ = model.encode(body, {}, x, shard.mask, False)
        heads = [tree.take(game_now.players.params, k) for k in range(PLAYERS)]
        logits = sum(model.decode(h, {}, features, shard.mask, False)[0] for h in heads) / PLAYERS
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)
        return jnp.where(shard.mask, losses, 0).sum() / shard.mask.sum()

    chex.assert_trees_all_close(
        upload.params, jax.grad(risk)(game_now.body.params), rtol=1e-4, atol=1e-7
    )


def test_prediction_is_the_mean_of_the_players_logits():
    model = variable()
    algorithm = game(model, adam(), learned=True)
    state = rounds.init(algorithm, federations.initial(model, KEY), KEY, PLAYERS)
    x = federations.federation(SIZES).data.x
    mask = jnp.ones(len(x), bool)
    features, _ = model.encode(state.server.body.params, {}, x, mask, False)
    heads = [tree.take(state.server.players.params, k) for k in range(PLAYERS)]
    expected = sum(model.decode(h, {}, features, mask, False)[0] for h in heads) / PLAYERS
    assert_close(algorithm.predict(state.server, (), x), expected)


def test_players_start_differently():
    algorithm = game(fixed(), adam())
    state = rounds.init(algorithm, federations.initial(fixed(), KEY), KEY, PLAYERS)
    kernels = [a for a in jax.tree.leaves(state.server.players.params) if a.ndim == 3]
    for kernel in kernels:
        assert jnp.abs(kernel[0] - kernel[1]).max() > 1e-3


def test_a_regression_game_reaches_its_equilibrium():
    """Two players, scalar data, quadratic loss (Ahuja et al. 2021): with an ensemble of half the
    sum, player k's best response is 2 b_k - (the other's action); where both environments agree on
    b, every pair with mean b is an equilibrium, and turns of best responses reach one at once."""
    optima = jnp.array([0.7, 0.7])

    def respond(actions, player):
        other = actions[1 - player]
        grad = jax.grad(
            lambda own: (
                (
                    fl_games.response_logits(
                        own.reshape(1, 1),
                        other.reshape(1, 1, 1),
                        jnp.zeros((1, 0, 1, 1)),
                        0,
                        memory_mix="per_opponent",
                    )[0, 0]
                    - optima[player]
                )
                ** 2
            )
        )
        action = actions[player]
        for _ in range(200):
            action = action - 0.5 * grad(action)
        return actions.at[player].set(action)

    actions = jnp.array([-1.0, 3.0])
    for turn in range(4):
        actions = respond(actions, turn % 2)
    np.testing.assert_allclose(actions.mean(), 0.7, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(memory=-1), "memory=-1: must be at least 0"),
        (dict(memory_mix="sum"), "memory_mix='sum': must be one of per_opponent"),
        (dict(body_every=1), "body_every=1: must be at least 2"),
    ],
)
def test_bad_values_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        game(fixed(), adam(), **options)
