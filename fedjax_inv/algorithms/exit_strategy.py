"""Exit strategy: after a pre-training phase, clients that hold the others back leave.

    client i stays if the mean over the phase of its C_i is at least the threshold

    C_i = step_size a_i (<grad R(w), g_i> - (L step_size / 2) ||g_i||^2) / ||grad R(w)||^2     (13)

with g_i = grad R_i at the network that client i trains from, which is older than w if the client is
delayed, a_i = n_i / n, and L the smoothness of R. Hao et al. 2025, "Invariant Federated Learning
for Edge Intelligence", arXiv 2503.06158, Section IV and Algorithm 1, lines 1 and 7.

A client that rarely arrives contributes as much as others in its rounds, but little over the phase.
The optional `share` is our rule for such clients: a client also leaves if its sum of C_i, 0 where
it did not arrive, is below that share of the median client's sum.

Where last parameters of late clients are averaged (`late_uploads.parameters`), the harm is not in
their gradients but in where they are. The option `displaced` puts d_i = w - w_i, the distance from
the client's parameters to the server's, in place of step_size g_i, which the same lemma gives:

    C_i = a_i (<grad R(w), d_i> - (L / 2) ||d_i||^2) / ||grad R(w)||^2

with w_i one step of length step_size from the network that the client received, so that without
delay both are equal.

Eq. 13 is printed with a plus, without the second step size and without 1 / n: the descent lemma
gives the formula above. Eq. 15 to 17, also without the second step size, have C_i with a smoothness
of L / step_size. The paper leaves open, and we chose: the phase consists of rounds of the
algorithm itself, each measured at its end, so that the exchanges keep their random numbers; n
counts the clients that attend; R is evaluated as clients are served (no dropout, normalisation by
stored statistics); a client that was never measured stays; if no L is given, each round of the
phase does one step of power iteration on the Hessian of R, and all C_i use the latest estimate.

The server needs <grad R(w), g_i> but no gradient of a single client. So a round measures in two
exchanges: first the mean of all gradients at w, then each client's product with it. The server
stores one gradient and [P, C] numbers. Both exchanges reach delayed clients in time, as if clients
answered these questions at once; only the network of g_i is delayed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import aggregators, checks, keys, local, objectives, tree, types, wrapping
from fedjax_inv.algorithms import fedavg, fedipg
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree

# Contributions compare gradients, whose differences are small; the threshold may be -inf.
FACTS = types.Facts(precision="highest", infinite=("threshold",))
_BATCH_SIZE = 256  # of the pass for a gradient, which is over all examples
StepSize = float | Array | Callable[[Array], Array]


def contribution(
    global_grad: Tree,
    client_grads: Tree,
    weights: Array,
    *,
    step_size: float | Array,
    smoothness: float | Array,
) -> Array:
    """Return each client's contribution to a round of gradient descent (Eq. 13, corrected), [S].

    The round decreases R by at least ||grad R(w)||^2 sum C_i. Contributions are 0 if the global
    gradient is zero.

    Args:
      global_grad: grad R(w).
      client_grads: the gradients g_i of the clients, with a leading S.
      weights: a_i, [S], at least 0 and of sum 1.
      step_size: the length of the round along the gradient.
      smoothness: L.
    """
    chex.assert_rank(weights, 1)
    chex.assert_tree_shape_prefix(client_grads, weights.shape)
    inner = jax.vmap(lambda grad: optax.tree.vdot(global_grad, grad))(client_grads)
    squares = jax.vmap(_square)(client_grads)
    linear, quadratic = _terms(inner, squares, _square(global_grad), weights, step_size)
    return linear - smoothness * quadratic


def _square(gradient: Tree) -> Array:
    return optax.tree.norm(gradient, squared=True)


def _terms(
    inner: Array, squares: Array, global_square: Array, weights: Array, step_size: float | Array
) -> tuple[Array, Array]:
    """Return (a, b), [S] each, such that contributions are a - smoothness * b."""
    is_zero = global_square == 0
    scale = step_size * weights * jnp.where(is_zero, 0, 1 / jnp.where(is_zero, 1, global_square))
    return scale * inner, scale * step_size * squares / 2


def power_step(direction: Tree, product: Tree) -> tuple[Tree, Array]:
    """Return (next unit vector, estimate of the largest |eigenvalue| []) of power iteration.

    The product is the matrix times the direction, a unit vector, which stays if the product is
    zero. The estimate is the norm of the product, which is too low at first: Rayleigh's quotient
    does not converge if the largest eigenvalues have both signs.
    """
    norm = optax.tree.norm(product)
    is_zero = norm == 0
    unit = optax.tree.scale(1 / jnp.where(is_zero, 1, norm), product)
    return optax.tree.where(is_zero, direction, unit), norm


class Assessment(NamedTuple):
    """The server's measurements of its clients' contributions."""

    gradient: Tree  # grad R at the current network, of the parameters' shapes
    direction: Tree  # state of the power iteration, a unit vector; () if the smoothness is given
    smoothness: Array  # [], L; 0 until the first measurement
    # C_i of each round is linear - smoothness * quadratic; 0 where not measured.
    linear: Array  # [P, C]
    quadratic: Array  # [P, C]
    measured: Array  # [P, C] bool
    stays: Array  # [C] bool, which clients would stay if the phase ended now


class Server(NamedTuple):
    """The server of the wrapped algorithm, and the assessment."""

    wrapped: Tree
    assessment: Assessment


class Outcome(NamedTuple):
    """The results of the phase as NumPy arrays; of several runs with leading axes."""

    contributions: np.ndarray  # [P, C] C_i of each round; NaN where not measured
    mean: np.ndarray  # [C] over the phase; NaN for a client that was never measured
    stays: np.ndarray  # [C] bool, I_ID
    exits: np.ndarray  # [C] bool, I_OOD
    smoothness: np.ndarray  # [], L


def server_in(server: Tree) -> Server | None:
    """Return the exit strategy's server inside of a server that may wrap it; None without one."""
    return next((one for one in wrapping.layers(server) if isinstance(one, Server)), None)


def outcome(server: Server) -> Outcome:
    """Return the results of the phase up to now, for a table or a figure."""
    of: Any = jax.tree.map(np.asarray, server.assessment)
    table = of.linear - of.smoothness[..., None, None] * of.quadratic
    count = of.measured.sum(-2)
    mean = np.where(of.measured, table, 0).sum(-2) / np.maximum(count, 1)
    known = np.where(of.measured, table, np.nan), np.where(count > 0, mean, np.nan)
    return Outcome(*known, of.stays, ~of.stays, of.smoothness)


def check_someone_stays(server: Server) -> None:
    """Raise UsageError if all clients that were measured have left: a run then changes nothing."""
    _, mean, stays, _, _ = outcome(server)
    known = ~np.isnan(mean)
    empty = known.any(-1) & ~(known & stays).any(-1)
    if empty.any():
        highest = np.nanmax(mean[empty], axis=-1).min()
        text = f"no client that was measured stays; the largest mean contribution is {highest:.3g}"
        raise UsageError("threshold", ..., text)


class Phase(NamedTuple):
    """The settings of the phase; those without a comment are arguments of `exit_strategy`."""

    # Also a function of the clients' numbers of examples, [S] -> [S].
    step_size: StepSize = 0.01
    smoothness: float | Array | None = None
    threshold: float | Array = 0.0
    share: float | Array | None = None
    rounds: int = 5  # P
    displaced: bool = False
    loss: types.Loss = objectives.cross_entropy  # whose mean is R_i, on the outputs of `predict`
    # Server -> its leaves that are the network's parameters; None: those of `Algorithm.network`.
    # For FL Games `lambda game: (game.table.body.params, game.table.players.params)`.
    parameters: Callable[[Any], Tree] | None = None

    def length(self, size: Array) -> float | Array:
        """Return the step size of clients with these numbers of examples."""
        return self.step_size(size) if callable(self.step_size) else self.step_size


class _Measure(NamedTuple):
    """Means over a client's examples of what depends on its risk, as the client is served."""

    algorithm: types.Algorithm
    parameters: Callable[[Any], Tree]
    loss: types.Loss

    def of(self, fn: Callable[[Any, Tree], Tree], visit: types.Visit, server: Tree) -> Tree:
        """fn: (the function parameters -> the sum of a batch's losses, parameters) -> a sum."""
        server_with = tree.replacing(self.parameters, server)

        def sums(batch: types.Batch) -> Tree:
            def risk(params: Tree) -> Array:
                outputs = self.algorithm.predict(server_with(params), visit.own, batch.x)
                return batch.mask.sum() * self.loss(outputs, batch.y, batch.mask)

            return fn(risk, self.parameters(server))

        total = local.fold(visit.shard, sums, batch_size=_BATCH_SIZE)
        return optax.tree.scale(1 / jnp.maximum(visit.shard.size, 1), total)


def _global_gradient(phase: Phase, measure: _Measure) -> types.Exchange:
    """The exchange for the mean of all gradients at the current network, and L."""

    def client(visit: types.Visit) -> types.Reply:
        server, direction = visit.undelayed_message

        def gradient_and_product(risk: Callable[[Tree], Array], params: Tree) -> Tree:
            gradient = jax.grad(risk)
            if phase.smoothness is None:
                return jax.jvp(gradient, (params,), (direction,))
            return gradient(params), ()

        return types.Reply(visit.own, measure.of(gradient_and_product, visit, server), {})

    def update(server: Server, mean: tuple[Tree, Tree], cohort: types.Cohort) -> Server:
        del cohort
        (gradient, product), old = mean, server.assessment
        # A given L may differ between runs with the same start, so it is stored only here.
        if phase.smoothness is None:
            direction, estimate = power_step(old.direction, product)
        else:
            direction = old.direction
            estimate = jnp.asarray(phase.smoothness)
        smoothness = estimate.astype(old.smoothness.dtype)
        new = old._replace(gradient=gradient, direction=direction, smoothness=smoothness)
        return server._replace(assessment=new)

    return types.Exchange(
        lambda server: (),
        client,
        aggregators.mean(),
        update,
        lambda server, who, round: round < phase.rounds,
        lambda server: (server.wrapped, server.assessment.direction),
    )


def _products(phase: Phase, measure: _Measure) -> types.Exchange:
    """The exchange for the products of Eq. 13, at the network that each client last received."""

    def client(visit: types.Visit) -> types.Reply:
        global_gradient, now = visit.undelayed_message
        moved = measure.of(lambda risk, at: jax.grad(risk)(at), visit, visit.message)
        if phase.displaced:
            step = optax.tree.scale(phase.length(visit.shard.size), moved)
            behind = optax.tree.sub(now, measure.parameters(visit.message))
            moved = optax.tree.add(behind, step)
        inner = optax.tree.vdot(global_gradient, moved)
        return types.Reply(visit.own, (inner, _square(moved), visit.round), {})

    def update(server: Server, sent: aggregators.Stack, cohort: types.Cohort) -> Server:
        del cohort
        return server._replace(assessment=_assess(phase, server.assessment, sent))

    return types.Exchange(
        lambda server: server.wrapped,
        client,
        aggregators.stacked(),
        update,
        lambda server, who, round: round < phase.rounds,
        lambda server: (
            server.assessment.gradient,
            measure.parameters(server.wrapped) if phase.displaced else (),
        ),
    )


def _assess(phase: Phase, old: Assessment, sent: aggregators.Stack) -> Assessment:
    """The assessment after a round's products."""
    size = jnp.where(sent.present, sent.size, 0)
    inner, square, round = sent.values
    step_size = 1.0 if phase.displaced else phase.length(size)  # a displacement has its length
    weights = size / jnp.maximum(size.sum(), 1)
    linear, quadratic = _terms(inner, square, _square(old.gradient), weights, step_size)
    at = (round, jnp.where(sent.present, sent.who, old.stays.shape[0]))
    new = old._replace(
        linear=old.linear.at[at].set(linear, mode="drop"),
        quadratic=old.quadratic.at[at].set(quadratic, mode="drop"),
        measured=old.measured.at[at].set(True, mode="drop"),
    )
    count = new.measured.sum(0)
    total = (new.linear - new.smoothness * new.quadratic).sum(0)
    leaves = total / jnp.maximum(count, 1) < phase.threshold
    if phase.share is not None:
        median = jnp.nanmedian(jnp.where(count > 0, total, jnp.nan))
        # Beside a negative median, better clients have smaller ratios.
        leaves |= (median > 0) & (total < phase.share * median)
    leaves &= count > 0
    return new._replace(stays=~leaves)


def wrap(algorithm: types.Algorithm, phase: Phase = Phase()) -> types.Algorithm:  # noqa: B008
    """Return `algorithm` whose clients leave after the phase if they contribute too little.

    A client that has left attends no exchange. What the algorithm's server keeps of its clients,
    such as SCAFFOLD's sum of variates, it keeps of those that left, too; so `late_uploads.reuse`
    and `freezing.train_only` must go around this one. If nobody is left, nothing changes any more;
    see `check_someone_stays`. With the threshold -inf and without `share` nobody leaves, and the
    network is that of `algorithm` bit for bit. The contributions of clients that are served with
    their own networks alone, as Ditto's, are 0.
    """
    for name in ("step_size", "smoothness", "share"):
        value = getattr(phase, name)
        if value is not None and not callable(value):
            checks.real(name, value)
    checks.integer("pretraining_rounds", phase.rounds)
    network: Any = algorithm.network
    assert phase.parameters or network, "without a single network, `parameters` must be given"
    parameters = phase.parameters or (lambda server: network(server).params)

    def init_server(setup: types.Setup) -> Server:
        wrapped = algorithm.init_server(setup)
        params, direction = parameters(wrapped), ()
        if phase.smoothness is None:
            drawn = optax.tree.random_like(keys.stream(setup.key, "direction"), params)
            direction = optax.tree.scale(1 / optax.tree.norm(drawn), drawn)
        table = jnp.zeros((phase.rounds, setup.num_clients))
        stays = jnp.ones(setup.num_clients, bool)
        none = optax.tree.zeros_like(params), direction, jnp.zeros(())
        return Server(wrapped, Assessment(*none, table, table, table > 0, stays))

    def of_staying(exchange: types.Exchange) -> types.Exchange:
        lifted = wrapping.lift(exchange)

        def attends(server: Server, who: Array, round: Array) -> Array:
            stays = (round < phase.rounds) | server.assessment.stays[who]
            return stays & lifted.attends(server, who, round)

        return lifted._replace(attends=attends)

    measure = _Measure(algorithm, parameters, phase.loss)
    own = _global_gradient(phase, measure), _products(phase, measure)
    return wrapping.around(algorithm, init_server, (*map(of_staying, algorithm.exchanges), *own))


WRAPPED: dict[str, Callable[..., types.Algorithm]] = {
    "fedavg": fedavg.fedavg,
    "fedipg": fedipg.fedipg,
}


def exit_strategy(
    model: types.Model,
    work: types.Work,
    *,
    wrapped: str | Callable[..., types.Algorithm] = "fedavg",
    penalty: float | Array | None = None,
    step_size: float | Array | None = 0.01,
    smoothness: float | Array | None = None,
    threshold: float | Array = 0.0,
    share: float | Array | None = None,
    displaced: bool = False,
    pretraining_rounds: int = 5,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "size",
) -> types.Algorithm:
    """Return FedAvg, FedIPG or another algorithm with the exit strategy (see `wrap`).

    Args:
      wrapped: the algorithm, "fedavg" or "fedipg"; in Python also a factory of one's own, called
        with the arguments of FedAvg.
      penalty: FedIPG's penalty, or None for its default.
      step_size: the length of a round along the gradient: the clients' learning rate times their
        number of local steps; None: both as `work` records them. With a longer one clients leave
        that contribute.
      smoothness: L, or None for an estimate by power iteration.
      threshold: the least mean C_i of a client that stays, over the rounds in which it was
        measured; -inf for no such rule.
      share: the least ratio of the sum of C_i of a client that stays to the median client's sum,
        where that is above 0; it finds clients that rarely arrive. None for no such rule.
      displaced: whether contributions measure how far a late client's parameters lie behind, for
        `late_uploads.parameters`.
      pretraining_rounds: the rounds after which clients may leave.
      loss: the objective of local training and of contributions.
      weighting: weights of clients in the mean of their updates, "size" or "uniform"; in Python
        also a function of `Slots`. Contributions are weighted by size whatever it is.
    """
    rate: Any = work.learning_rate
    num_steps: Any = work.num_steps
    if step_size is None and (rate is None or num_steps is None):
        text = "must be a number, or `work` must record its `learning_rate` and `num_steps`"
        raise UsageError("step_size", None, text)
    if not callable(wrapped):
        checks.one_of("wrapped", wrapped, WRAPPED)
        wrapped = WRAPPED[wrapped]
    settings: dict[str, Any] = {} if penalty is None else {"penalty": penalty}
    if settings and wrapped is fedavg.fedavg:
        raise UsageError("penalty", penalty, "must be None for fedavg, which has none")
    settings |= {"loss": loss, "server_optimizer": server_optimizer, "weighting": weighting}
    length = (lambda size: rate * num_steps(size)) if step_size is None else step_size
    phase = Phase(length, smoothness, threshold, share, pretraining_rounds, displaced, loss)
    return wrap(wrapped(model, work, **settings), phase)
