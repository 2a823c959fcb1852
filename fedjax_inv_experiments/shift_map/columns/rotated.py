"""Rotated domains: clients hold images at five angles, and the test shows a sixth, unseen one."""

from fedjax_inv_experiments.shift_map.columns.kind import Shift

_TRAINING = (0, 15, 30, 45, 60)


def _flags(degrees: float) -> tuple[str, ...]:
    unseen = f"{_TRAINING[-1] + degrees:g}"
    angles = ",".join([*map(str, _TRAINING), unseen])
    return ("--environment=rotated", f"--angles={angles}", f"--held_out={unseen}")


SHIFT = Shift(
    "unseen angle",
    "degrees beyond the largest training angle",
    (5, 15, 30, 45),
    30,
    _flags,
    has_unseen_domain=True,
    domains="none",
)
