"""Environments: functions from a `Dataset` to a `Dataset` with other domains."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset, check_classes, originals
from fedjax_inv.types import Array

_WHITE = 255  # the brightest of 8 bits
_CHUNK = 4096  # images rotated at once: bounds the memory of their float copies

# The two classes that FL Games forms from a data set, label 0 first, for `grouped`. Other classes
# are dropped: "Bag", as in the code of IRM Games, and "frog". For MNIST, FL Games uses `binned`.
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
# uneven probabilities, but equal sizes, as all have.
FLIPS: dict[str, tuple[float, ...]] = {
    "2": (0.3, 0.1),
    "3": (0.3, 0.2, 0.1),
    "5": (0.3, 0.25, 0.2, 0.15, 0.1),
    "5_uneven": (0.3, 0.2, 0.19, 0.12, 0.1),
    "10": tuple(np.linspace(0.3, 0.1, 10).tolist()),
}


class Colored(NamedTuple):
    """Grey images, and the colour of each."""

    image: np.ndarray | Array  # [M, height, width, 1] uint8
    color: np.ndarray | Array  # [M] int32


class Patched(NamedTuple):
    """Images, and the covered corner of each: 0 is the top left one, 1 the top right one."""

    image: np.ndarray | Array  # [M, height, width, channels] uint8
    corner: np.ndarray | Array  # [M] int32


def rotated(
    dataset: Dataset, angles: Sequence[float], seed: int, shares: Sequence[float] | None = None
) -> Dataset:
    """Deal the images to angles in turn, after a shuffle, and rotate each by its angle.

    Train and official test images are pooled, as in RotatedMNIST (Ghifary et al. 2015, and
    DomainBed), and there is no test split. Copies of one original get one angle. Angles are in
    degrees, counter-clockwise about the centre of images [M, height, width, channels], which are
    rotated by bilinear interpolation and keep their row and their size; a pixel from outside the
    image is 0. The new domains have the angles as names, such as "0" or "22.5", and relative sizes
    `shares` above 0; by default all are equal.
    """
    domains = _domain_names("angles", angles)
    sizes = np.ones(len(angles)) if shares is None else np.asarray(shares)
    _check_images(
        dataset,
        "images [M, height, width, channels] uint8 or floating",
        lambda x: x.ndim == 4 and (x.dtype == np.uint8 or x.dtype.kind == "f"),
    )
    every, original = originals(dataset)
    domain = in_turns(len(every), sizes, seed)[original]
    x = np.empty_like(dataset.x)
    for index, angle in enumerate(angles):
        rows = np.flatnonzero(domain == index)
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            x[chunk] = _rotate(dataset.x[chunk], angle)
    none = np.zeros(len(domain), bool)
    return dataset._replace(x=x, domain=domain, domains=domains, test=none)


def in_turns(count: int, shares: np.ndarray, seed: int) -> np.ndarray:
    """Shuffle examples, deal them in turn to domains of relative sizes; return the domains."""
    domain = np.empty(count, np.int32)
    # Domain d's k-th example is due at (k + 1/2) / share [count, domains]; they go by due times.
    due = (np.arange(count)[:, None] + 0.5) / shares
    order = np.random.default_rng(seed).permutation(count)
    domain[order] = np.argsort(due, axis=None, kind="stable")[:count] % len(shares)
    return domain


def grouped(dataset: Dataset, groups: Mapping[str, Sequence[str]]) -> Dataset:
    """Merge groups of classes into one class each, and drop the examples of all other classes.

    groups: new class -> names of the classes that it merges, in the order of the new labels.
    """
    label = np.full(len(dataset.classes), -1, np.int32)
    for index, names in enumerate(groups.values()):
        label[[dataset.classes.index(name) for name in names]] = index
    y = label[dataset.y]
    return dataset._replace(y=y, classes=tuple(groups)).take(y >= 0)


def binned(dataset: Dataset, num_classes: int) -> Dataset:
    """Merge each K / num_classes neighbours of K classes into one, such as "0-4" and "5-9".

    There is a UsageError if `num_classes` does not divide K.
    """
    check_classes(dataset)
    classes = dataset.classes
    if len(classes) % num_classes:
        raise UsageError(
            "num_classes", num_classes, f"must divide {len(classes)}, the number of classes"
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
    test_fraction: float = 0.2,
    seed: int,
) -> Dataset:
    """Paint grey images in colours that predict the label better than the image does.

    Colored MNIST of IRM Games (Ahuja et al. 2020) and FL Games (Gupta et al. 2022), and its
    extension to K classes by Choe et al. (2020). With the class y~ of an image and the flip
    probability p of its environment,

        y = y~ + Bernoulli(label_noise) mod K,    colour = y + Bernoulli(p) mod K.

    Args:
      dataset: grey images, x [M, height, width, 1] uint8, of K >= 2 classes; `binned` and `grouped`
        make few classes of many.
      flips: p of each training environment. These share the examples outside the test split.
      test_flip: p of the test environment, which holds the test split.
      label_noise: the probability that the label is not the class of the image. It is drawn for
        each example, also for each copy of one original.
      binarise: whether every pixel that is not 0 becomes white, as for MNIST in IRM Games.
      test_fraction: the part of the examples that the test environment holds, drawn at random, if
        the data set has no test split.
      seed: the seed of all draws.

    Returns:
      The data set with x a `Colored`, which `paint` renders with one channel for each class. Its
      domains have the flip probabilities as names, such as "0.2", and so these must differ; the
      last one is the test environment, and there is no test split.
    """
    check_grey(dataset)
    drawn, color = _environments(dataset, flips, test_flip, label_noise, test_fraction, seed)
    image = (dataset.x > 0) * np.uint8(_WHITE) if binarise else dataset.x
    return drawn._replace(
        x=Colored(image, color), render=partial(paint, num_colors=len(dataset.classes))
    )


def patched(
    dataset: Dataset,
    *,
    flips: Sequence[float] = (0.2, 0.1),
    test_flip: float = 0.9,
    label_noise: float = 0.25,
    patch_size: int = 5,
    test_fraction: float = 0.2,
    seed: int,
) -> Dataset:
    """Cover the top left (0) or top right (1) corner of images with a black patch.

    Spurious CIFAR-10 of FL Games (Gupta et al. 2022): as `colored`, with the corner in place of the
    colour, and K = 2 classes. x [M, height, width, channels] uint8 becomes a `Patched`, which
    `cover` renders. The side of a patch is `patch_size` pixels; the patches of the two corners must
    not overlap.
    """
    check_classes(dataset)
    _check_images(
        dataset,
        "images [M, height, width, channels] uint8",
        lambda x: x.ndim == 4 and x.dtype == np.uint8,
    )
    if len(dataset.classes) != 2:
        raise UsageError("dataset.classes", dataset.classes, "must be two")
    drawn, corner = _environments(dataset, flips, test_flip, label_noise, test_fraction, seed)
    return drawn._replace(
        x=Patched(dataset.x, corner), render=partial(cover, patch_size=patch_size)
    )


def paint(x: Colored, num_colors: int) -> Array:
    """Put each image into the channel of its colour; the other channels are 0.

    Colour c is channel num_colors - 1 - c: with two colours, 1 is the first channel, red, as in IRM
    Games.

    From image [B, height, width, 1] uint8 and color [B] come images [B, height, width, num_colors]
    in [0, 1], float32.
    """
    channel = jax.nn.one_hot(num_colors - 1 - x.color, num_colors)
    return x.image / jnp.float32(_WHITE) * channel[..., None, None, :]


def cover(x: Patched, patch_size: int) -> Array:
    """Blacken a square in one corner of each image: 0 top left, 1 top right.

    From image [B, height, width, channels] uint8 and corner [B] come images of the same shape in
    [0, 1], float32.
    """
    height, width = x.image.shape[-3:-1]
    column = jnp.arange(width)
    column = jnp.where(x.corner[..., None] == 1, column[::-1], column)  # from the corner
    covered = (jnp.arange(height) < patch_size)[:, None] & (column < patch_size)[..., None, :]
    return jnp.where(covered[..., None], 0, x.image / jnp.float32(_WHITE))


def _check_images(dataset: Dataset, needed: str, fits: Callable[[np.ndarray], bool]) -> None:
    if dataset.render is not None or not hasattr(dataset.x, "ndim") or not fits(dataset.x):
        found = " and ".join(f"{leaf.dtype} {leaf.shape}" for leaf in jax.tree.leaves(dataset.x))
        raise UsageError("dataset.x", ..., f"must be {needed}, is {found}")


def check_grey(dataset: Dataset) -> None:
    """Raise UsageError unless x are grey images [M, height, width, 1] uint8 of classes."""
    check_classes(dataset)
    _check_images(
        dataset,
        "grey images [M, height, width, 1] uint8",
        lambda x: x.ndim == 4 and x.shape[3] == 1 and x.dtype == np.uint8,
    )


def _domain_names(name: str, values: Iterable[float]) -> tuple[str, ...]:
    """Return numbers as names of domains."""
    names = tuple(f"{value:g}" for value in values)
    if len(set(map(float, names))) < len(names):
        raise UsageError(name, names, "must all differ, in six digits")
    return names


def _environments(
    dataset: Dataset,
    flips: Sequence[float],
    test_flip: float,
    label_noise: float,
    test_fraction: float,
    seed: int,
) -> tuple[Dataset, np.ndarray]:
    """Deal the examples to environments and draw the labels; return both, and the cue [M]."""
    domains = _domain_names("flips", [*flips, test_flip])
    rng = np.random.default_rng(seed)
    num_examples = len(dataset.y)
    num_classes = len(dataset.classes)

    def in_turn(count: int) -> np.ndarray:
        ends = np.rint(np.arange(1, len(flips) + 1) / len(flips) * count)
        return np.searchsorted(ends, np.arange(count), side="right")

    domain = dealt(dataset, len(flips), in_turn, test_fraction, rng)
    y = (dataset.y + (rng.random(num_examples) < label_noise)) % num_classes
    flip = np.array([*flips, test_flip])[domain]
    cue = (y + (rng.random(num_examples) < flip)) % num_classes
    drawn = dataset._replace(
        y=y.astype(np.int32), domain=domain, domains=domains, test=np.zeros(num_examples, bool)
    )
    return drawn, cue.astype(np.int32)


def dealt(
    dataset: Dataset,
    num_domains: int,
    domains_of: Callable[[int], np.ndarray],
    test_fraction: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Deal the examples to D training domains and the test, D: the domain of each, [M] int32.

    Copies of one original go together. The test is the test split, or a part drawn at random if
    there is none. `domains_of` returns for n the domains [n] of the n originals outside the test,
    which are shuffled, in 0..D-1, or -1 for none.
    """
    every, original = originals(dataset)
    test = dataset.test[every]
    if not test.any():
        test[rng.permutation(len(every))[: round(test_fraction * len(every))]] = True
    domain = np.full(len(every), num_domains, np.int32)
    train = rng.permutation(np.flatnonzero(~test))
    domain[train] = domains_of(len(train))
    if {*range(num_domains + 1)} - {*domain.tolist()}:
        text = f"must hold examples for the test and for each of {num_domains} training domains"
        raise UsageError("dataset", ..., f"{text}, but holds {test.sum()} and {len(train)}")
    return domain[original]


def _rotate(x: np.ndarray, angle: float) -> np.ndarray:
    from scipy import ndimage  # JAX depends on scipy; only rotations load this part of it

    turned = ndimage.rotate(
        x, angle, axes=(1, 2), reshape=False, output=np.float32, order=1, mode="grid-constant"
    )
    return np.rint(turned) if x.dtype == np.uint8 else turned
