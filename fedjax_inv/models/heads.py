"""Heads for the features of a frozen network: linear, by cosines, and with an adapter before it."""

from collections.abc import Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks, types
from fedjax_inv.checks import UsageError
from fedjax_inv.models.blocks import from_blocks
from fedjax_inv.models.layers import Flat, Logits
from fedjax_inv.types import Array, Tree

_VECTORS = "vectors"  # the name of the class vectors, in a network as in a file
_SCALE = 100.0  # CLIP's, at which its training ends


def linear(num_classes: int) -> types.Model:
    """Build a linear classifier: logits [B, K] of inputs [B, ...], which are flattened."""
    return from_blocks([Flat(), Logits(num_classes)], 0)


class _Cosines(nn.Module):
    """scale x (the cosine of features [B, P] and of each class's vector)."""

    num_classes: int
    scale: float

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        shape = (self.num_classes, x.shape[-1])
        vectors = self.param(_VECTORS, nn.initializers.normal(), shape)
        return self.scale * _normalised(x) @ _normalised(vectors).T


def _normalised(x: Array) -> Array:
    """Return vectors [..., P] of length 1; zeros stay zeros, also in gradients."""
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-12)


class _Adapter(nn.Module):
    """(1 - ratio) x + ratio relu(W relu(V x)), with a bottleneck of so many units between."""

    units: int
    ratio: float

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        units = self.units or max(1, x.shape[-1] // 4)
        hidden = nn.relu(nn.Dense(units, use_bias=False)(x))
        added = nn.relu(nn.Dense(x.shape[-1], use_bias=False)(hidden))
        return (1 - self.ratio) * x + self.ratio * added


def cosine(num_classes: int, *, logit_scale: float = _SCALE) -> types.Model:
    """Build a classifier by cosines: logits [B, K] = scale x cosine of input and class vector.

    Inputs are features [B, P]; the vectors "vectors" [K, P] are the head, and the body is empty.
    """
    checks.positive("logit_scale", logit_scale)
    return from_blocks([Flat(), _Cosines(num_classes, logit_scale)], 0)


def adapter(
    num_classes: int,
    *,
    widths: Sequence[int] = (),
    ratio: float = 0.2,
    logit_scale: float = _SCALE,
) -> types.Model:
    """Build CLIP-Adapter (Gao et al. 2024, arXiv 2110.04544, equations 4 to 6, visual side).

    The body is a bottleneck with a residual, x + ratio (relu(W relu(V x)) - x), and the head is
    that of `cosine`. The paper trains the body alone, with class vectors of texts.

    Args:
      widths: the units of the bottleneck, one number; by default a quarter of the features.
      ratio: how much of the features is replaced; the paper's default is 0.2.
      logit_scale: the factor of the cosines.

    Returns:
      A model with logits [B, K] of features [B, P].
    """
    if len(widths) > 1:
        raise UsageError("widths", tuple(widths), "must be one number, the bottleneck's units")
    checks.real("ratio", ratio, 0, 1)
    checks.positive("logit_scale", logit_scale)
    units = widths[0] if widths else 0
    return from_blocks([_Adapter(units, ratio), _Cosines(num_classes, logit_scale)], 1)


def from_vectors(model: types.Model, file: str | Path, classes: Sequence[str]) -> types.Model:
    """Return the `cosine` or `adapter` whose class vectors start from a file.

    With the embeddings of texts, and without an adapter, it classifies as CLIP does zero-shot.

    Args:
      file: an .npz file with names [K], those of the classes in any order, and vectors [K, P].
      classes: the names of the K classes, in the order of the logits.
    """
    vectors = _read(file, classes)

    def init(key: Array, x: Tree) -> types.Variables:
        variables = model.init(key, x)
        named = jax.tree_util.tree_leaves_with_path(variables.params.head)
        shapes = [leaf.shape for (*_, name), leaf in named if name.key == _VECTORS]
        if not shapes:
            raise UsageError("file", file, "needs models.cosine or adapter")
        if shapes != [vectors.shape]:
            text = f"has vectors of {vectors.shape[1]} numbers, must be {shapes[0][1]}"
            raise UsageError("file", file, f"{text} as the features")
        head = jax.tree_util.tree_map_with_path(
            lambda place, leaf: jnp.asarray(vectors) if place[-1].key == _VECTORS else leaf,
            variables.params.head,
        )
        return variables._replace(params=variables.params._replace(head=head))

    return model._replace(init=init)


def _read(file: str | Path, classes: Sequence[str]) -> np.ndarray:
    """Return the vectors [K, P] float32 of a file in the order of the classes."""
    needed = f"an .npz file with names [{len(classes)}] and {_VECTORS} [{len(classes)}, P]"
    try:
        with np.load(checks.regular(Path(file).expanduser())) as archive:
            names = map(str, archive["names"])
            vectors = archive[_VECTORS].astype(np.float32)
    except Exception as error:  # of many types, such as for no archive and for pickled objects
        raise UsageError("file", file, f"must be {needed}: {checks.one_line(error)}") from None
    rows = {name: row for row, name in enumerate(names)}
    if {*rows} != {*classes}:
        lacking = sorted({*classes} - {*rows})
        others = sorted({*rows} - {*classes})
        texts = [f"lacks {', '.join(lacking[:3])}"] * bool(lacking)
        texts += [f"has {', '.join(others[:3])}"] * bool(others)
        raise UsageError("file", file, f"must name the data's classes, it {' and '.join(texts)}")
    if vectors.ndim != 2 or len(vectors) != len(classes) or not np.isfinite(vectors).all():
        raise UsageError("file", file, f"must be {needed}, finite; vectors are {vectors.shape}")
    return vectors[[rows[name] for name in classes]]
