"""Wrong labels: some clients hold labels that are often wrong."""

from fedjax_inv_experiments.shift_map.columns.kind import Shift


def _flags(share: float) -> tuple[str, ...]:
    return (
        *("--environment=none", "--held_out=none"),
        "--partition=iid",
        *(f"--wrong_labels={share:g}", "--wrong_clients=0.4"),
    )


SHIFT = Shift(
    "wrong labels",
    "part of the labels that is wrong, at 4 of 10 clients",
    (0.2, 0.5, 0.8),
    0.8,
    _flags,
)
