"""Means and deviations of features, from sums that clients send.

A client sends the number of its examples, and for each feature its mean and its sum of squared
deviations from that mean. They add up to those of all examples without cancellation (Chan, Golub,
LeVeque 1983).
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError

# A deviation of float32 values is larger relative to their mean, unless all are equal.
_ROUNDING = 1e-13
_BLOCK = 2**20  # numbers that are float64 at once


class Moments(NamedTuple):
    """The sums of M examples, in float64."""

    number: int  # M, for images times the number of pixels
    mean: np.ndarray  # [D]
    squares: np.ndarray  # [D] the sums of squared deviations from the mean

    @property
    def deviation(self) -> np.ndarray:
        """The standard deviations [D], 0 for a feature that is constant."""
        deviation = np.sqrt(self.squares / max(self.number, 1))
        return np.where(deviation > _ROUNDING * np.abs(self.mean), deviation, 0.0)


def moments(x: np.ndarray) -> Moments:
    """Return the sums of a client's examples.

    Args:
      x: [M, ..., D] numbers; of images the last axis are the channels.

    Raises:
      UsageError: for anything but an array of numbers with two axes or more.
    """
    checks.array("x", x)
    x = np.asarray(x)
    if x.ndim < 2:
        raise UsageError("x", x, "must be numbers [M, ..., D]")
    step = max(1, _BLOCK // max(1, x[:1].size))
    starts = range(0, max(1, len(x)), step)
    return joined(_of_block(x[start : start + step]) for start in starts)


def _of_block(x: np.ndarray) -> Moments:
    flat = x.reshape(-1, x.shape[-1]).astype(np.float64)
    mean = flat.mean(0) if len(flat) else np.zeros(flat.shape[1])
    return Moments(len(flat), mean, np.square(flat - mean).sum(0))


def joined(parts: Iterable[Moments]) -> Moments:
    """Return the sums of all examples from those of the clients.

    Args:
      parts: the sums of each client, at least one.

    Raises:
      UsageError: for no client, and for clients with different numbers of features.
    """
    checks.record("parts", parts, Iterable)
    total: Moments | None = None
    for part in parts:
        checks.record("parts", part, Moments)
        if total is None:
            total = part
            continue
        if part.mean.shape != total.mean.shape:
            raise UsageError("parts", ..., "must have equal numbers of features")
        count = total.number + part.number
        step = part.mean - total.mean
        share = part.number / max(count, 1)
        squares = total.squares + part.squares + step**2 * total.number * share
        total = Moments(count, total.mean + step * share, squares)
    if total is None:
        raise UsageError("parts", ..., "must hold at least one")
    return total
