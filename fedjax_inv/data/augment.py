"""DomainBed's training augmentation (Gulrajani & Lopez-Paz 2021) as pure functions on the device.

A random resized crop, a horizontal flip, colour jitter and a random loss of colour, in this order,
with the distributions of PyTorch's torchvision in floating point instead of 8 bits.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array

_ATTEMPTS = 10  # to draw a crop that fits
_LUMA = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)


def resized_crop(image: Array, top: Array, left: Array, height: Array, width: Array) -> Array:
    """The window of an image [H, W, C], resized to [H, W, C] by linear interpolation.

    top, left, height, width: [] in pixels, of a window inside the image. Centres of pixels are
    interpolated; what lies beyond those of the window's edge is the edge's.
    """

    def weights(start: Array, length: Array, size: int) -> Array:
        """[size of the outputs, size of the inputs]."""
        at = (jnp.arange(size) + 0.5) * length / size - 0.5
        at = start + jnp.clip(at, 0, length - 1)
        return jnp.maximum(0, 1 - jnp.abs(at[:, None] - jnp.arange(size)))

    rows, columns = weights(top, height, image.shape[0]), weights(left, width, image.shape[1])
    return jnp.einsum("ri,sj,ijc->rsc", rows, columns, image, precision="highest")


def crop_window(
    key: Array, height: int, width: int, scale: Sequence[float], ratio: Sequence[float]
) -> tuple[Array, Array, Array, Array]:
    """(top, left, height, width) of a random window of an image, each [] int32.

    Its share of the area is uniform in scale, the logarithm of width over height uniform in that of
    ratio, and where it lies uniform. The first of ten draws that fits into the image counts; if
    none does, the largest centred window with the image's ratio, or with the next one allowed.
    """
    area_key, ratio_key, top_key, left_key = jax.random.split(key, 4)
    bounds = [math.log(bound) for bound in ratio]
    drawn = jnp.exp(jax.random.uniform(ratio_key, (_ATTEMPTS,), minval=bounds[0], maxval=bounds[1]))
    area = jax.random.uniform(area_key, (_ATTEMPTS,), minval=scale[0], maxval=scale[1])
    area = height * width * area
    widths = jnp.round(jnp.sqrt(area * drawn)).astype(jnp.int32)
    heights = jnp.round(jnp.sqrt(area / drawn)).astype(jnp.int32)
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    first = jnp.argmax(fits)
    rows = jnp.where(fits.any(), heights[first], max(1, min(height, round(width / ratio[0]))))
    columns = jnp.where(fits.any(), widths[first], max(1, min(width, round(height * ratio[1]))))
    top = jax.random.randint(top_key, (), 0, height - rows + 1)
    left = jax.random.randint(left_key, (), 0, width - columns + 1)
    top = jnp.where(fits.any(), top, (height - rows) // 2)
    left = jnp.where(fits.any(), left, (width - columns) // 2)
    return top, left, rows, columns


def grey(image: Array) -> Array:
    """The luma of an image [H, W, 3] in all three channels."""
    luma = jnp.einsum("...c,c->...", image, jnp.array(_LUMA, image.dtype), precision="highest")
    return jnp.broadcast_to(luma[..., None], image.shape)


def brightened(image: Array, factor: Array) -> Array:
    """An image in [0, 1] blended with black: factor [] 0 is black, 1 the image."""
    return jnp.clip(factor * image, 0, 1)


def contrasted(image: Array, factor: Array) -> Array:
    """An image [H, W, 3] in [0, 1] blended with its mean luma: factor [] 0 is that, 1 the image."""
    return jnp.clip(factor * image + (1 - factor) * grey(image).mean(), 0, 1)


def saturated(image: Array, factor: Array) -> Array:
    """An image [H, W, 3] in [0, 1] blended with its luma: factor [] 0 is grey, 1 the image."""
    return jnp.clip(factor * image + (1 - factor) * grey(image), 0, 1)


def hue_shifted(image: Array, shift: Array) -> Array:
    """An image [..., 3] in [0, 1] with its hue in HSV moved by shift [] of a full turn."""
    red, green, blue = (image[..., i] for i in range(3))
    value, low = image.max(-1), image.min(-1)
    chroma = value - low
    safe = jnp.where(chroma > 0, chroma, 1)
    hue = jnp.where(  # in sixths of a turn
        value == red,
        (green - blue) / safe,
        jnp.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = (hue + 6 * shift)[..., None]
    # A channel is full within a sixth of its own hue, and empty beyond a third.
    place = (jnp.array([5.0, 3.0, 1.0], image.dtype) + hue) % 6
    missing = jnp.clip(jnp.minimum(place, 4 - place), 0, 1)
    return value[..., None] - chroma[..., None] * missing


_JITTERS = (brightened, contrasted, saturated, hue_shifted)


def jittered(image: Array, order: Array, amounts: Array) -> Array:
    """An image [H, W, 3] in [0, 1], its colours changed.

    order: [4] a permutation of 0 brightness, 1 contrast, 2 saturation, 3 hue. amounts: [4] of them
    in this numbering, three factors and a shift.
    """
    return jax.lax.fori_loop(
        0,
        len(_JITTERS),
        lambda i, image: jax.lax.switch(order[i], _JITTERS, image, amounts[order[i]]),
        image,
    )


def augment(
    x: Array,
    key: Array,
    *,
    scale: Sequence[float] = (0.7, 1.0),
    ratio: Sequence[float] = (3 / 4, 4 / 3),
    flip: float = 0.5,
    jitter: float = 0.3,
    greyed: float = 0.1,
) -> Array:
    """Images x [B, H, W, 3] in [0, 1], each changed by draws of its own; the same shape and range.

    An example's draws depend on the key and on its place in the batch, on nothing else. For
    `models.augmented`; keywords are bound with `functools.partial`.

    scale, ratio: smallest and largest area of the crop, as a share of the image, and width over
    height. flip: the probability of a mirror image. jitter: at most 0.5; brightness, contrast and
    saturation are multiplied by factors uniform in [1 - jitter, 1 + jitter], the hue moves by
    [-jitter, jitter] of a turn, in random order. greyed: the probability of a grey image. Raises
    ValueError for an argument that is not allowed and for x that is no colour images in floats.
    """
    _check(scale, ratio, flip, jitter, greyed)
    if x.ndim != 4 or x.shape[-1] != 3 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise UsageError(f"x={checks.shown(x)}: must be floating-point images [B, H, W, 3]")
    height, width = x.shape[1:3]

    def one(image: Array, index: Array) -> Array:
        keys = jax.random.split(jax.random.fold_in(key, index), 5)
        image = resized_crop(image, *crop_window(keys[0], height, width, scale, ratio))
        image = jnp.where(jax.random.bernoulli(keys[1], flip), image[:, ::-1], image)
        order = jax.random.permutation(keys[2], len(_JITTERS))
        amounts = jitter * jax.random.uniform(keys[3], (len(_JITTERS),), x.dtype, -1, 1)
        # Rounding of the crop may leave the range, and the jitters are for images within.
        image = jittered(jnp.clip(image, 0, 1), order, amounts + jnp.array([1, 1, 1, 0], x.dtype))
        image = jnp.where(jax.random.bernoulli(keys[4], greyed), grey(image), image)
        return jnp.clip(image, 0, 1).astype(x.dtype)

    return jax.vmap(one)(x, jnp.arange(len(x)))


def _check(
    scale: Sequence[float], ratio: Sequence[float], flip: float, jitter: float, greyed: float
) -> None:
    for name, pair, highest in (("scale", scale, 1.0), ("ratio", ratio, math.inf)):
        if len(pair) != 2 or not 0 < pair[0] <= pair[1] <= highest or math.isinf(pair[1]):
            allowed = "above 0 and at most 1" if highest == 1 else "above 0"
            raise UsageError(f"{name}={tuple(pair)}: must be two increasing numbers {allowed}")
    checks.probability("flip", flip)
    checks.probability("greyed", greyed)
    checks.number("jitter", jitter, "between 0 and 0.5", lambda share: 0 <= share <= 0.5)
