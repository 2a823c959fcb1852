"""Published networks by name, and their features, computed once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_inv import platforms, types
from fedjax_inv.models.blocks import no_body
from fedjax_inv.models.efficientnet import efficientnet_lite0
from fedjax_inv.models.resnet import resnet18, resnet50
from fedjax_inv.models.vit import vit
from fedjax_inv.models.weights import IMAGENET_MEAN, IMAGENET_STD
from fedjax_inv.types import Array, Tree

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)


class Body(NamedTuple):
    """A published network, with what its file of weights does not tell."""

    make: Callable[..., types.Model]  # called as make(num_classes, ...)
    layer: str  # what its features are
    mean: Sequence[float] = IMAGENET_MEAN  # of each channel of images in [0, 1]
    std: Sequence[float] = IMAGENET_STD
    interpolation: str = "bicubic"  # by which images are resized
    image_size: int = 224


_small = partial(vit, width=384, depth=12, heads=6)
_base = partial(vit, width=768, depth=12, heads=12)
_large = partial(vit, width=1024, depth=24, heads=16)
_huge = partial(vit, width=1280, depth=32, heads=16)
_TOKEN = "class token after the last norm"
_POOLED = "mean over height and width"


def _dinov2(make: Callable[..., types.Model], registers: int = 0) -> Body:
    return Body(partial(make, patch=14, layer_scale=True, registers=registers), _TOKEN)


def _clip(
    make: Callable[..., types.Model], patch: int, projection: int, of_openai: bool = True
) -> Body:
    make = partial(make, patch=patch, projection=projection, quick_gelu=of_openai)
    return Body(make, f"{_TOKEN}, projected", _CLIP_MEAN, _CLIP_STD)


# The names are those of --model.
BODIES = {
    "resnet18": Body(partial(resnet18, image_size=224), _POOLED, interpolation="bilinear"),
    "resnet50": Body(resnet50, _POOLED, interpolation="bilinear"),
    "efficientnet_lite0": Body(efficientnet_lite0, _POOLED, _HALF, _HALF),
    "vit_s16": Body(partial(_small, patch=16), _TOKEN, _HALF, _HALF),
    "vit_b16": Body(partial(_base, patch=16), _TOKEN, _HALF, _HALF),
    "vit_b32": Body(partial(_base, patch=32), _TOKEN, _HALF, _HALF),
    "vit_l16": Body(partial(_large, patch=16), _TOKEN, _HALF, _HALF),
    "dinov2_s14": _dinov2(_small),
    "dinov2_b14": _dinov2(_base),
    "dinov2_l14": _dinov2(_large),
    "dinov2_s14_reg": _dinov2(_small, 4),
    "dinov2_b14_reg": _dinov2(_base, 4),
    "dinov2_l14_reg": _dinov2(_large, 4),
    "clip_b32": _clip(_base, 32, 512),
    "clip_b16": _clip(_base, 16, 512),
    "clip_l14": _clip(_large, 14, 768),
    # LAION's have the exact GELU.
    "laion_clip_b32": _clip(_base, 32, 512, of_openai=False),
    "laion_clip_b16": _clip(_base, 16, 512, of_openai=False),
    "laion_clip_h14": _clip(_huge, 14, 1024, of_openai=False),
}


def encoder(
    model: types.Model,
    variables: types.Variables,
    *,
    devices: Sequence[jax.Device] | None = None,
    batch_size: int = 64,
    precision: str = "highest",
) -> Callable[[Tree], np.ndarray]:
    """Return the function from inputs [M, ...] to the outputs [M, ...] of the model's body.

    It runs the body in evaluation mode, in batches over all devices, of which each takes a part of
    a batch. The precision is that of products on GPUs and TPUs, as in `platforms.products_at`.
    """
    devices = platforms.devices() if devices is None else devices
    mesh = Mesh(np.array(devices), ("images",))
    rows, everywhere = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (["images"], []))
    size = -(-batch_size // len(devices)) * len(devices)
    body = jax.device_put(types.Halves(variables.params.body, variables.stats.body), everywhere)

    @jax.jit
    def encode(body: types.Halves, x: Tree) -> Array:
        params, stats = body
        with platforms.products_at(precision):
            return model.encode(params, stats, x, jnp.ones(size, bool), False)[0]

    def features(x: Tree) -> np.ndarray:
        count = len(jax.tree.leaves(x)[0])
        outputs = []
        for first in range(0, count, size):
            # The last row stands in for those that fill the last batch.
            places = np.minimum(np.arange(first, first + size), count - 1)
            batch = jax.tree.map(lambda leaf, at=places: leaf[at], x)
            outputs.append(np.asarray(encode(body, jax.device_put(batch, rows))))
        return np.concatenate(outputs)[:count]

    return features


def without_body(model: types.Model, x: Tree) -> types.Model:
    """Return the head of a model as a model of the body's outputs.

    Its initial head is that of the whole model on inputs like x [B, ...], with the same key. Where
    the body is frozen, and is the same in all runs, it trains as the whole model does.
    """
    like = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), x)

    def init(key: Array, features: Tree) -> types.Variables:
        del features
        params, stats = model.init(key, like)
        return types.Variables(types.Halves({}, params.head), types.Halves({}, stats.head))

    return types.Model(init, no_body, model.decode)
