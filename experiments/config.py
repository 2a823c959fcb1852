"""A configuration: the values of all flags of an experiment.

`chosen` is that of this process's command line; `of`, `changed` and `of_arguments` make others,
which the same parsers and validators check.
"""

import copy
import difflib
import functools
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from .flags import ALGORITHMS, NAMES, PRESETS, SOURCES

FLAGS = flags.FLAGS


class Config:
    """The values of all flags of an experiment, which do not change: config.rounds."""

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
        is_name = self.dataset in ("digits", "moved_digits", "dsprites")
        return path.suffix in (".npz", ".json", ".csv", ".parquet") or (
            not is_name and os.path.isdir(path)
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
    def is_grid(self) -> bool:
        """Whether there are several algorithms, held-out domains or values of a hyperparameter."""
        lists = self.algorithm, self.learning_rate, self.server_learning_rate
        texts = (self.held_out, *self.set)
        return (
            max(self.draws, *map(len, lists)) > 1
            or self.held_out == "all"
            or any("," in t for t in texts)
        )

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The thresholds of --stop_below or --stop_above."""
        return self.stop_below or self.stop_above

    @property
    def outside(self) -> tuple[str, ...]:
        """The algorithms, the network, the loss and the score from outside of this project."""
        return self.outside_of(*self.algorithm)

    def outside_of(self, *algorithms: str) -> tuple[str, ...]:
        """Those of them that runs of some algorithms have."""
        named = (*algorithms, self.model, self.loss, self.score)
        return tuple(name for name in named if ":" in name)


def _config(values: flags.FlagValues) -> Config:
    """The configuration of parsed flags."""
    found: dict[str, Any] = {name: values[name].value for name in NAMES}
    for name in ("set", "optimizer_set"):
        found[name] = _merged(found[name])
    found["eval_every"] = following(**found)
    found["leave_one_out"] |= found["select"] == "leave_one_out"
    if found["draws"]:
        is_adaptive = found["server_optimizer"] != "sgd"
        for name in ["learning_rate"] + ["server_learning_rate"] * is_adaptive:
            found[name] = found[name] if values[name].present else ()  # empty: drawn
    config = Config(**found)
    how = "mark" if config.is_grid else "stop"
    return config.unchecked(nonfinite=how) if config.nonfinite == "auto" else config


def _merged(entries: Sequence[str]) -> tuple[str, ...]:
    """Entries name=value: the last one of each name, without those that take a value back."""
    by_name = {entry.partition("=")[0]: entry for entry in entries}
    return tuple(entry for entry in by_name.values() if not entry.endswith("="))


def following(*, eval_every: int, rounds: int, checkpoint_every: int, **others: Any) -> int:
    """The largest --eval_every, up to its own, that fits the other flags."""
    del others
    fits = range(min(eval_every, rounds), 0, -1)
    return next(n for n in fits if checkpoint_every % n == 0)


def chosen() -> Config:
    """The configuration of this process's command line."""
    return _config(FLAGS)


@functools.cache
def defaults() -> Config:
    """The default of each flag."""
    return _config(_copy())


def _copy() -> flags.FlagValues:
    """The flags of an experiment with their defaults, apart from those of this process."""
    values = flags.FlagValues()
    for name in NAMES:
        values[name] = copy.deepcopy(FLAGS[name])
        values[name].unparse()
    return values


def of(**values: Any) -> Config:
    """The configuration with these values of flags, and defaults otherwise.

    Raises UsageError for a bad value, and TypeError for what is no flag.
    """
    copied = _copy()
    if unknown := {*values} - {*NAMES}:
        raise TypeError(f"{min(unknown)} is no flag")
    try:
        for name, value in values.items():
            copied[name].parse(value)
        copied.validate_all_flags()
    except flags.Error as error:
        raise _usage_error(error) from None
    return _config(copied)


def changed(config: Config, **values: Any) -> Config:
    """The configuration with other values of some flags."""
    return of(**(vars(config) | values))


def of_arguments(arguments: Sequence[str]) -> Config:
    """The configuration of a command line without the program; raises UsageError for a bad one."""
    copied = _copy()
    try:
        _read(copied, ["", *arguments])
    except flags.Error as error:
        raise _usage_error(error) from None
    return _config(copied)


def to_record(config: Config) -> dict[str, Any]:
    """The flags as a run folder stores them; the environment is never "auto"."""
    return vars(config) | {"environment": config.environment_name}


def from_record(record: Mapping[str, Any]) -> Config:
    """The configuration that a run folder stores; missing flags have their defaults.

    Raises TypeError or ValueError for what is no flag, or a value of another type.
    """
    return of(**record)


def given(values: flags.FlagValues = FLAGS) -> list[str]:
    """The flags of an experiment that a command line or a preset sets, as on a command line."""
    texts = [values[name].serialize() for name in NAMES if values[name].present]
    return [line for text in texts for line in text.splitlines()]


def _usage_error(error: flags.Error) -> Exception:
    from fedjax_inv.checks import UsageError  # with it JAX, for seconds

    return UsageError(str(error).removeprefix("flag ").replace("\n", "; "))


def parse(argv: Sequence[str], words: int = 0) -> list[str]:
    """Reads this process's command line, for `app.run`: a bad one ends it with status 2.

    words: how many words that are no flags the binary takes.
    """
    try:
        read = _read(FLAGS, argv)
        if len(read) > 1 + words:
            raise flags.Error(f"{read[1 + words]}: not a flag; flags are --name=value")
    except flags.Error as error:
        print(f"error: {str(error).replace(chr(10), '; ')}", file=sys.stderr)
        sys.exit(2)
    return read


def _read(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    try:
        return values([argv[0], *_with_presets(argv[1:])])
    except flags.UnrecognizedFlagError as error:
        raise flags.Error(f"{error}{_meant(error.flagname)}") from None
    except UnicodeDecodeError as error:
        raise flags.Error(f"--flagfile: {error}") from None


def _meant(name: str) -> str:
    """The flag of a name that is none: by the initials of a flag, or as an algorithm's setting."""
    near = [each for each in NAMES if name == "".join(word[0] for word in each.split("_"))]
    argument = re.compile(rf"^    {re.escape(name)}: ", re.MULTILINE)
    if any(argument.search((SOURCES / f"{each}.py").read_text()) for each in ALGORITHMS):
        near = [f"set={name}"]
    return f". Did you mean --{near[0]}=...?" if near else ""


def _with_presets(words: Sequence[str]) -> Iterator[str]:
    """The words, with --flagfile in place of --preset."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.lstrip("-") != "preset" or not name.startswith("-"):
            yield word
            continue
        for preset in (value if equals else next(rest, "")).split(","):
            yield f"--flagfile={preset_file(preset)}"


def preset_file(name: str) -> Path:
    """The flag file of a preset; raises flags.Error if there is none."""
    path = PRESETS / f"{name}.flags"
    if not path.is_file():
        names = sorted(path.stem for path in PRESETS.glob("*.flags"))
        near = difflib.get_close_matches(name, names) or names
        raise flags.IllegalFlagValueError(f"flag --preset={name}: unknown; is it {near[0]}?")
    return path
