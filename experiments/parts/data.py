"""The data set, and which of its domains only the test sees."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources, tables
from fedjax_inv.data.dataset import TASKS, Dataset

from ..flags.configuration import Config
from ..flags.flag import (
    INSIDE,
    at_least,
    check_different,
    check_known,
    flag,
    flag_error,
    flag_names,
    flags_of,
    in_flags,
)

# Names that a domain among others cannot have -> where they mean something else.
_TAKEN = {
    **dict.fromkeys(("none", "all", ""), "to --held_out"),
    **dict.fromkeys(("clients", "mean", "worst domain", "at the last round"), "in the tables"),
}
_LONGEST_NAME = 100  # bytes of a domain's name
# The flag of each of `tables.Roles`.
_ROLES = {
    "target": "target_column",
    "domain": "domain_column",
    "client": "client_column",
    "test": "test_column",
    "ignored": "ignored_columns",
    "task": "task",
}


@dataclasses.dataclass(frozen=True)
class Data:
    """The examples, and which of them only the test sees."""

    dataset: str = flag(
        "digits",
        "digits, moved_digits (nine copies of each, moved by a pixel), dsprites, a TFDS name, or "
        "the path of an .npz, of a folder of images, of LEAF's FEMNIST (.json), of Sentiment140 "
        "(.csv), of a table (.csv or .parquet) or of a folder of x.npy, y.npy and others, whose x "
        "is mapped into memory.",
    )
    target_column: tuple[str, ...] = flag(
        ("target",), "The column of a table's targets; several with commas."
    )
    domain_column: str = flag(
        "domain", "The column of a table's domains; it may be absent if it has its default name."
    )
    client_column: str = flag(
        "client",
        "The column of a table's clients, for --partition=user; it may be absent if it has its "
        "default name.",
    )
    test_column: str = flag(
        "test",
        "The column that says whether a row of a table is in the test split (true/false or 1/0); "
        "it may be absent if it has its default name.",
    )
    ignored_columns: tuple[str, ...] = flag(
        (), "Columns of a table that no flag names and that are not features.", kind=str
    )
    task: str = flag(
        "auto",
        "What a table's targets are; auto: one target is of classes if it holds texts, true/false, "
        f"or whole numbers of which at most {tables.MOST_CLASSES} differ, else of values; several "
        "are labels if they hold true/false, else values.",
        choices=("auto", *TASKS),
    )
    data_dir: str = flag("", "The TFDS folder; default: $TFDS_DATA_DIR, or TFDS's own.")
    image_size: int = flag(
        0, "Side in pixels that a folder's images are scaled to; 0: as they are.", at_least(0)
    )
    stride: int = flag(
        1, "Keep every n-th pixel of each row and column (2: 14x14 MNIST).", at_least(1)
    )
    num_images: int = flag(
        0, "Number of images that are rendered for --dataset=dsprites; 0: 20,000.", at_least(0)
    )
    vocabulary: int = flag(
        0,
        "Size of a text's vocabulary, the most frequent words in training; 0: 10,000.",
        at_least(0),
    )
    text_length: int = flag(
        0, "Number of words that a text is cut or padded to; 0: 30.", at_least(0)
    )
    max_examples: int = flag(
        0,
        "How many examples are drawn from larger data, the same ones in every run; 0: all.",
        at_least(0),
    )
    held_out: str = flag(
        "",
        "The domain that only the test sees; sweep: several with commas, or 'all', each in turn; "
        "'none': the official test split, or a random part. Default: the last domain, or none "
        "if there is only one.",
    )
    test_fraction: float = flag(
        0.2,
        "The part of the examples that is drawn for the test, if the data have no test split and "
        "no domain is held out.",
        INSIDE,
    )


def check(chosen: Config) -> None:
    """Raises UsageError if --held_out names a domain twice."""
    check_different("held_out", chosen.held_out.split(","))


def _roles(chosen: Config) -> tables.Roles | None:
    """The roles of a table's columns; None for the default ones."""
    roles = tables.Roles(**{role: getattr(chosen, name) for role, name in _ROLES.items()})
    return None if roles == tables.Roles() else roles


def like(before: Config, dataset: str, data_dir: str) -> Config:
    """The flags that read other data as a run's own are read."""
    names = {field.name for field in flags_of(Data)} - {"image_size", "stride"}
    if is_table(before.dataset) and is_table(dataset):
        names -= {*_ROLES.values()}
    usual = {name: getattr(Data, name) for name in names}
    return before.unchecked(**usual | {"dataset": dataset, "data_dir": data_dir})


def is_table(dataset: str) -> bool:
    """Whether a data set is a table by its name, or else Sentiment140."""
    return Path(dataset).suffix in tables.SUFFIXES


def load(chosen: Config, like: Dataset | None = None) -> Dataset:
    """The data set, before environments. Raises UsageError if it cannot be read.

    like: the data set of a run; if both are tables, the new one must have its columns.
    """
    both = like is not None and like.columns and is_table(chosen.dataset)
    try:
        loaded = sources.load(
            chosen.dataset,
            data_dir=chosen.data_dir or None,
            image_size=chosen.image_size or None,
            num_images=chosen.num_images or None,
            vocabulary=chosen.vocabulary or None,
            text_length=chosen.text_length or None,
            roles=_roles(chosen),
            like=like if both else None,
        )
    except UsageError as error:
        names = flag_names(Data) | {f"roles.{role}": name for role, name in _ROLES.items()}
        names["like"] = "dataset"
        if error.argument == "roles":  # an error about all roles names the first flag that sets one
            roles = (
                name for name in _ROLES.values() if getattr(chosen, name) != getattr(Data, name)
            )
            name = next(roles)
            error = flag_error(name, getattr(chosen, name), error.allowed)
        # An error about a file inside a folder names that file instead.
        if str(error.value) == chosen.dataset:
            names["name"] = "dataset"
        raise in_flags(error, f"--dataset={chosen.dataset}", names) from None
    _check_names(chosen.dataset, loaded)
    return _strided(_drawn(loaded, chosen.max_examples), chosen.stride)


def _check_names(dataset: str, loaded: Dataset) -> None:
    """Raises UsageError for names of domains or classes that flags and tables cannot contain."""
    for kind, names in (("domain", loaded.domains), ("class", loaded.classes)):
        for name in names:
            if not name.isprintable():
                text = f"has the {kind} {name!r}, must have names that can be printed in a line"
                raise flag_error("dataset", dataset, text)
    for name in loaded.domains:
        if len(name.encode()) > _LONGEST_NAME:  # the name of a folder contains it
            text = f"has the domain {name[:20]!r}..., must have names of at most"
            raise flag_error("dataset", dataset, f"{text} {_LONGEST_NAME} bytes")
    if len({name.strip() for name in loaded.domains}) < len(loaded.domains):
        text = "has domains whose names differ in blanks alone, must have other names"
        raise flag_error("dataset", dataset, text)
    words = {*_TAKEN} & set(loaded.domains)
    if words and len(loaded.domains) > 1:
        word = min(words)
        raise flag_error(
            "dataset",
            dataset,
            f"has the domain {word!r}, which means something else {_TAKEN[word]}; must have "
            "another name",
        )


def _drawn(loaded: Dataset, count: int) -> Dataset:
    """The data set with `count` of its examples, in their order; 0 for all."""
    if not 0 < count < len(loaded.y):
        return loaded
    rows = np.sort(np.random.default_rng(0).choice(len(loaded.y), count, replace=False))
    return loaded.take(rows)


def _strided(loaded: Dataset, stride: int) -> Dataset:
    """The data set with every n-th pixel of each row and column."""
    if stride == 1:
        return loaded
    if loaded.render is not None or np.ndim(loaded.x) != 4:
        raise flag_error("stride", stride, "must be 1, as the data are no images")
    if stride >= min(loaded.x.shape[1:3]):
        height, width = loaded.x.shape[1:3]
        text = f"must be below a side of the images, {height}x{width}"
        raise flag_error("stride", stride, text)
    return loaded._replace(x=loaded.x[:, ::stride, ::stride])


def held_out(chosen: Config, domains: Sequence[str]) -> list[str | None]:
    """The domains to hold out in turn; None stands for the test split."""
    asked = chosen.held_out
    if asked == "none" or (not asked and len(domains) == 1):
        return [None]
    if len(domains) == 1:
        raise flag_error("held_out", asked, "must be none, as there is one domain only")
    if asked == "all":
        return list(domains)
    if not asked or asked in domains:
        return [asked or domains[-1]]
    names = asked.split(",")
    for name in names:  # "all" and "none" cannot stand in a list
        check_known("held_out", name, domains if len(names) > 1 else [*domains, "all", "none"])
    return list(names)
