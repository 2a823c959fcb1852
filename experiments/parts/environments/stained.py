"""Coloured strokes or backgrounds that go with the digit.

With `combinations` each domain has a fixed rule from digit to colour; with `stained` the colour
follows the label by a rule that the test breaks. FedIPG's Fig. 5 is --environment=combinations
--held_out=all --clients=50. Its Table III is --environment=stained in three settings:
--stain=foreground --training_domains=5 --domain_size=600; --stain=background with 5 domains of
2,000 examples; and --stain=both with 20 domains of 2,000.
"""

import dataclasses

import numpy as np

from fedjax_inv import checks
from fedjax_inv.data import stains
from fedjax_inv.data.dataset import Dataset

from ...flags.configuration import Config
from ...flags.flag import PROBABILITY, at_least, flag, flag_error
from ...parts.environments.kind import Kind, Source


@dataclasses.dataclass(frozen=True)
class Stains:
    """The flags of coloured strokes and backgrounds."""

    stain: str = flag(
        "foreground",
        "What is coloured: the strokes, the ground, or both.",
        choices=stains.STAINS,
    )
    colors: int = flag(
        10,
        "Number of colours of stained images and of combinations, at most one for each class.",
        at_least(2),
    )


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The flags of stained images: how colour and label agree, and the sizes of domains."""

    training_domains: int = flag(5, "Training domains of stained images.", at_least(1))
    domain_size: int = flag(
        0,
        "Examples of each, or originals if they have copies (--dataset=moved_digits); 0: an equal "
        "share of all that are not for the test.",
        at_least(0),
    )
    agreements: tuple[float, ...] = flag(
        (0.9, 0.98),
        "Probabilities that the colour agrees with the label in the training domains: one number "
        "for all, the two ends of a range that they are spread over, or one for each.",
        PROBABILITY,
    )
    test_agreement: float = flag(
        0.9, "Probability that the colour follows --test_rule in the test domain.", PROBABILITY
    )
    test_rule: str = flag(
        "reversed",
        "The colour of a label in the test: the one at the other end of the palette (reversed), or "
        "the next one (shifted).",
        choices=stains.TEST_RULES,
    )
    mislabelled: float = flag(
        0.0, "Probability that a stained image's label disagrees with the image.", PROBABILITY
    )


def _of_domains(chosen: Config) -> tuple[float, ...]:
    """The agreement of each training domain; raises UsageError for a list of another length."""
    values, count = chosen.agreements, chosen.training_domains
    if len(values) == count:
        return values
    is_default = values == Agreement.agreements
    if len(values) not in (1, 2) or (count == 1 and not is_default):
        text = "must be one number, the two ends of a range, or one for each of"
        raise flag_error("agreements", values, f"{text} --training_domains={count}")
    return tuple(np.linspace(values[0], values[-1], count).tolist())


def _combinations(data: Dataset, source: Source, chosen: Config) -> Dataset:
    return stains.combinations(data, stain=chosen.stain, colors=chosen.colors, seed=source.seed)


def _stained(data: Dataset, source: Source, chosen: Config) -> Dataset:
    count, most = chosen.training_domains, len(data.y) - 1
    checks.integer("training_domains", count, 1, most, ", the number of examples but one")
    return stains.stained(
        data,
        stain=chosen.stain,
        colors=chosen.colors,
        agreements=_of_domains(chosen),
        test_agreement=chosen.test_agreement,
        test_rule=chosen.test_rule,
        label_noise=chosen.mislabelled,
        domain_size=chosen.domain_size or None,
        test_fraction=source.test_fraction,
        seed=source.seed,
    )


COMBINATIONS = Kind("a domain for each fixed rule from digit to colour", (Stains,), _combinations)
STAINED = Kind(
    "colours that follow the label by another rule in the test", (Stains, Agreement), _stained
)
