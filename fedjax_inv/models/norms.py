"""Normalisation layers that use only the real examples of a batch."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from fedjax_inv.types import Array


class BatchNorm(nn.Module):
    """Batch normalisation (Ioffe & Szegedy 2015, Algorithm 1) over a batch's real examples.

    Called as block(x [B, ..., D], mask [B], train) -> [B, ..., D]. In training mode the D channels
    are normalised by their mean and biased variance over the real examples and the axes between,
    and the running statistics ("batch_stats": mean [D], var [D]) move there by 1 - momentum;
    without a real example they stay. In evaluation mode the running statistics normalise. Where the
    mask is false, x may be anything and the outputs are finite but arbitrary. On real examples the
    layer equals `flax.linen.BatchNorm`.

    Attributes:
      momentum: flax's default of 0.99 would keep a third of the initial statistics after 100 steps,
        which may be more than all steps of a client; 0.9 keeps a third after 10.
      epsilon: is added to the variance.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        some = mask.any()
        real = mask.reshape(-1, *(1,) * (x.ndim - 1))
        # Without a real example, the batch's statistics are those of zeros and must not count.
        momentum: Any = jnp.where(some, self.momentum, 1.0)  # flax types a float; an array works
        norm = nn.BatchNorm(
            use_running_average=not train,
            momentum=momentum,
            epsilon=self.epsilon,
            # E[x^2] - E[x]^2 loses all digits of a variance that is small beside the mean.
            use_fast_variance=False,
        )
        nn.share_scope(self, norm)  # puts parameters under this module's name
        # Zeros where the mask is false: a NaN would reach the gradients as 0 x NaN.
        return norm(jnp.where(real, x, 0), mask=real | ~some)


class FrozenBatchNorm(nn.Module):
    """Batch normalisation that does not train, for networks that start from loaded weights.

    Called as `BatchNorm` is; in both modes it computes what `BatchNorm` does in evaluation mode.
    Scale [D] and bias [D] lie beside mean [D] and var [D] in "batch_stats", where neither a
    gradient nor an optimizer's decay reaches them. They start as 1, 0, 0 and 1. A federated round
    replaces all four by the mean of the clients' equal values, so they change by its rounding.

    Attributes:
      epsilon: is added to the variance.
    """

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train

        def fixed(name: str, value: float) -> Array:
            of = jnp.full, x.shape[-1:], value, jnp.float32
            return self.variable("batch_stats", name, *of).value

        mean, var, scale, bias = (
            fixed(name, value)
            for name, value in (("mean", 0.0), ("var", 1.0), ("scale", 1.0), ("bias", 0.0))
        )
        # In the type of the inputs, as other norms, or all layers behind would compute in float32.
        return ((x - mean) * (scale / jnp.sqrt(var + self.epsilon)) + bias).astype(x.dtype)


class GroupNorm(nn.Module):
    """Group normalisation (Wu & He 2018) of each example by itself, called as `BatchNorm` is.

    Attributes:
      groups: the number of groups of channels, which must divide D.
      epsilon: is added to the variance.
    """

    groups: int = 2
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        norm = nn.GroupNorm(self.groups, epsilon=self.epsilon, use_fast_variance=False)
        nn.share_scope(self, norm)
        return norm(x)
