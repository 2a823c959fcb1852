"""CAFE: FedAvg whose clients train a cosine classifier without the directions of its drift.

    minimise  CE(z, y),   z_c = scale (mean over the round's batches i = 1..t of q_c^i) . h / ||h||
    q_c = u_c - alpha (u_c . d_G) d_G - beta (u_c . d_L) d_L                 (Feature Calibration)
    u_c = w_c / (||w_c|| + gamma)                                          (Parameter Calibration)

The mean over batches is the History-Aware Average. h: the body's features. w_c: the classifier's
row of a class, without a bias. d_G: a unit direction of the received classifier. d_L: a unit
direction of the client's momentum for the classifier, before the step. The server serves with d_G
of its own classifier, without d_L and history.

Fang et al. 2025, "Drift-Aware Federated Learning: A Causal Perspective" (arXiv 2503.09116),
Eq. 34b and 37. The paper leaves scale and gamma open; they are those of Tang et al. 2020,
"Long-Tailed Classification by Keeping the Good and Removing the Bad Momentum Causal Effect". The
paper leaves open, and we chose: how a matrix becomes a direction (`drift_mode`), alpha and beta,
how d_L becomes orthogonal to d_G, and that the classifiers of earlier batches are applied to the
present features. Directions and earlier classifiers are constants for the gradient. The weights
p_k of Eq. 16 are those of the uploads that arrived.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, local, objectives, servers, tree
from fedjax_inv.checks import UsageError
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Facts,
    Halves,
    Local,
    LocalGradFn,
    Loss,
    Model,
    Setup,
    Step,
    Tree,
    Variables,
    Visit,
    Work,
)

_EPSILON = 1e-12  # added to squared norms under a root
_PARALLEL = 1e-4  # the sine below which two directions count as parallel
_SQUARINGS = 10
FACTS = Facts(needs_classes=True)  # its logits are bounded, one for each class


def _check_floats(name: str, value: Array, *, is_matrix: bool) -> None:
    """Raise UsageError unless an array is [K, D], or else [..., D], in floating point."""
    checks.array(name, value)
    fits = value.ndim == 2 if is_matrix else value.ndim > 0
    if not fits or not jnp.issubdtype(value.dtype, jnp.floating):
        needed = "[K, D]" if is_matrix else "[..., D]"
        raise UsageError(name, value, f"must be {needed} in floating point")


def unit(vectors: Array) -> Array:
    """Return vectors [..., D] scaled to length 1, however short; zeros stay, NaN gives NaN.

    Args:
      vectors: [..., D], floating point.

    Raises:
      UsageError: for anything else, and for D = 0.
    """
    _check_floats("vectors", vectors, is_matrix=False)
    if not vectors.shape[-1]:
        raise UsageError("vectors", vectors, "must be [..., D], D at least 1")
    largest = jnp.abs(vectors).max(-1, keepdims=True)
    is_some = ~(largest <= jnp.finfo(vectors.dtype).tiny)  # also NaN
    # Scaled first, so that no square underflows.
    scaled = jnp.where(is_some, vectors, 0) / jnp.where(is_some, largest, 1)
    square = (scaled**2).sum(-1, keepdims=True)
    return scaled / jnp.sqrt(jnp.where(is_some, square, 1))


def leading_direction(matrix: Array) -> Array:
    """Return the right-singular vector of the largest singular value, up to its sign, [D].

    It takes 2^10 steps of power iteration on the K x K matrix of products of rows, from a fixed
    start, which decides among equal singular values.

    Args:
      matrix: [K, D], floating point; zeros give zeros, and a NaN anywhere gives NaN.

    Raises:
      UsageError: for anything else, and for K = 0 or D = 0.
    """
    _check_floats("matrix", matrix, is_matrix=True)
    if not matrix.size:
        raise UsageError("matrix", matrix, "must be [K, D], K and D at least 1")
    size = matrix.shape[0]
    largest = jnp.abs(matrix).max()
    is_some = ~(largest <= jnp.finfo(matrix.dtype).tiny)  # also NaN
    matrix = jnp.where(is_some, matrix, 0) / jnp.where(is_some, largest, 1)

    def product(a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision="highest")

    power = product(matrix, matrix.T)
    for _ in range(_SQUARINGS):
        power = power / jnp.where(is_some, jnp.trace(power), 1)
        power = product(power, power)
    # Not ones, to which the columns of a matrix whose rows sum to 0 would be orthogonal.
    start = jnp.cos(jnp.arange(1, 1 + size, dtype=matrix.dtype))
    return unit(product(unit(product(power, start)), matrix))


# The ways from a matrix [K, D] to a direction [D], or to one direction for each class [K, D].
DIRECTIONS: dict[str, Callable[[Array], Array]] = {
    "svd": leading_direction,
    "row_mean": lambda matrix: unit(matrix.mean(0)),
    "classwise": unit,
    "feature_ema": unit,  # from a mean of features [D]
}


def orthogonal(direction: Array, to: Array) -> Array:
    """Return the part of `direction` orthogonal to `to`, at length 1, [..., D].

    Args:
      direction: unit vectors [..., D].
      to: unit vectors of a shape that broadcasts; a parallel pair gives zeros, and NaN gives NaN.

    Raises:
      UsageError: for what is no array, and for vectors of another D.
    """
    checks.array("direction", direction)
    checks.array("to", to)
    if not direction.ndim:
        raise UsageError("direction", direction, "must be [..., D]")
    if to.shape[-1:] != direction.shape[-1:]:
        raise UsageError("to", to, f"must be [..., {direction.shape[-1]}], as direction is")
    rest = direction - (direction * to).sum(-1, keepdims=True) * to
    square = (rest**2).sum(-1, keepdims=True)
    differs = ~(square < _PARALLEL**2)  # also NaN
    return jnp.where(differs, rest, 0) / jnp.sqrt(jnp.where(differs, square, 1))


def rows_over_norms(classifier: Array, gamma: float | Array) -> Array:
    """Return w_c / (||w_c|| + gamma) of each row, [K, D].

    Args:
      classifier: [K, D].
      gamma: the constant added to the norms.

    Raises:
      UsageError: for what is no array [K, D].
    """
    checks.array("classifier", classifier)
    if classifier.ndim != 2:
        raise UsageError("classifier", classifier, "must be [K, D]")
    classifier = tree.wide(classifier)
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
    """Return rows minus parts of their projections on two directions (Feature Calibration), [K, D].

    Args:
      rows: [K, D].
      global_direction: a unit vector [D], or one for each class [K, D]; zeros remove nothing.
      local_direction: of the same shapes.
      alpha: the share of the projection on the global direction to remove.
      beta: the share of the projection on the local direction to remove.

    Raises:
      UsageError: for other shapes.
    """
    checks.array("rows", rows)
    if rows.ndim != 2:
        raise UsageError("rows", rows, "must be [K, D]")
    for name, direction in (
        ("global_direction", global_direction),
        ("local_direction", local_direction),
    ):
        checks.array(name, direction)
        if direction.shape not in (rows.shape, rows.shape[1:]):
            num_classes, width = rows.shape
            raise UsageError(name, direction, f"must be [{width}] or [{num_classes}, {width}]")

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
    """Return q_c of each row of the classifier (Eq. 34b for one batch), [K, D].

    Args:
      classifier: [K, D].
      global_direction: a unit vector [D] or zeros, or one for each class [K, D].
      local_direction: of the same shapes.
      alpha: the share of the global direction to remove.
      beta: the share of the local direction to remove.
      gamma: the constant added to the classifier's norms.

    Raises:
      UsageError: for other shapes, and for a negative gamma.
    """
    _check_floats("classifier", classifier, is_matrix=True)
    checks.real("gamma", gamma)
    named = {"global_direction": global_direction, "local_direction": local_direction}
    for name, direction in named.items():
        checks.array(name, direction)
        if direction.shape not in (classifier.shape, classifier.shape[1:]):
            num_classes, width = classifier.shape
            raise UsageError(name, direction, f"must be [{width}] or [{num_classes}, {width}]")
    rows = rows_over_norms(classifier, gamma)
    return without(rows, global_direction, local_direction, alpha=alpha, beta=beta)


def logits(features: Array, calibrated: Array, *, scale: float | Array) -> Array:
    """Return scale h / ||h|| . q_c, [B, K]; 0 for features of 0, which have no gradient.

    Args:
      features: h, [B, D].
      calibrated: q, [K, D].
      scale: the factor of the logits.

    Raises:
      UsageError: for other shapes.
    """
    checks.array("features", features)
    checks.array("calibrated", calibrated)
    if features.ndim != 2 or calibrated.ndim != 2 or features.shape[1] != calibrated.shape[1]:
        raise UsageError(
            "features", features, f"must be [B, D] beside q [K, D], {calibrated.shape}"
        )
    features = tree.wide(features)
    squared = (features**2).sum(-1, keepdims=True)
    # A row of zeros, as of an example of zeros without biases, would have a gradient of 1e6.
    unit = jnp.where(squared > _EPSILON, features, 0) / jnp.sqrt(squared + _EPSILON)
    return scale * unit @ calibrated.T


class _History(NamedTuple):
    """A client's state from batch to batch of a round."""

    total: Array  # [K, D] sum of the past batches' calibrated classifiers
    num_batches: Array  # []
    features: Tree  # [D] moving average of the features; () if not needed


def _momentum(opt_state: Tree) -> Halves | None:
    """The momentum of sgd in an optimizer's state; None if it has none."""
    return optax.tree.get(opt_state, "trace")


def _check_momentum(work: Work) -> None:
    """Raise UsageError for local training without momentum."""
    some = Variables(Halves(jnp.zeros(1), jnp.zeros(1)), Halves((), ()))
    if _momentum(jax.eval_shape(work.init, some).opt_state) is None:
        raise UsageError(
            "optimizer", ..., "must be sgd with momentum above 0, or {beta}", beta=("beta", 0)
        )


def _kernel(head: Tree) -> Array:
    """The classifier's matrix [D, K] in a head, or in a tree of its structure."""
    return next(leaf for leaf in jax.tree.leaves(head) if leaf.ndim == 2)


def _embedding(features: Array, width: int) -> Array:
    """Features [B, ...] as the classifier's inputs [B, D]: flattened or averaged over positions."""
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
    """Return CAFE; the model's head must be one linear classifier, whose bias is not used.

    The clients' optimizer must be sgd with momentum, unless beta is 0, drift_mode "feature_ema" or
    feature_calibration False.
    The paper has momentum 0.9, reset in each round, and momentum on the server (`server_optimizer`)
    too.

    Args:
      model: the network.
      work: local training.
      alpha: share of the global direction that is removed.
      beta: share of the local direction that is removed.
      gamma: constant that is added to the classifier's norms.
      scale: factor of the logits; with parameter_calibration also their bound for alpha and beta
        of at most 1.
      drift_mode: how a matrix becomes a direction: "svd", its leading right-singular vector;
        "row_mean", the mean of its rows; "classwise", for each class its own row, which in serving
        only scales the logits; or "feature_ema", a moving average of features, which is sent beside
        the network, instead of a matrix.
      orthogonal_directions: whether the local direction is made orthogonal to the global one.
      feature_decay: decay of the average of features from batch to batch, in [0, 1). It starts at 0
        in each round, so that a client with few batches sends a shorter average and counts less.
      feature_calibration: whether the directions are removed.
      parameter_calibration: whether the classifier's rows are divided by their norms.
      history_average: whether classifiers are averaged over the batches of the round; if not, the
        present batch's is taken alone.
      history_gradient: gradient of that average by the present batch's classifier: "literal", 1/t,
        or "straight_through", 1.
      loss: the objective of local training.
      server_optimizer: the server's optimizer, on the mean delta.
      weighting: weights of clients, "size" or "uniform"; in Python also a function of `Slots`.

    Raises:
      UsageError: for values out of range; for "row_mean" without parameter_calibration, as the rows
        of a linear softmax's gradient sum to 0; for local training whose gradient sees no
        optimizer, or without momentum; before the first round for another head. A traced beta
        without momentum is not refused: unless it is 0, losses are NaN.
    """
    checks.record("model", model, Model)
    checks.function("loss", loss)
    for name, flag in (
        ("orthogonal_directions", orthogonal_directions),
        ("feature_calibration", feature_calibration),
        ("parameter_calibration", parameter_calibration),
        ("history_average", history_average),
    ):
        checks.boolean(name, flag)
    checks.one_of("drift_mode", drift_mode, DIRECTIONS)
    checks.one_of("history_gradient", history_gradient, ("literal", "straight_through"))
    for name, value in (("alpha", alpha), ("beta", beta), ("gamma", gamma), ("scale", scale)):
        checks.real(name, value)
    checks.real("feature_decay", feature_decay, 0, 1)
    if checks.is_concrete(feature_decay) and feature_decay == 1:
        raise UsageError("feature_decay", feature_decay, "must be below 1, or the average stays 0")
    if drift_mode == "row_mean" and feature_calibration and not parameter_calibration:
        raise UsageError(
            "drift_mode",
            drift_mode,
            "needs {parameter_calibration}, as the rows of a linear softmax's gradient sum to 0",
            parameter_calibration=("parameter_calibration", True),
        )
    direction_of = DIRECTIONS[drift_mode]
    averages_features = drift_mode == "feature_ema"
    # A traced beta may be 0.
    has_local_direction = checks.is_concrete(beta) and not checks.is_known_zero(beta)
    if feature_calibration and not averages_features and has_local_direction:
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
            raise UsageError(
                "model", ..., f"its head holds {shapes}, must be one linear classifier"
            )

    def rows(classifier: Array, global_direction: Array, local_direction: Array) -> Array:
        """q of one batch, without the parts that are switched off; [K, D]."""
        divided = rows_over_norms(classifier, gamma) if parameter_calibration else classifier
        if not feature_calibration:
            return divided
        return without(divided, global_direction, local_direction, alpha=alpha, beta=beta)

    def global_direction_of(head: Tree, side: Tree) -> Array:
        return direction_of(side if averages_features else _kernel(head).T)

    def gradient_from(visit: Visit) -> LocalGradFn:
        received = visit.message.variables
        global_direction = global_direction_of(received.params.head, visit.message.side)
        kernel = _kernel(received.params.head)

        def local_direction_of(at: Local) -> Array:
            trace = _momentum(at.opt_state)
            if averages_features:
                direction = direction_of(at.carry.features)
            elif trace is None:  # NaN where a traced beta is not 0, as nothing else can refuse it
                return jnp.full_like(global_direction, jnp.where(beta == 0, 0, jnp.nan))
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

        return grad_fn

    def start(visit: Visit) -> Local:
        received = visit.message.variables
        kernel = _kernel(received.params.head)
        mean = jnp.zeros_like(kernel[:, 0]) if averages_features else ()
        nothing = _History(jnp.zeros_like(kernel.T), jnp.zeros(()), mean)
        return work.init(received)._replace(carry=nothing)

    side = None
    if averages_features:
        weight = aggregators.weight_of(weighting)
        side = averaging.SideState(
            init=lambda setup: jnp.zeros_like(_kernel(setup.variables.params.head)[:, 0]),
            send=lambda mean: mean,
            upload=lambda visit, trained: (trained.local.carry.features, ()),
            aggregate=aggregators.combine(
                (aggregators.mean(weight), aggregators.weight_sum(weight))
            ),
            update=lambda old, new, delta: jnp.where(new[1] > 0, new[0], old),
        )
    training = averaging.averaging(
        model,
        local.seeing_local(work),
        gradient_from,
        server_optimizer=server_optimizer,
        weighting=weighting,
        start=start,
        side=side,
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

    return training._replace(init_server=init_server, predict=predict, own_outputs=True)
