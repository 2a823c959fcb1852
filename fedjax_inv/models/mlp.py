"""Multilayer perceptrons."""

from collections.abc import Callable, Sequence

import flax.linen as nn

from fedjax_inv import checks
from fedjax_inv.models.blocks import from_blocks
from fedjax_inv.models.norms import BatchNorm
from fedjax_inv.types import Array, Model

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"relu": nn.relu, "elu": nn.elu}
NORMS: dict[str, type[BatchNorm] | None] = {"none": None, "batch": BatchNorm}


class _Hidden(nn.Module):
    width: int
    activation: Callable[[Array], Array]
    norm: type[BatchNorm] | None

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        # No bias before a norm, which would subtract it with the mean and has its own.
        x = nn.Dense(self.width, use_bias=self.norm is None)(x.reshape(x.shape[0], -1))
        if self.norm is not None:
            x = self.norm()(x, mask, train)
        return self.activation(x)


class Logits(nn.Module):
    """A linear classifier of features [B, D]: logits [B, num_classes]."""

    num_classes: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        return nn.Dense(self.num_classes)(x)


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
) -> Model:
    """Build a multilayer perceptron: hidden layers, then a linear classifier.

    Args:
      num_classes: K.
      widths: units of the hidden layers; may be empty.
      cut: how many hidden layers are the body; by default all.
      activation: "relu" or "elu".
      norm: "batch" for `BatchNorm` between each hidden layer and its activation, or "none".

    Returns:
      A model with logits [B, K] of inputs [B, ...], which are flattened to [B, D].

    Raises:
      UsageError: for an argument that is not allowed.
    """
    checks.integer("num_classes", num_classes, 1)
    checks.integers("widths", widths, 1, may_be_empty=True)
    checks.one_of("activation", activation, ACTIVATIONS)
    checks.one_of("norm", norm, NORMS)
    blocks: list[nn.Module] = [
        _Hidden(width, ACTIVATIONS[activation], NORMS[norm]) for width in widths
    ]
    blocks += [Logits(num_classes)]
    return from_blocks(blocks, len(widths) if cut is None else cut)
