"""Masked losses and scores: means over real examples only.

Targets may be any tree; cross-entropy and accuracy are for those that are classes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array


def masked_mean(values: Array, mask: Array) -> Array:
    """The mean of `values` [B] where `mask` [B] bool is true; 0 if it is true nowhere.

    Raises ValueError for other shapes, and for weights instead of a mask.
    """
    if values.ndim != 1 or values.shape != mask.shape or mask.dtype != bool:
        raise UsageError(
            f"values {values.shape} and mask {mask.dtype} {mask.shape}: must be [B] and bool [B]"
        )
    # `where` first: a NaN under the mask must reach neither the value nor the gradient.
    total = jnp.where(mask, values, 0).sum()
    return total / jnp.maximum(mask.sum(), 1).astype(total.dtype)


def cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Mean softmax cross-entropy in nats of logits [B, K] against labels [B] in 0..K-1; [].

    A label outside has NaN for a loss, which a run reports. Raises ValueError for other shapes, for
    labels that are no integers, and for a label outside where it is concrete.
    """
    _check_classes(logits, labels, mask)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise UsageError(f"labels: are {labels.dtype}, must be integers")
    # Not by taking the label's entry, whose gradient scatters: on a GPU a kernel of its own.
    is_label = jnp.arange(logits.shape[1]) == labels[:, None]
    losses = -jnp.where(is_label, jax.nn.log_softmax(logits), 0).sum(-1)
    is_class = (labels >= 0) & (labels < logits.shape[1])
    return masked_mean(jnp.where(is_class, losses, jnp.nan), mask)


def accuracy(logits: Array, labels: Array, mask: Array) -> Array:
    """The fraction of real examples whose largest of the logits [B, K] is the label's [B]; [].

    Raises ValueError as `cross_entropy` does.
    """
    _check_classes(logits, labels, mask)
    return masked_mean((jnp.argmax(logits, -1) == labels).astype(jnp.float32), mask)


def _check_classes(logits: Array, labels: Array, mask: Array) -> None:
    if logits.ndim != 2 or labels.ndim != 1 or len(logits) != len(labels):
        raise UsageError(f"logits {logits.shape} and labels {labels.shape}: must be [B, K] and [B]")
    if checks.is_concrete((labels, mask)) and labels.shape == mask.shape:
        # Of NumPy, as a trace that these arrays are constants of would trace their indexing.
        real = np.asarray(labels)[np.asarray(mask)]
        checks.integers("labels", real, 0, logits.shape[1] - 1, may_be_empty=True)


def soft_cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Mean softmax cross-entropy in nats of logits [B, K] against labels [B, K] that sum to 1; [].

    Raises ValueError for other shapes.
    """
    if logits.ndim != 2 or logits.shape != labels.shape:
        raise UsageError(
            f"logits {logits.shape} and labels {labels.shape}: must both be [B, K], of one shape"
        )
    return masked_mean(optax.losses.softmax_cross_entropy(logits, labels), mask)
