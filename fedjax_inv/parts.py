"""The parameters that a method works on: all of them, or those of the classifier (the head)."""

from collections.abc import Callable
from typing import NamedTuple

from fedjax_inv.types import Halves, Tree


class Part(NamedTuple):
    """Access to a part of the parameters, or of a tree of their structure."""

    get: Callable[[Halves], Tree]  # params -> the part
    put: Callable[[Halves, Tree], Halves]  # (params, part) -> params with that part


EVERYTHING = Part(lambda params: params, lambda params, part: part)
CLASSIFIER = Part(lambda params: params.head, lambda params, part: params._replace(head=part))
PARTS = {"all": EVERYTHING, "classifier": CLASSIFIER}
