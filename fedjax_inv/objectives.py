"""Masked losses: means over real examples only.

Targets may be any tree; cross-entropy and accuracy are for those that are classes. All of them
raise AssertionError for other ranks than those written, and for axes B of different sizes.
"""

import chex
import jax.numpy as jnp
import optax

from fedjax_inv.types import Array


def masked_mean(values: Array, mask: Array) -> Array:
    """The mean of `values` [B] where `mask` [B] bool is true; 0 if it is true nowhere."""
    chex.assert_rank([values, mask], 1)
    chex.assert_equal_shape([values, mask])
    chex.assert_type(mask, bool)
    # `where` first: a NaN under the mask must reach neither the value nor the gradient.
    total = jnp.where(mask, values, 0).sum()
    return total / jnp.maximum(mask.sum(), 1).astype(total.dtype)


def cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Mean softmax cross-entropy in nats of logits [B, K] against labels [B] in 0..K-1; []."""
    _check_classes(logits, labels)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    return masked_mean(losses, mask)


def accuracy(logits: Array, labels: Array, mask: Array) -> Array:
    """The fraction of real examples whose largest of the logits [B, K] is the label's [B]; []."""
    _check_classes(logits, labels)
    return masked_mean((jnp.argmax(logits, -1) == labels).astype(jnp.float32), mask)


def _check_classes(logits: Array, labels: Array) -> None:
    chex.assert_rank([logits, labels], [2, 1])
    chex.assert_equal_shape_prefix([logits, labels], 1)
