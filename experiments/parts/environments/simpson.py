"""Simpson's paradox: one digit is the darker one in every client, and none is over all of them.

FedCFA's Fig. 4 is --environment=simpson --held_out=test, from a network that was trained with
--shading=random --algorithm=erm --stop_above=0.95 --after_stop=end (--init_from).
"""

import dataclasses

import numpy as np

from experiments.flags.flag import Range, flag, shown
from experiments.parts.environments.kind import Kind, Source
from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import simpson
from fedjax_inv.data.dataset import Dataset


def _rgb(text: str) -> list[int]:
    return list(bytes.fromhex(text))


def _is_rgb(text: str) -> bool:
    try:
        return len(text) == 6 and len(_rgb(text)) == 3
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True)
class Shades:
    """Which digits there are, and how light they are."""

    darker: str = flag("1", "The class that is darker in every client; label 0.")
    lighter: str = flag("7", "The class that is lighter in every client; label 1.")
    ramp: tuple[str, ...] = flag(
        tuple(bytes(end).hex() for end in simpson.ENDS),
        "Colours from light to dark, of strokes on black, as rrggbb: the two ends of a range, or "
        "one more than there are clients. Client i paints the lighter class in colour i, the "
        "darker one in colour i + 1. --clients tells how many there are; 0: 5.",
        Range(_is_rgb, "a colour, as rrggbb"),
    )
    shading: str = flag(
        "paradox",
        "How clients paint: so, or in random colours, as in the test (random).",
        choices=simpson.SHADINGS,
    )


def _make(data: Dataset, source: Source, chosen: Shades) -> Dataset:
    checks.integer(
        "clients", source.clients, 0, len(data.y) - 1, ", the number of examples but one"
    )
    colors, steps = [_rgb(color) for color in chosen.ramp], (source.clients or 5) + 1
    if len(colors) not in (2, steps):
        raise UsageError(
            f"--ramp={shown(chosen.ramp)}: must be the two ends of a range, or {steps} colours, "
            "one more than there are clients"
        )
    painted = simpson.ramp(steps, colors) if len(colors) == 2 else np.array(colors, np.uint8)
    try:
        simpson.check_ramp(painted)
    except UsageError as error:
        raise UsageError(f"--ramp={shown(chosen.ramp)}: of its {steps} colours, {error}") from None
    return simpson.simpson(
        data,
        darker=chosen.darker,
        lighter=chosen.lighter,
        colors=painted,
        shading=chosen.shading,
        test_fraction=source.test_fraction,
        seed=source.seed,
    )


SIMPSON = Kind(
    "one digit is darker in every client, and over all none is", (Shades,), _make, draws_test=True
)
