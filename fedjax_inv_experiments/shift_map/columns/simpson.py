"""Simpson's paradox: within each client the colour tells the digit, over all clients hardly."""

from fedjax_inv_experiments.shift_map.columns.kind import Shift


def _flags(paradox: float) -> tuple[str, ...]:
    return ("--environment=simpson", f"--paradox={paradox:g}", "--held_out=test")


SHIFT = Shift(
    "Simpson's paradox",
    "part of the clients' images with the colours of the paradox; the others' are random",
    (0.5, 0.8, 1),
    1,
    _flags,
    domains="none",
)
