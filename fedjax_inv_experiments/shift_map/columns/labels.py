"""Label skew: clients hold the classes in proportions of their own."""

from fedjax_inv_experiments.shift_map.columns.kind import WHOLE, Shift


def _flags(skew: float) -> tuple[str, ...]:
    return (
        *WHOLE,
        "--partition=dirichlet",
        *(f"--alpha={1 / skew:g}", "--min_size=10"),
    )


SHIFT = Shift("label skew", "1 / Dirichlet's alpha", (1, 3, 10), 10, _flags)
