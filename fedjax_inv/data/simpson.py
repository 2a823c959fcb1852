"""Simpson's paradox in colours: a colour tells the digit within each client, hardly over all.

`simpson` turns a `Dataset` of grey images into one with other domains, which `shade` renders.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import environments
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.types import Array

SHADINGS = ("paradox", "random")
# Red, green and blue at the ends of a ramp of one hue. The darkest stroke is visible on black.
ENDS = ((255, 240, 200), (102, 72, 0))
# White, yellow, orange, red, purple and navy, each darker than the one before.
HUES = ((255, 255, 255), (255, 255, 0), (255, 165, 0), (255, 0, 0), (128, 0, 128), (0, 0, 128))

_WHITE = 255  # the brightest of 8 bits


class Shaded(NamedTuple):
    """Grey images, and the step of the colour ramp for each; 0 is the lightest."""

    image: np.ndarray | Array  # [M, height, width, 1] uint8, strokes bright on a dark ground
    step: np.ndarray | Array  # [M] int32


def ramp(steps: int, through: Sequence[tuple[int, int, int]] = ENDS) -> np.ndarray:
    """Return colours from light to dark, evenly spaced `through` these: [steps, 3] uint8."""
    at = np.linspace(0, len(through) - 1, steps)
    places = np.arange(len(through))
    channels = [np.interp(at, places, channel) for channel in np.transpose(through)]
    return np.rint(np.stack(channels, axis=1)).astype(np.uint8)


def simpson(
    dataset: Dataset,
    *,
    darker: str = "1",
    lighter: str = "7",
    colors: np.ndarray | None = None,
    shading: str = "paradox",
    share: float = 1.0,
    test_fraction: float = 0.2,
    seed: int,
) -> Dataset:
    """Paint two classes so that one is darker than the other within every client.

    Simpson MNIST of FedCFA (Jiang et al. 2025, Fig. 4 and II). With S colours from light to dark,
    client i of S - 1 clients paints

        the lighter class in step i,   the darker class in step i + 1,

    so that a step tells the label within a client, and in two neighbouring clients it tells
    opposite labels. Only the first and the last step have one label each. Test images have a random
    step, whatever their label.

    Args:
      dataset: grey images, x [M, height, width, 1] uint8.
      darker: the name of the class that becomes label 0.
      lighter: the name of the class that becomes label 1; all other classes are dropped.
      colors: [S, 3] uint8, each darker than the one before; by default `ramp(6)`, for five clients.
        `ramp(6, HUES)` begins as the paper does, whose client 1 has white and yellow.
      shading: "paradox"; or "random": a random step everywhere, so that no colour misleads.
      share: the probability that a client's image has the colour of the paradox, not a random one.
      test_fraction: the part of the examples that is the test, if the data set has no test split.
      seed: the seed of all draws. With either shading it draws the same clients and the same test.

    Returns:
      The data set with x a `Shaded`, which `shade` renders. Its domains are the clients, "0" and so
      on, which share the examples evenly and at random, and last "test".
    """
    environments.check_grey(dataset)
    for name, chosen in (("darker", darker), ("lighter", lighter)):
        checks.one_of(name, chosen, dataset.classes)
    if darker == lighter:
        raise UsageError(
            "lighter", lighter, "must be another class than {darker}", darker=("darker", darker)
        )
    colors = ramp(6) if colors is None else colors
    checks.one_of("shading", shading, SHADINGS)
    pair = environments.grouped(dataset, {name: (name,) for name in (darker, lighter)})
    num_clients = len(colors) - 1
    num_examples = len(pair.y)
    rng = np.random.default_rng(seed)
    domain = environments.dealt(
        pair, num_clients, lambda count: np.arange(count) % num_clients, test_fraction, rng
    )
    step = rng.integers(0, len(colors), num_examples)
    if shading == "paradox":
        is_random = (domain == num_clients) | (rng.random(num_examples) >= share)
        step = np.where(is_random, step, domain + (pair.y == 0))
    return pair._replace(
        x=Shaded(pair.x, step.astype(np.int32)),
        domain=domain,
        domains=(*map(str, range(num_clients)), "test"),
        test=np.zeros(num_examples, bool),
        render=partial(shade, colors=colors),
    )


def shade(x: Shaded, colors: np.ndarray) -> Array:
    """Paint strokes on black.

    A pixel of brightness b in 0..255 has b / 255 of the colour. From image [B, height, width, 1]
    uint8, step [B] in 0..S-1 and colors [S, 3] uint8 come images [B, height, width, 3] in [0, 1],
    float32, red, green and blue.
    """
    color = jnp.take(jnp.asarray(colors, jnp.float32), x.step, axis=0, mode="clip") / _WHITE
    return x.image / jnp.float32(_WHITE) * color[..., None, None, :]
