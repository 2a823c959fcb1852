"""Domains mixed over clients: each client holds one domain, or a part of all."""

from fedjax_inv_experiments.shift_map.columns import rotated
from fedjax_inv_experiments.shift_map.columns.kind import Shift


def _flags(separation: float) -> tuple[str, ...]:
    angle = rotated.SHIFT.flags(rotated.SHIFT.at)
    return (*angle, "--partition=mixed", f"--mixing={1 - separation:g}")


SHIFT = Shift(
    "mixed domains",
    "1 - lambda: 0, all clients alike; 1, a domain a client",
    (0, 0.5, 0.9, 1),
    0.5,
    _flags,
    has_unseen_domain=True,
)
