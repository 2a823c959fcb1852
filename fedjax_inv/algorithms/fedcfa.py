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
and we chose, as in the authors' release: scores are signed (with `scores` "magnitude" the least are
those near 0, the plain reading of factors that hardly matter), F and F_g are constants in the two
counterfactual terms, and averages form a pool. Our own choices: the head computes scores in
evaluation mode, which scores each example by itself; BatchNorm's statistics are those of real
examples alone, whatever the weights (with `statistics` "all" those of all passes, as in the
release); and each kind of features is normalised by its own batch. The counterfactual terms are off
while there are no averages, in the first round, and the correlation is off for fewer than three
real examples.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, keys, mean_examples, objectives, permutation, tree, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.mean_examples import chunk_means as chunk_means
from fedjax_inv.types import Array, Tree

FACTS = types.Facts(needs_classes=True)
# Added to variances. A factor with a standard deviation below 1e-4 counts as constant, as the
# gradient of its correlation grows with the inverse of the deviation.
_EPSILON = 1e-8


def factor_scores(decode_true_logit: Callable[[Array], Array], factors: Array) -> Array:
    """Return the derivative of the true class's logit by each factor, [B, F].

    It is averaged over positions and signed, as in the release.

    Args:
      decode_true_logit: factors [B, ..., F] -> logits [B], each example by itself.
      factors: [B, ..., F].
    """
    chex.assert_type(factors, float)
    gradient = jax.grad(lambda factors: decode_true_logit(factors).sum())(factors)
    return averaging.embedding(gradient)


def default_top_k(num_factors: int) -> int:
    """Return three eighths of the factors, at least 1; 24 of 64 are best in the paper's Table 5."""
    return max(3 * num_factors // 8, 1)


def split_factors(scores: Array, top_k: int) -> tuple[Array, Array]:
    """Return (the lowest top_k factors of each row, the highest), bool [B, F] each.

    Exactly top_k of a row are true, and for top_k <= F / 2 no factor is true in both: among equal
    scores the left one counts as lower.

    Args:
      scores: [B, F].
      top_k: how many factors, in 0..F.
    """
    rank = permutation.ranks(scores)
    return rank < top_k, rank >= scores.shape[1] - top_k


def replaced(factors: Array, average: Array, which: Array) -> Array:
    """Return factors [B, ..., F] with those of `which` [B, F] replaced by `average` (Eq. 6, 7)."""
    chex.assert_equal_shape([factors, average])
    chex.assert_shape(which, (factors.shape[0], factors.shape[-1]))
    which = which.reshape(which.shape[0], *(1,) * (factors.ndim - 2), which.shape[1])
    return jnp.where(which, average, factors)


def counterfactual_labels(labels: Array, average: Array, top_k: int, num_factors: int) -> Array:
    """Return (top_k / F) average + (1 - top_k / F) labels (Eq. 8), [B, K].

    Args:
      labels: one-hot labels [B, K].
      average: labels of the averages [B, K].
      top_k: how many factors are replaced.
      num_factors: F.
    """
    chex.assert_equal_shape([labels, average])
    share = top_k / num_factors
    return share * average + (1 - share) * labels


@jax.custom_jvp
def _absolute_products(units: Array) -> Array:
    """Return the sum of |units^T units| [] of units [B, F]."""
    return jnp.abs(jnp.matmul(units.T, units, precision="highest")).sum()


@_absolute_products.defjvp
def _of_change(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The products are symmetric, so one matmul is enough where the derivative of each has two."""
    (units,), (change,) = primals, tangents
    products = jnp.matmul(units.T, units, precision="highest")
    slope = jnp.matmul(units, jnp.sign(products), precision="highest")
    return jnp.abs(products).sum(), 2 * (slope * change).sum()


def factor_decorrelation(factors: Array, mask: Array) -> Array:
    """Return the mean of |Pearson's r| over pairs of factors (Eq. 10, 11), [].

    A factor with a standard deviation below about 1e-3 correlates less than it should, and a
    constant one with none.

    Args:
      factors: [B, F].
      mask: [B] bool, which examples are real. With fewer than three the result is 0, as any two
        examples correlate.
    """
    chex.assert_rank(factors, 2)
    chex.assert_shape(mask, factors.shape[:1])
    num_factors, count = factors.shape[1], mask.sum()
    real, factors = mask[:, None], tree.wide(factors)
    number = jnp.maximum(count, 1).astype(factors.dtype)
    factors = jnp.where(real, factors, 0)
    centred = jnp.where(real, factors - factors.sum(0) / number, 0)
    scale = jax.lax.rsqrt((centred**2).sum(0) / number + _EPSILON)
    units = centred * scale
    # All pairs, less a factor with itself, whose product is positive.
    twice = (_absolute_products(units) - (units**2).sum()) / number
    return jnp.where(count >= 3, twice / max(num_factors * (num_factors - 1), 1), 0)


def local_loss(
    decode: Callable[[Array], Array],
    factors: Array,
    labels: Array,
    mask: Array,
    average: Array,
    average_labels: Array,
    scores: Array,
    *,
    top_k: int,
    positive_weight: float | Array = 5.0,
    negative_weight: float | Array = 5.0,
    decorrelation_weight: float | Array = 0.1,
    detach: bool = True,
) -> Array:
    """Return a client's objective on a batch (Eq. 12), [].

    Args:
      decode: factors -> logits [B, K], by the head that is trained.
      factors: F, [B, ..., F].
      labels: [B] int.
      mask: [B] bool, which examples are real.
      average: factors of the averages, [B, ..., F].
      average_labels: their labels [B, K].
      scores: `factor_scores` by the head at the start of the round, [B, F].
      top_k: how many factors are replaced.
      positive_weight: as in `fedcfa`, also the next three.
    """
    which, one_hot = split_factors(scores, top_k), jax.nn.one_hot(labels, average_labels.shape[1])
    mixed = counterfactual_labels(one_hot, average_labels, top_k, scores.shape[1])
    fixed = jax.lax.stop_gradient((factors, average)) if detach else (factors, average)

    def counterfactual(which: Array, soft: Array) -> Array:
        return objectives.soft_cross_entropy(decode(replaced(*fixed, which)), soft, mask)

    total = objectives.cross_entropy(decode(factors), labels, mask)
    total += positive_weight * counterfactual(which[0], one_hot)
    total += negative_weight * counterfactual(which[1], mixed)
    correlation = factor_decorrelation(averaging.embedding(factors), mask)
    return total + decorrelation_weight * correlation


class _Settings(NamedTuple):
    """The arguments of `fedcfa` for a local step."""

    top_k: int | None
    scores: str
    swaps: dict[str, float | Array]  # by kind of counterfactuals its weight; none is known to be 0
    decorrelation_weight: float | Array
    detach: bool
    statistics: str


def _gradient(model: types.Model, chosen: _Settings, visit: types.Visit) -> types.GradFn:
    """The gradient of a client's local steps."""

    def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
        body_key, head_key = jax.random.split(key)
        mask, stats = batch.mask, variables.stats

        def objective(params: types.Halves) -> tuple[Array, tuple[types.Halves, types.Metrics]]:
            factors, body = model.encode(params.body, stats.body, batch.x, mask, True, body_key)
            logits, head = model.decode(params.head, stats.head, factors, mask, True, head_key)
            total = objectives.cross_entropy(logits, batch.y, mask)
            metrics = {"loss": total}
            moved = types.Halves(body, head)
            if chosen.swaps:
                losses, moved = _counterfactual_losses(
                    model,
                    chosen,
                    visit,
                    params,
                    moved,
                    batch,
                    factors,
                    keys.stream(key, "counterfactuals"),
                )
                total += sum(weight * losses[name] for name, weight in chosen.swaps.items())
                metrics |= {f"{name}_loss": value for name, value in losses.items()}
            if not checks.is_known_zero(chosen.decorrelation_weight):
                correlation = factor_decorrelation(averaging.embedding(factors), mask)
                total += chosen.decorrelation_weight * correlation
                metrics["correlation"] = correlation
            return total, (moved, metrics)

        grads, (moved, metrics) = jax.grad(objective, has_aux=True)(variables.params)
        return types.Step(grads, moved, metrics)

    return grad_fn


def _counterfactual_losses(
    model: types.Model,
    chosen: _Settings,
    visit: types.Visit,
    params: types.Halves,
    stats: types.Halves,
    batch: types.Batch,
    factors: Array,
    key: Array,
) -> tuple[types.Metrics, types.Halves]:
    """The mean loss of the head on each kind of counterfactuals, and new statistics.

    Without averages the losses are 0 and the statistics stay.

    stats: behind the batch. factors: [B, ..., F] of the batch.
    """
    draw_key, body_key, *head_keys = jax.random.split(key, 2 + len(chosen.swaps))
    average_x, average_y = mean_examples.draw(visit.message.side, draw_key, len(batch.mask))
    average, body = model.encode(params.body, stats.body, average_x, batch.mask, True, body_key)
    by_kind = _replacements(model, chosen, visit, batch, factors, average_y)
    kinds = [by_kind[name] for name in chosen.swaps]
    if chosen.detach:
        factors, average = jax.lax.stop_gradient((factors, average))
    some = visit.message.side.real.any()

    def loss(which: Array, labels: Array, key: Array, head: Tree) -> tuple[Array, Tree]:
        # Without averages replace nothing, or the 0 would hide a NaN.
        counterfactual = replaced(factors, average, which & some)
        logits, head = model.decode(params.head, head, counterfactual, batch.mask, True, key)
        return objectives.soft_cross_entropy(logits, labels, batch.mask), head

    if chosen.statistics == "all":
        moved, values = types.Halves(body, stats.head), []
        for kind, head_key in zip(kinds, head_keys, strict=True):
            value, head = loss(*kind, head_key, moved.head)
            moved = moved._replace(head=head)
            values.append(value)
        losses = jnp.stack(values)
        stats = jax.tree.map(partial(jnp.where, some), moved, stats)
    else:
        which, soft = (jnp.stack(parts) for parts in zip(*kinds, strict=True))
        of_each = jax.vmap(loss, (0, 0, 0, None))  # both in one pass of the head
        losses, _ = of_each(which, soft, jnp.stack(head_keys), stats.head)
    return dict(zip(chosen.swaps, jnp.where(some, losses, 0), strict=True)), stats


def _replacements(
    model: types.Model,
    chosen: _Settings,
    visit: types.Visit,
    batch: types.Batch,
    factors: Array,
    average_y: Array,
) -> dict[str, tuple[Array, Array]]:
    """By kind of counterfactuals the factors to replace [B, F] and the labels [B, K]."""
    params, stats = visit.message.variables

    def true_logit(factors: Array) -> Array:
        logits, _ = model.decode(params.head, stats.head, factors, batch.mask, False)
        # By mask, as the gradient of an index is a scatter.
        is_true = batch.y[:, None] == jnp.arange(logits.shape[1])
        return jnp.where(is_true, logits, 0).sum(1)

    scores = factor_scores(true_logit, jax.lax.stop_gradient(factors))
    if chosen.scores == "magnitude":
        scores = jnp.abs(scores)
    num_factors = scores.shape[1]
    num_replaced = default_top_k(num_factors) if chosen.top_k is None else chosen.top_k
    low, high = split_factors(scores, num_replaced)
    labels = jax.nn.one_hot(batch.y, average_y.shape[1])
    mixed = counterfactual_labels(labels, average_y, num_replaced, num_factors)
    return {"positive": (low, labels), "negative": (high, mixed)}


def fedcfa(
    model: types.Model,
    work: types.Work,
    *,
    top_k: int | None = None,
    scores: str = "signed",
    positive_weight: float | Array = 5.0,
    negative_weight: float | Array = 5.0,
    decorrelation_weight: float | Array = 0.1,
    detach: bool = True,
    statistics: str = "examples",
    combining: str = "pool",
    rows: int = 16,
    chunk: int = 128,
    mixable: Callable[[Tree], Tree] = mean_examples.as_numbers,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return FedCFA; the factors are the outputs of the model's body.

    With all three weights at 0 this is FedAvg; a term of weight 0 is not computed. Each term is
    reported without its weight, averaged over local steps.

    Args:
      top_k: how many of the factors are replaced; None for three eighths of them, at least 1.
      scores: what ranks factors, the gradients as they are, "signed" (as in the release: the lowest
        speak against the true class most), or their "magnitude".
      positive_weight: weight of the counterfactuals that keep their label.
      negative_weight: weight of the counterfactuals whose label changes.
      decorrelation_weight: weight of the mean correlation of factors.
      detach: whether the counterfactual terms train the head alone, as in the release.
      statistics: what moves the running statistics of normalisation layers: "examples", the real
        batch alone, or "all", as in the release: behind the batch also the averages in the body,
        then the positive and the negative counterfactuals in the head.
      combining: how the server combines averages, "pool" (as in the release) or "paper"; see
        `mean_examples.side_state`, also for the next three.
      rows: the most averages that a client sends, the paper's B.
      chunk: examples in a row of a "pool".
      mixable: preprocessed inputs -> the inputs to average, which the model must accept; needed for
        inputs that are neither 8-bit images nor in floating point.
    """
    checks.one_of("scores", scores, ("signed", "magnitude"))
    checks.one_of("statistics", statistics, ("examples", "all"))
    weights = {"positive": positive_weight, "negative": negative_weight}
    for name, weight in (*weights.items(), ("decorrelation", decorrelation_weight)):
        checks.real(f"{name}_weight", weight)
    swaps = {name: weight for name, weight in weights.items() if not checks.is_known_zero(weight)}
    chosen = _Settings(top_k, scores, swaps, decorrelation_weight, detach, statistics)
    side = mean_examples.side_state(
        model, combining=combining, rows=rows, chunk=chunk, mixable=mixable
    )
    training = averaging.averaging(
        model,
        work,
        partial(_gradient, model, chosen),
        server_optimizer=server_optimizer,
        weighting=weighting,
        side=side if swaps else None,
    )

    def init_server(setup: types.Setup) -> Tree:
        if top_k is not None:
            factors, _ = averaging.output_shapes(model, setup)
            checks.integer("top_k", top_k, 0, factors.shape[-1])
        return training.init_server(setup)

    return training._replace(init_server=init_server)
