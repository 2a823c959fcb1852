"""CAFE: FedAvg whose clients train a cosine classifier without the directions that it drifts in.

    minimise  CE(z, y),   z_c = scale (mean over the round's batches i = 1..t of q_c^i) . h / ||h||
    q_c = u_c - alpha (u_c . d_G) d_G - beta (u_c . d_L) d_L                 (Feature Calibration)
    u_c = w_c / (||w_c|| + gamma)                                          (Parameter Calibration)

The mean over batches is the History-Aware Average. h: the body's features. w_c: the classifier's
row of a class, without a bias. d_G, d_L: unit directions of the classifier that was received, and
of the client's momentum for it before the step. The server serves with d_G of its own classifier,
without d_L and history.

"Drift-Aware Federated Learning: A Causal Perspective" (arXiv 2503.09116), Eq. 34b and 37. Open in
it, and taken from Tang et al. 2020, "Long-Tailed Classification by Keeping the Good and Removing
the Bad Momentum Causal Effect": scale and gamma. Ours: how a matrix becomes a direction
(`drift_mode`), alpha and beta, how d_L is made orthogonal to d_G, and that earlier batches count by
their classifiers, applied to the present features. Directions and earlier classifiers are constants
for the gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, local, objectives, servers
from fedjax_inv.checks import UsageError
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Halves,
    Local,
    Loss,
    Model,
    Setup,
    Step,
    Trained,
    Tree,
    Variables,
    Visit,
    Work,
)

_EPSILON = 1e-12  # added to squared norms under a root
_PARALLEL = 1e-4  # the sine below which two directions are one
_SQUARINGS = 10


def unit(vectors: Array) -> Array:
    """`vectors` [..., D] at length 1, however short they are; those of zeros stay."""
    largest = jnp.abs(vectors).max(-1, keepdims=True)
    is_some = largest > jnp.finfo(vectors.dtype).tiny
    # Scaled first, so that no square underflows.
    scaled = jnp.where(is_some, vectors, 0) / jnp.where(is_some, largest, 1)
    square = (scaled**2).sum(-1, keepdims=True)
    return scaled / jnp.sqrt(jnp.where(is_some, square, 1))


def leading_direction(matrix: Array) -> Array:
    """The right-singular vector of the largest singular value of `matrix` [K, D], up to its sign;
    [D], zeros of a matrix of zeros.

    By 2^10 steps of power iteration on the K x K matrix of products of rows, from a fixed start:
    among equal singular values, the direction is the start's.
    """
    size = matrix.shape[0]
    largest = jnp.abs(matrix).max()
    is_some = largest > jnp.finfo(matrix.dtype).tiny
    matrix = jnp.where(is_some, matrix, 0) / jnp.where(is_some, largest, 1)

    def product(a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision="highest")

    power = product(matrix, matrix.T)
    for _ in range(_SQUARINGS):
        power = power / jnp.where(is_some, jnp.trace(power), 1)
        power = product(power, power)
    # No vector that data make: rows that sum to 0 would be orthogonal to ones.
    start = jnp.cos(jnp.arange(1, 1 + size, dtype=matrix.dtype))
    return unit(product(unit(product(power, start)), matrix))


# What makes a direction of a matrix [K, D]: one [D], or one for each class [K, D].
DIRECTIONS: dict[str, Callable[[Array], Array]] = {
    "svd": leading_direction,
    "row_mean": lambda matrix: unit(matrix.mean(0)),
    "classwise": unit,
    "feature_ema": unit,  # of a mean of features [D]
}


def orthogonal(direction: Array, to: Array) -> Array:
    """The part of unit vectors `direction` [..., D] that is orthogonal to unit vectors `to`, at
    length 1; zeros where they are parallel."""
    rest = direction - (direction * to).sum(-1, keepdims=True) * to
    square = (rest**2).sum(-1, keepdims=True)
    differs = square >= _PARALLEL**2
    return jnp.where(differs, rest, 0) / jnp.sqrt(jnp.where(differs, square, 1))


def rows_over_norms(classifier: Array, gamma: float | Array) -> Array:
    """w_c / (||w_c|| + gamma), row by row of `classifier` [K, D]; [K, D]."""
    norm = jnp.sqrt((classifier**2).sum(-1, keepdims=True) + _EPSILON)
    return classifier / (norm + gamma)


def without(
    rows: Array,
    global_direction: Array,
    local_direction: Array,
    *,
    alpha: float | Array,
    beta: float | Array,
) -> Array:
    """`rows` [K, D] less alpha and beta of their projections on two unit vectors; [K, D].

    The directions: [D], or one for each class [K, D]; zeros remove nothing (Feature Calibration).
    """

    def part(direction: Array) -> Array:
        return (rows * direction).sum(-1, keepdims=True) * direction

    return rows - alpha * part(global_direction) - beta * part(local_direction)


def calibrate(
    classifier: Array,
    global_direction: Array,
    local_direction: Array,
    *,
    alpha: float | Array,
    beta: float | Array,
    gamma: float | Array,
) -> Array:
    """q_c of each row of `classifier` [K, D]; [K, D] (Eq. 34b for one batch).

    The directions: unit vectors [D] or zeros, or one for each class [K, D].
    """
    rows = rows_over_norms(classifier, gamma)
    return without(rows, global_direction, local_direction, alpha=alpha, beta=beta)


def logits(features: Array, calibrated: Array, *, scale: float | Array) -> Array:
    """scale h / ||h|| . q_c of features [B, D] and calibrated rows [K, D]; [B, K]."""
    norm = jnp.sqrt((features**2).sum(-1, keepdims=True) + _EPSILON)
    return scale * (features / norm) @ calibrated.T


class _History(NamedTuple):
    """What a client carries from batch to batch of a round."""

    total: Array  # [K, D] sum of the past batches' calibrated classifiers
    num_batches: Array  # []
    features: Tree  # [D] their mean, newer ones counting more; () where nobody needs it


def _momentum(opt_state: Tree) -> Halves | None:
    """The momentum of sgd in an optimizer's state; None where it keeps none."""
    return optax.tree.get(opt_state, "trace")


def _check_momentum(work: Work) -> None:
    """Raises ValueError for local training without a momentum."""
    some = Variables(Halves(jnp.zeros(1), jnp.zeros(1)), Halves((), ()))
    if _momentum(jax.eval_shape(work.init, some).opt_state) is None:
        raise UsageError("beta: must be 0 where the clients' optimizer is no sgd with momentum")


def _is_zero(weight: float | Array) -> bool:
    """Whether a weight is known to be 0; one that is traced counts as such."""
    return not checks.is_concrete(weight) or float(weight) == 0


def _kernel(head: Tree) -> Array:
    """The classifier's matrix [D, K] in a head, or in a tree of its structure."""
    return next(leaf for leaf in jax.tree.leaves(head) if leaf.ndim == 2)


def _embedding(features: Array, width: int) -> Array:
    """Features [B, ...] as the classifier takes them [B, D]: flattened, or averaged over
    positions."""
    flat = features.reshape(features.shape[0], -1)
    return flat if flat.shape[1] == width else averaging.embedding(features)


def cafe(
    model: Model,
    work: Work,
    *,
    alpha: float | Array = 0.2,
    beta: float | Array = 0.2,
    gamma: float | Array = 1 / 32,
    scale: float | Array = 16.0,
    drift_mode: str = "svd",
    orthogonal_directions: bool = True,
    feature_decay: float | Array = 0.9,
    feature_calibration: bool = True,
    parameter_calibration: bool = True,
    history_average: bool = True,
    history_gradient: str = "literal",
    loss: Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "size",
) -> Algorithm:
    """CAFE; the model's head must be one linear classifier, whose bias is not used.

    The clients' optimizer must be sgd with momentum, unless beta is 0 or drift_mode "feature_ema";
    the paper has 0.9, anew in each round, and momentum on the server (`server_optimizer`) too.

    alpha: how much of the global direction is removed. beta: how much of the local one. gamma: what
    is added to the classifier's norms. scale: of the logits, which lie within it for alpha and beta
    of at most 1. drift_mode: how a direction is made of a matrix: "svd", its leading right-singular
    vector; "row_mean", the mean of its rows; "classwise", each class has that of its own row, which
    when serving only scales the logits; or "feature_ema", of no matrix but of a moving average of
    features, which travels beside the network. feature_decay: of that average, a batch.
    orthogonal_directions: whether the local direction is made orthogonal to the global one.
    feature_calibration: False leaves both directions in. parameter_calibration: False leaves the
    classifier's norms in. history_average: False takes the present batch's classifier alone.
    history_gradient: "literal", 1/t of the present batch's, or "straight_through", all of it.
    weighting: of clients, as in FedAvg ("size" or "uniform").

    Raises ValueError for values out of range, for "row_mean" without parameter_calibration, as the
    rows of a linear softmax's gradient sum to 0, and for local training that cannot be looked into
    and without a momentum; before the first round for another head.
    """
    checks.one_of("drift_mode", drift_mode, DIRECTIONS)
    checks.one_of("history_gradient", history_gradient, ("literal", "straight_through"))
    for name, value in (("alpha", alpha), ("beta", beta), ("gamma", gamma), ("scale", scale)):
        checks.real(name, value)
    checks.real("feature_decay", feature_decay, 0, 1)
    if drift_mode == "row_mean" and feature_calibration and not parameter_calibration:
        raise UsageError(
            "drift_mode='row_mean': needs parameter_calibration, as the rows of a linear softmax's "
            "gradient sum to 0"
        )
    train_local, direction_of = local.seeing_local(work), DIRECTIONS[drift_mode]
    averages_features = drift_mode == "feature_ema"
    if feature_calibration and not averages_features and not _is_zero(beta):
        _check_momentum(work)

    def check(setup: Setup) -> None:
        params, stats = setup.variables
        shapes = sorted((leaf.shape for leaf in jax.tree.leaves(params.head)), key=len)
        is_kernel = bool(shapes) and len(shapes[-1]) == 2
        if (
            not is_kernel
            or shapes[:-1] not in ([], [shapes[-1][1:]])
            or jax.tree.leaves(stats.head)
        ):
            raise UsageError(f"model: its head holds {shapes}, must be one linear classifier")

    def rows(classifier: Array, global_direction: Array, local_direction: Array) -> Array:
        """q of one batch, without the parts that are switched off; [K, D]."""
        taken = rows_over_norms(classifier, gamma) if parameter_calibration else classifier
        if not feature_calibration:
            return taken
        return without(taken, global_direction, local_direction, alpha=alpha, beta=beta)

    def global_direction_of(head: Tree, side: Tree) -> Array:
        return direction_of(side if averages_features else _kernel(head).T)

    def train(visit: Visit) -> Trained:
        received = visit.message.variables
        global_direction = global_direction_of(received.params.head, visit.message.side)
        kernel = _kernel(received.params.head)

        def local_direction_of(at: Local) -> Array:
            trace = _momentum(at.opt_state)
            if averages_features:
                direction = direction_of(at.carry.features)
            elif trace is None:
                return jnp.zeros_like(global_direction)
            else:
                direction = direction_of(_kernel(trace.head).T)
            return orthogonal(direction, global_direction) if orthogonal_directions else direction

        def grad_fn(at: Local, batch: Batch, key: Array) -> Step:
            (params, stats), history = at.variables, at.carry
            count = history.num_batches + 1
            body_key, _ = jax.random.split(key)  # as `models.apply` does
            no_direction = jnp.zeros_like(global_direction)
            local_direction = local_direction_of(at) if feature_calibration else no_direction

            def risk(params: Halves) -> tuple[Array, tuple[Halves, Array, Array]]:
                features, body = model.encode(
                    params.body, stats.body, batch.x, batch.mask, True, body_key
                )
                features = _embedding(features, kernel.shape[0])
                now = rows(_kernel(params.head).T, global_direction, local_direction)
                average = (history.total + now) / count if history_average else now
                if history_gradient == "straight_through":
                    average = now + jax.lax.stop_gradient(average - now)
                z = logits(features, average, scale=scale)
                return loss(z, batch.y, batch.mask), (Halves(body, stats.head), now, features)

            (value, (stats_after, now, features)), grads = jax.value_and_grad(risk, has_aux=True)(
                params
            )
            mean: Any = ()
            if averages_features:
                new = jax.vmap(objectives.masked_mean, (1, None))(features, batch.mask)
                mean = feature_decay * history.features + (1 - feature_decay) * new
            carry = _History(history.total + now, count, mean)
            return Step(grads, stats_after, {"loss": value}, carry=carry)

        mean = jnp.zeros(kernel.shape[0]) if averages_features else ()
        nothing = _History(jnp.zeros_like(kernel.T), jnp.zeros(()), mean)
        start = work.init(received)._replace(carry=nothing)
        return train_local(grad_fn, start, visit.shard, visit.key)

    side = averaging.NOTHING
    if averages_features:
        side = averaging.SideState(
            init=lambda setup: jnp.zeros(_kernel(setup.variables.params.head).shape[0]),
            send=lambda mean: mean,
            upload=lambda visit, trained: trained.local.carry.features,
            aggregate=aggregators.mean(aggregators.weight_of(weighting)),
            update=lambda mean, uploaded: uploaded,
        )
    training = averaging.averaging_of(
        model, train, server_optimizer=server_optimizer, weighting=weighting, side=side
    )

    def init_server(setup: Setup) -> servers.Server:
        check(setup)
        return training.init_server(setup)

    def predict(server: servers.Server, own: Tree, x: Tree) -> Array:
        del own
        params, stats = server.variables
        real = jnp.ones(jax.tree.leaves(x)[0].shape[0], bool)
        features, _ = model.encode(params.body, stats.body, x, real, False)
        kernel = _kernel(params.head)
        direction = global_direction_of(params.head, server.side)
        served = rows(kernel.T, direction, jnp.zeros_like(direction))
        return logits(_embedding(features, kernel.shape[0]), served, scale=scale)

    return training._replace(init_server=init_server, predict=predict)
