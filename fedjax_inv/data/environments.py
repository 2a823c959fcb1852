"""Environments made from a data set: functions from a `Dataset` to one with other domains."""

from collections.abc import Sequence

import numpy as np
from scipy import ndimage

from fedjax_inv.data.sources import Dataset

_CHUNK = 4096  # images rotated at once: bounds the memory of their float copies


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
    if dataset.x.ndim != 4:
        raise ValueError(
            f"dataset has x {dataset.x.shape}: images [M, height, width, channels] are needed"
        )
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


def _rotate(x: np.ndarray, angle: float) -> np.ndarray:
    turned = ndimage.rotate(
        x, angle, axes=(1, 2), reshape=False, output=np.float32, order=1, mode="grid-constant"
    )
    return np.rint(turned) if x.dtype == np.uint8 else turned
