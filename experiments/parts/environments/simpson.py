"""Simpson's paradox: the colour tells the digit within a client, and hardly over all clients.

FedCFA's Fig. 4 is --environment=simpson --held_out=test. Its --init_from is a network that was
trained with --shading=random --algorithm=erm --stop_above=0.95 --after_stop=end.
"""

import dataclasses

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import simpson
from fedjax_inv.data.dataset import Dataset

from ...flags.configuration import Config
from ...flags.flag import PROBABILITY, Range, flag, flag_error
from ...parts.environments.kind import Kind, Source


def _rgb(text: str) -> list[int]:
    return list(bytes.fromhex(text))


def _is_rgb(text: str) -> bool:
    try:
        return len(text) == 6 and len(_rgb(text)) == 3
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True)
class Shades:
    """The flags of Simpson's paradox: the two digits and their colours."""

    darker: str = flag("1", "The class that is darker in every client; label 0.")
    lighter: str = flag("7", "The class that is lighter in every client; label 1.")
    ramp: tuple[str, ...] = flag(
        tuple(bytes(end).hex() for end in simpson.ENDS),
        "Colours of strokes on black, from light to dark, as rrggbb: the two ends of a range, or "
        "one more than there are clients. Client i paints the lighter class in colour i, the "
        "darker one in colour i + 1. With --clients=0 there are 5 clients.",
        Range(_is_rgb, "a colour, as rrggbb"),
    )
    shading: str = flag(
        "paradox",
        "Colours of the clients' images: those of --ramp (paradox), or random ones, as in the test "
        "(random).",
        choices=simpson.SHADINGS,
    )
    paradox: float = flag(
        1.0,
        "The probability that a client's image has its colour by --shading=paradox; the others "
        "have random ones.",
        PROBABILITY,
    )


def _make(data: Dataset, source: Source, chosen: Config) -> Dataset:
    checks.integer(
        "clients", source.clients, 0, len(data.y) - 1, ", the number of examples but one"
    )
    colors, steps = [_rgb(color) for color in chosen.ramp], (source.clients or 5) + 1
    if len(colors) not in (2, steps):
        text = (
            f"must be the two ends of a range, or {steps} colours, one more than there are clients"
        )
        raise flag_error("ramp", chosen.ramp, text)
    painted = simpson.ramp(steps, colors) if len(colors) == 2 else np.array(colors, np.uint8)
    try:
        simpson.check_ramp(painted)
    except UsageError as error:
        text = f"of its {steps} colours, {error}"
        raise flag_error("ramp", chosen.ramp, text) from None
    return simpson.simpson(
        data,
        darker=chosen.darker,
        lighter=chosen.lighter,
        colors=painted,
        shading=chosen.shading,
        share=chosen.paradox,
        test_fraction=source.test_fraction,
        seed=source.seed,
    )


SIMPSON = Kind(
    "a colour that tells the digit in each client, but hardly over all clients",
    (Shades,),
    _make,
)
