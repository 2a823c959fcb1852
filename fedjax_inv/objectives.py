"""Masked losses and scores: means over real examples only.

The targets of a loss may be anything. Here they are those of `data.dataset.Dataset.y`: classes [B],
labels [B, K], of which several may be true, or values [B] or [B, K].

A `Score` says how to read a score; DEFAULTS holds a loss and a score for each kind of targets.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import checks, tree
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Loss

_LEAST = 1e-30  # in place of a probability of 0, under a power


def masked_mean(values: Array, mask: Array) -> Array:
    """Return the mean [] of values whose mask is true.

    Args:
      values: [B].
      mask: [B] bool. If all are false, the mean is 0.

    Raises:
      UsageError: for other shapes, and if the mask is not of booleans.
    """
    checks.array("values", values)
    checks.array("mask", mask)
    if values.ndim != 1 or values.shape != mask.shape or mask.dtype != bool:
        raise UsageError(
            "values", values, "must be [B], and {mask} must be bool [B]", mask=("mask", mask)
        )
    # `where` first: a NaN under the mask must reach neither the value nor the gradient.
    total = tree.wide(jnp.where(mask, values, 0)).sum()
    return total / jnp.maximum(mask.sum(), 1).astype(total.dtype)


def cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the mean softmax cross-entropy [] in nats.

    If the mask of an example is false, a NaN in its logits leaves the loss finite, but makes the
    gradient of these logits NaN.

    Args:
      logits: [B, K].
      labels: [B] integers in 0..K-1. The loss of another label is NaN, which a run reports.
      mask: [B] bool, which examples are real.

    Raises:
      UsageError: for other shapes, for labels that are not integers, and for a label outside of
        0..K-1 unless labels are traced.
    """
    return masked_mean(-_of_label(jax.nn.log_softmax, logits, labels, mask), mask)


def _of_label(
    function: Callable[[Array], Array], logits: Array, labels: Array, mask: Array
) -> Array:
    """Return the entry of function(logits) [B, K] at each label, [B]; NaN for a label of no class.

    Raises UsageError as `cross_entropy` does.
    """
    _check_classes(logits, labels, mask)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise UsageError("labels", labels, "must be integers")
    labels = labels.astype(jnp.int32)  # a number of classes may not fit into 8 bits
    # Not an index into the logits: its gradient is a scatter, a kernel of its own on a GPU.
    is_label = jnp.arange(logits.shape[1]) == labels[:, None]
    values = jnp.where(is_label, function(tree.wide(logits)), 0).sum(-1)
    is_class = (labels >= 0) & (labels < logits.shape[1])
    return jnp.where(is_class, values, jnp.nan)


def smoothed_cross_entropy(label_smoothing: float | Array) -> Loss:
    """Return the loss `cross_entropy` against smoothed labels (Szegedy et al. 2016, Section 7).

    The target of a class is 1 - label_smoothing for the label, plus label_smoothing / K for each of
    the K classes.

    Args:
      label_smoothing: the part of the target that all classes share, at least 0 and below 1.

    Returns:
      (logits [B, K], labels [B] integers, mask [B]) -> the mean loss [] in nats. Labels may also be
      probabilities [B, K], as those of `soft_cross_entropy`. Logits must be finite: if one of
      another class than the label is -inf, the loss is infinite, and NaN for a label_smoothing of
      0.

    Raises:
      UsageError: for a label_smoothing out of range; the loss raises those of `cross_entropy`.
    """
    checks.real("label_smoothing", label_smoothing, 0, 1)
    if checks.is_concrete(label_smoothing) and float(label_smoothing) == 1:
        text = "must be below 1: with 1 all classes have the same target"
        raise UsageError("label_smoothing", label_smoothing, text)

    def loss(logits: Array, labels: Array, mask: Array) -> Array:
        if getattr(labels, "ndim", 1) == 2:
            sharp = soft_cross_entropy(logits, labels, mask)
        else:
            sharp = cross_entropy(logits, labels, mask)
        even = masked_mean(-jax.nn.log_softmax(tree.wide(logits)).mean(-1), mask)
        return (1 - label_smoothing) * sharp + label_smoothing * even

    return loss


def focal(gamma: float | Array) -> Loss:
    """Return the focal loss, which gives examples that are predicted well less weight.

    (1 - p)^gamma times the cross-entropy, where p is the probability of the target (Lin et al.
    2017, "Focal Loss for Dense Object Detection", Eq. 4). With classes a NaN in the logits of an
    example whose mask is false acts as in `cross_entropy`.

    Args:
      gamma: the exponent, at least 0; 0 is the cross-entropy.

    Returns:
      (logits [B, K], targets, mask [B]) -> the mean loss [] in nats. Targets are integers [B] for
      classes, with a softmax over K, or [B, K] for labels, with a sigmoid and a mean over K. The
      loss of a label outside of [0, 1] is NaN.

    Raises:
      UsageError: for a gamma out of range; the loss raises those of `cross_entropy`, or of
        `binary_cross_entropy`.
    """
    checks.real("gamma", gamma)

    def of_class(logits: Array) -> Array:
        log_p = jax.nn.log_softmax(logits)
        # Above 0, or the gradient of the power might be infinite.
        rest = jnp.maximum(-jnp.expm1(log_p), _LEAST)
        return -(rest**gamma) * log_p

    def loss(logits: Array, targets: Array, mask: Array) -> Array:
        if getattr(targets, "ndim", 1) == 2:
            logits, targets = _columns("logits", logits, "labels", targets, mask)
            losses = optax.losses.sigmoid_focal_loss(logits, targets, gamma=gamma)
            return masked_mean(_of_labels(losses, targets).mean(-1), mask)
        return masked_mean(_of_label(of_class, logits, targets, mask), mask)

    return loss


def binary_cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the mean sigmoid cross-entropy [] in nats, over the K labels and over examples.

    Args:
      logits: [B, K].
      labels: [B, K] bool, or probabilities. The loss of another label is NaN, which a run reports.
      mask: [B] bool, which examples are real.

    Raises:
      UsageError: for other shapes.
    """
    logits, labels = _columns("logits", logits, "labels", labels, mask)
    losses = optax.losses.sigmoid_binary_cross_entropy(logits, labels)
    return masked_mean(_of_labels(losses, labels).mean(-1), mask)


def _of_labels(losses: Array, labels: Array) -> Array:
    """Losses [B, K], but NaN for a label outside of [0, 1], as -1 for false would be."""
    return jnp.where((labels >= 0) & (labels <= 1), losses, jnp.nan)


def squared_error(outputs: Array, y: Array, mask: Array) -> Array:
    """Return the mean squared error [], over the K values and over examples.

    Args:
      outputs: [B, K], or [B] for one value.
      y: [B, K], or [B] for one value.
      mask: [B] bool, which examples are real.

    Raises:
      UsageError: for other shapes.
    """
    outputs, y = _columns("outputs", outputs, "y", y, mask)
    return masked_mean(optax.losses.squared_error(outputs, y).mean(-1), mask)


def huber(delta: float | Array) -> Loss:
    """Return the Huber loss: e^2 / 2 for an error |e| <= delta, else delta (|e| - delta / 2).

    Huber 1964, "Robust Estimation of a Location Parameter".

    Args:
      delta: the error from which on the loss is linear, above 0.

    Returns:
      A loss with the arguments of `squared_error`.

    Raises:
      UsageError: for a delta that is not above 0.
    """
    checks.real("delta", delta)
    if checks.is_concrete(delta) and float(delta) == 0:
        raise UsageError("delta", delta, "must be above 0")

    def loss(outputs: Array, y: Array, mask: Array) -> Array:
        outputs, y = _columns("outputs", outputs, "y", y, mask)
        return masked_mean(optax.losses.huber_loss(outputs, y, delta=delta).mean(-1), mask)

    return loss


def absolute_error(outputs: Array, y: Array, mask: Array) -> Array:
    """Return the mean absolute error [], with the arguments of `squared_error`."""
    outputs, y = _columns("outputs", outputs, "y", y, mask)
    return masked_mean(jnp.abs(outputs - y).mean(-1), mask)


def accuracy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the fraction [] of real examples whose largest logit is that of the label.

    It is NaN if a logit of a real example is NaN.

    Args:
      logits: [B, K].
      labels: [B] in 0..K-1.
      mask: [B] bool, which examples are real.

    Raises:
      UsageError: for other shapes, and for a label outside of 0..K-1 unless labels are traced.
    """
    _check_classes(logits, labels, mask)
    right = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    # A NaN would be the largest, so a network of NaN would predict class 0.
    return masked_mean(jnp.where(jnp.isnan(logits).any(-1), jnp.nan, right), mask)


def label_accuracy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the fraction [] of labels that are predicted right, over the K labels and examples.

    A label is predicted if its logit is above 0, that is with a probability above a half.

    Args:
      logits: [B, K].
      labels: [B, K] bool.
      mask: [B] bool, which examples are real.

    Raises:
      UsageError: for other shapes.
    """
    return masked_mean(_right(logits, labels, mask).mean(-1), mask)


def exact_match(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the fraction [] of examples whose K labels are all predicted right.

    The arguments and errors are those of `label_accuracy`.
    """
    return masked_mean(_right(logits, labels, mask).min(-1), mask)


def _right(logits: Array, labels: Array, mask: Array) -> Array:
    """Return 1 for each label that is predicted right, 0 for the others, NaN where logits are NaN.

    [B, K] float32.
    """
    logits, labels = _columns("logits", logits, "labels", labels, mask)
    right = ((logits > 0) == (labels > 0.5)).astype(jnp.float32)
    return jnp.where(jnp.isnan(logits), jnp.nan, right)


def _columns(
    name: str, outputs: Array, name_of_y: str, y: Array, mask: Array
) -> tuple[Array, Array]:
    """Return outputs and targets as [B, K] of at least 32 bits, with 0 where the mask is false.

    So a NaN under the mask does not reach the gradient. Raises UsageError for other shapes.
    """
    checks.array(name, outputs)
    checks.array(name_of_y, y)
    checks.array("mask", mask)
    if not jnp.issubdtype(outputs.dtype, jnp.floating):
        raise UsageError(name, outputs, "must be floating point")
    shapes = [(*leaf.shape, 1)[:2] if leaf.ndim == 1 else leaf.shape for leaf in (outputs, y)]
    if len(shapes[0]) != 2 or shapes[0] != shapes[1]:
        raise UsageError(
            name,
            outputs,
            "must be [B, K], and {y} must be [B, K], or [B] for K = 1",
            y=(name_of_y, y),
        )
    if mask.shape != shapes[0][:1] or mask.dtype != bool:
        raise UsageError("mask", mask, f"must be bool [{shapes[0][0]}]")
    real = mask[:, None]
    outputs, y = (jnp.where(real, leaf.reshape(shapes[0]), 0) for leaf in (outputs, y))
    outputs = tree.wide(outputs)
    return outputs, y.astype(outputs.dtype)


def _check_arrays(logits: Array, labels: Array, mask: Array) -> None:
    checks.array("logits", logits)
    checks.array("labels", labels)
    checks.array("mask", mask)
    for name, values in (("logits", logits), ("labels", labels)):
        if not jnp.issubdtype(values.dtype, jnp.number):
            raise UsageError(name, values, "must be numbers")


def _check_classes(logits: Array, labels: Array, mask: Array) -> None:
    _check_arrays(logits, labels, mask)
    if logits.ndim != 2 or labels.ndim != 1 or len(logits) != len(labels):
        raise UsageError(
            "logits",
            logits,
            "must be [B, K], and {labels} must be [B]; other outputs need a `loss=` of their own",
            labels=("labels", labels),
        )
    is_mask = mask.shape == labels.shape and mask.dtype == bool  # else masked_mean refuses it
    if is_mask and checks.is_concrete((labels, mask)):
        # In NumPy: inside a trace, jnp would trace the indexing of these constants.
        real = np.asarray(labels)[np.asarray(mask)]
        checks.integers("labels", real, 0, logits.shape[1] - 1, may_be_empty=True)


def soft_cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the mean softmax cross-entropy [] in nats against probabilities of the classes.

    Args:
      logits: [B, K].
      labels: probabilities [B, K], which sum to 1 for each example.
      mask: [B] bool, which examples are real.

    Raises:
      UsageError: for other shapes, and for labels of real examples that are negative or do not sum
        to 1 unless labels are traced.
    """
    _check_arrays(logits, labels, mask)
    if logits.ndim != 2 or logits.shape != labels.shape:
        raise UsageError(
            "logits",
            logits,
            "must be [B, K], and {labels} must have the same shape",
            labels=("labels", labels),
        )
    is_mask = mask.shape == logits.shape[:1] and mask.dtype == bool  # else masked_mean refuses it
    # A NaN under the mask would reach that example's gradient.
    logits = tree.wide(logits)
    real_logits = jnp.where(mask[:, None], logits, 0) if is_mask else logits
    losses = masked_mean(optax.losses.softmax_cross_entropy(real_logits, labels), mask)
    if checks.is_concrete((labels, mask)):
        real = np.asarray(labels, np.float32)[np.asarray(mask)]
        if not ((real >= 0).all() and np.allclose(real.sum(1), 1, atol=1e-2)):
            raise UsageError("labels", labels, "must be probabilities, which sum to 1")
    return losses


class Score(NamedTuple):
    """A score of evaluations, and how to read it."""

    name: str  # in words
    function: Loss
    tasks: tuple[str, ...] = ("classes", "labels", "values")  # that it fits
    higher_is_better: bool = True
    is_share: bool = False  # whether it is a part of 1, shown in percent

    def rank(self, value: float) -> float:
        """Return a number that is higher, the better the score is."""
        return value if self.higher_is_better else -value


SCORES: dict[str, Score] = {
    "accuracy": Score("accuracy", accuracy, ("classes",), is_share=True),
    "label_accuracy": Score("label accuracy", label_accuracy, ("labels",), is_share=True),
    "exact_match": Score("exact match", exact_match, ("labels",), is_share=True),
    "absolute_error": Score("absolute error", absolute_error, ("values",), higher_is_better=False),
    "squared_error": Score("squared error", squared_error, ("values",), higher_is_better=False),
}
# The loss and the score of a task (`data.dataset.Dataset.task`), unless others are chosen.
DEFAULTS: dict[str, tuple[Loss, Score]] = {
    "classes": (cross_entropy, SCORES["accuracy"]),
    "labels": (binary_cross_entropy, SCORES["label_accuracy"]),
    "values": (squared_error, SCORES["absolute_error"]),
}
