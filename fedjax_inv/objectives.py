"""Masked losses and scores: means over real examples only.

The targets of a loss may be anything; here they are classes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array


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
    total = jnp.where(mask, values, 0).sum()
    return total / jnp.maximum(mask.sum(), 1).astype(total.dtype)


def cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the mean softmax cross-entropy [] in nats.

    Args:
      logits: [B, K].
      labels: [B] integers in 0..K-1. The loss of another label is NaN, which a run reports.
      mask: [B] bool, which examples are real.

    Raises:
      UsageError: for other shapes, for labels that are not integers, and for a label outside of
        0..K-1 unless labels are traced.
    """
    _check_classes(logits, labels, mask)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise UsageError("labels", labels, "must be integers")
    # Not an index into the logits: its gradient is a scatter, a kernel of its own on a GPU.
    is_label = jnp.arange(logits.shape[1]) == labels[:, None]
    losses = -jnp.where(is_label, jax.nn.log_softmax(logits), 0).sum(-1)
    is_class = (labels >= 0) & (labels < logits.shape[1])
    return masked_mean(jnp.where(is_class, losses, jnp.nan), mask)


def accuracy(logits: Array, labels: Array, mask: Array) -> Array:
    """Return the fraction [] of real examples whose largest logit is that of the label.

    Args:
      logits: [B, K].
      labels: [B] in 0..K-1.
      mask: [B] bool, which examples are real.

    Raises:
      UsageError: for other shapes, for a label outside of 0..K-1 unless labels are traced, and for
        logits that are NaN unless they are traced, as argmax takes NaN for the largest.
    """
    _check_classes(logits, labels, mask)
    right = masked_mean((jnp.argmax(logits, -1) == labels).astype(jnp.float32), mask)
    if checks.is_concrete((logits, mask)):
        wrong = np.argwhere(np.isnan(np.asarray(logits)) & np.asarray(mask)[:, None])
        if len(wrong):
            raise UsageError(f"logits{wrong[0].tolist()}", np.nan, "must be a number")
    return right


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
    losses = masked_mean(optax.losses.softmax_cross_entropy(logits, labels), mask)
    if checks.is_concrete((labels, mask)):
        real = np.asarray(labels, np.float32)[np.asarray(mask)]
        if not ((real >= 0).all() and np.allclose(real.sum(1), 1, atol=1e-2)):
            raise UsageError("labels", labels, "must be probabilities, which sum to 1")
    return losses
