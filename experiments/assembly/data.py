"""From values to the data set, its domains and its environments."""

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
    images,
    simpson,
    sources,
    stains,
    tables,
)
from fedjax_inv.data.dataset import Dataset

from ..config import Config, Data
from ..errors import check_known, flag_error, in_flags

# The names of examples that no client has, as of domains.
NEVER_SEEN = "clients never seen"
KNOWN = "known domains"
# Names that a domain among others cannot have, as flags and tables have another meaning for them.
_TAKEN = {"none", "all", "next", "", "clients", "mean", "worst domain", "at the last round"}
_TAKEN |= {NEVER_SEEN, KNOWN}
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
_TEST_FLIP = 0.9  # how often a cue disagrees with the label in the test, as in IRM's Colored MNIST
_PATCH = 5  # the side of a patch in pixels, as in FL Games; those of the two corners do not overlap
_ODD_SHARE = 0.05  # of the images, in each of --odd_angles


def like(before: Data, dataset: str) -> Data:
    """The flags that read other data as a run's own are read."""
    data = Data(dataset, image_size=before.image_size, stride=before.stride)
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
    if loaded.source is None:
        loaded = loaded._replace(source=np.arange(len(loaded.y)))
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


def held_out(data: Data, domains: Sequence[str], *, tests_unseen: bool = False) -> list[str | None]:
    """The domains to hold out in turn; None stands for the test split.

    tests_unseen: whether the test split is of unseen domains; it is then the default.
    """
    asked = data.held_out
    if asked == "none" or (not asked and (len(domains) == 1 or tests_unseen)):
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
    data: Data, domains: Sequence[str], held_out: Sequence[str | None]
) -> dict[str | None, str | None]:
    """The domain of --validate by held-out domain; None without one."""
    asked = data.validate
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
    data_seed = config.environment.data_seed
    return seed if data_seed == "each" else int(data_seed)


def domains(config: Config, loaded: Dataset, seed: int) -> Dataset:
    """The data set with its environments, drawn by `draw_seed`."""
    try:
        return _ENVIRONMENTS[config.environment_name](loaded, seed, config)
    except UsageError as error:
        raise in_flags(error, f"--environment={config.environment_name}", {}) from None


def _rotated(loaded: Dataset, seed: int, config: Config) -> Dataset:
    angles = config.environment.angles
    odd = config.environment.odd_angles
    if not odd:
        return environments.rotated(loaded, angles, seed)
    rest = 1 - len(odd) * _ODD_SHARE
    if rest <= 0 or _ODD_SHARE * len(loaded.y) < 1:
        raise flag_error("odd_angles", odd, "leave no image to a domain; must be fewer")
    shares = [*(_ODD_SHARE for _ in odd), *(rest / len(angles) for _ in angles)]
    return environments.rotated(loaded, (*odd, *angles), seed, shares)


def _spurious(loaded: Dataset, seed: int, config: Config, *, patched: bool) -> Dataset:
    """A colour or a patch that misleads in the test; FL Games' groups are its two classes."""
    environment, classes = config.environment, config.environment.num_classes
    if classes == 2 and (groups := environments.GROUPS.get(config.data.dataset)):
        labelled = environments.grouped(loaded, groups)
    else:
        labelled = environments.binned(loaded, classes)
    how: dict[str, Any] = {
        "flips": environment.flips,
        "test_flip": _TEST_FLIP,
        "label_noise": environment.label_noise,
        "test_fraction": config.data.test_fraction,
        "seed": seed,
    }
    if patched:
        return environments.patched(labelled, patch_size=_PATCH, **how)
    return environments.colored(labelled, binarise=environment.binarise, **how)


def _combinations(loaded: Dataset, seed: int, config: Config) -> Dataset:
    return stains.combinations(loaded, stain=config.environment.stain, seed=seed)


def _stained(loaded: Dataset, seed: int, config: Config) -> Dataset:
    environment = config.environment
    most = len(loaded.y) - 1
    first, last = environment.agreements
    count = environment.training_domains
    checks.integer("training_domains", count, 1, most, ", the number of examples but one")
    return stains.stained(
        loaded,
        stain=environment.stain,
        agreements=np.linspace(first, last, count).tolist(),
        joint=environment.joint_colors,
        domain_size=environment.domain_size or None,
        test_fraction=config.data.test_fraction,
        seed=seed,
    )


def _simpson(loaded: Dataset, seed: int, config: Config) -> Dataset:
    """FedCFA's Fig. 4 is --environment=simpson --held_out=test."""
    environment = config.environment
    most = len(loaded.y) - 1
    count = config.partition.clients
    checks.integer("clients", count, 0, most, ", the number of examples but one")
    return simpson.simpson(
        loaded,
        colors=simpson.ramp((count or 5) + 1, simpson.HUES if environment.hues else simpson.ENDS),
        shading=environment.shading,
        share=environment.paradox,
        test_fraction=config.data.test_fraction,
        seed=seed,
    )


def _plain(loaded: Dataset, seed: int, config: Config) -> Dataset:
    return loaded


_ENVIRONMENTS: dict[str, Callable[[Dataset, int, Config], Dataset]] = {
    "rotated": _rotated,
    "colored": partial(_spurious, patched=False),
    "patched": partial(_spurious, patched=True),
    "combinations": _combinations,
    "stained": _stained,
    "simpson": _simpson,
    "none": _plain,
}
