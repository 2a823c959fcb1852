"""Multilayer perceptrons."""

from collections.abc import Sequence

import flax.linen as nn

from fedjax_inv import checks, types
from fedjax_inv.models.blocks import from_blocks
from fedjax_inv.models.layers import ACTIVATIONS, NORMS, Dense, Flat, Logits


def widths_for(num_features: int) -> tuple[int, int]:
    """Return the widths of an MLP for vectors [D]: two layers of 4 D units, from 32 to 390."""
    width = min(max(4 * num_features, 32), 390)
    return (width, width)


def mlp(
    num_classes: int,
    *,
    widths: Sequence[int] = (390, 390),
    cut: int | None = None,
    activation: str = "relu",
    norm: str = "none",
) -> types.Model:
    """Build a multilayer perceptron: hidden layers, then a linear classifier.

    Args:
      widths: units of the hidden layers; may be empty.
      cut: how many hidden layers are the body; by default all.
      activation: "relu" or "elu".
      norm: "batch" for `BatchNorm` between each hidden layer and its activation, or "none".

    Returns:
      A model with logits [B, K] of inputs [B, ...], which are flattened to [B, D].
    """
    checks.one_of("activation", activation, ACTIVATIONS)
    checks.one_of("norm", norm, NORMS)
    hidden: list[nn.Module] = [
        Dense(n, norm=NORMS[norm], activation=ACTIVATIONS[activation]) for n in widths
    ]
    blocks: list[nn.Module] = [*(hidden or [Flat()]), Logits(num_classes)]
    return from_blocks(blocks, len(widths) if cut is None else cut)
