"""A small AlexNet (Krizhevsky et al. 2012) for images of 28x28 pixels."""

from collections.abc import Sequence

import flax.linen as nn

from fedjax_inv import types
from fedjax_inv.checks import UsageError
from fedjax_inv.models import lowerings
from fedjax_inv.models.blocks import from_blocks
from fedjax_inv.models.layers import Conv, Dense, Logits

# (window, whether a pooling follows) of each convolution.
_CONVS = ((5, True), (5, True), (3, False), (3, False), (3, True))


def alexnet(
    num_classes: int,
    *,
    widths: Sequence[int] = (32, 96, 192, 128, 128, 256, 256),
    cut: int | None = None,
    conv: str = "auto",
    dropout: float = 0.0,
) -> types.Model:
    """Build a small AlexNet: five convolutions, three poolings and three dense layers.

    For images of 28x28x1, at the default widths:

        5x5 convolution,  32 channels, ReLU, 2x2 max pooling    14x14x32         832 parameters
        5x5 convolution,  96 channels, ReLU, 2x2 max pooling     7x7x96       76,896
        3x3 convolution, 192 channels, ReLU                      7x7x192     166,080
        3x3 convolution, 128 channels, ReLU                      7x7x128     221,312
        3x3 convolution, 128 channels, ReLU, 2x2 max pooling     3x3x128     147,584
        dropout, dense, ReLU                                         256     295,168
        dropout, dense, ReLU                                         256      65,792
        dense, logits                                                 10       2,570
                                                                   total     976,234

    The images are small, so windows are smaller than the original's and every stride is 1. Poolings
    do not overlap, there is no response normalisation, and kernels start as in He et al. 2015.

    Args:
      widths: channels of the five convolutions, then units of the two hidden dense layers.
      cut: how many of these seven layers are the body; by default all.
      dropout: the fraction of inputs left out before each hidden dense layer in training mode,
        below 1; the original's is 0.5.

    Returns:
      A model with logits [B, K] of images [B, height, width, channels] of at least 8x8 pixels.
    """
    if len(widths) != len(_CONVS) + 2:
        raise UsageError("widths", tuple(widths), f"must be {len(_CONVS)} channels and 2 units")
    init = nn.initializers.he_normal()
    chosen = lowerings.lowering(conv)
    blocks: list[nn.Module] = [
        Conv(width, window, chosen, init, pool=pool, smallest=1 if i else 8)
        for i, (width, (window, pool)) in enumerate(zip(widths, _CONVS, strict=False))
    ]
    blocks += [Dense(width, init, dropout=dropout) for width in widths[len(_CONVS) :]]
    blocks += [Logits(num_classes)]
    return from_blocks(blocks, len(widths) if cut is None else cut)
