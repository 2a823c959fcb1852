"""DomainBed's training augmentation (Gulrajani & Lopez-Paz 2021) as pure functions on the device.

A random resized crop, a horizontal flip, colour jitter and a random grey image, in this order, with
the distributions of PyTorch's torchvision, but in floating point instead of 8 bits. dm-pix has
other distributions: contrast about the mean of each channel, saturation in HSV, no resized crop.
"""

import math
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp

from fedjax_inv.types import Array

_ATTEMPTS = 10  # draws of a crop, until one fits
_LUMA = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)


def resized_crop(image: Array, top: Array, left: Array, height: Array, width: Array) -> Array:
    """Cut a window (in pixels, inside the image) out of an image [H, W, C], and resize it to that.

    The interpolation is linear between the centres of pixels; beyond the centres at the window's
    edge, it takes the edge's values.
    """

    def weights(start: Array, length: Array, size: int) -> Array:
        """Return the weight of each input in each output, [size, size]."""
        at = (jnp.arange(size) + 0.5) * length / size - 0.5
        at = start + jnp.clip(at, 0, length - 1)
        return jnp.maximum(0, 1 - jnp.abs(at[:, None] - jnp.arange(size)))

    rows = weights(top, height, image.shape[0])
    columns = weights(left, width, image.shape[1])
    return jnp.einsum("ri,sj,ijc->rsc", rows, columns, image, precision="highest")


def crop_window(
    key: Array, height: int, width: int, scale: Sequence[float], ratio: Sequence[float]
) -> tuple[Array, Array, Array, Array]:
    """Draw (top, left, height, width) of a random window of an image, in pixels.

    Its share of the area is uniform in `scale`, the logarithm of its width over its height is
    uniform between the logarithms of `ratio`, and its place is uniform. The first of ten draws that
    fits into the image counts. If none fits, the window is the largest centred one with the image's
    own ratio, or with the nearest ratio allowed.
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
    """Return an image [..., 3] with its luma in all three channels."""
    luma = jnp.einsum("...c,c->...", image, jnp.array(_LUMA, image.dtype), precision="highest")
    return jnp.broadcast_to(luma[..., None], image.shape)


def brightened(image: Array, factor: Array) -> Array:
    """Blend an image in [0, 1] with black, which factor 0 gives; 1 gives the image."""
    return jnp.clip(factor * image, 0, 1)


def contrasted(image: Array, factor: Array) -> Array:
    """Blend an image [H, W, 3] in [0, 1] with its mean luma."""
    return jnp.clip(factor * image + (1 - factor) * grey(image).mean(), 0, 1)


def saturated(image: Array, factor: Array) -> Array:
    """Blend an image [..., 3] in [0, 1] with its luma."""
    return jnp.clip(factor * image + (1 - factor) * grey(image), 0, 1)


def hue_shifted(image: Array, shift: Array) -> Array:
    """Move the hue (of HSV) of an image [..., 3] in [0, 1] by a shift in full turns."""
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
    # A channel is full up to a sixth of a turn from its own hue, and empty beyond a third.
    place = (jnp.array([5.0, 3.0, 1.0], image.dtype) + hue) % 6
    missing = jnp.clip(jnp.minimum(place, 4 - place), 0, 1)
    return value[..., None] - chroma[..., None] * missing


_JITTERS = (brightened, contrasted, saturated, hue_shifted)


def jittered(image: Array, order: Array, amounts: Array) -> Array:
    """Change the colours of an image [H, W, 3] in [0, 1].

    order [4] is a permutation of 0 brightness, 1 contrast, 2 saturation and 3 hue; amounts [4] are
    three factors and a shift.
    """

    def change(i: Array, image: Array) -> Array:
        return jax.lax.switch(order[i], _JITTERS, image, amounts[order[i]])

    return jax.lax.fori_loop(0, len(_JITTERS), change, image)


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
    """Change each image of a batch by random draws, which depend on the key and on its place alone.

    Args:
      x: images [B, H, W, 3] in [0, 1], floating point.
      key: the key of the draws.
      scale: the smallest and the largest area of the crop, as a share of the image.
      ratio: the smallest and the largest width over height of the crop.
      flip: the probability of a mirror image.
      jitter: at most 0.5. Brightness, contrast and saturation are multiplied by factors uniform in
        [1 - jitter, 1 + jitter], and the hue moves by [-jitter, jitter] of a turn, in random order.
      greyed: the probability of a grey image.

    Returns:
      Images of the same shape, dtype and range.
    """
    chex.assert_shape(x, (None, None, None, 3))
    chex.assert_type(x, float)
    height, width = x.shape[1:3]

    def one(image: Array, index: Array) -> Array:
        keys = jax.random.split(jax.random.fold_in(key, index), 5)
        image = resized_crop(image, *crop_window(keys[0], height, width, scale, ratio))
        image = jnp.where(jax.random.bernoulli(keys[1], flip), image[:, ::-1], image)
        order = jax.random.permutation(keys[2], len(_JITTERS))
        amounts = jitter * jax.random.uniform(keys[3], (len(_JITTERS),), x.dtype, -1, 1)
        # Rounding in the crop may leave [0, 1], in which the jitters expect images.
        image = jittered(jnp.clip(image, 0, 1), order, amounts + jnp.array([1, 1, 1, 0], x.dtype))
        image = jnp.where(jax.random.bernoulli(keys[4], greyed), grey(image), image)
        return jnp.clip(image, 0, 1).astype(x.dtype)

    return jax.vmap(one)(x, jnp.arange(len(x)))
