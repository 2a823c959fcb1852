"""FL Games: clients as players, whose equilibrium is an ensemble of invariant predictors.

    player k minimises  R_k( (1/m) (w_k + sum_{q != k} w_q) o phi )                          (1)
    SMOOTH              w_q becomes (w_q + M_q) / 2, M_q the mean of q's last H predictors   (2)

Gupta et al. 2022, "FL Games", arXiv 2205.11101, Algorithm 1. The terms are functions: logits are
averaged, not parameters. A player responds with a few optimizer steps while its opponents are
fixed; players move together (parallel) or in turn (sequential). The representation phi is the
identity (F: a model whose body is empty) or learned (V).

As printed, Eq. 2 adds the M_q to the sum of Eq. 1 and divides by m still (`memory_mix` "literal").
The paper leaves open, and we chose: this scale, as the mean above (`memory_mix`); an empty memory
is left out; a predictor enters the memory right after its update, so a current predictor counts
twice; each player keeps its optimizer's state; phi's server optimizer is Adam; FAST takes the mean
over a client's examples, not over its batches, as the last batch may be smaller; each player draws
its own head, also where the network is given; a late player goes on from its head in the late
broadcast; players respond to phi in evaluation mode, without dropout and augmentation. IRM Games'
release has Keras's Adam, whose epsilon acts otherwise; adds half of each player's logits
(`output_scale`), which is the mean of two players alone; and lets the players of a learned phi move
from the last to the first, anew in each epoch.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, checks, local, objectives, tree, types
from fedjax_inv.parts import needing_head
from fedjax_inv.types import Array, Tree

PLAYS = ("parallel", "sequential")
MEMORY_MIXES = ("per_opponent", "literal", "normalised")
_BATCHES_AT_ONCE = 4  # of phi's gradient
FACTS = types.Facts(precision="highest")  # a game amplifies rounding


class Predictor(NamedTuple):
    """A half of a network: a player's action, or the representation."""

    params: Tree
    stats: Tree


class Table(NamedTuple):
    """All moves so far: the message for a response."""

    body: Predictor  # phi
    players: Predictor  # [C, ...] current actions
    memory: Predictor  # [C, H, ...] the last H actions of each player, move n in place n % H
    moves: Array  # [C] int32, number of moves of each player
    plays: Array  # [C] bool; a client without examples is no player


class Game(NamedTuple):
    """The server."""

    table: Table
    body_opt_state: Tree


class Ensemble(NamedTuple):
    """The part of the table for an update of the representation."""

    body: Predictor
    players: Predictor  # [C, ...]
    plays: Array  # [C] bool


def response_logits(
    own: Array,
    opponents: Array,
    memory: Array | None = None,
    memory_size: Array | int = 0,
    *,
    memory_mix: str = "per_opponent",
    plays: Array | None = None,
    output_scale: float | Array | None = None,
) -> Array:
    """Return the logits of a player's loss (Eq. 1 and 2), [B, K].

    Args:
      own: the player's logits [B, K].
      opponents: the opponents' logits [P, B, K], P = m - 1.
      memory: logits of their last actions [P, H, B, K]; None: no memory.
      memory_size: [] or [P] int, how many of H are filled, the first ones.
      memory_mix: the scale of Eq. 2: "literal" (1 / m over all 2m - 1 terms, as printed),
        "normalised" (1 / (2m - 1)), or "per_opponent" (an opponent counts as the mean of its action
        and its memory, then 1 / m).
      plays: [P] bool, the opponents that count, m - 1 of them; None: all.
      output_scale: stands in place of 1 / m, if it is not None.
    """
    memory = opponents[:, None][:, :0] if memory is None else memory
    chex.assert_rank([own, opponents, memory], [2, 3, 4])
    chex.assert_equal_shape_suffix([own, opponents, memory], 2)
    chex.assert_equal_shape_prefix([opponents, memory], 1)
    checks.one_of("memory_mix", memory_mix, MEMORY_MIXES)
    num_opponents, depth = memory.shape[:2]
    counts = jnp.ones(num_opponents, bool) if plays is None else plays
    opponents = jnp.where(counts[:, None, None], opponents, 0)
    size = jnp.where(counts, jnp.broadcast_to(memory_size, num_opponents), 0)
    filled = jnp.arange(depth) < size[:, None]
    past = (
        jnp.where(filled[..., None, None], memory, 0).sum(1) / jnp.maximum(size, 1)[:, None, None]
    )
    remembered = (size > 0)[:, None, None]
    players = terms = counts.sum() + 1
    theirs = opponents + past
    if memory_mix == "per_opponent":
        theirs = jnp.where(remembered, theirs / 2, opponents)
    if memory_mix == "normalised":
        terms += remembered.sum()
    return _of_scale((own + theirs.sum(0)) / terms, output_scale, players)


def best_response(
    logits: Callable[[Tree], Array],
    own: Tree,
    opt_state: Tree,
    opponents: Tree,
    labels: Array,
    mask: Array,
    *,
    optimizer: optax.GradientTransformation,
    num_steps: int,
    loss: types.Loss = objectives.cross_entropy,
    memory: Tree = None,
    memory_size: Array | int = 0,
    memory_mix: str = "per_opponent",
    output_scale: float | Array | None = None,
) -> tuple[Tree, Tree]:
    """Return (a player's new action, its optimizer's state) against fixed opponents (Algorithm 1).

    Args:
      logits: action -> its logits [B, K] on the player's examples.
      own: the player's action.
      opt_state: the state of its optimizer.
      opponents: their actions, each leaf [P, ...].
      labels: [B] int.
      mask: [B] bool, which examples are real.
      optimizer: the player's.
      num_steps: of the optimizer, each along the gradient on all of the examples.
      loss: of logits, labels and mask.
      memory: the opponents' last actions, each leaf [P, H, ...]; None: no memory.
      memory_size: as in `response_logits`, also the next two.
    """
    theirs = jax.vmap(logits)(opponents)
    past = None if memory is None else jax.vmap(jax.vmap(logits))(memory)
    mixed = functools.partial(response_logits, memory_mix=memory_mix, output_scale=output_scale)

    def risk(action: Tree) -> Array:
        return loss(mixed(logits(action), theirs, past, memory_size), labels, mask)

    def step(state: tuple[Tree, Tree], _: None) -> tuple[tuple[Tree, Tree], None]:
        action, opt_state = state
        updates, opt_state = optimizer.update(jax.grad(risk)(action), opt_state, action)
        return (optax.apply_updates(action, updates), opt_state), None

    response, _ = jax.lax.scan(step, (own, opt_state), length=num_steps)
    return response


def fl_games(
    model: types.Model,
    work: types.Work,
    *,
    play: str = "parallel",
    memory: int = 0,
    memory_mix: str = "per_opponent",
    learned: bool = False,
    body_optimizer: Callable[..., optax.GradientTransformation] = optax.adam,
    body_learning_rate: float | Array = 2.5e-5,
    body_batch_size: int = 256,
    fast: bool = False,
    output_scale: float | Array | None = None,
    loss: types.Loss = objectives.cross_entropy,
) -> types.Algorithm:
    """Return FL Games (Algorithm 1); the clients that have examples are the players.

    Args:
      play: "parallel": all players move in every round; "sequential": one player after the other.
      memory: H of SMOOTH, how many last actions of a player the others respond to; 0 for none.
      memory_mix: weight of the memory (`response_logits`), "per_opponent", "literal" or
        "normalised".
      learned: whether the representation is learned (V) or fixed (F). If learned, a round that
        updates it precedes each cycle of moves.
      body_optimizer: learning rate -> the server's optimizer of the representation.
      body_learning_rate: the learning rate of this optimizer.
      body_batch_size: examples of each client for a gradient of the representation.
      fast: whether the gradient of the representation is over all of a client's examples instead
        of one batch.
      output_scale: the factor of the sum of the players' logits. None: 1 / m, their mean, as in the
        papers. IRM Games' release has 0.5 for any m, and thresholds that fit it.

    Returns:
      The algorithm. It has no `network`: its players are served together.
    """
    checks.one_of("play", play, PLAYS)
    checks.integer("memory", memory, 0)
    checks.one_of("memory_mix", memory_mix, MEMORY_MIXES)
    checks.real("body_learning_rate", body_learning_rate)
    checks.integer("body_batch_size", body_batch_size)
    if output_scale is not None:
        checks.positive("output_scale", output_scale)
    optimizer = body_optimizer(body_learning_rate)

    def init_server(setup: types.Setup) -> Game:
        keys = jax.random.split(setup.key, setup.num_clients)
        drawn = jax.vmap(lambda key: model.init(key, setup.sample))(keys)
        players = Predictor(drawn.params.head, drawn.stats.head)
        table = Table(
            Predictor(setup.variables.params.body, setup.variables.stats.body),
            players,
            jax.tree.map(lambda a: jnp.zeros((a.shape[0], memory, *a.shape[1:]), a.dtype), players),
            jnp.zeros(setup.num_clients, jnp.int32),
            jnp.asarray(setup.has_examples),
        )
        return Game(table, optimizer.init(setup.variables.params.body))

    def init_client(game: Game, who: Array) -> Tree:
        return work.init(_alone(tree.take(game.table.players, who))).opt_state

    def predict(game: Game, own: Tree, x: Tree) -> Array:
        del own
        mask = jnp.ones(jax.tree.leaves(x)[0].shape[0], bool)
        table = game.table
        features, _ = model.encode(*table.body, x, mask, False)
        logits = jax.vmap(lambda p: _logits(model, p, features, mask))(table.players)
        return together(logits, table.plays)

    together = functools.partial(_together, output_scale=output_scale)
    mixed = functools.partial(response_logits, memory_mix=memory_mix, output_scale=output_scale)
    all_attend, players_attend = _turns(play, learned)
    responses = _responses(model, work, loss, memory, players_attend, mixed)
    representation = _representation(
        model, optimizer, loss, body_batch_size, fast, all_attend, together
    )
    exchanges = (representation, responses) if learned else (responses,)
    return needing_head(types.Algorithm(init_server, init_client, exchanges, predict))


def _turns(play: str, learned: bool) -> tuple[types.Attends, types.Attends]:
    """Who attends phi's exchange, and who the players'."""

    def turn(game: Game, round: Array) -> Array:
        """Whose turn of the players it is, [] int32: 0 in parallel play, -1 for phi."""
        moves = jnp.maximum(game.table.plays.sum(), 1) if play == "sequential" else 1
        return round % (moves + learned) - learned

    def all_attend(game: Game, who: Array, round: Array) -> Array:
        del who
        return turn(game, round) < 0

    def players_attend(game: Game, who: Array, round: Array) -> Array:
        now, plays = turn(game, round), game.table.plays
        place = jnp.cumsum(plays)[who] - 1  # among the players
        return plays[who] & (now == place if play == "sequential" else now >= 0)

    return all_attend, players_attend


def _alone(predictor: Predictor) -> types.Variables:
    """A predictor as variables without a body."""
    return types.Variables(types.Halves({}, predictor.params), types.Halves({}, predictor.stats))


def _logits(model: types.Model, predictor: Predictor, features: Array, mask: Array) -> Array:
    return model.decode(predictor.params, predictor.stats, features, mask, False)[0]


def _of_scale(mean: Array, output_scale: float | Array | None, players: Array) -> Array:
    return mean if output_scale is None else mean * (output_scale * players)


def _together(logits: Array, plays: Array, output_scale: float | Array | None) -> Array:
    """The ensemble: the mean of logits [C, B, K] over the players, or their sum in that scale."""
    total = jnp.where(plays[:, None, None], logits, 0).sum(0)
    players = jnp.maximum(plays.sum(), 1)
    return _of_scale(total / players, output_scale, players)


def _representation(
    model: types.Model,
    optimizer: optax.GradientTransformation,
    loss: types.Loss,
    batch_size: int,
    fast: bool,
    attends: types.Attends,
    together: Callable[[Array, Array], Array],
) -> types.Exchange:
    """phi's exchange: its gradient through the ensemble, then a step of the server."""

    def broadcast(game: Game) -> Ensemble:
        return Ensemble(game.table.body, game.table.players, game.table.plays)

    def client(visit: types.Visit) -> types.Reply:
        ensemble: Ensemble = visit.message
        batch_key, step_key = jax.random.split(visit.key)

        def risk(body: Tree, batch: types.Batch) -> tuple[Array, tuple[Array, Tree]]:
            features, stats = model.encode(
                body, ensemble.body.stats, batch.x, batch.mask, True, step_key
            )
            logits = jax.vmap(lambda p: _logits(model, p, features, batch.mask))(ensemble.players)
            value = loss(together(logits, ensemble.plays), batch.y, batch.mask)
            return value, (value, stats)

        def sums(batch: types.Batch) -> tuple[Tree, tuple[Array, Tree]]:
            """The gradients, losses and statistics of parts of a batch, times their sizes."""
            parts = jax.tree.map(lambda leaf: leaf.reshape(-1, batch_size, *leaf.shape[1:]), batch)
            count = parts.mask.sum(1).astype(jnp.float32)

            def total(body: Tree) -> tuple[Array, Tree]:
                values, others = jax.vmap(risk, in_axes=(None, 0))(body, parts)
                return count @ values, tree.weighted_sum(others, count)

            return jax.grad(total, has_aux=True)(ensemble.body.params)

        if fast:
            # Several batches at a time, as each sum has the size of phi.
            width = _BATCHES_AT_ONCE * batch_size
            total = local.fold(visit.shard, sums, batch_size=width)
            count = visit.shard.size
        else:
            total = local.fold_sample(visit.shard, batch_key, sums, batch_size=batch_size)
            count = jnp.minimum(visit.shard.size, batch_size)
        grads, (value, stats) = optax.tree.scale(1 / jnp.maximum(count, 1), total)
        return types.Reply(visit.own, Predictor(grads, stats), {"body_loss": value})

    def update(game: Game, mean: Predictor, cohort: types.Cohort) -> Game:
        del cohort
        params = game.table.body.params
        updates, opt_state = optimizer.update(mean.params, game.body_opt_state, params)
        body = Predictor(optax.apply_updates(params, updates), mean.stats)
        return Game(game.table._replace(body=body), opt_state)

    return types.Exchange(broadcast, client, aggregators.mean(), update, attends)


def _response_gradient(
    model: types.Model, loss: types.Loss, mixed: Callable[..., Array], visit: types.Visit
) -> types.GradFn:
    """The gradient of a player's local steps, while its opponents are fixed."""
    table: Table = visit.message
    num_players = table.moves.shape[0]
    others = (visit.shard.who + 1 + jnp.arange(num_players - 1)) % num_players
    # The opponents' actions, current and past, [P, 1 + H, ...]: their logits are one product.
    actions = jax.tree.map(
        lambda now, past: jnp.concatenate([now[others, None], past[others]], 1),
        table.players,
        table.memory,
    )

    def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
        features, _ = model.encode(*table.body, batch.x, batch.mask, False)
        # A barrier, or XLA merges the product of fixed parameters with that of trained ones, and
        # copies them together in every step.
        fixed = jax.lax.optimization_barrier(features)
        theirs = jax.vmap(jax.vmap(lambda p: _logits(model, p, fixed, batch.mask)))(actions)
        past = theirs[:, 1:]
        memory_size = jnp.minimum(table.moves[others], past.shape[1])

        def risk(head: Tree) -> tuple[Array, Tree]:
            own, stats = model.decode(head, variables.stats.head, features, batch.mask, True, key)
            logits = mixed(own, theirs[:, 0], past, memory_size, plays=table.plays[others])
            return loss(logits, batch.y, batch.mask), stats

        (value, stats), grads = jax.value_and_grad(risk, has_aux=True)(variables.params.head)
        return types.Step(types.Halves({}, grads), types.Halves({}, stats), {"loss": value})

    return grad_fn


def _responses(
    model: types.Model,
    work: types.Work,
    loss: types.Loss,
    memory: int,
    attends: types.Attends,
    mixed: Callable[..., Array],
) -> types.Exchange:
    """The players' exchange: a best response to the opponents' last actions."""

    def client(visit: types.Visit) -> types.Reply:
        grad_fn = _response_gradient(model, loss, mixed, visit)
        start = types.Local(_alone(tree.take(visit.message.players, visit.shard.who)), visit.own)
        trained = work.run(grad_fn, start, visit.shard, visit.key)
        end = trained.local.variables
        response = Predictor(end.params.head, end.stats.head)
        return types.Reply(trained.local.opt_state, response, trained.metrics)

    def update(game: Game, sent: aggregators.Stack, cohort: types.Cohort) -> Game:
        del cohort
        table, num_players = game.table, game.table.moves.shape[0]
        who = jnp.where(sent.present, sent.who, num_players)
        moved = jnp.zeros(num_players, bool).at[who].set(True, mode="drop")
        players = tree.put(table.players, who, sent.values)
        # The place of the oldest action, once all are filled.
        is_place = moved[:, None] & (table.moves[:, None] % max(memory, 1) == jnp.arange(memory))

        def enter(past: Array, new: Array) -> Array:
            here = is_place.reshape(*is_place.shape, *[1] * (new.ndim - 1))
            return jnp.where(here, new[:, None], past)

        past = jax.tree.map(enter, table.memory, players)
        after = table._replace(players=players, memory=past, moves=table.moves + moved)
        return game._replace(table=after)

    return types.Exchange(lambda game: game.table, client, aggregators.stacked(), update, attends)
