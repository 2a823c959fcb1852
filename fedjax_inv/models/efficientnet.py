"""EfficientNet-Lite0 (Tan & Le 2019, "EfficientNet", arXiv 1905.11946; Liu 2020, "Higher accuracy
on vision models with EfficientNet-Lite", for the variant).
"""

from typing import NamedTuple

import flax.linen as nn

from fedjax_inv import checks, types
from fedjax_inv.models import lowerings
from fedjax_inv.models.blocks import from_blocks
from fedjax_inv.models.layers import Logits, SpatialMean, check_images
from fedjax_inv.models.norms import BatchNorm, FrozenBatchNorm
from fedjax_inv.types import Array

# Modules have timm's names (tf_efficientnet_lite0), but for norms: `weights` translates them.

_EPSILON = 1e-3
_NORMS = {"batch": BatchNorm, "frozen": FrozenBatchNorm}
_FIRST = 32  # channels of the first layer
_LAST = 1280


class _StageShape(NamedTuple):
    window: int
    stride: int  # of the first block
    expansion: int  # channels inside of a block for each of its inputs
    width: int
    depth: int


_STAGES = (
    _StageShape(3, 1, 1, 16, 1),
    _StageShape(3, 2, 6, 24, 2),
    _StageShape(5, 2, 6, 40, 2),
    _StageShape(3, 2, 6, 80, 3),
    _StageShape(5, 1, 6, 112, 3),
    _StageShape(5, 2, 6, 192, 4),
    _StageShape(3, 1, 6, 320, 1),
)


class _Pointwise(nn.Module):
    """A 1x1 convolution, as a matrix product."""

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (1, 1, x.shape[-1], self.features)
        return x @ self.param("kernel", nn.initializers.he_normal(), shape)[0, 0]


class _Depthwise(nn.Module):
    window: int
    stride: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (self.window, self.window, 1, x.shape[-1])
        kernel = self.param("kernel", nn.initializers.he_normal(), shape)
        return lowerings.depthwise(x, kernel, self.stride)


class _Block(nn.Module):
    """An inverted residual without squeeze and excitation: expand, filter each channel, project."""

    window: int
    stride: int
    expansion: int
    width: int
    norm: str

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        norm = _NORMS[self.norm]
        is_expanded = self.expansion > 1
        layers: list[nn.Module] = []
        if is_expanded:
            layers = [_Pointwise(self.expansion * x.shape[-1], name="conv_pw")]
        layers += [
            _Depthwise(self.window, self.stride, name="conv_dw"),
            _Pointwise(self.width, name="conv_pwl" if is_expanded else "conv_pw"),
        ]
        hidden = x
        for i, layer in enumerate(layers, 1):
            hidden = layer(hidden)
            hidden = norm(epsilon=_EPSILON, name=f"norm{i}")(hidden, mask, train)
            hidden = hidden if i == len(layers) else nn.relu6(hidden)
        return x + hidden if x.shape == hidden.shape else hidden


class _Stage(nn.Module):
    number: int  # from 0
    shape: _StageShape
    norm: str

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        window, first_stride, expansion, width, depth = self.shape
        for i in range(depth):
            stride = 1 if i else first_stride
            name = f"blocks.{self.number}.{i}"
            x = _Block(window, stride, expansion, width, self.norm, name=name)(x, mask, train)
        return x


class _FirstLayer(nn.Module):
    norm: str
    conv: lowerings.Conv

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        check_images(x)
        x = nn.Conv(
            _FIRST, (3, 3), 2, use_bias=False, conv_general_dilated=self.conv, name="conv_stem"
        )(x)
        return nn.relu6(_NORMS[self.norm](epsilon=_EPSILON, name="norm1")(x, mask, train))


class _LastLayer(nn.Module):
    norm: str

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        x = _Pointwise(_LAST, name="conv_head")(x)
        return nn.relu6(_NORMS[self.norm](epsilon=_EPSILON, name="norm2")(x, mask, train))


def efficientnet_lite0(
    num_classes: int, *, norm: str = "batch", cut: int | None = None, conv: str = "auto"
) -> types.Model:
    """Build EfficientNet-Lite0, whose weights in timm's names `models.weights` loads.

    It has a convolution at stride 2, seven stages of inverted residuals without squeeze and
    excitation, a 1x1 convolution to 1,280 channels, the spatial mean and a linear classifier.
    Activations are ReLU6, padding is TensorFlow's SAME.

    Args:
      norm: "batch" for `BatchNorm`; "frozen" for `FrozenBatchNorm`, which keeps the statistics,
        scale and bias of loaded weights. Both add 1e-3 to the variance.
      cut: the layers of the body: 0 none, 1 the first layer, 2 to 8 up to stage 1 to 7, 9 the last
        convolution, 10 all but the classifier, whose inputs are then features [B, 1280]; by default
        10.

    Returns:
      A model with logits [B, K] of images [B, height, width, channels].
    """
    checks.one_of("norm", norm, _NORMS)
    blocks: list[nn.Module] = [
        _FirstLayer(norm, lowerings.lowering(conv)),
        *(_Stage(i, shape, norm) for i, shape in enumerate(_STAGES)),
        _LastLayer(norm),
        SpatialMean(),
        Logits(num_classes, "classifier"),
    ]
    return from_blocks(blocks, len(blocks) - 1 if cut is None else cut)
