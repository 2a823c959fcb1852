"""Domains by rotation, such as RotatedMNIST."""

import dataclasses

from fedjax_inv.data import environments
from fedjax_inv.data.dataset import Dataset

from ...flags.configuration import Config
from ...flags.flag import INSIDE, Range, flag, flag_error, shown
from ...parts.environments.kind import Kind, Source

_ANGLE = Range(lambda value: -360 <= value <= 360, "degrees, in -360..360")


@dataclasses.dataclass(frozen=True)
class Angles:
    """The flags of rotated domains."""

    angles: tuple[float, ...] = flag(
        (0.0, 15.0, 30.0, 45.0, 60.0, 75.0), "Degrees of the rotated domains.", _ANGLE
    )
    odd_angles: tuple[float, ...] = flag(
        (),
        "Degrees of further, small domains, which come first: with --partition=domain clients 0, 1 "
        "and so on hold one each, if there are at most 1 / --odd_share clients.",
        _ANGLE,
        kind=float,
    )
    odd_share: float = flag(0.05, "The part of the images that each of --odd_angles has.", INSIDE)


def _make(data: Dataset, source: Source, chosen: Config) -> Dataset:
    angles, odd, share = chosen.angles, chosen.odd_angles, chosen.odd_share
    if not odd:
        return environments.rotated(data, angles, source.seed)
    names = [f"{angle:g}" for angle in (*odd, *angles)]
    if len(set(names)) < len(names):
        text = f"must differ from each other and from --angles={shown(angles)}"
        raise flag_error("odd_angles", odd, text)
    if share * len(data.y) < 1:
        text = f"is not an image, must be at least 1 / {len(data.y)}"
        raise flag_error("odd_share", share, text)
    rest = 1 - len(odd) * share
    if rest <= 0:
        text = f"leaves no image to --angles, must be below 1 / {len(odd)}"
        raise flag_error("odd_share", share, text)
    shares = [*(share for _ in odd), *(rest / len(angles) for _ in angles)]
    return environments.rotated(data, (*odd, *angles), source.seed, shares)


ROTATED = Kind("a domain for each angle", (Angles,), _make)
