"""The blocks of which several networks consist, each called as block(x, mask, train)."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn

from fedjax_inv.checks import UsageError
from fedjax_inv.models import lowerings
from fedjax_inv.models.norms import BatchNorm
from fedjax_inv.types import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"relu": nn.relu, "elu": nn.elu}
NORMS: dict[str, type[BatchNorm] | None] = {"none": None, "batch": BatchNorm}


def check_images(x: Array, smallest: int = 1) -> None:
    """Check that x are images of a least size, else raise UsageError.

    flax would take three axes for one image, and poolings would leave nothing of a small one.
    """
    if x.ndim != 4 or min(x.shape[1:3]) < smallest:
        text = f"must be images [B, height, width, channels], at least {smallest} pixels a side"
        raise UsageError("inputs", x, text)


class Conv(nn.Module):
    """A convolution at stride 1, a norm or none, ReLU, and 2x2 max pooling or none."""

    features: int
    window: int
    conv: lowerings.Conv
    kernel_init: Any = nn.initializers.lecun_normal()
    norm: type[BatchNorm] | None = None
    pool: bool = True
    smallest: int = 1  # the least pixels a side of the inputs

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        check_images(x, self.smallest)
        x = nn.Conv(
            self.features,
            (self.window, self.window),
            kernel_init=self.kernel_init,
            conv_general_dilated=self.conv,
            use_bias=self.norm is None,  # a norm has its own
        )(x)
        if self.norm is not None:
            x = self.norm()(x, mask, train)
        return lowerings.max_pool(nn.relu(x), 2) if self.pool else nn.relu(x)


class Dense(nn.Module):
    """Dropout, a dense layer of flattened inputs, a norm or none, and an activation."""

    features: int
    kernel_init: Any = nn.initializers.lecun_normal()
    norm: type[BatchNorm] | None = None
    activation: Callable[[Array], Array] = nn.relu
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        x = nn.Dropout(self.dropout, deterministic=not train)(x.reshape(x.shape[0], -1))
        # A norm would subtract a bias with the mean, and has its own.
        x = nn.Dense(self.features, kernel_init=self.kernel_init, use_bias=self.norm is None)(x)
        if self.norm is not None:
            x = self.norm()(x, mask, train)
        return self.activation(x)


class Flat(nn.Module):
    """Inputs [B, ...] as vectors [B, D]."""

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        return x.reshape(x.shape[0], -1)


class Logits(nn.Module):
    """A linear classifier of features [B, ..., D]: logits [B, ..., num_classes]."""

    num_classes: int
    layer: str | None = None  # the name of its variables; None: flax's

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        return nn.Dense(self.num_classes, name=self.layer)(x)


class SpatialMean(nn.Module):
    """The mean over height and width: [B, height, width, C] -> [B, C]."""

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        return x.mean((1, 2))
