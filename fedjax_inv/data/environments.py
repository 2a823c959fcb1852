"""Environments made from a data set: functions from a `Dataset` to one with other domains."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import ndimage

from fedjax_inv.data.sources import Dataset
from fedjax_inv.types import Array

_CHUNK = 4096  # images rotated at once: bounds the memory of their float copies

# The two classes that FL Games makes of a data set, label 0 first, for `grouped`. Classes that are
# not named are dropped: "Bag", as in the code of IRM Games, and "frog". MNIST is `binned`.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "fashion_mnist": {
        "clothing": ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Shirt"),
        "footwear": ("Sandal", "Sneaker", "Ankle boot"),
    },
    "cifar10": {
        "vehicle": ("airplane", "automobile", "ship", "truck"),
        "animal": ("bird", "cat", "deer", "dog", "horse"),
    },
    "dsprites": {"ellipse": ("ellipse",), "square": ("square",)},
}

# Flip probabilities of the extended clients of FL Games, after Choe et al. (2020). "5_uneven" has
# uneven probabilities; its environments are of one size, as all are.
FLIPS: dict[str, tuple[float, ...]] = {
    "2": (0.3, 0.1),
    "3": (0.3, 0.2, 0.1),
    "5": (0.3, 0.25, 0.2, 0.15, 0.1),
    "5_uneven": (0.3, 0.2, 0.19, 0.12, 0.1),
    "10": tuple(np.linspace(0.3, 0.1, 10).tolist()),
}


class Colored(NamedTuple):
    """Grey images, and the colour that each is painted in."""

    image: np.ndarray | Array  # [M, height, width, 1] uint8
    color: np.ndarray | Array  # [M] int32


class Patched(NamedTuple):
    """Images, and the corner that is covered: 0 is the top left one, 1 the top right one."""

    image: np.ndarray | Array  # [M, height, width, channels] uint8
    corner: np.ndarray | Array  # [M] int32


def rotated(dataset: Dataset, angles: Sequence[float], seed: int) -> Dataset:
    """Deals the images to the angles in turn, after a shuffle, and rotates each by its angle.

    Train and official test images are pooled, as in RotatedMNIST (Ghifary et al. 2015, and
    DomainBed). Images keep their row and size; what comes from outside an image is 0. Domains are
    named after the angles, as "0" or "22.5", and replace those of the data set.

    Args:
      dataset: x [M, height, width, channels].
      angles: in degrees, counter-clockwise about the image centre; bilinear interpolation.
      seed: of the shuffle.

    Raises:
      ValueError: if there are no angles, two are equal, or x are not images.
    """
    domains = tuple(f"{angle:g}" for angle in angles)
    if not domains or len(set(domains)) < len(domains):
        raise ValueError(f"angles={list(angles)} must hold at least one, and none twice")
    _check_images(dataset, "images [M, height, width, channels]", lambda x: x.ndim == 4)
    num_examples = len(dataset.y)
    order = np.random.default_rng(seed).permutation(num_examples)
    domain = np.empty(num_examples, np.int32)
    domain[order] = np.arange(num_examples) % len(domains)
    x = np.empty_like(dataset.x)
    for index, angle in enumerate(angles):
        rows = np.flatnonzero(domain == index)
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            x[chunk] = _rotate(dataset.x[chunk], angle)
    return dataset._replace(x=x, domain=domain, domains=domains, test=np.zeros(num_examples, bool))


def flip_probabilities(setting: str) -> tuple[float, ...]:
    """The flip probabilities of a setting in FLIPS. Raises ValueError if there is no such one."""
    if setting not in FLIPS:
        raise ValueError(f"{setting=} must be one of {', '.join(FLIPS)}")
    return FLIPS[setting]


def grouped(dataset: Dataset, groups: Mapping[str, Sequence[str]]) -> Dataset:
    """Makes one class of each group of classes, and drops the examples of all other classes.

    Args:
      dataset: K classes.
      groups: the new classes in the order of their labels, and the names of the classes in each.

    Raises:
      ValueError: if the data set lacks a named class, or one is named twice.
    """
    label = np.full(len(dataset.classes), -1, np.int32)
    for index, names in enumerate(groups.values()):
        for name in names:
            if name not in dataset.classes:
                raise ValueError(
                    f"groups needs class {name!r}, the data set has {', '.join(dataset.classes)}"
                )
            if label[dataset.classes.index(name)] >= 0:
                raise ValueError(f"groups names class {name!r} twice")
            label[dataset.classes.index(name)] = index
    y = label[dataset.y]
    keep = y >= 0
    return dataset._replace(
        x=jax.tree.map(lambda leaf: leaf[keep], dataset.x),
        y=y[keep],
        classes=tuple(groups),
        domain=dataset.domain[keep],
        test=dataset.test[keep],
    )


def binned(dataset: Dataset, num_classes: int) -> Dataset:
    """Makes `num_classes` classes of K, each of K / num_classes neighbours: "0-4" and "5-9".

    Raises:
      ValueError: if `num_classes` is less than 2 or does not divide K.
    """
    classes = dataset.classes
    if num_classes < 2 or len(classes) % num_classes:
        raise ValueError(
            f"{num_classes=} must be at least 2 and divide {len(classes)}, the number of classes"
        )
    width = len(classes) // num_classes
    bins = [classes[start : start + width] for start in range(0, len(classes), width)]
    return grouped(
        dataset, {names[0] if width == 1 else f"{names[0]}-{names[-1]}": names for names in bins}
    )


def colored(
    dataset: Dataset,
    *,
    flips: Sequence[float] = (0.2, 0.1),
    test_flip: float = 0.9,
    label_noise: float = 0.25,
    binarise: bool = True,
    shares: Sequence[float] | None = None,
    test_fraction: float = 0.2,
    seed: int,
) -> Dataset:
    """Paints grey images in colours that predict the label better than the image does.

    Colored MNIST of IRM Games (Ahuja et al. 2020) and FL Games (Gupta et al. 2022), and its
    extension to K classes by Choe et al. (2020): of the class y~ of an image and the flip
    probability p of its environment,

        y = y~ + Bernoulli(label_noise) mod K,    colour = y + Bernoulli(p) mod K.

    x becomes `Colored`, which `paint` renders: one channel per class. The domains are named after
    the flip probabilities, as "0.2", and replace those of the data set; the last one is the test
    environment, and no example is in the test split any more.

    Args:
      dataset: grey images, x [M, height, width, 1] uint8, of K classes: those that are to be told
        apart, as `binned` and `grouped` make them.
      flips: p of each training environment. They share the examples outside the test split.
      test_flip: p of the test environment, which holds the test split.
      label_noise: the probability that the label is not the class of the image.
      binarise: makes every pixel that is not 0 white, as IRM Games does for MNIST.
      shares: the relative sizes of the training environments; by default all are equal.
      test_fraction: the part of the examples that makes the test environment, drawn at random, if
        the data set has no test split.
      seed: of all draws.

    Raises:
      ValueError: if an argument is out of its range, two environments have one flip probability,
        or an environment is left without examples.
    """
    _check_images(
        dataset,
        "grey images [M, height, width, 1] uint8",
        lambda x: x.ndim == 4 and x.shape[3] == 1 and x.dtype == np.uint8,
    )
    drawn, color = _environments(
        dataset, flips, test_flip, label_noise, shares, test_fraction, seed
    )
    image = (dataset.x > 0) * np.uint8(255) if binarise else dataset.x
    return drawn._replace(
        x=Colored(image, color), render=partial(paint, num_colors=len(dataset.classes))
    )


def patched(
    dataset: Dataset,
    *,
    flips: Sequence[float] = (0.2, 0.1),
    test_flip: float = 0.9,
    label_noise: float = 0.25,
    size: int = 5,
    shares: Sequence[float] | None = None,
    test_fraction: float = 0.2,
    seed: int,
) -> Dataset:
    """Covers the top left (0) or top right (1) corner of images with a black patch.

    Spurious CIFAR-10 of FL Games (Gupta et al. 2022): as `colored`, with the corner for the colour
    and K = 2 classes. x becomes `Patched`, which `cover` renders.

    Args:
      dataset: images, x [M, height, width, channels] uint8, of two classes.
      size: of the patch in pixels; the patches of the two corners must not meet.
      flips, test_flip, label_noise, shares, test_fraction, seed: as in `colored`.

    Raises:
      ValueError: as in `colored`, or if there are not two classes, or the size does not fit.
    """
    _check_images(
        dataset,
        "images [M, height, width, channels] uint8",
        lambda x: x.ndim == 4 and x.dtype == np.uint8,
    )
    if len(dataset.classes) != 2:
        raise ValueError(f"dataset has classes {', '.join(dataset.classes)}: two are needed")
    height, width = dataset.x.shape[1:3]
    if not 1 <= size <= min(height, width // 2):
        raise ValueError(f"{size=} must be in 1..{min(height, width // 2)}, in pixels")
    drawn, corner = _environments(
        dataset, flips, test_flip, label_noise, shares, test_fraction, seed
    )
    return drawn._replace(x=Patched(dataset.x, corner), render=partial(cover, size=size))


def paint(x: Colored, num_colors: int) -> Array:
    """Puts each image in the channel of its colour; the other channels are 0.

    Colour c is channel num_colors - 1 - c: of two, 1 is the first channel, red, as in IRM Games.

    Args:
      x: image [B, height, width, 1] uint8, color [B] in 0..num_colors-1.
      num_colors: number of channels.

    Returns: [B, height, width, num_colors] float32 in [0, 1].
    """
    channel = jax.nn.one_hot(num_colors - 1 - x.color, num_colors)
    return x.image / jnp.float32(255) * channel[..., None, None, :]


def cover(x: Patched, size: int) -> Array:
    """Blackens `size` x `size` pixels in the corner of each image.

    Args:
      x: image [B, height, width, channels] uint8, corner [B]: 0 top left, 1 top right.
      size: in pixels.

    Returns: [B, height, width, channels] float32 in [0, 1].
    """
    height, width = x.image.shape[-3:-1]
    column = jnp.arange(width)
    column = jnp.where(x.corner[..., None] == 1, column[::-1], column)  # from the corner
    covered = (jnp.arange(height) < size)[:, None] & (column < size)[..., None, :]
    return jnp.where(covered[..., None], 0, x.image / jnp.float32(255))


def _check_images(dataset: Dataset, needed: str, fits: Callable[[np.ndarray], bool]) -> None:
    if dataset.render is not None or not fits(dataset.x):
        has = " and ".join(f"{leaf.dtype} {leaf.shape}" for leaf in jax.tree.leaves(dataset.x))
        raise ValueError(f"dataset has x {has}: {needed} are needed")


def _environments(
    dataset: Dataset,
    flips: Sequence[float],
    test_flip: float,
    label_noise: float,
    shares: Sequence[float] | None,
    test_fraction: float,
    seed: int,
) -> tuple[Dataset, np.ndarray]:
    """Deals the environments and draws the labels: the data set with both, and the cue [M]."""
    domains = tuple(f"{flip:g}" for flip in (*flips, test_flip))
    if len(flips) == 0 or not all(0 <= flip <= 1 for flip in (*flips, test_flip)):
        raise ValueError(
            f"flips={list(flips)} must hold at least one, and they and {test_flip=} be in [0, 1]"
        )
    if len(set(domains)) < len(domains):
        raise ValueError(f"flips={list(flips)} and {test_flip=} must differ, in six digits")
    if not 0 <= label_noise <= 1:
        raise ValueError(f"{label_noise=} must be in [0, 1]")
    if not 0 < test_fraction < 1:
        raise ValueError(f"{test_fraction=} must be in (0, 1)")
    shares = [1.0] * len(flips) if shares is None else shares
    if len(shares) != len(flips) or not all(0 < share < np.inf for share in shares):
        raise ValueError(
            f"shares={list(shares)} must be positive, one for each of flips={list(flips)}"
        )
    rng = np.random.default_rng(seed)
    num_examples, num_classes = len(dataset.y), len(dataset.classes)
    test = dataset.test
    if not test.any():
        order = rng.permutation(num_examples)
        test = np.isin(np.arange(num_examples), order[: round(test_fraction * num_examples)])
    train = rng.permutation(np.flatnonzero(~test))
    ends = np.rint(np.cumsum(shares) / np.sum(shares) * len(train))
    domain = np.full(num_examples, len(flips), np.int32)
    domain[train] = np.searchsorted(ends, np.arange(len(train)), side="right")
    sizes = np.bincount(domain, minlength=len(domains))
    if sizes.min() == 0:
        raise ValueError(
            f"domain {domains[sizes.argmin()]} is left without examples: "
            f"{len(train)} to train and {test.sum()} to test are too few"
        )
    y = (dataset.y + (rng.random(num_examples) < label_noise)) % num_classes
    flip = np.array([*flips, test_flip])[domain]
    cue = (y + (rng.random(num_examples) < flip)) % num_classes
    drawn = dataset._replace(
        y=y.astype(np.int32),
        domain=domain,
        domains=domains,
        test=np.zeros(num_examples, bool),
    )
    return drawn, cue.astype(np.int32)


def _rotate(x: np.ndarray, angle: float) -> np.ndarray:
    turned = ndimage.rotate(
        x, angle, axes=(1, 2), reshape=False, output=np.float32, order=1, mode="grid-constant"
    )
    return np.rint(turned) if x.dtype == np.uint8 else turned
