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
"Long-Tailed Classification by Keeping the Good and Removing the Bad Momentum Causal Effect", whose
direction, a moving average of features, is `drift_mode` "features". The paper leaves open, and we
chose: how a matrix becomes a direction (the other modes), alpha and beta,
how d_L becomes orthogonal to d_G, and that the classifiers of earlier batches are applied to the
present features. Directions and earlier classifiers are constants for the gradient. The weights
p_k of Eq. 16 are those of the uploads that arrived.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, local, objectives, servers, tree, types
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree

_EPSILON = 1e-12  # added to squared norms under a root
_PARALLEL = 1e-4  # the sine below which two directions count as parallel
_SQUARINGS = 10
FACTS = types.Facts(needs_classes=True)  # its logits are bounded, one for each class


def unit(vectors: Array) -> Array:
    """Return vectors [..., D] scaled to length 1, however short; zeros stay, NaN gives NaN."""
    chex.assert_type(vectors, float)
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
    """
    chex.assert_rank(matrix, 2)
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
    start = jnp.cos(jnp.arange(1, 1 + matrix.shape[0], dtype=matrix.dtype))
    return unit(product(unit(product(power, start)), matrix))


# The ways from a matrix [K, D] to a direction [D], or to one direction for each class [K, D].
DIRECTIONS: dict[str, Callable[[Array], Array]] = {
    "svd": leading_direction,
    "row_mean": lambda matrix: unit(matrix.mean(0)),
    "classwise": unit,
}


def orthogonal(direction: Array, to: Array) -> Array:
    """Return the part of unit vectors orthogonal to others, at length 1, [..., D].

    A parallel pair gives zeros, and NaN gives NaN.
    """
    chex.assert_equal_shape_suffix([direction, to], 1)
    rest = direction - (direction * to).sum(-1, keepdims=True) * to
    square = (rest**2).sum(-1, keepdims=True)
    differs = ~(square < _PARALLEL**2)  # also NaN
    return jnp.where(differs, rest, 0) / jnp.sqrt(jnp.where(differs, square, 1))


def rows_over_norms(classifier: Array, gamma: float | Array) -> Array:
    """Return w_c / (||w_c|| + gamma) of each row of a classifier, [K, D]."""
    chex.assert_rank(classifier, 2)
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
      alpha: the share of the global direction to remove.
      beta: the share of the local direction to remove.
    """
    chex.assert_equal_shape_suffix([rows, global_direction, local_direction], 1)

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
    """Return q_c of each row w_c of the classifier (Eq. 34b for one batch), [K, D].

    It is `without` after `rows_over_norms`, whose arguments it takes.
    """
    rows = rows_over_norms(classifier, gamma)
    return without(rows, global_direction, local_direction, alpha=alpha, beta=beta)


def logits(features: Array, calibrated: Array, *, scale: float | Array) -> Array:
    """Return scale h / ||h|| . q_c, [B, K]; 0 for features of 0, which have no gradient.

    Args:
      features: h, [B, D].
      calibrated: q, [K, D].
      scale: the factor of the logits.
    """
    chex.assert_rank([features, calibrated], 2)
    features = tree.wide(features)
    squared = (features**2).sum(-1, keepdims=True)
    # A row of zeros, as of an example of zeros without biases, would have a gradient of 1e6.
    unit = jnp.where(squared > _EPSILON, features, 0) / jnp.sqrt(squared + _EPSILON)
    return scale * unit @ calibrated.T


def local_loss(
    features: Array,
    classifier: Array,
    labels: Array,
    mask: Array,
    global_direction: Array,
    local_direction: Array,
    past: Array,
    num_past: Array | int,
    *,
    alpha: float | Array,
    beta: float | Array,
    gamma: float | Array | None,
    scale: float | Array,
    loss: types.Loss = objectives.cross_entropy,
) -> tuple[Array, Array]:
    """Return (the loss of a local step [], the classifier that the history adds [K, D]) (Eq. 34b).

    Args:
      features: h, [B, D].
      classifier: w, [K, D].
      labels: [B] int.
      mask: [B] bool, which examples are real.
      global_direction: as in `without`.
      local_direction: as in `without`; zeros in the first step.
      past: the sum of the calibrated classifiers of the round's earlier batches, [K, D].
      num_past: how many these are.
      alpha: share of the global direction to remove.
      beta: share of the local direction to remove.
      gamma: constant that is added to norms; None: rows keep their norms.
      scale: the factor of the logits.
      loss: of logits, labels and mask.
    """
    rows = classifier if gamma is None else rows_over_norms(classifier, gamma)
    now = without(rows, global_direction, local_direction, alpha=alpha, beta=beta)
    z = logits(features, (past + now) / (num_past + 1), scale=scale)
    return loss(z, labels, mask), now


class _History(NamedTuple):
    """A client's state from batch to batch of a round."""

    total: Array  # [K, D] sum of the past batches' calibrated classifiers
    num_batches: Array  # []
    features: Tree = ()  # [D] moving average of the features, where they make the directions


def _kernel(head: Tree) -> Array:
    """The classifier's matrix [D, K] in a head, or in a tree of its structure."""
    return next(leaf for leaf in jax.tree.leaves(head) if leaf.ndim == 2)


def _embedding(features: Array, width: int) -> Array:
    """Features [B, ...] as the classifier's inputs [B, D]: flattened or averaged over positions."""
    flat = features.reshape(features.shape[0], -1)
    return flat if flat.shape[1] == width else averaging.embedding(features)


class _Settings(NamedTuple):
    """The arguments of `cafe`, and what follows from them alone."""

    alpha: float | Array
    beta: float | Array
    gamma: float | Array
    scale: float | Array
    drift_mode: str
    feature_decay: float | Array
    orthogonal_directions: bool
    parameter_calibration: bool
    history_average: bool

    @property
    def by_features(self) -> bool:
        return self.drift_mode == "features"

    @property
    def shares(self) -> dict[str, Any]:
        """Arguments of `local_loss`."""
        gamma = self.gamma if self.parameter_calibration else None
        return {"alpha": self.alpha, "beta": self.beta, "gamma": gamma, "scale": self.scale}

    def direction(self, head: Tree) -> Array:
        return DIRECTIONS[self.drift_mode](_kernel(head).T)

    def global_direction(self, head: Tree, mean_features: Tree) -> Array:
        return unit(mean_features) if self.by_features else self.direction(head)

    def local_direction(self, at: types.Local, global_direction: Array) -> Array:
        trace: types.Halves | None = optax.tree.get(at.opt_state, "trace")  # the momentum of sgd
        if self.by_features:
            direction = unit(at.carry.features)
        elif trace is None:  # NaN where a traced beta is not 0, as nothing else can refuse it
            return jnp.full_like(global_direction, jnp.where(self.beta == 0, 0, jnp.nan))
        else:
            direction = self.direction(trace.head)
        return orthogonal(direction, global_direction) if self.orthogonal_directions else direction


def _gradient(
    model: types.Model, loss: types.Loss, chosen: _Settings, global_direction: Array
) -> types.LocalGradFn:
    """The gradient of a client's local steps."""

    def grad_fn(at: types.Local, batch: types.Batch, key: Array) -> types.Step:
        (params, stats), history, mask = at.variables, at.carry, batch.mask
        body_key, _ = jax.random.split(key)  # as `models.apply` does
        local_direction = chosen.local_direction(at, global_direction)
        past, number = history.total, history.num_batches
        if not chosen.history_average:
            past = jnp.zeros_like(past)
            number = jnp.zeros_like(number)

        def risk(params: types.Halves) -> tuple[Array, tuple[types.Halves, Array, Array]]:
            features, body = model.encode(params.body, stats.body, batch.x, mask, True, body_key)
            kernel = _kernel(params.head)
            features = _embedding(features, kernel.shape[0])
            directions = global_direction, local_direction
            value, now = local_loss(
                features,
                kernel.T,
                batch.y,
                mask,
                *directions,
                past,
                number,
                loss=loss,
                **chosen.shares,
            )
            return value, (types.Halves(body, stats.head), now, features)

        (value, (after, now, features)), grads = jax.value_and_grad(risk, has_aux=True)(params)
        carry = _History(history.total + now, history.num_batches + 1)
        if chosen.by_features:
            new = jax.vmap(objectives.masked_mean, (1, None))(features, mask)
            decay = chosen.feature_decay
            carry = carry._replace(features=decay * history.features + (1 - decay) * new)
        return types.Step(grads, after, {"loss": value}, carry=carry)

    return grad_fn


def _mean_features(weighting: str | aggregators.Weight) -> averaging.SideState:
    """The mean of the clients' features, which the server sends beside the network."""
    weight = aggregators.weight_of(weighting)
    return averaging.SideState(
        init=lambda setup: jnp.zeros_like(_kernel(setup.variables.params.head)[:, 0]),
        send=lambda mean: mean,
        upload=lambda visit, trained: (trained.local.carry.features, ()),
        aggregate=aggregators.combine((aggregators.mean(weight), aggregators.weight_sum(weight))),
        update=lambda old, new, delta: jnp.where(new[1] > 0, new[0], old),
    )


def _check(work: types.Work, chosen: _Settings) -> None:
    """Raise UsageError for wrong settings, and for local training without the momentum needed."""
    for name in ("alpha", "beta", "gamma", "scale"):
        checks.real(name, getattr(chosen, name))
    checks.real("feature_decay", chosen.feature_decay, 0, 1)
    checks.one_of("drift_mode", chosen.drift_mode, (*DIRECTIONS, "features"))
    if chosen.by_features:
        return
    # A traced beta may be 0.
    if checks.is_concrete(chosen.beta) and not checks.is_known_zero(chosen.beta):
        some = types.Variables(types.Halves(jnp.zeros(1), jnp.zeros(1)), types.Halves((), ()))
        if optax.tree.get(jax.eval_shape(work.init, some).opt_state, "trace") is None:
            text = "must be sgd with momentum above 0, or {beta}"
            raise UsageError("optimizer", ..., text, beta=("beta", 0))


def cafe(
    model: types.Model,
    work: types.Work,
    *,
    alpha: float | Array = 0.2,
    beta: float | Array = 0.2,
    gamma: float | Array = 1 / 32,
    scale: float | Array = 16.0,
    drift_mode: str = "svd",
    feature_decay: float | Array = 0.9,
    orthogonal_directions: bool = True,
    feature_calibration: bool = True,
    parameter_calibration: bool = True,
    history_average: bool = True,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "size",
) -> types.Algorithm:
    """Return CAFE; the model's head must be one linear classifier, whose bias is not used.

    The clients' optimizer must be sgd with momentum, unless beta is 0, drift_mode "features" or
    feature_calibration False; without it a traced beta above 0 gives NaN. The paper has momentum
    0.9, reset in each round, and momentum on the server (`server_optimizer`), too.

    Args:
      alpha: share of the global direction that is removed.
      beta: share of the local direction that is removed.
      gamma: constant that is added to the classifier's norms.
      scale: factor of the logits; with parameter_calibration also their bound for alpha and beta
        of at most 1.
      drift_mode: how a matrix becomes a direction: "svd", its leading right-singular vector;
        "row_mean", the mean of its rows (with parameter_calibration, as the rows of a linear
        softmax's gradient sum to 0); "classwise", for each class its own row, which in serving only
        scales the logits; or "features", in place of a matrix a moving average of the features, as
        in Tang et al. 2020, whose mean over clients is sent beside the network.
      feature_decay: decay of that average from batch to batch, below 1. It starts at 0 in each
        round, so that a client of few batches sends a shorter one.
      orthogonal_directions: whether the local direction is made orthogonal to the global one.
      feature_calibration: whether the directions are removed; if not, alpha and beta are 0.
      parameter_calibration: whether the classifier's rows are divided by their norms.
      history_average: whether classifiers are averaged over the batches of the round; if not, the
        present batch's is taken alone.
    """
    if not feature_calibration:
        alpha = beta = 0.0
    switches = orthogonal_directions, parameter_calibration, history_average
    chosen = _Settings(alpha, beta, gamma, scale, drift_mode, feature_decay, *switches)
    _check(work, chosen)

    def gradient_from(visit: types.Visit) -> types.LocalGradFn:
        head = visit.message.variables.params.head
        direction = chosen.global_direction(head, visit.message.side)
        return _gradient(model, loss, chosen, direction)

    def start(visit: types.Visit) -> types.Local:
        kernel = _kernel(visit.message.variables.params.head)
        features = jnp.zeros_like(kernel[:, 0]) if chosen.by_features else ()
        nothing = _History(jnp.zeros_like(kernel.T), jnp.zeros(()), features)
        return work.init(visit.message.variables)._replace(carry=nothing)

    training = averaging.averaging(
        model,
        local.seeing_local(work),
        gradient_from,
        server_optimizer=server_optimizer,
        weighting=weighting,
        start=start,
        side=_mean_features(weighting) if chosen.by_features else None,
    )

    def init_server(setup: types.Setup) -> servers.Server:
        params, stats = setup.variables
        shapes = sorted((leaf.shape for leaf in jax.tree.leaves(params.head)), key=len)
        fits = [*map(len, shapes)] in ([2], [1, 2]) and not jax.tree.leaves(stats.head)
        if not fits or shapes[0][-1:] != shapes[-1][1:]:
            text = f"its head holds {shapes}, must be one linear classifier"
            raise UsageError("model", ..., text)
        return training.init_server(setup)

    def predict(server: servers.Server, own: Tree, x: Tree) -> Array:
        del own
        params, stats = server.variables
        real = jnp.ones(jax.tree.leaves(x)[0].shape[0], bool)
        features, _ = model.encode(params.body, stats.body, x, real, False)
        kernel = _kernel(params.head)
        rows = rows_over_norms(kernel.T, gamma) if parameter_calibration else kernel.T
        direction = chosen.global_direction(params.head, server.side)
        served = without(rows, direction, jnp.zeros_like(direction), alpha=alpha, beta=beta)
        return logits(_embedding(features, kernel.shape[0]), served, scale=scale)

    return training._replace(init_server=init_server, predict=predict, own_outputs=True)
