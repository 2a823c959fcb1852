"""A colour or a patch that predicts the label in training and misleads in the test."""

import dataclasses
from typing import Any

from fedjax_inv.data import environments
from fedjax_inv.data.dataset import Dataset

from ...flags.configuration import Config
from ...flags.flag import PROBABILITY, at_least, flag, flag_error
from ...parts.environments.kind import Kind, Source

_PATCH = 5  # the side of a patch in pixels, as in FL Games; those of the two corners do not overlap


@dataclasses.dataclass(frozen=True)
class Flips:
    """The flags of misleading colours and patches: how often cues and labels are wrong."""

    num_classes: int = flag(
        2, "Classes of colored and patched environments, each a group of the data's.", at_least(2)
    )
    flips: tuple[float, ...] = flag(
        (0.2, 0.1),
        "Probability that the colour (or patch) disagrees with the label, in each training domain.",
        PROBABILITY,
    )
    test_flip: float = flag(0.9, "The same in the test.", PROBABILITY)
    label_noise: float = flag(
        0.25, "Probability that the label disagrees with the image.", PROBABILITY
    )


@dataclasses.dataclass(frozen=True)
class Colours:
    """The flags of coloured images alone."""

    binarise: bool = flag(True, "Whether colored makes every pixel that is not 0 white.")


def _colored(data: Dataset, source: Source, chosen: Config) -> Dataset:
    classes = _classes(data, source, chosen)
    return environments.colored(classes, binarise=chosen.binarise, **_drawn(source, chosen))


def _patched(data: Dataset, source: Source, chosen: Config) -> Dataset:
    classes = _classes(data, source, chosen)
    if data.x.ndim == 4 and (data.x.shape[1] < _PATCH or data.x.shape[2] < 2 * _PATCH):
        text = f"must be for images of at least {_PATCH} pixels in height and {2 * _PATCH} in width"
        height, width = data.x.shape[1:3]
        raise flag_error("environment", "patched", f"{text}, the data have {height}x{width}")
    return environments.patched(classes, patch_size=_PATCH, **_drawn(source, chosen))


def _classes(data: Dataset, source: Source, chosen: Config) -> Dataset:
    """The data with --num_classes classes: FL Games' groups for two, else bins of neighbours."""
    groups = environments.GROUPS.get(source.dataset) if chosen.num_classes == 2 else None
    return (
        environments.grouped(data, groups)
        if groups
        else environments.binned(data, chosen.num_classes)
    )


def _drawn(source: Source, chosen: Config) -> dict[str, Any]:
    return {
        "flips": chosen.flips,
        "test_flip": chosen.test_flip,
        "label_noise": chosen.label_noise,
        "test_fraction": source.test_fraction,
        "seed": source.seed,
    }


COLORED = Kind("a colour that misleads in the test (Colored MNIST)", (Flips, Colours), _colored)
PATCHED = Kind("a black corner that misleads in the test", (Flips,), _patched)
