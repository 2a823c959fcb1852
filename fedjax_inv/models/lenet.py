"""Two convolutions and dense layers, in the manner of LeNet-5 (LeCun et al. 1998)."""

from collections.abc import Sequence

import flax.linen as nn

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.models import lowerings
from fedjax_inv.models.blocks import check_images, from_blocks
from fedjax_inv.models.mlp import NORMS, Logits
from fedjax_inv.models.norms import BatchNorm
from fedjax_inv.types import Array, Model

_NUM_CONVS = 2
_SMALLEST = 2**_NUM_CONVS  # pixels a side, which the poolings reduce to one


class _Conv(nn.Module):
    """A 5x5 convolution, a norm or none, ReLU and 2x2 max pooling."""

    features: int
    smallest: int  # the least pixels a side of the inputs
    conv: lowerings.Conv
    norm: type[BatchNorm] | None

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        check_images(x)
        if min(x.shape[1:3]) < self.smallest:
            raise UsageError(
                "inputs", x, f"must be images of at least {self.smallest} pixels a side"
            )
        x = nn.Conv(
            self.features,
            (5, 5),
            kernel_init=nn.initializers.he_normal(),
            conv_general_dilated=self.conv,
            use_bias=self.norm is None,  # a norm has its own
        )(x)
        if self.norm is not None:
            x = self.norm()(x, mask, train)
        return lowerings.max_pool(nn.relu(x), 2)


class _Dense(nn.Module):
    features: int
    norm: type[BatchNorm] | None

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        init = nn.initializers.he_normal()
        dense = nn.Dense(self.features, kernel_init=init, use_bias=self.norm is None)
        x = dense(x.reshape(x.shape[0], -1))
        if self.norm is not None:
            x = self.norm()(x, mask, train)
        return nn.relu(x)


def lenet(
    num_classes: int,
    *,
    widths: Sequence[int] = (32, 32, 512, 384, 192),
    cut: int | None = None,
    conv: str = "auto",
    norm: str = "none",
) -> Model:
    """Build two convolutions and dense layers, in the manner of LeNet-5.

    There are two 5x5 convolutions, each followed by ReLU and 2x2 max pooling, then dense layers
    with ReLU and a linear classifier. Convolutions keep an image's size; kernels start as in He et
    al. 2015.

    Args:
      num_classes: K.
      widths: channels of the two convolutions, then units of the dense layers, at least one.
      cut: how many of these layers are the body; by default all.
      conv: one of `lowerings.LOWERINGS`.
      norm: "batch" for `BatchNorm` between each hidden layer and its ReLU, or "none".

    Returns:
      A model with logits [B, K] of images [B, height, width, channels] of at least 4x4 pixels.

    Raises:
      UsageError: for an argument that is not allowed, and at initialisation for other inputs.
    """
    checks.integer("num_classes", num_classes, 1)
    checks.integers("widths", widths, 1)
    if len(widths) <= _NUM_CONVS:
        raise UsageError("widths", tuple(widths), f"must be {_NUM_CONVS} channels, then units")
    checks.one_of("norm", norm, NORMS)
    chosen, layer = lowerings.lowering(conv), NORMS[norm]
    blocks: list[nn.Module] = [
        _Conv(width, _SMALLEST if i == 0 else 1, chosen, layer)
        for i, width in enumerate(widths[:_NUM_CONVS])
    ]
    blocks += [_Dense(width, layer) for width in widths[_NUM_CONVS:]]
    blocks += [Logits(num_classes)]
    return from_blocks(blocks, len(widths) if cut is None else cut)
