"""An entry in the list of environments."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_inv.data.dataset import Dataset


class Source(NamedTuple):
    """The facts that an environment may use besides its own flags."""

    dataset: str  # the name of the data set
    test_fraction: float  # the part that is drawn for the test if the data have no test split
    seed: int  # for all random draws
    clients: int = 0  # the value of --clients; 0: as many as domains


class Kind(NamedTuple):
    """An environment: a way to make domains."""

    text: str  # a description in a few words
    records: tuple[type[Any], ...]  # the records of its flags
    make: Callable[..., Dataset]  # (data, source, config) -> the data with new domains
