"""Quantity skew: clients hold very different numbers of examples, and pass over each once."""

from fedjax_inv_experiments.shift_map.columns.kind import WHOLE, Shift


def _flags(skew: float) -> tuple[str, ...]:
    return (
        *WHOLE,
        "--partition=quantity",
        *(f"--alpha={1 / skew:g}", "--min_size=10", "--local_steps=0", "--local_epochs=1"),
    )


SHIFT = Shift("quantity skew", "1 / Dirichlet's alpha of the sizes", (0.3, 1, 3), 3, _flags)
