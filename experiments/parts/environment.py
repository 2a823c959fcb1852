"""The environment: the domains that are made from a data set."""

import dataclasses

from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset

from ..flags.configuration import Config
from ..flags.flag import flag, flag_names, in_flags, number_or
from ..parts import environments
from ..parts.environments.kind import Source


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


# The records with the flags of all kinds.
RECORDS = dict.fromkeys(r for kind in environments.LISTED.values() for r in kind.records)


def draw_seed(chosen: Config, seed: int) -> int:
    """The seed for drawing the environments of a run's seed; 0 if nothing is drawn."""
    if not chosen.is_drawn:
        return 0
    return seed if chosen.data_seed == "each" else int(chosen.data_seed)


def domains(chosen: Config, loaded: Dataset, source: Source) -> Dataset:
    """The data set with its environments. Raises UsageError if they do not fit the data."""
    kind = environments.LISTED[chosen.environment_name]
    try:
        return kind.make(loaded, source, chosen)
    except UsageError as error:
        others = {"clients": "clients", "dataset": "dataset"}
        names = {**flag_names(*kind.records), **others}
        raise in_flags(error, f"--environment={chosen.environment_name}", names) from None
