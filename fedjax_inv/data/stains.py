"""Coloured strokes and grounds: colours follow the label by a rule, which the test breaks.

`combinations` and `stained` turn a `Dataset` of grey images into one with other domains, which
`tint` renders.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import environments
from fedjax_inv.data.dataset import Dataset, check_dataset, originals
from fedjax_inv.types import Array

STAINS = ("foreground", "background", "both")
TEST_RULES = ("reversed", "shifted")
COLORS = (
    *("red", "orange", "yellow", "lime", "green"),
    *("cyan", "blue", "purple", "magenta", "pink"),
)
UNSTAINED = len(COLORS)  # the index of no colour: white strokes, a black ground

# [len(COLORS) + 1, 3] uint8: red, green, blue. A ground has two fifths of its colour's brightness,
# so that the largest channel of every stroke is above that of every ground.
STROKES = np.array(
    [
        *((255, 0, 0), (255, 128, 0), (255, 255, 0), (170, 255, 0), (0, 190, 0)),
        *((0, 255, 255), (0, 80, 255), (150, 0, 255), (255, 0, 255), (255, 150, 180)),
        (255, 255, 255),
    ],
    np.uint8,
)
GROUNDS = np.concatenate([STROKES[:-1] // 5 * 2, np.zeros((1, 3), np.uint8)])

_WHITE = 255  # the brightest of 8 bits


class Stained(NamedTuple):
    """Grey images, and the colours of strokes and grounds: indices into COLORS, or UNSTAINED."""

    image: np.ndarray | Array  # [M, height, width, 1] uint8, strokes bright on a dark ground
    stroke: np.ndarray | Array  # [M] int32
    ground: np.ndarray | Array  # [M] int32


def rule(y: np.ndarray, colors: int, shift: int | np.ndarray = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the colours of strokes and grounds for labels, out of the first `colors` ones.

    Label y has strokes of colour y + shift and a ground of colour y + shift + colors // 2, both
    modulo colors.

    Args:
      y: [M] labels, integers of at least 0.
      colors: the number of colours, at least 1.
      shift: an integer for all labels, or one for each, [M].

    Returns:
      (strokes [M], grounds [M]).

    Raises:
      UsageError: for arguments that are not allowed.
    """
    y = checks.integers("y", y, 0, may_be_empty=True)
    checks.integer("colors", colors)
    known = checks.integers("shift", shift, ndim=None, may_be_empty=True)
    if known.shape not in ((), y.shape):
        raise UsageError("shift", known, f"must be one integer or of shape {y.shape}")
    stroke = (y + shift) % colors
    return stroke, (stroke + colors // 2) % colors


def combinations(
    dataset: Dataset, *, stain: str = "foreground", colors: int = 10, seed: int
) -> Dataset:
    """Deal the images to fixed combinations of digits and colours, a domain for each combination.

    FedIPG, Fig. 5: of ten combinations, nine are for training and the tenth is the test. A
    combination is a rule for all labels: in domain k label y has the colours `rule(y, colors, k)`,
    without exception. So every domain holds every class, a client can tell the label by its colour
    alone, and no two domains agree on what a colour means. A label has each colour in one domain
    only: in the held-out domain, it has the colour that no other domain shows with it.

    Train and official test images are pooled and dealt in turn after a shuffle, as in
    `environments.rotated`.

    Args:
      dataset: grey images, x [M, height, width, 1] uint8, of K classes.
      stain: the coloured part of an image, one of STAINS.
      colors: the number of colours and of combinations, at most K.
      seed: the seed of the shuffle.

    Returns:
      The data set with x a `Stained`, which `tint` renders. Its domains have the names
      "0", "1" and so on, by k.

    Raises:
      UsageError: for arguments that are not allowed, and for fewer examples than combinations.
    """
    _check(dataset, stain, colors)
    checks.integer("seed", seed, 0)
    every, original = originals(dataset)
    count = len(every)
    if count < colors:
        raise UsageError("colors", colors, f"must be at most {count}, one for each example")
    dealt = np.empty(count, np.int32)
    dealt[np.random.default_rng(seed).permutation(count)] = np.arange(count) % colors
    domain = dealt[original]
    stroke, ground = rule(dataset.y, colors, domain)
    return dataset._replace(
        x=_stained(dataset.x, stain, stroke, ground),
        domain=domain,
        domains=tuple(map(str, range(colors))),
        test=np.zeros(len(domain), bool),
        render=tint,
    )


def stained(
    dataset: Dataset,
    *,
    stain: str = "foreground",
    colors: int = 10,
    agreements: Sequence[float] = (0.9, 0.98),
    test_agreement: float = 0.9,
    test_rule: str = "reversed",
    label_noise: float = 0.0,
    domain_size: int | None = None,
    test_fraction: float = 0.2,
    seed: int,
) -> Dataset:
    """Give images colours that agree with the label in training, and not in the test.

    FedIPG, Table III. With probability label_noise the label is not the class of the image but one
    of the others, all equally likely. In a domain of agreement a, for strokes and grounds
    independently,

        colour = rule(label) with probability a, else one of the other colours, all equally likely.

    In the test domain the rule's colour c is replaced by colors - 1 - c (reversed) or by c + 1 mod
    colors (shifted), so that no colour is right; with two classes and colours, both are Colored
    MNIST's reversal.

    The paper states neither the agreements nor any label noise. Without noise the image predicts
    the label better than the colour does, but is learned later; with Colored MNIST's noise of 0.25,
    it predicts it worse.

    Args:
      dataset: grey images, x [M, height, width, 1] uint8, of K >= 2 classes.
      stain: the coloured part of an image, one of STAINS.
      colors: the number of colours, at most K; it must be even for the rule "reversed".
      agreements: a of each training domain; they may be equal.
      test_agreement: a of the test domain, which holds the test split.
      test_rule: one of TEST_RULES.
      label_noise: the probability that the label is not the class of the image. It is drawn for
        each example, also for each copy of one original.
      domain_size: originals of each training domain, which are examples unless some are copies
        (`Dataset.original`); the rest is dropped. By default the domains share all examples outside
        the test split evenly.
      test_fraction: the part of the examples that makes the test domain, drawn at random, if the
        data set has no test split.
      seed: the seed of all draws.

    Returns:
      The data set with x a `Stained`, which `tint` renders. Its domains are named by their number
      and agreement, such as "0 (0.9)", and the last one is "test".

    Raises:
      UsageError: for arguments that are not allowed, and if there are too few examples.
    """
    _check(dataset, stain, colors)
    checks.each("agreements", agreements, checks.probability)
    checks.probability("test_agreement", test_agreement)
    checks.one_of("test_rule", test_rule, TEST_RULES)
    if test_rule == "reversed" and colors % 2:
        raise UsageError(
            "colors",
            colors,
            "must be even for {test_rule}, or the middle one stays",
            test_rule=("test_rule", test_rule),
        )
    checks.probability("label_noise", label_noise)
    checks.fraction("test_fraction", test_fraction)
    checks.integer("seed", seed, 0)
    rng = np.random.default_rng(seed)
    domain = _deal(dataset, len(agreements), domain_size, test_fraction, rng)
    rows = np.flatnonzero(domain >= 0)
    y, domain = dataset.y[rows], domain[rows]
    y = _mostly(y, 1 - label_noise, len(dataset.classes), rng)
    agreement = np.array([*agreements, test_agreement])[domain]
    is_test = domain == len(agreements)

    def drawn(right: np.ndarray) -> np.ndarray:
        wrong = colors - 1 - right if test_rule == "reversed" else (right + 1) % colors
        return _mostly(np.where(is_test, wrong, right), agreement, colors, rng)

    stroke, ground = map(drawn, rule(y, colors))
    return dataset._replace(
        x=_stained(dataset.x[rows], stain, stroke, ground),
        y=y,
        domain=domain,
        domains=(*(f"{index} ({a:.3g})" for index, a in enumerate(agreements)), "test"),
        test=np.zeros(len(rows), bool),
        user=None if dataset.user is None else dataset.user[rows],
        original=None if dataset.original is None else dataset.original[rows],
        render=tint,
    )


def tint(x: Stained) -> Array:
    """Colour strokes and grounds.

    A pixel of brightness b in 0..255 has b / 255 of the stroke's colour and the rest of the
    ground's.

    Args:
      x: image [B, height, width, 1] uint8; stroke and ground [B], indices into COLORS or UNSTAINED.

    Returns:
      Images [B, height, width, 3] float32 in [0, 1], red, green and blue. If colours are tracers,
      an index out of range gives the nearest colour.

    Raises:
      UsageError: for other images, and for colours out of range.
    """
    checks.record("x", x, Stained)
    environments.check_cue("stroke", x.stroke, UNSTAINED + 1, x.image)
    environments.check_cue("ground", x.ground, UNSTAINED + 1, x.image)
    if x.image.shape[-1] != 1:
        raise UsageError("image", x.image, "must be grey, uint8 [B, height, width, 1]")

    def of(table: np.ndarray, index: np.ndarray | Array) -> Array:
        colors = jnp.take(jnp.asarray(table, jnp.int32), index, axis=0, mode="clip")
        return colors[..., None, None, :]  # the same for all pixels

    bright = jnp.asarray(x.image, jnp.int32)
    mixed = of(STROKES, x.stroke) * bright + of(GROUNDS, x.ground) * (_WHITE - bright)
    return mixed / jnp.float32(_WHITE**2)


def _check(dataset: Dataset, stain: str, colors: int) -> None:
    check_dataset(dataset, "classes")
    environments.check_grey(dataset)
    num_classes = len(dataset.classes)
    if num_classes < 2:
        raise UsageError("dataset.classes", dataset.classes, "must be at least two")
    checks.one_of("stain", stain, STAINS)
    most = min(len(COLORS), num_classes)
    meaning = f": there are {len(COLORS)} colours, and {num_classes} classes"
    checks.integer("colors", colors, 2, most, meaning)


def _stained(image: np.ndarray, stain: str, stroke: np.ndarray, ground: np.ndarray) -> Stained:
    plain = np.full(len(image), UNSTAINED, np.int32)
    return Stained(
        image,
        plain if stain == "background" else stroke.astype(np.int32),
        plain if stain == "foreground" else ground.astype(np.int32),
    )


def _mostly(
    value: np.ndarray, probability: float | np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Return each value [M] in 0..count-1 with its probability, else another one at random."""
    other = (value + rng.integers(1, count, len(value))) % count
    return np.where(rng.random(len(value)) < probability, value, other).astype(np.int32)


def _deal(
    dataset: Dataset,
    num_domains: int,
    domain_size: int | None,
    test_fraction: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return each example's domain [M]: a training one, num_domains for the test, -1 for none."""
    test = environments.test_rows(dataset, test_fraction, rng)
    every, original = originals(dataset)
    train = rng.permutation(np.flatnonzero(~test[every]))  # of the originals
    if domain_size is not None:
        what = "examples" if len(every) == len(original) else "originals"
        most = f", as {len(train)} {what} are shared by {num_domains} training domains"
        checks.integer("domain_size", domain_size, 1, len(train) // num_domains, most)
        train = train[: num_domains * domain_size]
    if not test.any() or len(train) < num_domains:
        raise UsageError(
            "dataset",
            ...,
            f"must hold an example for the test and for each of {num_domains} training "
            f"domains, but holds {test.sum()} and {len(train)}",
        )
    dealt = np.where(test[every], num_domains, -1).astype(np.int32)
    for index, rows in enumerate(np.array_split(train, num_domains)):
        dealt[rows] = index
    return dealt[original]
