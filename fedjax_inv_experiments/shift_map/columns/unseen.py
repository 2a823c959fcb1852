"""An unseen domain: the test shows a domain of the data that no client has."""

from fedjax_inv_experiments.shift_map.columns.kind import Shift


def _flags(_: float) -> tuple[str, ...]:
    return ()


SHIFT = Shift("unseen domain", "always 1", (1,), 1, _flags, has_unseen_domain=True, domains="own")
