"""dSprites, rendered: white squares, ellipses and hearts of 64x64 pixels, from six latents.

After Matthey et al. (2017), https://github.com/google-deepmind/dsprites-dataset: the latents, their
values and their order are those of the original. The exact outlines are not published, so the
images are not bit-equal to the original's. Here all outlines turn about their centroid, and their
sizes give the mean pixel of the original, 0.043.
"""

from collections.abc import Sequence

import numpy as np

from fedjax_inv import checks
from fedjax_inv.data.dataset import Dataset

SHAPES = ("square", "ellipse", "heart")
LATENTS = ("color", "shape", "scale", "orientation", "x", "y")
VALUES = (
    np.ones(1),
    np.arange(1.0, 4.0),  # 1 + the index into SHAPES
    np.linspace(0.5, 1, 6),
    np.linspace(0, 2 * np.pi, 40),  # the first and the last show the same image
    np.linspace(0, 1, 32),
    np.linspace(0, 1, 32),
)
SIZES = tuple(map(len, VALUES))
NUM_IMAGES = int(np.prod(SIZES))  # 737,280

_SIZE = 64  # pixels
_FIRST, _SPAN = 16, 31  # the centre's column or row at position 0, and how far 1 is from there
_WHITE = np.uint8(255)
_CHUNK = 512  # images rendered at once: bounds the memory of their float coordinates

# The outlines at scale 1, in pixels. No pixel centre is on one at orientation 0, where rounding
# would decide.
_SQUARE = 10.3  # half a side
_ELLIPSE = (12.2, 6.1)  # semi-axes, the long one horizontal at orientation 0
_HEART = 7.9  # pixels of one unit of (u^2 + v^2 - 1)^3 = u^2 v^3
_HEART_CENTROID = 0.2935  # v, in those units


def latent_classes(index: np.ndarray) -> np.ndarray:
    """Return for each latent of images the index into its VALUES, [..., 6].

    index [...] are numbers of images in 0..737,279. The last latent, y, changes fastest.
    """
    return np.stack(np.unravel_index(index, SIZES), axis=-1)


def latent_values(index: np.ndarray) -> np.ndarray:
    """Return the latents [..., 6] of the images `index` [...], as `render` takes them."""
    classes = latent_classes(index)
    return np.stack([values[classes[..., i]] for i, values in enumerate(VALUES)], axis=-1)


def render(latents: np.ndarray) -> np.ndarray:
    """Draw images [n, 64, 64] uint8, 1 inside the shape and 0 elsewhere.

    Latents [n, 6] are color (not used); shape 1, 2 or 3, as in SHAPES; scale; orientation in
    radians counter-clockwise; position x and y in [0, 1], which are columns 16 to 47 from the left
    and rows 16 to 47 from the top. Values between the original's are allowed.
    """
    images = np.zeros((len(latents), _SIZE, _SIZE), np.uint8)
    for code, inside in enumerate((_in_square, _in_ellipse, _in_heart), start=1):
        rows = np.flatnonzero(latents[:, 1] == code)
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            images[chunk] = inside(*_coordinates(latents[chunk]))
    return images


def _coordinates(latents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the centres of pixels lie in the upright shape of scale 1: (u right, v up)."""
    _, _, scale, orientation, x, y = latents.T[:, :, None, None]
    pixels = np.arange(_SIZE)
    right = pixels - (_FIRST + _SPAN * x)  # [n, 1, 64]
    up = (_FIRST + _SPAN * y) - pixels[:, None]  # [n, 64, 1]
    cos = np.cos(orientation) / scale
    sin = np.sin(orientation) / scale
    return cos * right + sin * up, cos * up - sin * right


def _in_square(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return (np.abs(u) <= _SQUARE) & (np.abs(v) <= _SQUARE)


def _in_ellipse(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return (u / _ELLIPSE[0]) ** 2 + (v / _ELLIPSE[1]) ** 2 <= 1


def _in_heart(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    u, v = u / _HEART, v / _HEART + _HEART_CENTROID
    bulge = u * u + v * v - 1
    return bulge * bulge * bulge <= u * u * (v * v * v)


def load(
    shapes: Sequence[str] = ("square", "ellipse"), *, num_images: int | None = 20_000, seed: int = 0
) -> Dataset:
    """Render M random images of one or several shapes, [M, 64, 64, 1], 0 or 255, of one domain.

    The classes are shapes out of SHAPES, in the order of their labels. No image occurs twice;
    `num_images` None stands for all: 245,760 images (1 GB) of each shape.
    """
    per_shape = NUM_IMAGES // len(SHAPES)
    available = per_shape * len(shapes)
    num_images = available if num_images is None else num_images
    meaning = f", the images of {', '.join(shapes)}"
    checks.integer("num_images", num_images, 1, available, meaning)
    rng = np.random.default_rng(seed)
    y, index = np.divmod(rng.choice(available, num_images, replace=False), per_shape)
    index += per_shape * np.array([SHAPES.index(shape) for shape in shapes])[y]
    return Dataset(
        render(latent_values(index))[..., None] * _WHITE,
        y.astype(np.int32),
        tuple(shapes),
        np.zeros(num_images, np.int32),
        ("all",),
        np.zeros(num_images, bool),  # the original has no test split
    )
