"""FL Games: clients as players, whose equilibrium is an ensemble of invariant predictors.

    player k minimises  R_k( (1/m) (w_k + sum_{q != k} w_q) o phi )                          (1)
    SMOOTH adds         (1/m) sum_{p != k} (mean over p's last H predictors)                 (2)

Gupta et al. 2022, "FL Games", arXiv 2205.11101, Algorithm 1. The terms are functions: logits are
averaged, not parameters. A player answers with a few optimizer steps while its opponents stand
still; the schedule alone decides whether players move together (parallel) or in turn (sequential).
The representation phi is the identity (F: a model whose body is empty) or learned (V).

The paper leaves open, and we chose: the scale of Eq. 2, by `memory_mix`; an empty memory is left
out; a predictor enters the memory right after its update, so a current predictor counts twice; each
player keeps its optimizer's state; phi's server optimizer is Adam.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, local, objectives, tree
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Cohort,
    Exchange,
    Halves,
    Local,
    Metrics,
    Model,
    Shard,
    Tree,
    Variables,
    Work,
)

MEMORY_MIXES = ("per_opponent", "literal", "normalised")


class Predictor(NamedTuple):
    """A half of a network: a player's action, or the representation."""

    params: Tree
    stats: Tree


class Game(NamedTuple):
    """The server: what has been played so far. Every player knows all of it."""

    body: Predictor  # phi
    body_opt_state: Tree
    players: Predictor  # [C, ...] current actions
    memory: Predictor  # [C, H, ...] the last H actions of each, move n in place n % H
    moves: Array  # [C] int32, how often each has moved


def response_logits(
    own: Array,
    opponents: Array,
    memory: Array,
    memory_size: Array,
    *,
    memory_mix: str,
) -> Array:
    """The logits [B, K] that a player is judged by, Eq. 1 and 2.

    own: [B, K]. opponents: [P, B, K], P = m - 1. memory: [P, H, B, K]. memory_size: [] or [P],
    how many of H are filled, the first. memory_mix: the scale of Eq. 2, "literal" (1 / m over all
    2m - 1 terms, as printed), "normalised" (1 / (2m - 1)), or "per_opponent" (an opponent counts as
    the mean of its action and its memory, then 1 / m). Raises ValueError for another mix.
    """
    chex.assert_rank([own, opponents, memory], [2, 3, 4])
    chex.assert_equal_shape_suffix([own, opponents, memory], 2)
    if memory_mix not in MEMORY_MIXES:
        raise ValueError(f"memory_mix={memory_mix!r}: must be one of {', '.join(MEMORY_MIXES)}")
    num_opponents, depth = memory.shape[:2]
    size = jnp.broadcast_to(memory_size, num_opponents)
    filled = jnp.arange(depth) < size[:, None]
    past = (
        jnp.where(filled[..., None, None], memory, 0).sum(1) / jnp.maximum(size, 1)[:, None, None]
    )
    remembered = (size > 0)[:, None, None]
    terms = num_opponents + 1
    if memory_mix == "per_opponent":
        return (own + jnp.where(remembered, (opponents + past) / 2, opponents).sum(0)) / terms
    if memory_mix == "normalised":
        return (own + (opponents + past).sum(0)) / (terms + remembered.sum())
    return (own + (opponents + past).sum(0)) / terms


def fl_games(
    model: Model,
    work: Work,
    *,
    num_players: int,
    sample: Tree,
    memory: int = 0,
    memory_mix: str = "per_opponent",
    learned: bool = False,
    body_every: int = 2,
    body_learning_rate: float | Array = 2.5e-5,
    body_batch_size: int = 256,
    fast: bool = False,
) -> Algorithm:
    """FL Games (Algorithm 1); the clients of the federation are the players 0 .. num_players - 1.

    sample: a batch of inputs, whose shape the networks are made for; every player draws its own
    predictor. memory: H of SMOOTH, 0 for none. learned: whether the representation is (V), or stays
    as it is (F). body_every: of V: phi is updated in the rounds that it divides and predictors in
    the others; 2 for parallel play, num_players + 1 for sequential. fast: phi's gradient is that of
    all local batches, not of one. Raises ValueError for values out of range.
    """
    if memory < 0:
        raise ValueError(f"memory={memory}: must be at least 0")
    if memory_mix not in MEMORY_MIXES:
        raise ValueError(f"memory_mix={memory_mix!r}: must be one of {', '.join(MEMORY_MIXES)}")
    if body_every < 2:
        raise ValueError(f"body_every={body_every}: must be at least 2")
    body_optimizer = optax.adam(body_learning_rate)

    def init_server(variables: Variables, key: Array) -> Game:
        drawn = jax.vmap(lambda k: model.init(k, sample))(jax.random.split(key, num_players))
        players = Predictor(drawn.params.head, drawn.stats.head)
        return Game(
            Predictor(variables.params.body, variables.stats.body),
            body_optimizer.init(variables.params.body),
            players,
            jax.tree.map(lambda a: jnp.zeros((a.shape[0], memory, *a.shape[1:]), a.dtype), players),
            jnp.zeros(num_players, jnp.int32),
        )

    def init_client(game: Game, who: Array) -> Tree:
        return work.init(_alone(tree.take(game.players, who))).opt_state

    def logits_of(predictor: Predictor, features: Array, mask: Array) -> Array:
        return model.decode(predictor.params, predictor.stats, features, mask, False)[0]

    # phi's exchange: its gradient through the ensemble.

    def body_client(game: Game, own: Tree, shard: Shard, key: Array) -> tuple[Tree, Tree, Metrics]:
        def risk(body: Tree, batch: Batch) -> tuple[Array, tuple[Array, Tree]]:
            features, stats = model.encode(body, game.body.stats, batch.x, batch.mask, True)
            logits = jax.vmap(lambda p: logits_of(p, features, batch.mask))(game.players)
            loss = objectives.cross_entropy(logits.mean(0), batch.y, batch.mask)
            return loss, (loss, stats)

        grads, (loss, stats) = local.mean_gradient(
            risk, game.body.params, shard, key, batch_size=body_batch_size, all_batches=fast
        )
        return own, Predictor(grads, stats), {"body_loss": loss}

    def body_update(game: Game, mean: Predictor, cohort: Cohort) -> Game:
        del cohort
        updates, opt_state = body_optimizer.update(
            mean.params, game.body_opt_state, game.body.params
        )
        body = Predictor(optax.apply_updates(game.body.params, updates), mean.stats)
        return game._replace(body=body, body_opt_state=opt_state)

    # The players' exchange: the best response to what the others last played.

    def client(game: Game, own: Tree, shard: Shard, key: Array) -> tuple[Tree, Predictor, Metrics]:
        others = (shard.who + 1 + jnp.arange(num_players - 1)) % num_players
        opponents, past = tree.take((game.players, game.memory), others)
        memory_size = jnp.minimum(game.moves[others], memory)

        def grad_fn(
            variables: Variables, batch: Batch, key: Array
        ) -> tuple[Halves, Halves, Metrics]:
            del key
            features, _ = model.encode(*game.body, batch.x, batch.mask, False)

            def play(predictor: Predictor) -> Array:
                return logits_of(predictor, features, batch.mask)

            theirs, remembered = jax.vmap(play)(opponents), jax.vmap(jax.vmap(play))(past)

            def risk(head: Tree) -> tuple[Array, Tree]:
                logits, stats = model.decode(head, variables.stats.head, features, batch.mask, True)
                logits = response_logits(
                    logits, theirs, remembered, memory_size, memory_mix=memory_mix
                )
                return objectives.cross_entropy(logits, batch.y, batch.mask), stats

            (loss, stats), grads = jax.value_and_grad(risk, has_aux=True)(variables.params.head)
            return Halves({}, grads), Halves({}, stats), {"loss": loss}

        start = Local(_alone(tree.take(game.players, shard.who)), own)
        end, metrics = work.run(grad_fn, start, shard, key)
        played = Predictor(end.variables.params.head, end.variables.stats.head)
        return end.opt_state, played, metrics

    def update(game: Game, played: aggregators.Stack, cohort: Cohort) -> Game:
        del cohort
        who = jnp.where(played.present, played.who, num_players)
        remembered = game.memory
        if memory:
            place = game.moves[played.who] % memory  # of the oldest, once all are filled
            remembered = jax.tree.map(
                lambda past, new: past.at[who, place].set(new, mode="drop"),
                game.memory,
                played.values,
            )
        return game._replace(
            players=tree.put(game.players, who, played.values),
            memory=remembered,
            moves=game.moves.at[who].add(1, mode="drop"),
        )

    def predict(game: Game, own: Tree, x: Tree) -> Array:
        del own
        mask = jnp.ones(jax.tree.leaves(x)[0].shape[0], bool)
        features, _ = model.encode(*game.body, x, mask, False)
        return jax.vmap(lambda p: logits_of(p, features, mask))(game.players).mean(0)

    def everything(game: Game) -> Game:
        return game

    moves = Exchange(everything, client, aggregators.stacked(), update)
    exchanges: tuple[Exchange, ...] = (moves,)
    if learned:
        learns = Exchange(everything, body_client, aggregators.weighted_mean(), body_update)
        exchanges = (
            learns._replace(takes_place=lambda t: t % body_every == 0),
            moves._replace(takes_place=lambda t: t % body_every != 0),
        )
    return Algorithm(init_server, init_client, exchanges, predict)


def _alone(predictor: Predictor) -> Variables:
    """A predictor as variables without a body."""
    return Variables(Halves({}, predictor.params), Halves({}, predictor.stats))
