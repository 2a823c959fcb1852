"""Domains by rotation: RotatedMNIST and its like."""

import dataclasses

from experiments.environments.kind import Kind, Source
from experiments.flag import flag
from fedjax_inv.data import environments
from fedjax_inv.data.dataset import Dataset


@dataclasses.dataclass(frozen=True)
class Angles:
    """The flags of rotated domains."""

    angles: tuple[float, ...] = flag(
        (0.0, 15.0, 30.0, 45.0, 60.0, 75.0), "Degrees of the rotated domains."
    )


def _make(data: Dataset, source: Source, chosen: Angles) -> Dataset:
    return environments.rotated(data, chosen.angles, source.seed)


ROTATED = Kind("a domain for each angle", (Angles,), _make)
