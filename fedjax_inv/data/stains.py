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
from fedjax_inv.data.dataset import Dataset, originals
from fedjax_inv.types import Array

STAINS = ("foreground", "background", "both")
TEST_RULES = ("reversed", "shifted")
_RGB = {
    "red": (255, 0, 0),
    "orange": (255, 128, 0),
    "yellow": (255, 255, 0),
    "lime": (170, 255, 0),
    "green": (0, 190, 0),
    "cyan": (0, 255, 255),
    "blue": (0, 80, 255),
    "purple": (150, 0, 255),
    "magenta": (255, 0, 255),
    "pink": (255, 150, 180),
}
COLORS = tuple(_RGB)
UNSTAINED = len(COLORS)  # the index of no colour: white strokes, a black ground

# [len(COLORS) + 1, 3] uint8: red, green, blue. A ground has two fifths of its colour's brightness,
# so that the largest channel of every stroke is above that of every ground.
STROKES = np.array([*_RGB.values(), (255, 255, 255)], np.uint8)
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
    modulo colors. y are labels [M], and shift is an integer for all of them or one for each [M].
    """
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

    Train and official test images, x [M, height, width, 1] uint8 of K classes, are pooled and dealt
    in turn after a shuffle, as in `environments.rotated`. x becomes a `Stained`, which `tint`
    renders: of the coloured part `stain`, one of STAINS, in `colors` colours, at most K. Domains
    are called "0", "1" and so on, by k.
    """
    _check(dataset, stain, colors)
    every, original = originals(dataset)
    domain = environments.in_turns(len(every), np.ones(colors), seed)[original]
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
    joint: bool = False,
    test_rule: str = "reversed",
    label_noise: float = 0.0,
    domain_size: int | None = None,
    test_fraction: float = 0.2,
    seed: int,
) -> Dataset:
    """Give images colours that agree with the label in training, and not in the test.

    FedIPG, Table III. With probability label_noise the label is not the class of the image but one
    of the others. In a domain of agreement a, for strokes and grounds independently or `joint`ly,

        colour = rule(label) with probability a, else one of the others, all equally likely.

    In the test domain the rule's colour c is replaced by colors - 1 - c (reversed) or by c + 1 mod
    colors (shifted), so that no colour is right; with two classes and colours, both are Colored
    MNIST's reversal. The paper states neither the agreements nor any label noise. Without noise the
    image predicts the label better than the colour does, but is learned later.

    Args:
      dataset: grey images, x [M, height, width, 1] uint8, of K >= 2 classes.
      stain: the coloured part of an image, one of STAINS.
      colors: the number of colours, at most K; it must be even for the rule "reversed".
      agreements: a of each training domain; they may be equal.
      test_agreement: a of the test domain, which holds the test split.
      joint: whether a ground has the colour that the rule pairs with its stroke's, so that both are
        right or wrong.
      test_rule: one of TEST_RULES.
      label_noise: the probability that the label is not the class of the image, for each example.
      domain_size: originals of each training domain, which are examples unless some are copies; the
        rest is dropped. By default the domains share all outside the test split evenly.
      test_fraction: the part of the examples that is the test, if the data set has no test split.
      seed: the seed of all draws.

    Returns:
      The data set with x a `Stained`, which `tint` renders. Its domains are named by their number
      and agreement, such as "0 (0.9)", and the last one is "test".
    """
    _check(dataset, stain, colors)
    checks.one_of("test_rule", test_rule, TEST_RULES)
    if test_rule == "reversed" and colors % 2:
        text = "must be even for {test_rule}, or the middle one stays"
        raise UsageError("colors", colors, text, test_rule=("test_rule", test_rule))
    rng = np.random.default_rng(seed)
    domain = _dealt(dataset, len(agreements), domain_size, test_fraction, rng)
    held = dataset._replace(domain=domain, test=np.zeros(len(domain), bool)).take(domain >= 0)
    domain = held.domain
    y = _mostly(held.y, 1 - label_noise, len(dataset.classes), rng)
    agreement = np.array([*agreements, test_agreement])[domain]
    is_test = domain == len(agreements)

    def drawn(right: np.ndarray) -> np.ndarray:
        wrong = colors - 1 - right if test_rule == "reversed" else (right + 1) % colors
        return _mostly(np.where(is_test, wrong, right), agreement, colors, rng)

    stroke, ground = map(drawn, rule(y, colors))
    if joint:
        stroke, ground = rule(stroke, colors)
    return held._replace(
        x=_stained(held.x, stain, stroke, ground),
        y=y,
        domains=(*(f"{index} ({a:.3g})" for index, a in enumerate(agreements)), "test"),
        render=tint,
    )


def tint(x: Stained) -> Array:
    """Colour strokes and grounds.

    A pixel of brightness b in 0..255 has b / 255 of the stroke's colour and the rest of the
    ground's. The images are [B, height, width, 3] in [0, 1], float32, red, green and blue.
    """

    def of(table: np.ndarray, index: np.ndarray | Array) -> Array:
        colors = jnp.take(jnp.asarray(table, jnp.int32), index, axis=0, mode="clip")
        return colors[..., None, None, :]  # the same for all pixels

    bright = jnp.asarray(x.image, jnp.int32)
    mixed = of(STROKES, x.stroke) * bright + of(GROUNDS, x.ground) * (_WHITE - bright)
    return mixed / jnp.float32(_WHITE**2)


def _check(dataset: Dataset, stain: str, colors: int) -> None:
    environments.check_grey(dataset)
    checks.one_of("stain", stain, STAINS)
    most = min(len(COLORS), len(dataset.classes))
    checks.integer("colors", colors, 2, most, ", the colours or the classes")


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


def _dealt(
    dataset: Dataset,
    num_domains: int,
    domain_size: int | None,
    test_fraction: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return each example's domain [M]: a training one, num_domains for the test, -1 for none."""

    def domains_of(count: int) -> np.ndarray:
        used = count
        if domain_size is not None:
            most = f", as {count} examples are shared by {num_domains} training domains"
            checks.integer("domain_size", domain_size, 1, count // num_domains, most)
            used = num_domains * domain_size
        domains = np.full(count, -1)
        for index, places in enumerate(np.array_split(np.arange(used), num_domains)):
            domains[places] = index
        return domains

    return environments.dealt(dataset, num_domains, domains_of, test_fraction, rng)
