"""The data of a configuration: the data set, its domains, and the examples of each client."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.data import (
    environments,
    federation,
    images,
    simpson,
    sources,
    stains,
    tables,
    wrong_labels,
)
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split
from fedjax_inv.data.wrong_labels import Mislabelled
from fedjax_inv.types import Examples

from .config import Config, Data
from .errors import check_known, flag_error, in_flags, shown
from .running import summary

# Names that a domain among others cannot have, as flags and tables have another meaning for them.
_TAKEN = {"none", "all", "next", "", "clients", "mean", "worst domain", "at the last round"}
_TAKEN |= {summary.NEVER_SEEN}
_LONGEST_NAME = 100  # bytes of a domain's name
# The flag of each of `tables.Roles`.
_ROLES = {
    "target": "target_column",
    "domain": "domain_column",
    "client": "client_column",
    "test": "test_column",
    "group": "group_column",
    "split": "split_column",
    "image": "image_column",
    "ignored": "ignored_columns",
    "task": "task",
}
_PATCH = 5  # the side of a patch in pixels, as in FL Games; those of the two corners do not overlap
_ODD_SHARE = 0.05  # of the images, in each of --odd_angles
_AGREEMENTS = (0.9, 0.98)  # of label and colour, in the first and last domain of stained images


def like(before: Data, dataset: str, data_dir: str) -> Data:
    """The flags that read other data as a run's own are read."""
    data = Data(dataset, data_dir=data_dir, image_size=before.image_size, stride=before.stride)
    if not (is_table(before.dataset) and is_table(dataset)):
        return data
    columns = {name: getattr(before, name) for name in _ROLES.values()}
    return dataclasses.replace(data, **columns)


def is_table(dataset: str) -> bool:
    """Whether a data set is a table by its name, or else Sentiment140."""
    return Path(dataset).suffix in tables.SUFFIXES


def load(data: Data, like: Dataset | None = None, decode: images.Decode | None = None) -> Dataset:
    """The data set, before environments.

    like: the data set of a run; a table then has its task, and its columns if it is one, too.
    decode: makes x of files of images; None: decodes all of them.
    """
    roles = tables.Roles(**{role: getattr(data, name) for role, name in _ROLES.items()})
    try:
        loaded = sources.load(
            data.dataset,
            data_dir=data.data_dir or None,
            image_size=data.image_size or None,
            vocabulary=data.vocabulary or None,
            text_length=data.text_length or None,
            roles=None if roles == tables.Roles() else roles,
            like=like if is_table(data.dataset) else None,
            decode=decode,
        )
    except UsageError as error:
        names = {"like": "dataset"} | {f"roles.{role}": name for role, name in _ROLES.items()}
        if error.argument == "roles":  # an error about all roles names the first flag that sets one
            name = next(n for n in _ROLES.values() if getattr(data, n) != getattr(Data(), n))
            error = flag_error(name, getattr(data, name), error.allowed)
        # An error about a file inside a folder names that file instead.
        if str(error.value) == data.dataset:
            names["name"] = "dataset"
        raise in_flags(error, f"--dataset={data.dataset}", names) from None
    _check_names(data.dataset, loaded)
    count = data.max_examples
    if 0 < count < len(loaded.y):
        rows = np.random.default_rng(0).choice(len(loaded.y), count, replace=False)
        loaded = loaded.take(np.sort(rows))
    return _strided(loaded, data.stride)


def _check_names(dataset: str, loaded: Dataset) -> None:
    """Raises UsageError for names of domains or classes that flags and tables cannot contain."""
    for name in (*loaded.domains, *loaded.classes):
        if not name.isprintable():
            raise flag_error("dataset", dataset, f"has the name {name!r}, which cannot be printed")
    if len({name.strip() for name in loaded.domains}) < len(loaded.domains):
        raise flag_error("dataset", dataset, "has domains whose names differ in blanks alone")
    for name in loaded.domains if len(loaded.domains) > 1 else ():
        if name in _TAKEN or len(name.encode()) > _LONGEST_NAME:
            text = f"has the domain {name[:20]!r}; must have another name for it"
            raise flag_error("dataset", dataset, text)


def _strided(loaded: Dataset, stride: int) -> Dataset:
    """The data set with every n-th pixel of each row and column."""
    if stride == 1:
        return loaded
    if loaded.render is not None or np.ndim(loaded.x) != 4 or stride >= min(loaded.x.shape[1:3]):
        raise flag_error("stride", stride, "must be below a side of the images")
    return loaded._replace(x=loaded.x[:, ::stride, ::stride])


def held_out(config: Config, domains: Sequence[str]) -> list[str | None]:
    """The domains to hold out in turn; None stands for the test split."""
    asked = config.data.held_out
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


def validated(
    config: Config, domains: Sequence[str], held_out: Sequence[str | None]
) -> dict[str | None, str | None]:
    """The domain of --validate by held-out domain; None without one."""
    asked = config.data.validate
    if not asked:
        return dict.fromkeys(held_out)
    if len(domains) < 2 + (held_out[0] is not None):
        raise flag_error("validate", asked, "must be left out, as no other domain would train")
    if asked != "next":
        check_known("validate", asked, [*domains, "next"])
        if asked in held_out:
            raise flag_error("validate", asked, "must be none of --held_out, which is the test")
        return dict.fromkeys(held_out, asked)
    if held_out[0] is None:
        raise flag_error("validate", asked, "needs a domain in --held_out, which it follows")
    order = [*(held_out if len(held_out) > 1 else domains)]
    return {name: order[(order.index(name) + 1) % len(order)] for name in held_out}


def training_domains(data: Dataset, held_out: str | None, validate: str | None) -> list[str]:
    """The domains that runs of --leave_one_out leave out; at least two."""
    there = {*data.domain[~data.test].tolist()}
    others = held_out, validate
    names = [name for at, name in enumerate(data.domains) if at in there and name not in others]
    if len(names) < 2:
        text = f"needs several training domains, there {'is one' if names else 'are none'}"
        raise flag_error("leave_one_out", True, text)
    return names


def draw_seed(config: Config, seed: int) -> int:
    """The seed for drawing the environments of a run's seed; 0 if nothing is drawn."""
    if not config.is_drawn:
        return 0
    return seed if config.environment.data_seed == "each" else int(config.environment.data_seed)


def domains(config: Config, loaded: Dataset, seed: int) -> Dataset:
    """The data set with its environments, drawn by `draw_seed`."""
    try:
        return _ENVIRONMENTS[config.environment_name](loaded, seed, config)
    except UsageError as error:
        raise in_flags(error, f"--environment={config.environment_name}", {}) from None


def _rotated(data: Dataset, seed: int, config: Config) -> Dataset:
    odd, angles = config.environment.odd_angles, config.environment.angles
    if not odd:
        return environments.rotated(data, angles, seed)
    rest = 1 - len(odd) * _ODD_SHARE
    if rest <= 0 or _ODD_SHARE * len(data.y) < 1:
        raise flag_error("odd_angles", odd, "leave no image to a domain; must be fewer")
    shares = [*(_ODD_SHARE for _ in odd), *(rest / len(angles) for _ in angles)]
    return environments.rotated(data, (*odd, *angles), seed, shares)


def _spurious(data: Dataset, seed: int, config: Config, *, patched: bool) -> Dataset:
    """A colour or a patch that misleads in the test; FL Games' groups are its two classes."""
    groups = (
        environments.GROUPS.get(config.data.dataset)
        if config.environment.num_classes == 2
        else None
    )
    if groups:
        classes = environments.grouped(data, groups)
    else:
        classes = environments.binned(data, config.environment.num_classes)
    how: dict[str, Any] = {
        "flips": config.environment.flips,
        "test_flip": config.environment.test_flip,
        "label_noise": config.environment.label_noise,
        "test_fraction": config.data.test_fraction,
        "seed": seed,
    }
    if patched:
        return environments.patched(classes, patch_size=_PATCH, **how)
    return environments.colored(classes, binarise=config.environment.binarise, **how)


def _stained(data: Dataset, seed: int, config: Config) -> Dataset:
    count, most = config.environment.training_domains, len(data.y) - 1
    checks.integer("training_domains", count, 1, most, ", the number of examples but one")
    return stains.stained(
        data,
        stain=config.environment.stain,
        agreements=np.linspace(*_AGREEMENTS, count).tolist(),
        domain_size=config.environment.domain_size or None,
        test_fraction=config.data.test_fraction,
        seed=seed,
    )


def _simpson(data: Dataset, seed: int, config: Config) -> Dataset:
    """FedCFA's Fig. 4 is --environment=simpson --held_out=test."""
    count, most = config.partition.clients, len(data.y) - 1
    checks.integer("clients", count, 0, most, ", the number of examples but one")
    return simpson.simpson(
        data,
        colors=simpson.ramp((count or 5) + 1),
        shading=config.environment.shading,
        share=config.environment.paradox,
        test_fraction=config.data.test_fraction,
        seed=seed,
    )


_ENVIRONMENTS: dict[str, Callable[[Dataset, int, Config], Dataset]] = {
    "rotated": _rotated,
    "colored": partial(_spurious, patched=False),
    "patched": partial(_spurious, patched=True),
    "combinations": lambda data, seed, config: stains.combinations(
        data, stain=config.environment.stain, seed=seed
    ),
    "stained": _stained,
    "simpson": _simpson,
    "none": lambda data, seed, config: data,
}


def num_clients(config: Config, dataset: Dataset, *held_out: str | None) -> int:
    """The number of clients, also of those that never train.

    held_out: the domains that no client has; None stands for no domain.
    """
    if config.partition.clients:
        return config.partition.clients
    trains = federation.dealt(dataset, *held_out)
    if config.partition.partition != "user" or dataset.user is None:
        return max(1, len(np.unique(dataset.domain[trains])))
    return max(1, len(np.unique(dataset.user[trains])))


def split(
    config: Config,
    dataset: Dataset,
    data: Examples,
    *,
    held_out: str | None,
    validate: str | None,
    seed: int,
    first_row: int,
) -> Split:
    """The examples of the clients and of the test.

    dataset: the data set; its examples are the rows first_row, first_row + 1, ... of `data`.
    held_out: the domain for the test; None for the test split.
    validate: the domain of --validate, or None.
    """
    number = num_clients(config, dataset, held_out, validate)
    is_by_user = config.partition.partition == "user" and not config.partition.clients
    try:
        partition = federation.partitioner(
            config.partition.partition,
            dataset,
            number,
            alpha=config.partition.alpha,
            min_size=None if config.partition.min_size < 0 else config.partition.min_size,
            shards_per_client=config.partition.classes_per_client,
            mixing=config.partition.mixing,
        )
        found = federation.split(
            dataset,
            data,
            _of_users(dataset, number) if is_by_user else partition,
            held_out=held_out,
            seed=seed,
            test_fraction=config.data.test_fraction,
            first_row=first_row,
            imbalance=config.partition.imbalance,
            validate=validate,
            held_out_clients=config.partition.held_out_clients,
        )
    except UsageError as error:
        where = f"--partition={config.partition.partition}"
        if config.partition.imbalance != 1:
            where += f" --imbalance={shown(config.partition.imbalance)}"
        names = {"num_clients": "clients", "name": "partition"}
        names["shards_per_client"] = "classes_per_client"
        raise in_flags(error, where, names) from None
    if is_by_user:  # a client without examples makes no group of domains of its own
        is_empty = np.asarray(found.train.size) == 0
        found = found._replace(domain=np.where(is_empty, found.domain[0], found.domain))
    return found


def _of_users(dataset: Dataset, num_clients: int) -> federation.Partition:
    """Each user's examples to one client; clients without examples for users who have none.

    All examples of a user may be test examples, or be left out by --imbalance, with some seeds.
    """
    users = np.asarray(dataset.user)

    def deal(rows: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        present = len(np.unique(users[rows]))
        parts = federation.partitioner("user", dataset, present)(rows, rng)
        return [*parts, *[np.zeros(0, rows.dtype)] * (num_clients - present)]

    return deal


def with_wrong_labels(
    config: Config, dataset: Dataset, splits: Sequence[Split], seeds: Sequence[int]
) -> Mislabelled:
    """The splits with wrong labels at some clients. seeds: of the splits."""
    if dataset.task != "classes":
        text = f"needs data with classes, these have {dataset.task}"
        raise flag_error("wrong_labels", config.partition.wrong_labels, text)
    try:
        how = {"share": config.partition.wrong_labels, "part": config.partition.wrong_clients}
        return wrong_labels.at_clients(splits, len(dataset.classes), seeds=seeds, **how)
    except UsageError as error:
        names = {"share": "wrong_labels", "part": "wrong_clients"}
        where = f"--wrong_labels={shown(config.partition.wrong_labels)}"
        raise in_flags(error, where, names) from None
