"""What the list of environments holds of each."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_inv.data.dataset import Dataset


class Source(NamedTuple):
    """What an environment may know beside its flags."""

    dataset: str  # the name of the data set
    test_fraction: float  # what is drawn for the test of data without a test split
    seed: int  # of all draws
    clients: int = 0  # how many training clients were asked for; 0: as many as domains


class Kind(NamedTuple):
    """A way to make domains."""

    text: str  # what it is, in a few words
    records: tuple[type[Any], ...]  # the records of its flags
    make: Callable[..., Dataset]  # (data, source, *records) -> data with other domains
    draws_test: bool = False  # whether it draws a test environment for data without a test split
