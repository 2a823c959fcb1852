"""Convolutional networks: DomainBed's for RotatedMNIST, and LEAF's for FEMNIST."""

from collections.abc import Sequence

import flax.linen as nn

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.models import lowerings
from fedjax_inv.models.blocks import check_images, from_blocks
from fedjax_inv.models.mlp import Logits
from fedjax_inv.types import Array, Model

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
) -> Model:
    """Build DomainBed's MNIST_CNN (Gulrajani & Lopez-Paz 2021).

    It has 3x3 convolutions, each followed by ReLU and GroupNorm(8), the second with stride 2, then
    the spatial mean and a linear classifier.

    Args:
      num_classes: K.
      widths: channels of the convolutions, multiples of 8. The last is at least 16: with 8 each
        group of GroupNorm is a channel, whose mean over positions is the same for every image.
      cut: how many convolutions are the body; by default all.
      conv: one of `lowerings.LOWERINGS`.

    Returns:
      A model with logits [B, K] of images [B, height, width, channels] of any size.

    Raises:
      UsageError: for an argument that is not allowed, and at initialisation for other inputs.
    """
    checks.integer("num_classes", num_classes, 1)
    checks.integers("widths", widths, 1)
    if any(width % _GROUPS for width in widths):
        raise UsageError("widths", tuple(widths), f"must be multiples of {_GROUPS}")
    if widths[-1] == _GROUPS:
        text = "must end in at least 16: with 8 the mean over positions is the same for every image"
        raise UsageError("widths", tuple(widths), text)
    chosen = lowerings.lowering(conv)
    blocks: list[nn.Module] = [
        _Conv(width, 2 if i == 1 else 1, chosen) for i, width in enumerate(widths)
    ]
    blocks += [_PooledLogits(num_classes)]
    return from_blocks(blocks, len(widths) if cut is None else cut)


class _PooledConv(nn.Module):
    features: int
    conv: lowerings.Conv

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        check_images(x)
        if min(x.shape[1:3]) < 2:
            raise UsageError(
                "inputs",
                x,
                "must be images of at least 2 pixels a side before every convolution, which halves "
                "them; leave out a convolution",
            )
        conv = nn.Conv(self.features, (5, 5), padding=2, conv_general_dilated=self.conv)
        return lowerings.max_pool(nn.relu(conv(x)), 2)


class _Dense(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        return nn.relu(nn.Dense(self.width)(x.reshape(x.shape[0], -1)))


def leaf_cnn(
    num_classes: int,
    *,
    widths: Sequence[int] = (32, 64, 2048),
    cut: int | None = None,
    conv: str = "auto",
) -> Model:
    """Build LEAF's network for FEMNIST (Caldas et al. 2018, arXiv 1812.01097).

    It has 5x5 convolutions, each followed by ReLU and 2x2 max pooling, then a dense layer with ReLU
    and a linear classifier.

    Args:
      num_classes: K.
      widths: channels of the convolutions, and last the units of the dense layer.
      cut: how many of these layers are the body, so that a factor is a channel of a convolution or
        a unit of the dense layer; by default all.
      conv: one of `lowerings.LOWERINGS`.

    Returns:
      A model with logits [B, K] of images [B, height, width, channels], with sides of at least 2
      pixels before every convolution, which halves them.

    Raises:
      UsageError: for an argument that is not allowed, and at initialisation for other inputs.
    """
    checks.integer("num_classes", num_classes, 1)
    checks.integers("widths", widths, 1)
    *channels, units = widths
    chosen = lowerings.lowering(conv)
    blocks: list[nn.Module] = [_PooledConv(width, chosen) for width in channels]
    blocks += [_Dense(units), Logits(num_classes)]
    return from_blocks(blocks, len(widths) if cut is None else cut)
