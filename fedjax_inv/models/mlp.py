"""Multilayer perceptron."""

from collections.abc import Sequence

import flax.linen as nn

from fedjax_inv.models.blocks import from_blocks
from fedjax_inv.types import Array, Model


class _Hidden(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        return nn.relu(nn.Dense(self.width)(x.reshape(x.shape[0], -1)))


class _Logits(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


def mlp(num_classes: int, *, widths: Sequence[int] = (390, 390), cut: int | None = None) -> Model:
    """ReLU layers of the given widths on flattened inputs, then a linear classifier.

    cut: how many hidden layers are the body; all of them by default.
    """
    if any(width < 1 for width in widths):
        raise ValueError(f"widths={tuple(widths)}: each must be at least 1")
    blocks = [*(_Hidden(width) for width in widths), _Logits(num_classes)]
    return from_blocks(blocks, len(widths) if cut is None else cut)
