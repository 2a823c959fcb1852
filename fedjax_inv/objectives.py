"""Masked losses: means over real examples only."""

import jax.numpy as jnp
import optax

from fedjax_inv.types import Array


def masked_mean(values: Array, mask: Array) -> Array:
    """The mean of `values` [B] where `mask` [B] is true; 0 if it is true nowhere."""
    # `where` first: a NaN under the mask must reach neither the value nor the gradient.
    total = jnp.where(mask, values, 0).sum()
    return total / jnp.maximum(mask.sum(), 1).astype(total.dtype)


def cross_entropy(logits: Array, labels: Array, mask: Array) -> Array:
    """Mean softmax cross-entropy in nats of logits [B, K] against labels [B]; []."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    return masked_mean(losses, mask)


def accuracy(logits: Array, labels: Array, mask: Array) -> Array:
    """The fraction of real examples whose largest logit is the label's; []."""
    return masked_mean((jnp.argmax(logits, -1) == labels).astype(jnp.float32), mask)
