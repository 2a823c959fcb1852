"""From values to clients: the draws of the data, and the examples of each client.

Functions raise UsageError for values that do not fit.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fedjax_inv import devices, platforms
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation, wrong_labels
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split
from fedjax_inv.types import Array, Examples, Tree

from ..config import Config, Data, Environment, Partition
from ..errors import check_known, flag_error, in_flags, shown
from . import data as data_sets

SplitsByDomain = Mapping[str | None, Mapping[int, Split]]  # by held-out domain, by seed

_SMALL_DRAW = 2**23  # bytes
_SMALL = 2**26  # bytes


@dataclass(frozen=True, eq=False)
class Draws:
    """The draws of a data set's environments, each for one or several seeds."""

    loaded: Dataset  # as it was read, before environments
    of_seed: Mapping[int, int]  # the draw of each seed
    datasets: Mapping[int, Dataset]  # by draw, with its environments; first that of the first seed

    @property
    def first(self) -> Dataset:
        """The data set of the first seed."""
        return next(iter(self.datasets.values()))


def draws(config: Config, seeds: Sequence[int]) -> Draws:
    """The draws of the environments for these seeds."""
    loaded = data_sets.load(config.data)
    of_seed = {seed: data_sets.draw_seed(config, seed) for seed in seeds}
    numbers = [*dict.fromkeys(of_seed.values())]
    _check_memory(config, loaded, len(numbers), len(of_seed))
    return Draws(loaded, of_seed, {draw: _domains(config, loaded, draw) for draw in numbers})


def _domains(config: Config, loaded: Dataset, draw: int) -> Dataset:
    """The data set with a draw of its environments."""
    if config.data.is_path or num_bytes(loaded.x) > _SMALL_DRAW:
        return data_sets.domains(config, loaded, draw)
    return _kept_domains(config.data, config.environment, config.partition.clients, draw)


@functools.lru_cache(maxsize=64)
def _kept_domains(data: Data, environment: Environment, clients: int, draw: int) -> Dataset:
    """The last draws of small data sets, which the next rows of a study use again."""
    config = Config(data, environment, Partition(clients=clients))
    return data_sets.domains(config, data_sets.load(data), draw)


def _check_memory(config: Config, loaded: Dataset, count: int, seeds: int) -> None:
    """Raises UsageError if so many draws of the data do not fit into memory.

    seeds: the number of seeds, of which each has its own copies with wrong labels.
    """
    wrong = config.partition.wrong_labels * seeds
    bytes_of_draw = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.x))
    size = int(2 * (count + wrong) * bytes_of_draw)  # and on the device
    what = f" for {count} draws of the data{' and copies with wrong labels' * bool(wrong)}, twice"
    if count > 1 or wrong:
        try:
            platforms.check_memory("seeds", config.training.seeds, size, devices.memory(), what)
        except UsageError as error:
            raise in_flags(error, "", {"seeds": "seeds"}) from None


def examples(config: Config, datasets: Sequence[Dataset], *, with_domains: bool) -> Examples:
    """The examples of all draws in a row; on the host if they are too large for a device."""
    arrays_of = [(one.x, one.y, one.domain if with_domains else None) for one in datasets]
    arrays = arrays_of[0]
    if len(datasets) > 1:
        arrays = jax.tree.map(lambda *leaves: np.concatenate(leaves), *arrays_of)
    is_large = config.machine.hold == "auto" and devices.too_large(num_bytes(arrays))
    if config.machine.hold == "stream" or is_large:
        return federation.examples_on_host(*arrays)
    return federation.examples(*arrays)


@dataclass(frozen=True, eq=False)
class Deal:
    """The examples of all draws, and who holds which."""

    data: Examples  # of all draws in a row, then copies with wrong labels
    source: np.ndarray  # [L] the row of its draw that each row of `data` is, or is a copy of
    origin: np.ndarray  # [L] the file of each row of `data`, or its row in the source
    domain: np.ndarray  # [L] the domain of each row of `data`
    splits: SplitsByDomain


def deal(
    config: Config, made: Draws, data: Examples, validate: Mapping[str | None, str | None]
) -> Deal:
    """Splits the examples among the clients, for each held-out domain and seed.

    data: as `examples` returns them. validate: the domain of --validate by held-out domain.
    """
    first = made.first
    partition = config.partition
    first_rows = {draw: index * len(first.y) for index, draw in enumerate(made.datasets)}
    splits: dict[str | None, dict[int, Split]] = {}
    for held_out, by in validate.items():
        splits[held_out] = {}
        for seed, draw in made.of_seed.items():
            dataset = made.datasets[draw]
            first_row = first_rows[draw]
            splits[held_out][seed] = split(
                config,
                dataset,
                data,
                held_out=held_out,
                validate=by,
                seed=_split_seed(config, held_out, seed),
                first_row=first_row,
            )
    source = np.tile(np.arange(len(first.y)), len(made.datasets))
    origin = np.concatenate([draw.source for draw in made.datasets.values()])
    domain = np.concatenate([draw.domain for draw in made.datasets.values()])
    if not partition.wrong_labels:
        return Deal(data, source, origin, domain, splits)
    places = [(held_out, seed) for held_out, of_seed in splits.items() for seed in of_seed]
    mislabelled = with_wrong_labels(
        partition, first, [splits[held_out][seed] for held_out, seed in places], places
    )
    for (held_out, seed), wrong in zip(places, mislabelled.splits, strict=True):
        splits[held_out][seed] = wrong
    copied = mislabelled.source
    data = mislabelled.splits[0].train.data
    return Deal(data, source[copied], origin[copied], domain[copied], splits)


def _split_seed(config: Config, held_out: str | None, seed: int) -> int:
    """The seed of the split of a run's seed."""
    partition = config.partition
    if partition.partition_seed != "each":
        seed = int(partition.partition_seed)
    # Environments and splits begin with one permutation each. With the same seed it is the same, so
    # that the test that is drawn, or the clients, would be the environments.
    by_domain = partition.partition in ("domain", "mixed", "user")
    is_redrawn = config.is_drawn and (held_out is None or not by_domain)
    return seed + 2**31 if is_redrawn else seed


def num_clients(partition: Partition, dataset: Dataset, *held_out: str | None) -> int:
    """The number of clients, also of those that never train.

    held_out: the domains that no client has; None stands for no domain.
    """
    if partition.clients:
        return partition.clients
    trains = federation.dealt(dataset, *held_out)
    if partition.partition != "user" or dataset.user is None:
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
    how = config.partition
    number = num_clients(how, dataset, held_out, validate)
    is_own = federation.has_validation(dataset, held_out, validate)
    if is_own and how.validation != Partition.validation:
        text = "must be left out, as the data have validation examples of the clients"
        raise flag_error("validation", how.validation, text)
    is_by_user = how.partition == "user" and not how.clients
    try:
        partition = federation.partitioner(
            how.partition,
            dataset,
            number,
            alpha=how.alpha,
            min_size=None if how.min_size < 0 else how.min_size,
            shards_per_client=how.classes_per_client,
            mixing=how.mixing,
        )
        found = federation.split(
            dataset,
            data,
            _of_users(dataset, number) if is_by_user else partition,
            held_out=held_out,
            seed=seed,
            validation=how.validation,
            test_fraction=config.data.test_fraction,
            first_row=first_row,
            imbalance=how.imbalance,
            rare=_rare(how, dataset),
            validate=validate,
            held_out_clients=how.held_out_clients,
        )
    except UsageError as error:
        where = f"--partition={how.partition}"
        if how.imbalance != 1:
            where += f" --imbalance={shown(how.imbalance)}"
        names = {"num_clients": "clients", "name": "partition", "rare": "rare_domain"}
        names["shards_per_client"] = "classes_per_client"
        raise in_flags(error, where, names) from None
    if is_by_user:  # a client without examples makes no group of domains of its own
        is_empty = np.asarray(found.train.size) == 0
        found = found._replace(domain=np.where(is_empty, found.domain[0], found.domain))
    return found


def _rare(partition: Partition, dataset: Dataset) -> tuple[str, float] | None:
    """The domain of --rare_domain and its share."""
    if not partition.rare_domain:
        return None
    name, _, share = partition.rare_domain.rpartition(":")
    check_known("rare_domain", name, dataset.domains)
    return name, float(share)


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
    partition: Partition,
    dataset: Dataset,
    splits: Sequence[Split],
    places: Sequence[tuple[str | None, int]],
) -> wrong_labels.Mislabelled:
    """The splits with wrong labels at some clients. places: the (held-out domain, seed) of each."""
    share = partition.wrong_labels
    if dataset.task != "classes":
        text = f"needs data with classes, these have {dataset.task}"
        raise flag_error("wrong_labels", share, text)
    try:
        return wrong_labels.at_clients(
            splits,
            len(dataset.classes),
            seeds=[seed for _, seed in places],
            share=share,
            part=partition.wrong_clients,
        )
    except UsageError as error:
        names = {"share": "wrong_labels", "part": "wrong_clients"}
        raise in_flags(error, f"--wrong_labels={shown(share)}", names) from None


def on_host(data: Examples) -> Examples:
    """The examples as arrays of NumPy; mapped files stay mapped."""
    there: Examples = jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf), data
    )
    return there


def padded(data: Examples) -> Examples:
    """The examples, with zeros after them if they take little memory.

    Their number then has three significant bits, so that similar data share a compiled program.
    """
    count = len(data.y)
    step = 1 << max(count.bit_length() - 3, 0)
    more = -count % step
    if more == 0 or num_bytes(data) > _SMALL:
        return data

    def pad(leaf: Array) -> Any:
        zeros = np.zeros((more, *leaf.shape[1:]), leaf.dtype)
        whole = np.concatenate([np.asarray(leaf), zeros])
        return whole if isinstance(leaf, np.ndarray) else jax.device_put(whole)

    whole: Examples = jax.tree.map(pad, data)
    return whole


def num_bytes(shapes: Tree) -> int:
    """The bytes of arrays with these shapes."""
    return sum(
        int(np.prod(leaf.shape, dtype=object)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )
