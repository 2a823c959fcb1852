"""The parameters that a method works on: all of them, or those of the classifier (the head)."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from fedjax_inv import types
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Tree


class Part(NamedTuple):
    """Access to a part of the parameters, or of a tree of their structure."""

    get: Callable[[types.Halves], Tree]  # params -> the part
    put: Callable[[types.Halves, Tree], types.Halves]  # (params, part) -> params with that part


EVERYTHING = Part(lambda params: params, lambda params, part: part)
CLASSIFIER = Part(lambda params: params.head, lambda params, part: params._replace(head=part))
PARTS = {"all": EVERYTHING, "classifier": CLASSIFIER}


def needing_head(algorithm: types.Algorithm) -> types.Algorithm:
    """Return an algorithm that acts on the head, and refuses a network without a trained one.

    Args:
      algorithm: the algorithm, whose `init_server` then raises the UsageError.
    """

    def init_server(setup: types.Setup) -> Tree:
        if not jax.tree.leaves(setup.variables.params.head):
            raise UsageError("model", ..., "must have a head with a trained parameter")
        return algorithm.init_server(setup)

    return algorithm._replace(init_server=init_server)
