"""A configuration: the values of all flags, by name."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedjax_inv.data import sources

from ..flags import outside


class Config:
    """The values of all flags of an experiment, which do not change: config.rounds.

    `experiment.config.of` makes one and checks it.
    """

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: a configuration does not change")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def only(self, names: Collection[str]) -> "Config":
        """These flags alone."""
        return Config(**{name: getattr(self, name) for name in names})

    def unchecked(self, **values: Any) -> "Config":
        """With other values of some flags, which nothing checks."""
        return Config(**(vars(self) | values))

    @property
    def stem(self) -> str:
        """The data set's name without folders and suffix, for titles and names of folders."""
        return Path(self.dataset).stem

    @property
    def is_path(self) -> bool:
        """Whether the data set is a file or a folder."""
        path = Path(self.dataset).expanduser()
        return path.suffix in sources.FILES or (
            self.dataset not in sources.NEEDS_NO_FILE and os.path.isdir(path)
        )

    @property
    def environment_name(self) -> str:
        """The environment, also for --environment=auto."""
        if self.environment != "auto":
            return self.environment
        return "none" if self.is_path else "rotated"

    @property
    def is_drawn(self) -> bool:
        """Whether the domains depend on random draws."""
        return self.environment_name != "none"

    @property
    def title(self) -> str:
        """The name of the data and of their domains, for figures and tables."""
        domains = f", {self.environment_name} domains" if self.is_drawn else ""
        return f"{self.stem}{domains}"

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The thresholds of --stop_below or --stop_above."""
        return self.stop_below or self.stop_above

    @property
    def schedule_end(self) -> int:
        """The round in which a cosine schedule of the learning rate ends; 0 without one."""
        return (self.schedule_rounds or self.rounds) if self.schedule == "cosine" else 0

    @property
    def outside(self) -> tuple[str, ...]:
        """The algorithms, the network, the loss and the score from outside of this project."""
        return self.outside_of(*self.algorithm)

    def outside_of(self, *algorithms: str) -> tuple[str, ...]:
        """Those of them that runs of some algorithms have."""
        named = (*algorithms, self.model, self.loss, self.score)
        return tuple(filter(outside.is_outside, named))
