"""FedCFA: FedAvg whose clients also train on counterfactual features, made with average data.

    minimise  CE(f(x), y) + negative_weight CE(d(F_neg), y_neg) + positive_weight CE(d(F_pos), y)
              + decorrelation_weight mean over j < j' of |corr(F_j, F_j')|
    F = e(x), the body's outputs; F_pos, F_neg: F with the top_k factors of lowest, highest score
        replaced by those of e(x_g); y_neg = (top_k / |F|) y_g + (1 - top_k / |F|) y

(x_g, y_g) is a random row of averages that the clients of the last round sent. A factor is a unit,
or a channel with all of its positions (the last axis of F). Its score is the gradient of the true
class's logit through the head at the start of the round, averaged over positions.

Jiang et al. 2025, "FedCFA: Alleviating Simpson's Paradox in Model Aggregation with Counterfactual
Federated Learning" (AAAI; arXiv 2412.18904), Algorithm 1 and Eq. 3 to 12. The paper leaves open,
and we chose, as in the authors' release: scores are signed, F and F_g are constants in the two
counterfactual terms, and averages form a pool. Our own choices: the head computes scores in
evaluation mode, which scores each example by itself; BatchNorm's statistics are those of real
examples alone, whatever the weights (with `statistics` "all" those of all passes, as in the
release); and each kind of features is normalised by its own batch. The counterfactual terms are off
while there are no averages, in the first round, and the correlation is off for fewer than three
real examples.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averages, averaging, checks, objectives, platforms, tree
from fedjax_inv.aggregators import Weight
from fedjax_inv.averages import chunk_means as chunk_means
from fedjax_inv.checks import UsageError
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Facts,
    GradFn,
    Halves,
    Metrics,
    Model,
    Setup,
    Step,
    Tree,
    Variables,
    Visit,
    Work,
)

_WEIGHTS = "positive_weight", "negative_weight"
FACTS = Facts(needs_classes=True)

STATISTICS = ("examples", "all")

# Added to variances. A factor with a standard deviation below 1e-4 counts as constant, as the
# gradient of its correlation grows with the inverse of the deviation.
_EPSILON = 1e-8


def factor_scores(decode_true_logit: Callable[[Array], Array], factors: Array) -> Array:
    """Return the derivative of the true class's logit by each factor, [B, F].

    It is averaged over positions and signed, as in the release.

    Args:
      decode_true_logit: factors [B, ..., F] -> logits [B], each example by itself.
      factors: [B, ..., F].

    Raises:
      UsageError: for other outputs of the function, and for factors that are not [B, ..., F] in
        floating point.
    """
    checks.function("decode_true_logit", decode_true_logit, "factors")
    checks.array("factors", factors)
    if factors.ndim < 2 or not jnp.issubdtype(factors.dtype, jnp.floating):
        raise UsageError("factors", factors, "must be [B, ..., F] in floating point")
    if jax.eval_shape(decode_true_logit, factors).shape != jnp.shape(factors)[:1]:
        found = jax.eval_shape(decode_true_logit, factors).shape
        raise UsageError("decode_true_logit", ..., f"returns {found}, must return logits [B]")
    gradient = jax.grad(lambda factors: decode_true_logit(factors).sum())(factors)
    return averaging.embedding(gradient)


def default_top_k(num_factors: int) -> int:
    """Return three eighths of the factors, at least 1; 24 of 64 are best in the paper's Table 5."""
    checks.integer("num_factors", num_factors, 1)
    return max(3 * num_factors // 8, 1)


def _as_integers(numbers: Array) -> Array:
    """Integers in the order of floating-point numbers, and equal where they are, as -0 and 0."""
    numbers = tree.wide(jnp.asarray(numbers))  # NumPy's float64 would name another integer
    integer = jnp.dtype(f"int{8 * numbers.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(jnp.where(numbers == 0, 0, numbers), integer)
    # Of negative numbers larger bits mean smaller numbers.
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)


def split_factors(scores: Array, top_k: int) -> tuple[Array, Array]:
    """Return (the lowest top_k factors of each row, the highest), bool [B, F] each.

    Exactly top_k of a row are true, and for top_k <= F / 2 no factor is true in both: among equal
    scores the left one counts as lower.

    Args:
      scores: [B, F].
      top_k: how many factors, in 0..F.

    Raises:
      UsageError: for scores of another rank, and another top_k.
    """
    checks.array("scores", scores)
    if jnp.ndim(scores) != 2:
        raise UsageError("scores", scores, "must be [B, F]")
    checks.integer("top_k", top_k, 0, scores.shape[1], ", as many as there are factors")

    index = jnp.arange(scores.shape[1])
    if platforms.on_cpu():  # 4 to 15 times as fast as two of XLA's top_k, of 64 to 390 factors
        order = _as_integers(scores)

        def count(rank: Array, at: Array) -> tuple[Array, None]:
            other = jax.lax.dynamic_slice_in_dim(order, at, 1, axis=1)
            return rank + (other < order + (at < index)), None  # an equal one to the left, too

        rank, _ = jax.lax.scan(count, jnp.zeros(scores.shape, jnp.int32), index, unroll=8)
    else:
        one, other = scores[:, :, None], scores[:, None, :]
        rank = ((other < one) | ((other == one) & (index < index[:, None]))).sum(-1)
    return rank < top_k, rank >= scores.shape[1] - top_k


def replaced(factors: Array, average: Array, which: Array) -> Array:
    """Return factors with some of them replaced (Eq. 6, 7), [B, ..., F].

    Args:
      factors: [B, ..., F].
      average: the factors that replace them [B, ..., F].
      which: [B, F] bool, the factors to replace.

    Raises:
      UsageError: for other shapes, and if `which` is not of booleans.
    """
    for name, each in (("factors", factors), ("average", average), ("which", which)):
        checks.array(name, each)
    if factors.ndim < 2:
        raise UsageError("factors", factors, "must be [B, ..., F]")
    checks.same_shapes(factors=factors, average=average)
    if which.shape != (factors.shape[0], factors.shape[-1]) or which.dtype != bool:
        text = f"must be bool [{factors.shape[0]}, {factors.shape[-1]}]"
        raise UsageError("which", which, text)
    which = which.reshape(which.shape[0], *(1,) * (factors.ndim - 2), which.shape[1])
    return jnp.where(which, average, factors)


def counterfactual_labels(labels: Array, average: Array, top_k: int, num_factors: int) -> Array:
    """Return (top_k / F) average + (1 - top_k / F) labels (Eq. 8), [B, K].

    Args:
      labels: one-hot labels [B, K].
      average: labels of the averages [B, K].
      top_k: how many factors are replaced.
      num_factors: F.

    Raises:
      UsageError: for counts out of range, and for other shapes.
    """
    checks.array("labels", labels)
    checks.array("average", average)
    checks.same_shapes(labels=labels, average=average)
    if labels.ndim != 2:
        raise UsageError("labels", labels, "must be [B, K]")
    checks.integer("num_factors", num_factors)
    checks.integer("top_k", top_k, 0, num_factors)
    share = top_k / num_factors
    return share * average + (1 - share) * labels


def factor_decorrelation(factors: Array, mask: Array) -> Array:
    """Return the mean of |Pearson's r| over pairs of factors (Eq. 10, 11), [].

    A factor with a standard deviation below about 1e-3 correlates less than it should, and a
    constant one with none.

    Args:
      factors: [B, F].
      mask: [B] bool, which examples are real. With fewer than three the result is 0, as any two
        examples correlate.

    Raises:
      UsageError: for other shapes, and if the mask is not of booleans.
    """
    checks.array("factors", factors)
    checks.array("mask", mask)
    if factors.ndim != 2:
        raise UsageError("factors", factors, "must be [B, F]")
    if mask.shape != factors.shape[:1] or mask.dtype != bool:
        raise UsageError("mask", mask, f"must be bool [{len(factors)}]")
    num_factors, count = factors.shape[1], mask.sum()
    real, factors = mask[:, None], tree.wide(factors)
    number = jnp.maximum(count, 1).astype(factors.dtype)
    factors = jnp.where(real, factors, 0)
    centred = jnp.where(real, factors - factors.sum(0) / number, 0)
    scale = jax.lax.rsqrt((centred**2).sum(0) / number + _EPSILON)
    units = centred * scale
    correlation = jnp.matmul(units.T, units, precision="highest") / number
    pairs = jnp.triu(jnp.abs(correlation), 1).sum() / max(num_factors * (num_factors - 1) // 2, 1)
    return jnp.where(count >= 3, pairs, 0)


def fedcfa(
    model: Model,
    work: Work,
    *,
    top_k: int | None = None,
    positive_weight: float | Array = 5.0,
    negative_weight: float | Array = 5.0,
    decorrelation_weight: float | Array = 0.1,
    detach: bool = True,
    statistics: str = "examples",
    combining: str = "pool",
    rows: int = 16,
    chunk: int = 128,
    mixable: Callable[[Tree], Tree] = averages.as_numbers,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> Algorithm:
    """Return FedCFA; the factors are the outputs of the model's body.

    With all three weights at 0 this is FedAvg; a term of weight 0 is not computed. Each term is
    reported without its weight, averaged over local steps.

    Args:
      model: the network.
      work: local training.
      top_k: how many of the factors are replaced; None for three eighths of them, at least 1.
      positive_weight: weight of the counterfactuals that keep their label.
      negative_weight: weight of the counterfactuals whose label changes.
      decorrelation_weight: weight of the mean correlation of factors.
      detach: whether the counterfactual terms train the head alone, as in the release.
      statistics: what moves the running statistics of normalisation layers: "examples", the real
        batch alone, or "all", as in the release: behind the batch also the averages in the body,
        then the positive and the negative counterfactuals in the head.
      combining: how the server combines averages, "pool" (as in the release) or "paper"; see
        `averages.exchanged`, also for the next three.
      rows: the most averages that a client sends, the paper's B.
      chunk: examples in a row of a "pool".
      mixable: preprocessed inputs -> the inputs to average, which the model must accept; needed for
        inputs that are neither 8-bit images nor in floating point.
      server_optimizer: the server's optimizer, on the mean delta.
      weighting: weights of clients, "size" or "uniform"; in Python also a function of `Slots`.

    Raises:
      UsageError: for values out of range; before the first round for a top_k above the number of
        factors, and for inputs that cannot be averaged.
    """
    checks.boolean("detach", detach)
    checks.one_of("statistics", statistics, STATISTICS)
    if top_k is not None:
        checks.integer("top_k", top_k, 0)
    weights = {"positive": positive_weight, "negative": negative_weight}
    for name, weight in (*weights.items(), ("decorrelation", decorrelation_weight)):
        checks.real(f"{name}_weight", weight)
    swaps = {name: weight for name, weight in weights.items() if not checks.is_known_zero(weight)}
    side = averages.exchanged(model, combining=combining, rows=rows, chunk=chunk, mixable=mixable)

    def check_factors(setup: Setup) -> None:
        params, stats = setup.variables

        def encoded(x: Tree) -> Array:
            return model.encode(params.body, stats.body, x, jnp.ones(1, bool), False)[0]

        factors = jax.eval_shape(encoded, setup.sample)
        if getattr(factors, "ndim", 0) < 2:
            found = jax.tree.map(jnp.shape, factors)
            raise UsageError(
                "model", ..., f"its body puts out {found}, must put out factors [B, ..., F]"
            )
        if top_k is not None:
            checks.integer(
                "top_k", top_k, 0, factors.shape[-1], ", as many as the body has factors"
            )

    def counterfactual_losses(
        visit: Visit, params: Halves, stats: Halves, batch: Batch, factors: Array, key: Array
    ) -> tuple[Metrics, Halves]:
        """Return (the mean loss of the head on each kind of counterfactuals, new statistics).

        Without averages the losses are 0 and the statistics stay.

        stats: behind the batch. factors: [B, ..., F] of the batch.
        """
        received, pool = visit.message.variables, visit.message.side
        draw_key, body_key, *head_keys = jax.random.split(key, 2 + len(swaps))
        average_x, average_y = averages.draw(pool, draw_key, len(batch.mask))
        average, body = model.encode(params.body, stats.body, average_x, batch.mask, True, body_key)

        def true_logit(factors: Array) -> Array:
            logits, _ = model.decode(
                received.params.head, received.stats.head, factors, batch.mask, False
            )
            # By mask, as the gradient of an index is a scatter.
            is_true = batch.y[:, None] == jnp.arange(logits.shape[1])
            return jnp.where(is_true, logits, 0).sum(1)

        scores = factor_scores(true_logit, jax.lax.stop_gradient(factors))
        num_factors = scores.shape[1]
        num_replaced = default_top_k(num_factors) if top_k is None else top_k
        low, high = split_factors(scores, num_replaced)
        labels = jax.nn.one_hot(batch.y, average_y.shape[1])
        mixed = counterfactual_labels(labels, average_y, num_replaced, num_factors)
        kinds = {"positive": (low, labels), "negative": (high, mixed)}
        if detach:
            factors, average = jax.lax.stop_gradient((factors, average))

        some = pool.real.any()

        def loss(which: Array, labels: Array, key: Array, head: Tree) -> tuple[Array, Tree]:
            # Without averages replace nothing, or the 0 would hide a NaN.
            counterfactual = replaced(factors, average, which & some)
            logits, head = model.decode(params.head, head, counterfactual, batch.mask, True, key)
            return objectives.soft_cross_entropy(logits, labels, batch.mask), head

        if statistics == "all":
            moved, values = Halves(body, stats.head), []
            for name, head_key in zip(swaps, head_keys, strict=True):
                value, head = loss(*kinds[name], head_key, moved.head)
                moved = moved._replace(head=head)
                values.append(value)
            losses = jnp.stack(values)
            stats = jax.tree.map(partial(jnp.where, some), moved, stats)
        else:
            which, soft = (jnp.stack(parts) for parts in zip(*map(kinds.get, swaps), strict=True))
            of_each = jax.vmap(loss, (0, 0, 0, None))  # both in one pass of the head
            losses, _ = of_each(which, soft, jnp.stack(head_keys), stats.head)
        return dict(zip(swaps, jnp.where(some, losses, 0), strict=True)), stats

    def gradient_from(visit: Visit) -> GradFn:
        def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
            body_key, head_key = jax.random.split(key)
            mask, stats = batch.mask, variables.stats

            def objective(params: Halves) -> tuple[Array, tuple[Halves, Metrics]]:
                factors, body = model.encode(params.body, stats.body, batch.x, mask, True, body_key)
                logits, head = model.decode(params.head, stats.head, factors, mask, True, head_key)
                total = objectives.cross_entropy(logits, batch.y, mask)
                metrics, moved = {"loss": total}, Halves(body, head)
                if swaps:
                    swap_key = jax.random.fold_in(key, 1)
                    losses, moved = counterfactual_losses(
                        visit, params, moved, batch, factors, swap_key
                    )
                    total += sum(swaps[name] * losses[name] for name in swaps)
                    metrics |= {f"{name}_loss": value for name, value in losses.items()}
                if not checks.is_known_zero(decorrelation_weight):
                    correlation = factor_decorrelation(averaging.embedding(factors), mask)
                    total += decorrelation_weight * correlation
                    metrics["correlation"] = correlation
                return total, (moved, metrics)

            grads, (moved, metrics) = jax.grad(objective, has_aux=True)(variables.params)
            return Step(grads, moved, metrics)

        return grad_fn

    training = averaging.averaging(
        model,
        work,
        gradient_from,
        server_optimizer=server_optimizer,
        weighting=weighting,
        side=side if swaps else None,
    )

    def init_server(setup: Setup) -> Tree:
        check_factors(setup)
        return training.init_server(setup)

    return training._replace(init_server=init_server)
