"""ResNet-18 and ResNet-50 (He et al. 2016, "Deep Residual Learning for Image Recognition", arXiv
1512.03385), the latter with the stride in the 3x3 convolutions, as torchvision has it (v1.5).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn

from fedjax_inv import checks, types
from fedjax_inv.checks import UsageError
from fedjax_inv.models import lowerings
from fedjax_inv.models.blocks import from_blocks
from fedjax_inv.models.layers import Logits, SpatialMean, check_images
from fedjax_inv.models.norms import BatchNorm, FrozenBatchNorm, GroupNorm
from fedjax_inv.types import Array

# The names of modules correspond to torchvision's: `weights` translates them.

Norm = Callable[..., nn.Module]  # norm(name=...) is called as block(x, mask, train)
NORMS: dict[str, Norm] = {"batch": BatchNorm, "group": GroupNorm, "frozen": FrozenBatchNorm}


class _Stem(NamedTuple):
    window: int
    stride: int
    pool: bool


_STEMS = {32: _Stem(3, 1, False), 64: _Stem(7, 2, False), 224: _Stem(7, 2, True)}  # by image size
_STRIDES = (1, 2, 2, 2)  # of the stages
_WIDTHS = (64, 128, 256, 512)


def _conv(features: int, window: int, stride: int, conv: lowerings.Conv, name: str) -> nn.Conv:
    """Return a convolution before a norm, initialised as in He et al. 2015 by its outputs."""
    return nn.Conv(
        features,
        (window, window),
        stride,
        padding=window // 2,  # on every side, as in PyTorch: SAME would be lopsided at stride 2
        use_bias=False,
        kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
        conv_general_dilated=conv,
        name=name,
    )


class _FirstLayer(nn.Module):
    width: int
    stem: _Stem
    norm: Norm
    conv: lowerings.Conv

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        check_images(x)
        x = _conv(self.width, self.stem.window, self.stem.stride, self.conv, "conv1")(x)
        x = nn.relu(self.norm(name="norm1")(x, mask, train))
        return lowerings.max_pool(x, 3, 2, 1) if self.stem.pool else x


class _Residual(nn.Module):
    """relu(x + f(x)) with convolutions f; if shapes differ, a 1x1 convolution maps x."""

    windows: Sequence[int]  # (3, 3), or (1, 3, 1) with four times as many outputs: a bottleneck
    width: int
    stride: int  # of the first 3x3 convolution
    norm: Norm
    conv: lowerings.Conv

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        hidden, outputs = x, self.width
        for i, window in enumerate(self.windows):
            outputs = 4 * self.width if i == 2 else self.width
            stride = self.stride if i == self.windows.index(3) else 1
            hidden = nn.relu(hidden) if i else hidden
            hidden = _conv(outputs, window, stride, self.conv, f"conv{i + 1}")(hidden)
            hidden = self.norm(name=f"norm{i + 1}")(hidden, mask, train)
        if self.stride != 1 or x.shape[-1] != outputs:
            x = _conv(outputs, 1, self.stride, self.conv, "downsample_conv")(x)
            x = self.norm(name="downsample_norm")(x, mask, train)
        return nn.relu(x + hidden)


class _Stage(nn.Module):
    number: int  # from 1
    depth: int
    stride: int  # of the first block
    block: Callable[..., nn.Module]  # called as block(stride=..., name=...)

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        for i in range(self.depth):
            block = self.block(stride=1 if i else self.stride, name=f"layer{self.number}_{i}")
            x = block(x, mask, train)
        return x


def resnet18(
    num_classes: int,
    *,
    image_size: int = 32,
    norm: str = "batch",
    widths: Sequence[int] = _WIDTHS,
    cut: int | None = None,
    conv: str = "auto",
) -> types.Model:
    """Build ResNet-18.

    It has a convolution, four stages of two residual blocks, the spatial mean and a linear
    classifier. Convolutions before a norm have no bias; all padding is symmetric, as in PyTorch,
    whose weights `models.weights` loads.

    Args:
      image_size: the height and width for which the first layer is built. 32: a 3x3 convolution.
        64: the paper's 7x7 convolution at stride 2, but without its pooling, so that 32 and 64 end
        in 4x4 and the paper's weights fit. 224: the paper's, 7x7 at stride 2, then 3x3 max pooling
        at stride 2. Images of other sizes pass through.
      norm: "batch" for `BatchNorm`; "group" for `GroupNorm` with two groups (Hsieh et al. 2020);
        "frozen" for `FrozenBatchNorm`, which keeps the statistics, scale and bias of loaded
        weights.
      widths: channels of the four stages; the first layer has the first stage's.
      cut: the layers of the body: 0 none, 1 the first layer, 2 to 5 up to stage 1 to 4, 6 all but
        the classifier, whose inputs are then features [B, widths[-1]]; by default 6.

    Returns:
      A model with logits [B, K] of images [B, height, width, channels].
    """
    return _resnet((3, 3), (2, 2, 2, 2), num_classes, image_size, norm, widths, cut, conv)


def resnet50(
    num_classes: int,
    *,
    image_size: int = 224,
    norm: str = "batch",
    widths: Sequence[int] = _WIDTHS,
    cut: int | None = None,
    conv: str = "auto",
) -> types.Model:
    """Build ResNet-50, with logits [B, K] of images [B, height, width, channels].

    It differs from `resnet18` in its stages: 3, 4, 6 and 3 blocks of a 1x1, a 3x3 and a 1x1
    convolution, of which the last has four times as many channels; `widths` are those of the 3x3
    ones. With a cut of 6 the classifier's inputs are [B, 4 widths[-1]].
    """
    return _resnet((1, 3, 1), (3, 4, 6, 3), num_classes, image_size, norm, widths, cut, conv)


def _resnet(
    windows: Sequence[int],
    depths: Sequence[int],
    num_classes: int,
    image_size: int,
    norm: str,
    widths: Sequence[int],
    cut: int | None,
    conv: str,
) -> types.Model:
    """Return the network with `depths` blocks in its stages; the rest is as in `resnet18`."""
    checks.one_of("norm", norm, NORMS)
    if len(widths) != len(_STRIDES):
        raise UsageError("widths", tuple(widths), f"must be {len(_STRIDES)}, one of each stage")
    if norm == "group" and any(width % GroupNorm.groups for width in widths):
        raise UsageError("widths", tuple(widths), f"must be multiples of {GroupNorm.groups}")
    layers: Any = {"norm": NORMS[norm], "conv": lowerings.lowering(conv)}
    stages = [
        _Stage(1 + i, depth, stride, partial(_Residual, windows, width, **layers))
        for i, (depth, width, stride) in enumerate(zip(depths, widths, _STRIDES, strict=True))
    ]
    first = _FirstLayer(widths[0], _STEMS[image_size], **layers)
    blocks: list[nn.Module] = [first, *stages, SpatialMean(), Logits(num_classes, "fc")]
    return from_blocks(blocks, len(blocks) - 1 if cut is None else cut)
