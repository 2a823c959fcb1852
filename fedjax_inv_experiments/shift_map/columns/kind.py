"""A kind of shift: a column of the map, with one number for its severity."""

from collections.abc import Callable
from typing import Literal, NamedTuple

# All images upright, and a part of them for the test. Each seed has its own copy of the data, as in
# other kinds of shift, so that their programs have the same shapes and are compiled once.
WHOLE = ("--environment=rotated", "--angles=0", "--held_out=none")


class Shift(NamedTuple):
    """A way in which clients differ from each other, or from the test."""

    title: str  # the heading of its column
    severity: str  # the meaning of the number
    severities: tuple[float, ...]  # the weakest first
    at: float  # the severity in the map
    flags: Callable[[float], tuple[str, ...]]  # of `sweep`, at a severity
    has_unseen_domain: bool = False  # whether the test shows a domain that no client has
    domains: Literal["any", "none", "own"] = "any"  # the domains that the data must have

    def fits(self, *, has_domains: bool) -> bool:
        """Whether it can be made of data that have, or do not have, domains of their own."""
        return self.domains == "any" or (self.domains == "own") == has_domains
