"""Normalisation layers that see only the real examples of a batch."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from fedjax_inv.types import Array


class BatchNorm(nn.Module):
    """Batch normalisation (Ioffe & Szegedy 2015, Algorithm 1) over a batch's real examples.

    Called as block(x [B, ..., D], mask [B], train) -> [B, ..., D]. In training mode the D channels
    are normalised by their mean and biased variance over the real examples and over the axes
    between, and the running ones ("batch_stats": mean [D], var [D]) move there by 1 - momentum; a
    batch without a real example leaves them alone. In evaluation mode the running ones normalise.
    Where the mask is false, x may be anything and the outputs are finite but arbitrary. Parameters
    are scale [D] and bias [D]: all in all `flax.linen.BatchNorm` on the real examples.

    momentum: flax's default of 0.99 would keep a third of the initial statistics after 100 steps,
    and a client may take fewer than that in all; 0.9 keeps a third after 10.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        some = mask.any()
        real = mask.reshape(-1, *(1,) * (x.ndim - 1))
        # Without a real example, statistics are those of zeros, and do not move.
        momentum: Any = jnp.where(some, self.momentum, 1.0)  # flax says float, and multiplies
        norm = nn.BatchNorm(
            use_running_average=not train,
            momentum=momentum,
            epsilon=self.epsilon,
            # E[x^2] - E[x]^2 keeps no digit of a variance that is small beside the mean.
            use_fast_variance=False,
        )
        nn.share_scope(self, norm)  # parameters lie under this module's own name
        # Zeros, as a NaN would reach the gradients as 0 x NaN.
        return norm(jnp.where(real, x, 0), mask=real | ~some)


class FrozenBatchNorm(nn.Module):
    """Batch normalisation of which nothing moves, for networks that start from loaded weights.

    Called as `BatchNorm` is, and in both modes what that is in evaluation mode. Nothing of it
    trains: scale [D] and bias [D] lie beside mean [D] and var [D] in "batch_stats", where neither a
    gradient nor an optimizer's decay reaches them. They start as 1, 0, 0 and 1.
    """

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train

        def fixed(name: str, value: float) -> Array:
            return self.variable("batch_stats", name, jnp.full, x.shape[-1:], value).value

        mean, var, scale, bias = (
            fixed(name, value)
            for name, value in (("mean", 0.0), ("var", 1.0), ("scale", 1.0), ("bias", 0.0))
        )
        return (x - mean) * (scale / jnp.sqrt(var + self.epsilon)) + bias


class GroupNorm(nn.Module):
    """Group normalisation (Wu & He 2018) of each example by itself, called as `BatchNorm` is.

    groups: of the D channels, that are normalised together; they must divide D. Parameters are
    scale [D] and bias [D].
    """

    groups: int = 2
    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        norm = nn.GroupNorm(self.groups, epsilon=self.epsilon, use_fast_variance=False)
        nn.share_scope(self, norm)
        return norm(x)
