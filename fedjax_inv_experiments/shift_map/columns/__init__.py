"""Kinds of shift: a file for each, and the list of their names."""

from fedjax_inv_experiments.shift_map.columns import (
    colour,
    labels,
    mixed,
    noise,
    quantity,
    rotated,
    simpson,
    tail,
    unseen,
)
from fedjax_inv_experiments.shift_map.columns.kind import Shift

# Those whose programs have the same shapes stand side by side, so that few programs are kept.
LISTED: dict[str, Shift] = {
    "rotated": rotated.SHIFT,
    "unseen": unseen.SHIFT,
    "mixed": mixed.SHIFT,
    "labels": labels.SHIFT,
    "tail": tail.SHIFT,
    "noise": noise.SHIFT,
    "colour": colour.SHIFT,
    "simpson": simpson.SHIFT,
    "quantity": quantity.SHIFT,
}
