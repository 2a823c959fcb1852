"""A long tail with rare uploads: some classes, and the uploads of half of the clients, are rare."""

from fedjax_inv_experiments.shift_map.columns import labels
from fedjax_inv_experiments.shift_map.columns.kind import Shift


def _flags(imbalance: float) -> tuple[str, ...]:
    return (*labels.SHIFT.flags(3), f"--imbalance={imbalance:g}", "--frequency=0.1")


SHIFT = Shift(
    "long tail, rare uploads",
    "examples of the first class for one of the last; half of the clients upload in 1 of 10 rounds",
    (1, 5, 20),
    20,
    _flags,
)
