"""Masked losses and scores: means over real examples only.

Arguments are outputs [B, K], of classifiers logits; targets; and a mask [B] bool, which of them are
real. The targets of a loss may be anything. Here they are those of `data.dataset.Dataset.y`:
classes [B], integers in 0..K-1; labels [B, K] bool, of which several may be true; or values [B, K],
or [B] for K = 1, also of outputs. The loss of another class or label is NaN, which a run reports.

A `Score` says how to read a score; DEFAULTS holds a loss and a score for each kind of targets.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import checks, tree, types
from fedjax_inv.types import Array, Tree

_LEAST = 1e-30  # in place of a probability of 0, under a power


def masked_mean(values: Array, mask: Array) -> Array:
    """Return the mean [] of the values [B] whose mask [B] is true, 0 if none is."""
    chex.assert_rank([values, mask], 1)
    chex.assert_equal_shape([values, mask])
    chex.assert_type(mask, bool)
    # `where` first: a NaN under the mask must reach neither the value nor the gradient.
    total = tree.wide(jnp.where(mask, values, 0)).sum()
    return total / jnp.maximum(mask.sum(), 1).astype(total.dtype)


def cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the mean softmax cross-entropy [] in nats.

    If the mask of an example is false, a NaN in its logits leaves the loss finite, but makes the
    gradient of these logits NaN.
    """
    return masked_mean(-_of_label(jax.nn.log_softmax, logits, labels), mask)


def _of_label(function: Callable[[Array], Array], logits: Array, labels: Array) -> Array:
    """Return the entry of function(logits) [B, K] at each label, [B]."""
    chex.assert_rank([logits, labels], [2, 1])
    chex.assert_type(labels, int)
    labels = labels.astype(jnp.int32)  # a number of classes may not fit into 8 bits
    # Not an index into the logits: its gradient is a scatter, a kernel of its own on a GPU.
    is_label = jnp.arange(logits.shape[1]) == labels[:, None]
    values = jnp.where(is_label, function(tree.wide(logits)), 0).sum(-1)
    is_class = (labels >= 0) & (labels < logits.shape[1])
    return jnp.where(is_class, values, jnp.nan)


def focal(gamma: float | Array) -> types.Loss:
    """Return the focal loss, which gives examples that are predicted well less weight.

    (1 - p)^gamma times the cross-entropy, where p is the probability of the target (Lin et al.
    2017, "Focal Loss for Dense Object Detection", Eq. 4); gamma is at least 0. Targets are classes,
    with a softmax over K, or labels, with a sigmoid and a mean over K. With classes a NaN in the
    logits of an example whose mask is false acts as in `cross_entropy`.
    """
    checks.real("gamma", gamma)

    def of_class(logits: Array) -> Array:
        log_p = jax.nn.log_softmax(logits)
        # Above 0, or the gradient of the power might be infinite.
        rest = jnp.maximum(-jnp.expm1(log_p), _LEAST)
        return -(rest**gamma) * log_p

    def loss(logits: Array, targets: Array, mask: Array) -> Array:
        if targets.ndim == 2:
            logits, targets = _columns(logits, targets, mask)
            losses = optax.losses.sigmoid_focal_loss(logits, targets, gamma=gamma)
            return masked_mean(_of_labels(losses, targets).mean(-1), mask)
        return masked_mean(_of_label(of_class, logits, targets), mask)

    return loss


def binary_cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the mean sigmoid cross-entropy [] in nats, over the K labels and over examples.

    Labels may also be probabilities.
    """
    logits, labels = _columns(logits, labels, mask)
    losses = optax.losses.sigmoid_binary_cross_entropy(logits, labels)
    return masked_mean(_of_labels(losses, labels).mean(-1), mask)


def _of_labels(losses: Array, labels: Array) -> Array:
    """Losses [B, K], but NaN for a label outside of [0, 1], as -1 for false would be."""
    return jnp.where((labels >= 0) & (labels <= 1), losses, jnp.nan)


def squared_error(outputs: Array, y: Array, mask: Array) -> Array:
    """Return the mean squared error [], over the K values and over examples."""
    outputs, y = _columns(outputs, y, mask)
    return masked_mean(optax.losses.squared_error(outputs, y).mean(-1), mask)


def huber(delta: float | Array) -> types.Loss:
    """Return the Huber loss: e^2 / 2 for an error |e| <= delta, else delta (|e| - delta / 2).

    Huber 1964, "Robust Estimation of a Location Parameter"; delta is above 0.
    """
    checks.real("delta", delta)

    def loss(outputs: Array, y: Array, mask: Array) -> Array:
        outputs, y = _columns(outputs, y, mask)
        return masked_mean(optax.losses.huber_loss(outputs, y, delta=delta).mean(-1), mask)

    return loss


def absolute_error(outputs: Array, y: Array, mask: Array) -> Array:
    """Return the mean absolute error [], over the K values and over examples."""
    outputs, y = _columns(outputs, y, mask)
    return masked_mean(jnp.abs(outputs - y).mean(-1), mask)


def accuracy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the fraction [] of real examples whose largest logit is that of the label.

    It is NaN if a logit of a real example is NaN.
    """
    chex.assert_rank([logits, labels], [2, 1])
    right = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    # A NaN would be the largest, so a network of NaN would predict class 0.
    return masked_mean(jnp.where(jnp.isnan(logits).any(-1), jnp.nan, right), mask)


def label_accuracy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the fraction [] of labels that are predicted right, over the K labels and examples.

    A label is predicted if its logit is above 0, that is with a probability above a half.
    """
    return masked_mean(_right(logits, labels, mask).mean(-1), mask)


def exact_match(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the fraction [] of examples whose K labels are all predicted right."""
    return masked_mean(_right(logits, labels, mask).min(-1), mask)


def _right(logits: Array, labels: Array, mask: Array) -> Array:
    """Return [B, K] float32: 1 for a label that is predicted right, else 0; NaN for a NaN logit."""
    logits, labels = _columns(logits, labels, mask)
    right = ((logits > 0) == (labels > 0.5)).astype(jnp.float32)
    return jnp.where(jnp.isnan(logits), jnp.nan, right)


def _columns(outputs: Array, y: Array, mask: Array) -> tuple[Array, Array]:
    """Return outputs and targets as [B, K] of at least 32 bits, with 0 where the mask is false.

    So a NaN under the mask does not reach the gradient.
    """
    outputs, y = (leaf[:, None] if leaf.ndim == 1 else leaf for leaf in (outputs, y))
    chex.assert_rank([outputs, y], 2)
    chex.assert_equal_shape([outputs, y])
    outputs, y = (jnp.where(mask[:, None], leaf, 0) for leaf in (outputs, y))
    outputs = tree.wide(outputs)
    return outputs, y.astype(outputs.dtype)


def soft_cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the mean softmax cross-entropy [] in nats against probabilities of the classes.

    They are the labels [B, K], which sum to 1 for each example.
    """
    chex.assert_rank([logits, labels], 2)
    chex.assert_equal_shape([logits, labels])
    # A NaN under the mask would reach that example's gradient.
    real_logits = jnp.where(mask[:, None], tree.wide(logits), 0)
    return masked_mean(optax.losses.softmax_cross_entropy(real_logits, labels), mask)


class Counts(NamedTuple):
    """A score of counts, or of other sums over examples, which add over batches and clients.

    Called as a loss, it is the score of a batch, whose examples are of one domain.
    """

    # (outputs [B, ...], y [B, ...], mask [B], domain [B] int32) -> sums over the real examples [n];
    # the domain is None if the data have none
    add: Callable[[Array, Tree, Array, Array | None], Array]
    finish: Callable[[Array], Array]  # sums [..., n] -> scores [...], 0 of no examples

    def __call__(self, outputs: Array, y: Tree, mask: Array, /) -> Array:
        """Return the score [] of a batch, 0 if no example is real."""
        return self.finish(self.add(outputs, y, mask, None))


def _of_classes(logits: Array, labels: Array, mask: Array) -> tuple[Array, Array, Array]:
    """Return whether each class is true and predicted right, is true, is predicted, [B, K] float32.

    Of an example with a logit of NaN, its class is NaN times predicted right.
    """
    chex.assert_rank([logits, labels], [2, 1])
    classes = jnp.arange(logits.shape[1])
    predicted = jnp.argmax(logits, -1)[:, None]
    present = (labels.astype(jnp.int32)[:, None] == classes) & mask[:, None]
    right = jnp.where(jnp.isnan(logits).any(-1, keepdims=True), jnp.nan, predicted == classes)
    predicted = (predicted == classes) & mask[:, None]
    return jnp.where(present, right, 0), present.astype(jnp.float32), predicted.astype(jnp.float32)


def _recalls(sums: Array, put: float) -> tuple[Array, Array]:
    """Return the recalls [..., n] of classes or groups, and which occur; `put` for those not."""
    right, present = jnp.split(sums, 2, -1)
    return jnp.where(present > 0, right / jnp.maximum(present, 1), put), present > 0


def _mean_of(values: Array, occurs: Array) -> Array:
    return values.sum(-1) / jnp.maximum(occurs.sum(-1), 1)


def _add_recalls(logits: Array, labels: Array, mask: Array, domain: Array | None) -> Array:
    right, present, _ = _of_classes(logits, labels, mask)
    return jnp.concatenate([right.sum(0), present.sum(0)])


def _add_f1(logits: Array, labels: Array, mask: Array, domain: Array | None) -> Array:
    return jnp.concatenate([each.sum(0) for each in _of_classes(logits, labels, mask)])


def _finish_f1(sums: Array) -> Array:
    right, present, predicted = jnp.split(sums, 3, -1)
    total = present + predicted
    return _mean_of(2 * right / jnp.maximum(total, 1), total > 0)


def _finish_worst(sums: Array) -> Array:
    recalls, occurs = _recalls(sums, jnp.inf)
    return jnp.where(occurs.any(-1), recalls.min(-1), 0)


# The mean over the classes that occur of the part of their examples that is predicted right, as
# scikit-learn's `balanced_accuracy_score`. A client without a class has the mean over the others.
balanced_accuracy = Counts(_add_recalls, lambda sums: _mean_of(*_recalls(sums, 0.0)))
# The mean, over the classes that occur or are predicted, of 2 right / (occurring + predicted), as
# scikit-learn's `f1_score` with the average "macro".
macro_f1 = Counts(_add_f1, _finish_f1)


@functools.cache  # equal functions share programs
def worst_group(num_domains: int) -> Counts:
    """Return the lowest accuracy of a group, the examples of one class and one domain.

    Groups without examples do not count (Sagawa et al. 2020, "Distributionally Robust Neural
    Networks for Group Shifts"). Examples without a domain, None or -1, are in the first. The sums
    of each client have 2 x num_domains x classes numbers.
    """

    def add(logits: Array, labels: Array, mask: Array, domain: Array | None) -> Array:
        of = jnp.zeros_like(mask, jnp.int32) if domain is None else jnp.maximum(domain, 0)
        is_in = (of[:, None] == jnp.arange(num_domains))[..., None]  # [B, D, 1]
        right, present, _ = _of_classes(logits, labels, mask)
        sums = [jnp.where(is_in, each[:, None], 0).sum(0).ravel() for each in (right, present)]
        return jnp.concatenate(sums)

    return Counts(add, _finish_worst)


class Score(NamedTuple):
    """A score of evaluations, and how to read it."""

    name: str  # in words
    function: Any  # a `Loss`, which may be `Counts`
    tasks: tuple[str, ...] = ("classes", "labels", "values")  # that it fits
    higher_is_better: bool = True
    is_share: bool = False  # whether it is a part of 1, shown in percent
    # Whether it is the worst of groups within domains: of several domains it is the worst one's,
    # not the mean, and `function` is of (number of domains) -> `Loss`.
    is_worst: bool = False

    def of_domains(self, domain: Any = None) -> types.Loss:
        """Return the function of outputs, for examples of domains [M]; None: of one."""
        number = 1 if domain is None else int(domain.max()) + 1
        return self.function(number) if self.is_worst else self.function

    def rank(self, value: float) -> float:
        """Return a number that is higher, the better the score is."""
        return value if self.higher_is_better else -value


SCORES: dict[str, Score] = {
    "accuracy": Score("accuracy", accuracy, ("classes",), is_share=True),
    "balanced_accuracy": Score("balanced accuracy", balanced_accuracy, ("classes",), is_share=True),
    "macro_f1": Score("macro F1", macro_f1, ("classes",), is_share=True),
    "worst_group": Score(
        "worst group accuracy", worst_group, ("classes",), is_share=True, is_worst=True
    ),
    "label_accuracy": Score("label accuracy", label_accuracy, ("labels",), is_share=True),
    "exact_match": Score("exact match", exact_match, ("labels",), is_share=True),
    "absolute_error": Score("absolute error", absolute_error, ("values",), higher_is_better=False),
    "squared_error": Score("squared error", squared_error, ("values",), higher_is_better=False),
}
# The loss and the score of a task (`data.dataset.Dataset.task`), unless others are chosen.
DEFAULTS: dict[str, tuple[types.Loss, Score]] = {
    "classes": (cross_entropy, SCORES["accuracy"]),
    "labels": (binary_cross_entropy, SCORES["label_accuracy"]),
    "values": (squared_error, SCORES["absolute_error"]),
}
