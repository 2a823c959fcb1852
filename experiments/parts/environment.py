"""The environment: the domains that are made from a data set."""

import dataclasses
from typing import Any

from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset

from ..flags.flag import flag, flag_names, in_flags, number_or
from ..parts import environments
from ..parts.environments.kind import Kind, Source


@dataclasses.dataclass(frozen=True)
class Environment:
    """How domains are made from the data."""

    environment: str = flag(
        "auto",
        "How domains are made of the data; auto: none for a file or a folder, else rotated.",
        choices=("auto", *environments.LISTED),
    )
    data_seed: str = flag(
        "each",
        "Seeds which example goes to which environment, and what is drawn there; each: every seed "
        "draws its own.",
        number_or("each"),
    )
    name: str = "rotated"  # the listed kind that "auto" or the flag selects
    records: tuple[Any, ...] = ()  # the kind's own flags

    @property
    def kind(self) -> Kind:
        """The listed kind with this name."""
        return environments.LISTED[self.name]

    @property
    def is_drawn(self) -> bool:
        """Whether its domains depend on random draws."""
        return self.name != "none"


# The records with the flags of all kinds.
RECORDS = dict.fromkeys(r for kind in environments.LISTED.values() for r in kind.records)


def name_of(environment: str, *, is_path: bool) -> str:
    """The kind that --environment names. is_path: whether the data set is a file or a folder."""
    if environment != "auto":
        return environment
    return "none" if is_path else "rotated"


def draw_seed(chosen: Environment, seed: int) -> int:
    """The seed for drawing the environments of a run's seed; 0 if nothing is drawn."""
    if not chosen.is_drawn:
        return 0
    return seed if chosen.data_seed == "each" else int(chosen.data_seed)


def domains(chosen: Environment, loaded: Dataset, source: Source) -> Dataset:
    """The data set with its environments. Raises UsageError if they do not fit the data."""
    try:
        return chosen.kind.make(loaded, source, *chosen.records)
    except UsageError as error:
        others = {"clients": "clients", "dataset": "dataset"}
        names = {**flag_names(*chosen.kind.records), **others}
        raise in_flags(error, f"--environment={chosen.name}", names) from None
