"""Convolutional networks: DomainBed's for RotatedMNIST, and LEAF's for FEMNIST."""

from collections.abc import Sequence

import flax.linen as nn

from fedjax_inv import types
from fedjax_inv.checks import UsageError
from fedjax_inv.models import lowerings
from fedjax_inv.models.blocks import from_blocks
from fedjax_inv.models.layers import Conv, Dense, Logits, check_images
from fedjax_inv.types import Array

_GROUPS = 8  # of channels, in GroupNorm


class _Conv(nn.Module):
    features: int
    stride: int
    conv: lowerings.Conv

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        check_images(x)
        # Padding 1 on every side, as in PyTorch: SAME would be lopsided at stride 2.
        conv = nn.Conv(
            self.features, (3, 3), self.stride, padding=1, conv_general_dilated=self.conv
        )
        return nn.GroupNorm(num_groups=_GROUPS)(nn.relu(conv(x)))


class _PooledLogits(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        return nn.Dense(self.num_classes)(x.mean((1, 2)))


def cnn(
    num_classes: int,
    *,
    widths: Sequence[int] = (64, 128, 128, 128),
    cut: int | None = None,
    conv: str = "auto",
) -> types.Model:
    """Build DomainBed's MNIST_CNN (Gulrajani & Lopez-Paz 2021).

    It has 3x3 convolutions, each followed by ReLU and GroupNorm(8), the second with stride 2, then
    the spatial mean and a linear classifier.

    Args:
      widths: channels of the convolutions, multiples of 8. The last is at least 16: with 8 each
        group of GroupNorm is a channel, whose mean over positions is the same for every image.
      cut: how many convolutions are the body; by default all.

    Returns:
      A model with logits [B, K] of images [B, height, width, channels] of any size.
    """
    if any(width % _GROUPS for width in widths) or widths[-1] == _GROUPS:
        text = f"must be multiples of {_GROUPS} and end in at least {2 * _GROUPS}"
        raise UsageError("widths", tuple(widths), text)
    chosen = lowerings.lowering(conv)
    blocks: list[nn.Module] = [
        _Conv(width, 2 if i == 1 else 1, chosen) for i, width in enumerate(widths)
    ]
    blocks += [_PooledLogits(num_classes)]
    return from_blocks(blocks, len(widths) if cut is None else cut)


def leaf_cnn(
    num_classes: int,
    *,
    widths: Sequence[int] = (32, 64, 2048),
    cut: int | None = None,
    conv: str = "auto",
) -> types.Model:
    """Build LEAF's network for FEMNIST (Caldas et al. 2018, arXiv 1812.01097).

    It has 5x5 convolutions, each followed by ReLU and 2x2 max pooling, then a dense layer with ReLU
    and a linear classifier.

    Args:
      widths: channels of the convolutions, and last the units of the dense layer.
      cut: how many of these layers are the body, so that a factor is a channel of a convolution or
        a unit of the dense layer; by default all.

    Returns:
      A model with logits [B, K] of images [B, height, width, channels], with sides of at least 2
      pixels before every convolution, which halves them: 4 pixels by default.
    """
    *channels, units = widths
    chosen = lowerings.lowering(conv)
    smallest = 2 ** len(channels)
    blocks: list[nn.Module] = [
        Conv(width, 5, chosen, smallest=1 if i else smallest) for i, width in enumerate(channels)
    ]
    blocks += [Dense(units), Logits(num_classes)]
    return from_blocks(blocks, len(widths) if cut is None else cut)
