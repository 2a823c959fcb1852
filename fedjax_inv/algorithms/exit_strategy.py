"""Exit strategy: after a pre-training phase, clients that hold the others back leave.

    client i trains on if the mean over the phase of its C_i is at least the threshold

    C_i = step_size a_i (<grad R(w), g_i> - (L step_size / 2) ||g_i||^2) / ||grad R(w)||^2     (13)

with g_i = grad R_i at the network that client i trains from, which is older than w where it is
delayed, a_i = n_i / n, and L the smoothness of R. Hao et al. 2025, "Invariant Federated Learning
for Edge Intelligence", arXiv 2503.06158, Section IV and Algorithm 1, lines 1 and 7.

A client that rarely arrives contributes like any other when it does, and little over the phase. The
optional `share` is our rule for it: who also leaves is whose sum of C_i, 0 where it did not arrive,
is below that part of the median client's.

Eq. 13 is printed with a plus, without the second step size and without 1 / n: the descent lemma
gives the above. The paper leaves open, and we chose: the phase is rounds of the algorithm itself,
measured after each of them, so that its exchanges keep their random numbers; n counts the clients
that attend; R is evaluated as clients are served (no dropout, normalisation by its statistics); a
client that was never measured stays; without an L that is given, each round of the phase does one
step of power iteration on the Hessian of R, and all C_i are taken with the latest estimate.

The server needs <grad R(w), g_i> but no gradient of a client by itself, so a round measures in two
exchanges: the mean of everybody's gradients at w, then each client's product with it. It keeps a
gradient and [P, C] numbers. Both exchanges reach delayed clients in time, as if for the phase they
answered such questions at once; only the network that g_i is taken at is delayed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import aggregators, checks, local, objectives, tree
from fedjax_inv.algorithms import fedavg, fedipg
from fedjax_inv.checks import UsageError
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Cohort,
    Exchange,
    Loss,
    Model,
    Reply,
    Setup,
    Shard,
    Tree,
    Visit,
    Work,
)


class Assessment(NamedTuple):
    """What the server knows of its clients' contributions."""

    gradient: Tree  # grad R at the current network, of the parameters' shapes
    direction: Tree  # where power iteration has come, a unit vector; () if the smoothness is given
    smoothness: Array  # [], L; 0 until the first measurement
    # C_i of each round is linear - smoothness * quadratic; 0 where not measured.
    linear: Array  # [P, C]
    quadratic: Array  # [P, C]
    measured: Array  # [P, C] bool
    stays: Array  # [C] bool, who would stay if the phase ended now


class Server(NamedTuple):
    """The server of the wrapped algorithm, and the assessment."""

    wrapped: Tree
    assessment: Assessment


class Outcome(NamedTuple):
    """What the phase has found, as NumPy arrays; of several runs with leading axes."""

    contributions: np.ndarray  # [P, C] C_i of each round; NaN where not measured
    mean: np.ndarray  # [C] over the phase; NaN of who was never measured
    stays: np.ndarray  # [C] bool, I_ID
    exits: np.ndarray  # [C] bool, I_OOD
    smoothness: np.ndarray  # [], L


class _Gradients(NamedTuple):
    gradient: Tree
    product: Tree  # of the Hessian and the direction; () if the smoothness is given


class _Products(NamedTuple):
    inner: Array  # [] <grad R(w), g_i>
    square: Array  # [] ||g_i||^2
    round: Array  # []


def contribution(
    global_grad: Tree,
    client_grads: Tree,
    weights: Array,
    *,
    step_size: float | Array,
    smoothness: float | Array,
) -> Array:
    """What each client contributes to a round of gradient descent, Eq. 13 corrected; [S].

    global_grad: grad R(w). client_grads: the gradients that the clients send, with a leading S.
    weights: a_i [S], of sum 1. A round decreases R by at least ||grad R(w)||^2 sum C_i. 0 where the
    global gradient is zero. Raises ValueError for other shapes and weights, and negative numbers.
    """
    chex.assert_rank(weights, 1)
    chex.assert_tree_shape_prefix(client_grads, weights.shape)
    checks.same_shapes(global_grad=global_grad, client_grads=tree.take(client_grads, 0))
    checks.real("step_size", step_size)
    checks.real("smoothness", smoothness)
    if checks.is_concrete(weights) and not np.isclose(np.sum(weights), 1, atol=1e-3):
        raise UsageError(f"weights={np.asarray(weights)}: must have the sum 1")
    inner = jax.vmap(lambda grad: optax.tree.vdot(global_grad, grad))(client_grads)
    squares = jax.vmap(_square)(client_grads)
    linear, quadratic = _terms(inner, squares, _square(global_grad), weights, step_size)
    return linear - smoothness * quadratic


def _square(gradient: Tree) -> Array:
    return optax.tree.norm(gradient, squared=True)


def _terms(
    inner: Array, squares: Array, global_square: Array, weights: Array, step_size: float | Array
) -> tuple[Array, Array]:
    """(a, b), each [S], so that contributions are a - smoothness * b."""
    is_zero = global_square == 0
    scale = step_size * weights * jnp.where(is_zero, 0, 1 / jnp.where(is_zero, 1, global_square))
    return scale * inner, scale * step_size * squares / 2


def largest_curvature(
    risk: Callable[[Tree], Array], params: Tree, key: Array, *, num_iterations: int = 20
) -> Array:
    """The smoothness L at a point: the largest |eigenvalue| of the Hessian of risk at params; [].

    Power iteration from a random start, a Hessian-vector product each, which comes from below.
    risk: params -> scalar. Raises ValueError for less than one iteration.
    """
    checks.integer("num_iterations", num_iterations)

    def body(_: Array, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
        product = jax.jvp(jax.grad(risk), (params,), (carry[0],))[1]
        return power_step(carry[0], product)

    start = random_direction(key, params)
    return jax.lax.fori_loop(0, num_iterations, body, (start, optax.tree.norm(start)))[1]


def random_direction(key: Array, params: Tree) -> Tree:
    """A unit vector of the shapes of `params`."""
    drawn = optax.tree.random_like(key, params)
    return optax.tree.scale(1 / optax.tree.norm(drawn), drawn)


def power_step(direction: Tree, product: Tree) -> tuple[Tree, Array]:
    """(the next unit vector, the estimate of the largest |eigenvalue|) of power iteration.

    product: matrix times direction. Where it is zero, the direction stays. The norm is the
    estimate, as Rayleigh's quotient does not settle where eigenvalues of both signs are as large.
    """
    norm = optax.tree.norm(product)
    is_zero = norm == 0
    unit = optax.tree.scale(1 / jnp.where(is_zero, 1, norm), product)
    return optax.tree.where(is_zero, direction, unit), norm


def outcome(server: Server) -> Outcome:
    """What the phase has found up to now, for a table or a figure.

    server: of a run, or of several with leading axes.
    """
    assessment = jax.tree.map(np.asarray, server.assessment._replace(gradient=(), direction=()))
    measured, smoothness = assessment.measured, assessment.smoothness
    table = assessment.linear - smoothness[..., None, None] * assessment.quadratic
    count = measured.sum(-2)
    mean = np.where(measured, table, 0).sum(-2) / np.maximum(count, 1)
    return Outcome(
        np.where(measured, table, np.nan),
        np.where(count > 0, mean, np.nan),
        assessment.stays,
        ~assessment.stays,
        smoothness,
    )


def check_someone_stays(server: Server) -> None:
    """Raises ValueError where all clients that were measured have left.

    A run then changes nothing any more; it cannot raise, being compiled.
    """
    _, mean, stays, _, _ = outcome(server)
    known = ~np.isnan(mean)
    empty = known.any(-1) & ~(known & stays).any(-1)
    if empty.any():
        highest = np.nanmax(mean[empty], axis=-1).min()
        raise UsageError(
            "threshold, share: no client that was measured stays; must be at most the largest mean "
            f"contribution, {highest:.3g}, and 1"
        )


def wrap(
    algorithm: Algorithm,
    *,
    step_size: float | Array = 0.01,
    smoothness: float | Array | None = None,
    threshold: float | Array = 0.0,
    share: float | Array | None = None,
    pretraining_rounds: int = 5,
    parameters: Callable[[Any], Tree] = lambda server: server.variables.params,
    loss: Loss = objectives.cross_entropy,
    batch_size: int = 256,
) -> Algorithm:
    """`algorithm` whose clients leave after P rounds if they contribute less than the threshold.

    Who has left attends no exchange any more. Where nobody is left, nothing changes any more; see
    `check_someone_stays`. With the threshold -inf nobody leaves, and the network is that of
    `algorithm` bit for bit.

    step_size: how far a round goes along the gradient: the clients' learning rate times their local
    steps. smoothness: L, or None for an estimate. threshold: the least mean C_i of who stays, over
    the rounds in which it was measured. share: the least sum of C_i of who stays over that of the
    median client, None for no such rule. pretraining_rounds: P. parameters: server of
    `algorithm` -> its leaves that are the network's parameters; of FL Games
    `lambda game: (game.body.params, game.players.params)`. loss: whose mean R_i is, of
    `algorithm.predict`. batch_size: examples at a time of a gradient, which is of all examples.
    Raises ValueError for values out of range.
    """
    checks.real("step_size", step_size)
    if smoothness is not None:
        checks.real("smoothness", smoothness)
    if not (checks.is_concrete(threshold) and threshold == -np.inf):
        checks.real("threshold", threshold, -np.inf)
    if share is not None:
        checks.real("share", share)
    checks.integer("pretraining_rounds", pretraining_rounds)
    checks.integer("batch_size", batch_size)

    def init_server(setup: Setup) -> Server:
        wrapped = algorithm.init_server(setup)
        try:
            params = parameters(wrapped)
        except AttributeError as error:
            raise UsageError(
                f"parameters: do not fit the server of the algorithm ({error}); must be a function "
                "server -> the parameters of its network"
            ) from None
        table = jnp.zeros((pretraining_rounds, setup.num_clients))
        direction: Tree = ()
        if smoothness is None:
            direction = random_direction(jax.random.fold_in(setup.key, 1), params)
        assessment = Assessment(
            gradient=optax.tree.zeros_like(params),
            direction=direction,
            smoothness=jnp.zeros(()),
            linear=table,
            quadratic=table,
            measured=table > 0,
            stays=jnp.ones(setup.num_clients, bool),
        )
        return Server(wrapped, assessment)

    def pretraining(server: Server, who: Array, round: Array) -> Array:
        del server, who
        return round < pretraining_rounds

    def staying(exchange: Exchange) -> Exchange:
        """An exchange of the algorithm, for those who have not left."""
        blank = exchange.blank

        def update(server: Server, aggregated: Tree, cohort: Cohort) -> Server:
            wrapped = exchange.update(server.wrapped, aggregated, cohort)
            return server._replace(wrapped=wrapped)

        def attends(server: Server, who: Array, round: Array) -> Array:
            stays = (round < pretraining_rounds) | server.assessment.stays[who]
            return stays & exchange.attends(server.wrapped, who, round)

        return exchange._replace(
            broadcast=lambda server: exchange.broadcast(server.wrapped),
            update=update,
            attends=attends,
            broadcast_undelayed=lambda server: exchange.broadcast_undelayed(server.wrapped),
            blank=blank and (lambda server: blank(server.wrapped)),
        )

    def risk_of(wrapped: Tree, own: Tree, batch: Batch) -> Callable[[Tree], Array]:
        """Parameters -> the sum of the batch's losses."""
        leaves, structure = jax.tree.flatten(wrapped)
        places = jax.tree.leaves(parameters(jax.tree.unflatten(structure, range(len(leaves)))))

        def risk(params: Tree) -> Array:
            changed = list(leaves)
            for place, leaf in zip(places, jax.tree.leaves(params), strict=True):
                changed[place] = leaf
            served = jax.tree.unflatten(structure, changed)
            value = loss(algorithm.predict(served, own, batch.x), batch.y, batch.mask)
            return batch.mask.sum() * value

        return risk

    def mean(shard: Shard, sums: Callable[[Batch], Tree]) -> Tree:
        found = local.fold(shard, sums, batch_size=batch_size)
        return optax.tree.scale(1 / jnp.maximum(shard.size, 1), found)

    def global_gradient() -> Exchange:
        """The mean of everybody's gradients at the current network, and L."""

        def broadcast_undelayed(server: Server) -> tuple[Tree, Tree]:
            return server.wrapped, server.assessment.direction

        def client(visit: Visit) -> Reply:
            wrapped, direction = visit.undelayed_message
            params = parameters(wrapped)

            def sums(batch: Batch) -> _Gradients:
                gradient = jax.grad(risk_of(wrapped, visit.own, batch))
                if smoothness is None:
                    return _Gradients(*jax.jvp(gradient, (params,), (direction,)))
                return _Gradients(gradient(params), ())

            return Reply(visit.own, mean(visit.shard, sums), {})

        def update(server: Server, found: _Gradients, cohort: Cohort) -> Server:
            del cohort
            old = server.assessment
            # A given number may differ between runs of one start: it counts from here on.
            if smoothness is None:
                direction, estimate = power_step(old.direction, found.product)
            else:
                direction, estimate = old.direction, jnp.asarray(smoothness)
            new = old._replace(
                gradient=found.gradient,
                direction=direction,
                smoothness=estimate.astype(old.smoothness.dtype),
            )
            return server._replace(assessment=new)

        return Exchange(
            lambda server: (),
            client,
            aggregators.mean(),
            update,
            pretraining,
            broadcast_undelayed=broadcast_undelayed,
        )

    def products() -> Exchange:
        """What is in Eq. 13 of each client's gradient, at the network that it last received."""

        def client(visit: Visit) -> Reply:
            params = parameters(visit.message)
            gradient = mean(
                visit.shard,
                lambda batch: jax.grad(risk_of(visit.message, visit.own, batch))(params),
            )
            inner = optax.tree.vdot(visit.undelayed_message, gradient)
            return Reply(visit.own, _Products(inner, _square(gradient), visit.round), {})

        def update(server: Server, found: aggregators.Stack, cohort: Cohort) -> Server:
            del cohort
            old = server.assessment
            size = jnp.where(found.present, found.size, 0)
            inner, square, round = found.values
            linear, quadratic = _terms(
                inner, square, _square(old.gradient), size / jnp.maximum(size.sum(), 1), step_size
            )
            at = (round, jnp.where(found.present, found.who, old.stays.shape[0]))
            new = old._replace(
                linear=old.linear.at[at].set(linear, mode="drop"),
                quadratic=old.quadratic.at[at].set(quadratic, mode="drop"),
                measured=old.measured.at[at].set(True, mode="drop"),
            )
            count = new.measured.sum(0)
            total = (new.linear - new.smoothness * new.quadratic).sum(0)
            leaves = total / jnp.maximum(count, 1) < threshold
            if share is not None:
                leaves |= total < share * jnp.nanmedian(jnp.where(count > 0, total, jnp.nan))
            leaves &= count > 0
            return server._replace(assessment=new._replace(stays=~leaves))

        return Exchange(
            lambda server: server.wrapped,
            client,
            aggregators.stacked(),
            update,
            pretraining,
            broadcast_undelayed=lambda server: server.assessment.gradient,
        )

    return Algorithm(
        init_server,
        lambda server, who: algorithm.init_client(server.wrapped, who),
        (*map(staying, algorithm.exchanges), global_gradient(), products()),
        lambda server, own, x: algorithm.predict(server.wrapped, own, x),
        algorithm.personal,
    )


WRAPPED: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg.fedavg,
    "fedipg": fedipg.fedipg,
}


def exit_strategy(
    model: Model,
    work: Work,
    *,
    wrapped: str | Callable[..., Algorithm] = "fedavg",
    penalty: float | Array | None = None,
    step_size: float | Array = 0.01,
    smoothness: float | Array | None = None,
    threshold: float | Array = 0.0,
    share: float | Array | None = None,
    pretraining_rounds: int = 5,
    loss: Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "size",
) -> Algorithm:
    """`wrap` around FedAvg, FedIPG, or what a factory of one's own makes of these arguments.

    wrapped: "fedavg" or "fedipg"; in Python also a factory. penalty: of a wrapped FedIPG, None for
    its default. step_size: how far a round goes along the gradient: the clients' learning rate
    times their local steps. smoothness: L, None for an estimate by power iteration. threshold: the
    least mean contribution of who stays. share: the least sum of contributions of who stays over
    the median client's, None for no such rule; it finds who rarely arrives. pretraining_rounds:
    after which clients may leave. weighting: of clients, as in FedAvg ("size" or "uniform"). Raises
    ValueError for values out of range.
    """
    factory: Callable[..., Algorithm]
    if callable(wrapped):
        factory = wrapped
    else:
        checks.one_of("wrapped", wrapped, WRAPPED)
        factory = WRAPPED[wrapped]
    settings: dict[str, Any] = {} if penalty is None else {"penalty": penalty}
    if settings and factory is fedavg.fedavg:
        raise UsageError(f"penalty={penalty}: must be None for wrapped='fedavg', which has none")
    algorithm = factory(
        model,
        work,
        loss=loss,
        server_optimizer=server_optimizer,
        weighting=weighting,
        **settings,
    )
    return wrap(
        algorithm,
        step_size=step_size,
        smoothness=smoothness,
        threshold=threshold,
        share=share,
        pretraining_rounds=pretraining_rounds,
        loss=loss,
    )
