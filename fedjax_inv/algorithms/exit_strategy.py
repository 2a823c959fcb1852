"""Exit strategy: after a pre-training phase, clients that hold the others back leave.

    client i stays if the mean over the phase of its C_i is at least the threshold

    C_i = step_size a_i (<grad R(w), g_i> - (L step_size / 2) ||g_i||^2) / ||grad R(w)||^2     (13)

with g_i = grad R_i at the network that client i trains from, which is older than w if the client is
delayed, a_i = n_i / n, and L the smoothness of R. Hao et al. 2025, "Invariant Federated Learning
for Edge Intelligence", arXiv 2503.06158, Section IV and Algorithm 1, lines 1 and 7.

A client that rarely arrives contributes as much as others in its rounds, but little over the phase.
The optional `share` is our rule for such clients: a client also leaves if its sum of C_i, 0 where
it did not arrive, is below that share of the median client's sum.

Eq. 13 is printed with a plus, without the second step size and without 1 / n: the descent lemma
gives the formula above. The paper leaves open, and we chose: the phase consists of rounds of the
algorithm itself, each measured at its end, so that the exchanges keep their random numbers; n
counts the clients that attend; R is evaluated as clients are served (no dropout, normalisation by
stored statistics); a client that was never measured stays; if no L is given, each round of the
phase does one step of power iteration on the Hessian of R, and all C_i use the latest estimate.

The server needs <grad R(w), g_i> but no gradient of a single client. So a round measures in two
exchanges: first the mean of all gradients at w, then each client's product with it. The server
stores one gradient and [P, C] numbers. Both exchanges reach delayed clients in time, as if clients
answered these questions at once; only the network of g_i is delayed.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import (
    aggregators,
    averaging,
    checks,
    freezing,
    local,
    missing,
    objectives,
    tree,
    wrapping,
)
from fedjax_inv.algorithms import fedavg, fedipg
from fedjax_inv.checks import UsageError
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Cohort,
    Exchange,
    Facts,
    Loss,
    Model,
    Reply,
    Setup,
    Shard,
    Tree,
    Visit,
    Work,
)

FACTS = Facts(
    # Contributions compare gradients, whose differences are small.
    precision="highest",
    infinite=("threshold",),  # -inf
)


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


class _Phase(NamedTuple):
    """The settings of the phase."""

    algorithm: Algorithm
    parameters: Callable[[Any], Tree]
    step_size: float | Array | Callable[[Array], Array]
    smoothness: float | Array | None
    threshold: float | Array
    share: float | Array | None
    num_rounds: int
    loss: Loss
    batch_size: int

    def attends(self, server: Server, who: Array, round: Array) -> Array:
        """Whether a client is measured: in all rounds of the phase."""
        del server, who
        return round < self.num_rounds


class _Gradients(NamedTuple):
    gradient: Tree
    product: Tree  # of the Hessian and the direction; () if the smoothness is given


class _ClientProducts(NamedTuple):
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
    """Return each client's contribution to a round of gradient descent (Eq. 13, corrected), [S].

    The round decreases R by at least ||grad R(w)||^2 sum C_i. Contributions are 0 if the global
    gradient is zero.

    Args:
      global_grad: grad R(w).
      client_grads: the gradients g_i of the clients, with a leading S.
      weights: a_i, [S], of sum 1.
      step_size: the length of the round along the gradient.
      smoothness: L.

    Raises:
      UsageError: for weights of another sum, other shapes of gradients, negative numbers, no
        client, and weights that are no array.
      AssertionError: for weights that are no [S].
    """
    checks.array("weights", weights)
    chex.assert_rank(weights, 1)
    chex.assert_tree_shape_prefix(client_grads, weights.shape)
    if not len(weights):
        raise UsageError("weights", weights, "must be of at least one client")
    checks.same_shapes(global_grad=global_grad, client_grads=tree.take(client_grads, 0))
    checks.real("step_size", step_size)
    checks.real("smoothness", smoothness)
    if checks.is_concrete(weights) and not np.isclose(np.sum(weights), 1, atol=1e-3):
        raise UsageError("weights", weights, f"must have the sum 1, not {np.sum(weights):g}")
    if checks.is_concrete(weights) and np.min(weights, initial=0) < 0:
        raise UsageError("weights", weights, f"must be at least 0, one is {np.min(weights):g}")
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


def largest_curvature(
    risk: Callable[[Tree], Array], params: Tree, key: Array, *, num_iterations: int = 20
) -> Array:
    """Return the smoothness L at a point, the largest |eigenvalue| of the risk's Hessian, [].

    Power iteration from a random start approaches it from below.

    Args:
      risk: params -> a scalar.
      params: the point.
      key: the random key of the start.
      num_iterations: iterations, each with one Hessian-vector product.

    Raises:
      UsageError: for less than one iteration, a risk that returns something else, parameters that
        are not floats, and what is no random key.
    """
    checks.integer("num_iterations", num_iterations)
    checks.function("risk", risk, "params", form=" params -> a scalar")
    checks.key("key", key)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            kind, place = getattr(leaf, "dtype", type(leaf).__name__), jax.tree_util.keystr(path)
            text = f"holds {kind}{place and f' at {place}'}, must hold floating point"
            raise UsageError("params", ..., text)
    if jax.tree.map(jnp.shape, jax.eval_shape(risk, params)) != ():
        shapes = jax.tree.map(jnp.shape, jax.eval_shape(risk, params))
        raise UsageError("risk", ..., f"returns shapes {shapes}, must return a scalar")

    def body(_: Array, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
        product = jax.jvp(jax.grad(risk), (params,), (carry[0],))[1]
        return power_step(carry[0], product)

    start = random_direction(key, params)
    return jax.lax.fori_loop(0, num_iterations, body, (start, optax.tree.norm(start)))[1]


def random_direction(key: Array, params: Tree) -> Tree:
    """Return a random unit vector of the shapes of `params`.

    Args:
      key: the random key.
      params: a tree of arrays.
    """
    drawn = optax.tree.random_like(key, params)
    return optax.tree.scale(1 / optax.tree.norm(drawn), drawn)


def power_step(direction: Tree, product: Tree) -> tuple[Tree, Array]:
    """Return (next unit vector, estimate of the largest |eigenvalue| []) of power iteration.

    The estimate is the norm of the product: Rayleigh's quotient does not converge if the largest
    eigenvalues have both signs.

    Args:
      direction: the unit vector.
      product: the matrix times the direction; if it is zero, the direction stays.
    """
    norm = optax.tree.norm(product)
    is_zero = norm == 0
    unit = optax.tree.scale(1 / jnp.where(is_zero, 1, norm), product)
    return optax.tree.where(is_zero, direction, unit), norm


def server_in(server: Tree) -> Server | None:
    """Return the exit strategy's server inside a server that may wrap it; None without one.

    Args:
      server: the server of a run, or of several runs with leading axes.
    """
    return next((one for one in wrapping.layers(server) if isinstance(one, Server)), None)


def outcome(server: Server) -> Outcome:
    """Return the results of the phase up to now, for a table or a figure.

    Args:
      server: the server of a run, or of several runs with leading axes; see `server_in`.
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
    """Raise UsageError if all clients that were measured have left.

    From then on a run changes nothing; it cannot raise by itself, as it is compiled.

    Args:
      server: the server of a run, or of several runs with leading axes.

    Raises:
      UsageError: if all clients that were measured have left.
    """
    _, mean, stays, _, _ = outcome(server)
    known = ~np.isnan(mean)
    empty = known.any(-1) & ~(known & stays).any(-1)
    if empty.any():
        highest = np.nanmax(mean[empty], axis=-1).min()
        raise UsageError(
            "threshold",
            ...,
            "no client that was measured stays; must be at most the largest mean contribution, "
            f"{highest:.3g}, and {{share}} at most 1",
            share=("share", ...),
        )


def wrap(
    algorithm: Algorithm,
    *,
    step_size: float | Array | Callable[[Array], Array] = 0.01,
    smoothness: float | Array | None = None,
    threshold: float | Array = 0.0,
    share: float | Array | None = None,
    pretraining_rounds: int = 5,
    parameters: Callable[[Any], Tree] | None = None,
    loss: Loss = objectives.cross_entropy,
    batch_size: int = 256,
) -> Algorithm:
    """Return `algorithm` whose clients leave after P rounds if they contribute too little.

    A client that has left attends no exchange. What `algorithm`'s server keeps of its clients, such
    as SCAFFOLD's sum of variates or the heads of FL Games' players, it keeps of those that left,
    too. If nobody is left, nothing changes any more; see `check_someone_stays`. With the threshold
    -inf and without `share` nobody leaves, and the network is that of `algorithm` bit for bit.

    Args:
      algorithm: the algorithm.
      step_size: the length of a round along the gradient: the clients' learning rate times their
        number of local steps; or a function of the clients' numbers of examples, [S] -> [S].
      smoothness: L, or None for an estimate by power iteration.
      threshold: the least mean C_i of a client that stays, over the rounds in which it was
        measured.
      share: the least ratio of the sum of C_i of a client that stays to the median client's sum,
        where that is above 0; None for no such rule.
      pretraining_rounds: P.
      parameters: server of `algorithm` -> its leaves that are the network's parameters; default:
        those of `algorithm.network`. For FL Games
        `lambda game: (game.body.params, game.players.params)`.
      loss: the objective whose mean is R_i, on the outputs of `algorithm.predict`.
      batch_size: examples at a time in the pass for a gradient, which is over all examples.

    Raises:
      UsageError: for values out of range, and without `parameters` if there is no network. Before
        the first round: for an algorithm of `missing.reuse` or `freezing.train_only`, which go
        around this one, and for one that serves each client with its own network alone.
    """
    checks.record("algorithm", algorithm, Algorithm)
    checks.function("loss", loss)
    if parameters is not None:
        checks.function("parameters", parameters)
    if callable(step_size):
        checks.function("step_size", step_size, "size")
    else:
        checks.real("step_size", step_size)
    if smoothness is not None:
        checks.real("smoothness", smoothness)
    is_one = checks.is_concrete(threshold) and getattr(threshold, "ndim", 0) == 0
    if not (is_one and threshold == -np.inf):
        try:
            checks.real("threshold", threshold, -np.inf)
        except UsageError:
            text = "must be a finite number, or -inf for no threshold"
            raise UsageError("threshold", threshold, text) from None
    if share is not None:
        checks.real("share", share)
    checks.integer("pretraining_rounds", pretraining_rounds)
    checks.integer("batch_size", batch_size)
    phase = _Phase(
        algorithm,
        parameters or _network_parameters(algorithm),
        step_size,
        smoothness,
        threshold,
        share,
        pretraining_rounds,
        loss,
        batch_size,
    )
    staying = (_staying(exchange, pretraining_rounds) for exchange in algorithm.exchanges)
    return wrapping.around(
        algorithm,
        partial(_init_server, phase),
        (*staying, _global_gradient(phase), _products(phase)),
    )


def _network_parameters(algorithm: Algorithm) -> Callable[[Any], Tree]:
    network = algorithm.network
    if network is None:
        raise UsageError(
            "parameters",
            None,
            "must be a function server -> the parameters of its network, as the algorithm has no "
            "single network",
        )
    return lambda server: network(server).params


def _init_server(phase: _Phase, setup: Setup) -> Server:
    wrapped = phase.algorithm.init_server(setup)
    for layer in wrapping.layers(wrapped):
        if isinstance(layer, missing.Server):
            text = "stores uploads, also of clients that leave"
            order = "missing.reuse(exit_strategy.wrap(..))"
            raise UsageError("algorithm", ..., f"{text}; must be wrapped first: {order}")
        if isinstance(layer, freezing.Server):
            text = "has parameters that are not trained, which would count"
            order = "freezing.train_only(lambda model: exit_strategy.wrap(..), ..)"
            raise UsageError("algorithm", ..., f"{text}; must be wrapped first: {order}")
    try:
        params = phase.parameters(wrapped)
    except AttributeError as error:
        raise UsageError(
            "parameters",
            ...,
            f"do not fit the server of the algorithm ({error}); must be a function server -> the "
            "parameters of its network",
        ) from None
    if phase.algorithm.personal and not _has_effect(phase, wrapped, params, setup.sample):
        text = "serves each client with its own network alone, so that all contributions are 0"
        raise UsageError("algorithm", ..., f"{text}; must serve with the parameters of the server")
    table = jnp.zeros((phase.num_rounds, setup.num_clients))
    direction: Tree = ()
    if phase.smoothness is None:
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


def _has_effect(phase: _Phase, wrapped: Tree, params: Tree, x: Tree) -> bool:
    """Whether the outputs for a client depend on the server's parameters."""
    own = phase.algorithm.init_client(wrapped, jnp.int32(0))
    if isinstance(own, averaging.Own):  # which the server serves before its first turn
        own = own._replace(has_trained=np.True_)

    def outputs(params: Tree) -> Array:
        return phase.algorithm.predict(_with(phase, wrapped, params), own, x)

    traced = jax.make_jaxpr(outputs)(params).jaxpr
    used = {id(each) for equation in traced.eqns for each in equation.invars}
    return any(id(each) in used for each in traced.invars)


def _with(phase: _Phase, wrapped: Tree, params: Tree) -> Tree:
    """The wrapped server with other parameters."""
    leaves, structure = jax.tree.flatten(wrapped)
    numbered = jax.tree.unflatten(structure, range(len(leaves)))
    places = jax.tree.leaves(phase.parameters(numbered))
    for place, leaf in zip(places, jax.tree.leaves(params), strict=True):
        leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


def _staying(exchange: Exchange, num_rounds: int) -> Exchange:
    """An exchange of the algorithm, for clients that have not left."""
    lifted = wrapping.lift(exchange)

    def attends(server: Server, who: Array, round: Array) -> Array:
        stays = (round < num_rounds) | server.assessment.stays[who]
        return stays & lifted.attends(server, who, round)

    return lifted._replace(attends=attends)


def _risk(phase: _Phase, wrapped: Tree, own: Tree, batch: Batch) -> Callable[[Tree], Array]:
    """The function parameters -> the sum of the batch's losses, as the client is served."""

    def risk(params: Tree) -> Array:
        outputs = phase.algorithm.predict(_with(phase, wrapped, params), own, batch.x)
        return batch.mask.sum() * phase.loss(outputs, batch.y, batch.mask)

    return risk


def _mean(phase: _Phase, shard: Shard, sums: Callable[[Batch], Tree]) -> Tree:
    """The mean over a client's examples. sums: a batch -> sums over its examples."""
    total = local.fold(shard, sums, batch_size=phase.batch_size)
    return optax.tree.scale(1 / jnp.maximum(shard.size, 1), total)


def _global_gradient(phase: _Phase) -> Exchange:
    """The exchange for the mean of all gradients at the current network, and L."""

    def broadcast_undelayed(server: Server) -> tuple[Tree, Tree]:
        return server.wrapped, server.assessment.direction

    def client(visit: Visit) -> Reply:
        wrapped, direction = visit.undelayed_message
        params = phase.parameters(wrapped)

        def sums(batch: Batch) -> _Gradients:
            gradient = jax.grad(_risk(phase, wrapped, visit.own, batch))
            if phase.smoothness is None:
                return _Gradients(*jax.jvp(gradient, (params,), (direction,)))
            return _Gradients(gradient(params), ())

        return Reply(visit.own, _mean(phase, visit.shard, sums), {})

    def update(server: Server, mean: _Gradients, cohort: Cohort) -> Server:
        del cohort
        old = server.assessment
        # A given L may differ between runs with the same start, so it is stored only here.
        if phase.smoothness is None:
            direction, estimate = power_step(old.direction, mean.product)
        else:
            direction, estimate = old.direction, jnp.asarray(phase.smoothness)
        new = old._replace(
            gradient=mean.gradient,
            direction=direction,
            smoothness=estimate.astype(old.smoothness.dtype),
        )
        return server._replace(assessment=new)

    return Exchange(
        lambda server: (),
        client,
        aggregators.mean(),
        update,
        phase.attends,
        broadcast_undelayed=broadcast_undelayed,
    )


def _products(phase: _Phase) -> Exchange:
    """The exchange for the products of Eq. 13, at the network that each client last received."""

    def client(visit: Visit) -> Reply:
        params = phase.parameters(visit.message)

        def sums(batch: Batch) -> Tree:
            return jax.grad(_risk(phase, visit.message, visit.own, batch))(params)

        gradient = _mean(phase, visit.shard, sums)
        inner = optax.tree.vdot(visit.undelayed_message, gradient)
        return Reply(visit.own, _ClientProducts(inner, _square(gradient), visit.round), {})

    def update(server: Server, sent: aggregators.Stack, cohort: Cohort) -> Server:
        del cohort
        return server._replace(assessment=_assess(phase, server.assessment, sent))

    return Exchange(
        lambda server: server.wrapped,
        client,
        aggregators.stacked(),
        update,
        phase.attends,
        broadcast_undelayed=lambda server: server.assessment.gradient,
    )


def _assess(phase: _Phase, old: Assessment, sent: aggregators.Stack) -> Assessment:
    """The assessment after a round's products."""
    size = jnp.where(sent.present, sent.size, 0)
    inner, square, round = sent.values
    step_size = phase.step_size(size) if callable(phase.step_size) else phase.step_size
    linear, quadratic = _terms(
        inner, square, _square(old.gradient), size / jnp.maximum(size.sum(), 1), step_size
    )
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
    step_size: float | Array | None = 0.01,
    smoothness: float | Array | None = None,
    threshold: float | Array = 0.0,
    share: float | Array | None = None,
    pretraining_rounds: int = 5,
    loss: Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "size",
) -> Algorithm:
    """Return FedAvg, FedIPG or another algorithm with the exit strategy (see `wrap`).

    Args:
      model: the network.
      work: local training.
      wrapped: the algorithm, "fedavg" or "fedipg"; in Python also a factory of one's own, called
        with the arguments of FedAvg.
      penalty: FedIPG's penalty, or None for its default.
      step_size: the length of a round along the gradient: the clients' learning rate times their
        number of local steps; None: both as `work` records them. With a longer one clients leave
        that contribute.
      smoothness: L, or None for an estimate by power iteration.
      threshold: the least mean contribution of a client that stays.
      share: the least ratio of the sum of contributions of a client that stays to the median
        client's sum; it finds clients that rarely arrive. None for no such rule.
      pretraining_rounds: the rounds after which clients may leave.
      loss: the objective of local training and of contributions.
      server_optimizer: the server's optimizer, on the mean delta.
      weighting: weights of clients in the mean of their updates, "size" or "uniform"; in Python
        also a function of `Slots`. Contributions are weighted by size whatever it is.

    Raises:
      UsageError: for values out of range, for a factory with other arguments, and without a
        step_size where it is unknown.
    """
    checks.record("work", work, Work)
    if step_size is None:
        if work.learning_rate is None or work.num_steps is None:
            text = "must be a number, or `work` must record its `learning_rate` and `num_steps`"
            raise UsageError("step_size", None, text)
        rate, num_steps = work.learning_rate, work.num_steps
    factory: Callable[..., Algorithm]
    if callable(wrapped):
        factory = wrapped
    else:
        checks.one_of("wrapped", wrapped, WRAPPED)
        factory = WRAPPED[wrapped]
    settings: dict[str, Any] = {} if penalty is None else {"penalty": penalty}
    if settings and factory is fedavg.fedavg:
        raise UsageError(
            "penalty",
            penalty,
            "must be None for {wrapped}, which has none",
            wrapped=("wrapped", "fedavg"),
        )
    settings |= {"loss": loss, "server_optimizer": server_optimizer, "weighting": weighting}
    try:
        inspect.signature(factory).bind(model, work, **settings)
    except TypeError as error:
        raise UsageError("wrapped", ..., f"must take the arguments of FedAvg: {error}") from None
    algorithm = factory(model, work, **settings)
    return wrap(
        algorithm,
        step_size=(lambda size: rate * num_steps(size)) if step_size is None else step_size,
        smoothness=smoothness,
        threshold=threshold,
        share=share,
        pretraining_rounds=pretraining_rounds,
        loss=loss,
    )
