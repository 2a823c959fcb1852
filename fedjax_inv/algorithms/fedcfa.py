"""FedCFA: FedAvg whose clients also train on counterfactual features, made with average data.

    minimise  CE(f(x), y) + negative_weight CE(d(F_neg), y_neg) + positive_weight CE(d(F_pos), y)
              + decorrelation_weight mean over j < j' of |corr(F_j, F_j')|
    F = e(x), the body's outputs; F_pos, F_neg: F with the top_k factors of lowest, highest score
        replaced by those of e(x_g); y_neg = (top_k / |F|) y_g + (1 - top_k / |F|) y

(x_g, y_g) is a random row of averages that the clients of the last round sent. A factor is a unit,
or a channel with all of its positions (the last axis of F), and its score the gradient of the true
class's logit through the head that the round started with, a mean over positions.

Jiang et al. 2025, "FedCFA: Alleviating Simpson's Paradox in Model Aggregation with Counterfactual
Federated Learning" (AAAI; arXiv 2412.18904), Algorithm 1 and Eq. 3 to 12. Where it is silent: as in
the authors' release, scores are signed, F and F_g are constants in the two counterfactual terms and
averages form a pool. Ours: the head that scores is in evaluation mode, which scores each example by
itself; BatchNorm's statistics are those of real examples alone, whatever the weights, and each kind
of features is normalised by its own batch. Averages that nobody has sent yet, in the first round,
switch the counterfactual terms off, and fewer than three real examples the correlation.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averages, averaging, checks, objectives, platforms
from fedjax_inv.aggregators import Weight
from fedjax_inv.averages import chunk_means as chunk_means
from fedjax_inv.checks import UsageError
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
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

# Added to variances: a factor that hardly varies counts as constant, from a standard deviation of
# 1e-4 down, as the gradient of its correlation would be that many times larger.
_EPSILON = 1e-8


def factor_scores(decode_true_logit: Callable[[Array], Array], factors: Array) -> Array:
    """The gradient of the true class's logit by each factor, a mean over positions; [B, F].

    decode_true_logit: factors [B, ..., F] -> [B], each example by itself. Signed, as in the
    release.
    """
    gradient = jax.grad(lambda factors: decode_true_logit(factors).sum())(factors)
    return averaging.embedding(gradient)


def split_factors(scores: Array, top_k: int) -> tuple[Array, Array]:
    """Which top_k factors of each row of scores [B, F] are lowest, which highest; bool [B, F] both.

    Exactly top_k of a row are true, and for top_k <= F / 2 none in both: among equal scores, those
    to the left count as lower. Raises ValueError for a top_k outside 0..F.
    """
    checks.integer("top_k", top_k, 0, scores.shape[1], ", as many as there are factors")

    if not platforms.on_cpu():  # there top_k becomes a sort: the factors below each are counted
        one, other = scores[:, :, None], scores[:, None, :]
        index = jnp.arange(scores.shape[1])
        is_below = (other < one) | ((other == one) & (index < index[:, None]))
        rank = is_below.sum(-1)
        return rank < top_k, rank >= scores.shape[1] - top_k

    def largest(scores: Array) -> Array:
        _, index = jax.lax.top_k(scores, top_k)  # the leftmost of equals
        nowhere = jnp.zeros(scores.shape, bool)
        return jnp.put_along_axis(nowhere, index, True, axis=-1, inplace=False)

    return largest(-scores), largest(scores[:, ::-1])[:, ::-1]


def replaced(factors: Array, average: Array, which: Array) -> Array:
    """`factors` [B, ..., F] with those of `average` [B, ..., F] where `which` [B, F] (Eq. 6, 7)."""
    which = which.reshape(which.shape[0], *(1,) * (factors.ndim - 2), which.shape[1])
    return jnp.where(which, average, factors)


def counterfactual_labels(labels: Array, average: Array, top_k: int, num_factors: int) -> Array:
    """(top_k / F) average + (1 - top_k / F) labels, of one-hot labels [B, K]; [B, K] (Eq. 8)."""
    share = top_k / num_factors
    return share * average + (1 - share) * labels


def factor_decorrelation(factors: Array, mask: Array) -> Array:
    """The mean over pairs of factors [B, F] of |Pearson's r| over real examples; [] (Eq. 10, 11).

    mask: [B] bool, which are real; 0 with fewer than three, of which any two correlate. A factor
    that is constant correlates with none.
    """
    num_factors, count = factors.shape[1], mask.sum()
    real, number = mask[:, None], jnp.maximum(count, 1).astype(factors.dtype)
    factors = jnp.where(real, factors, 0)
    centred = jnp.where(real, factors - factors.sum(0) / number, 0)
    scale = jax.lax.rsqrt((centred**2).sum(0) / number + _EPSILON)
    units = centred * scale
    correlation = jnp.matmul(units.T, units, precision="highest") / number
    pairs = jnp.triu(jnp.abs(correlation), 1).sum() / max(num_factors * (num_factors - 1) // 2, 1)
    return jnp.where(count >= 3, pairs, 0)


def _is_zero(weight: float | Array) -> bool:
    """Whether a weight is known to be 0."""
    return checks.is_concrete(weight) and float(weight) == 0


def fedcfa(
    model: Model,
    work: Work,
    *,
    top_k: int = 24,
    positive_weight: float | Array = 5.0,
    negative_weight: float | Array = 5.0,
    decorrelation_weight: float | Array = 0.1,
    detach: bool = True,
    combining: str = "pool",
    rows: int = 16,
    chunk: int = 128,
    inputs: Callable[[Tree], Tree] = averages.as_numbers,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> Algorithm:
    """FedCFA; the factors are what the model's body puts out.

    top_k: how many of the factors are replaced. positive_weight: of the counterfactuals that keep
    their label. negative_weight: of those whose label changes. decorrelation_weight: of the mean
    correlation of factors. With all three at 0 this is FedAvg, and what a 0 switches off is not
    computed. detach: whether the counterfactual terms train the head alone, as in the release.

    combining: of averages on the server, "pool" (the release's) or "paper". rows: of averages, that
    a client sends, at most; the paper's B. chunk: examples in a row of a "pool". inputs: what of
    seen inputs is averaged, if they are neither 8-bit images nor in floating point; the model
    must take that too. See `averages.exchanged` for these four. weighting: of clients, as in FedAvg
    ("size" or "uniform").

    Reports each term, unweighted, averaged over local steps. Raises ValueError for values out of
    range; before the first round for a top_k above the number of factors, and for inputs that
    cannot be averaged.
    """
    checks.integer("top_k", top_k, 0)
    weights = {"positive": positive_weight, "negative": negative_weight}
    for name, weight in (*weights.items(), ("decorrelation", decorrelation_weight)):
        checks.real(f"{name}_weight", weight)
    swaps = {name: weight for name, weight in weights.items() if not _is_zero(weight)}
    side = averages.exchanged(model, combining=combining, rows=rows, chunk=chunk, inputs=inputs)

    def check_factors(setup: Setup) -> None:
        params, stats = setup.variables

        def encoded(x: Tree) -> Array:
            return model.encode(params.body, stats.body, x, jnp.ones(1, bool), False)[0]

        shape = jax.eval_shape(encoded, setup.sample).shape
        if len(shape) < 2:
            raise UsageError(f"model: its body puts out {shape}, must put out factors [B, ..., F]")
        checks.integer("top_k", top_k, 0, shape[-1], ", as many as the body has factors")

    def counterfactual_losses(
        visit: Visit, params: Halves, stats: Halves, batch: Batch, factors: Array, key: Array
    ) -> Metrics:
        """Of each kind that counts, the mean loss of the head on it; 0 before there are averages.

        factors: [B, ..., F] of the batch.
        """
        received, pool = visit.message.variables, visit.message.side
        draw_key, body_key, *head_keys = jax.random.split(key, 2 + len(swaps))
        average_x, average_y = averages.draw(pool, draw_key, len(batch.mask))
        average, _ = model.encode(params.body, stats.body, average_x, batch.mask, True, body_key)

        def true_logit(factors: Array) -> Array:
            logits, _ = model.decode(
                received.params.head, received.stats.head, factors, batch.mask, False
            )
            # Not by index, of which the gradient is a scatter.
            is_true = batch.y[:, None] == jnp.arange(logits.shape[1])
            return jnp.where(is_true, logits, 0).sum(1)

        scores = factor_scores(true_logit, jax.lax.stop_gradient(factors))
        low, high = split_factors(scores, top_k)
        labels = jax.nn.one_hot(batch.y, average_y.shape[1])
        mixed = counterfactual_labels(labels, average_y, top_k, scores.shape[1])
        kinds = {"positive": (low, labels), "negative": (high, mixed)}
        if detach:
            factors, average = jax.lax.stop_gradient((factors, average))

        def loss(which: Array, labels: Array, key: Array) -> Array:
            # Without averages nothing is replaced, so that no NaN hides behind the 0.
            counterfactual = replaced(factors, average, which & pool.real.any())
            logits, _ = model.decode(params.head, stats.head, counterfactual, batch.mask, True, key)
            return objectives.soft_cross_entropy(logits, labels, batch.mask)

        which, soft = (jnp.stack(parts) for parts in zip(*map(kinds.get, swaps), strict=True))
        losses = jax.vmap(loss)(which, soft, jnp.stack(head_keys))  # both in one pass of the head
        return dict(zip(swaps, jnp.where(pool.real.any(), losses, 0), strict=True))

    def gradient_from(visit: Visit) -> GradFn:
        def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
            body_key, head_key = jax.random.split(key)
            mask, stats = batch.mask, variables.stats

            def objective(params: Halves) -> tuple[Array, tuple[Halves, Metrics]]:
                factors, body = model.encode(params.body, stats.body, batch.x, mask, True, body_key)
                logits, head = model.decode(params.head, stats.head, factors, mask, True, head_key)
                total = objectives.cross_entropy(logits, batch.y, mask)
                told = {"loss": total}
                if swaps:
                    swap_key = jax.random.fold_in(key, 1)
                    losses = counterfactual_losses(visit, params, stats, batch, factors, swap_key)
                    total += sum(swaps[name] * losses[name] for name in swaps)
                    told |= {f"{name}_loss": value for name, value in losses.items()}
                if not _is_zero(decorrelation_weight):
                    correlation = factor_decorrelation(averaging.embedding(factors), mask)
                    total += decorrelation_weight * correlation
                    told["correlation"] = correlation
                return total, (Halves(body, head), told)

            grads, (moved, told) = jax.grad(objective, has_aux=True)(variables.params)
            return Step(grads, moved, told)

        return grad_fn

    training = averaging.averaging(
        model,
        work,
        gradient_from,
        server_optimizer=server_optimizer,
        weighting=weighting,
        side=side if swaps else averaging.NOTHING,
    )

    def init_server(setup: Setup) -> Tree:
        check_factors(setup)
        return training.init_server(setup)

    return training._replace(init_server=init_server)
