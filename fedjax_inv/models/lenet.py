"""Two convolutions and dense layers, in the manner of LeNet-5 (LeCun et al. 1998)."""

from collections.abc import Sequence

import flax.linen as nn

from fedjax_inv import checks, types
from fedjax_inv.checks import UsageError
from fedjax_inv.models import lowerings
from fedjax_inv.models.blocks import from_blocks
from fedjax_inv.models.layers import NORMS, Conv, Dense, Logits


def lenet(
    num_classes: int,
    *,
    widths: Sequence[int] = (32, 32, 512, 384, 192),
    cut: int | None = None,
    conv: str = "auto",
    norm: str = "none",
) -> types.Model:
    """Build two convolutions and dense layers, in the manner of LeNet-5.

    There are two 5x5 convolutions, each followed by ReLU and 2x2 max pooling, then dense layers
    with ReLU and a linear classifier. Convolutions keep an image's size; kernels start as in He et
    al. 2015.

    Args:
      widths: channels of the two convolutions, then units of the dense layers, at least one.
      cut: how many of these layers are the body; by default all.
      norm: "batch" for `BatchNorm` between each hidden layer and its ReLU, or "none".

    Returns:
      A model with logits [B, K] of images [B, height, width, channels] of at least 4x4 pixels.
    """
    if len(widths) < 3:
        raise UsageError("widths", tuple(widths), "must be 2 channels, then units")
    checks.one_of("norm", norm, NORMS)
    init = nn.initializers.he_normal()
    layer = NORMS[norm]
    chosen = lowerings.lowering(conv)
    blocks: list[nn.Module] = [
        Conv(widths[0], 5, chosen, init, layer, smallest=4),
        Conv(widths[1], 5, chosen, init, layer),
        *(Dense(width, init, layer) for width in widths[2:]),
        Logits(num_classes),
    ]
    return from_blocks(blocks, len(widths) if cut is None else cut)
