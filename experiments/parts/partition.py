"""The partition of the training examples among clients."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation, wrong_labels
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split
from fedjax_inv.data.wrong_labels import Mislabelled
from fedjax_inv.types import Examples

from ..flags.configuration import Config
from ..flags.flag import (
    POSITIVE,
    PROBABILITY,
    Range,
    at_least,
    flag,
    flag_error,
    flag_names,
    in_flags,
    shown,
)


@dataclasses.dataclass(frozen=True)
class Partition:
    """How clients share the training examples."""

    partition: str = flag(
        "domain",
        "How clients share the training examples; mixed: domains, mixed by --mixing; dirichlet: "
        "each class in random proportions; quantity: random sizes; shards: pieces of the examples "
        "sorted by label; user: all examples of a user (in a table or an .npz: client) go to one "
        "client.",
        choices=("domain", "mixed", "iid", "dirichlet", "quantity", "shards", "user"),
    )
    alpha: float = flag(
        0.5, "Concentration of --partition=dirichlet and --partition=quantity.", POSITIVE
    )
    min_size: int = flag(
        -1,
        "The fewest examples of a client in those two partitions; -1: as many as classes.",
        at_least(-1),
    )
    classes_per_client: int = flag(
        2,
        "Number of equal shards that a client of --partition=shards gets; one holds a class, or "
        "the end of one and the beginning of the next.",
        at_least(1),
    )
    mixing: float = flag(
        0.1,
        "The part of each domain that --partition=mixed shares among all clients; the rest goes to "
        "the clients of that domain. 0: as few domains in a client as possible; 1: all alike.",
        PROBABILITY,
    )
    clients: int = flag(
        0,
        "Training clients; 0: one per training domain, with --partition=user one per user.",
        at_least(0),
    )
    imbalance: float = flag(
        1.0,
        "Ratio of the first class's number of training examples to the last one's; the others "
        "lie on a curve between, and surplus examples are left out. 1: the data's own.",
        Range(lambda value: 1 <= value < float("inf"), "at least 1"),
    )

    wrong_labels: float = flag(
        0.0,
        "The probability that a label of some clients is replaced by another class, drawn "
        "uniformly: in training and, as nobody knows it, in validation. Labels of the test stay "
        "right.",
        PROBABILITY,
    )
    wrong_clients: float = flag(
        0.5,
        "The part of clients that --wrong_labels concerns, rounded; which ones is drawn.",
        Range(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    )


def num_clients(chosen: Config, dataset: Dataset, held_out: str | None) -> int:
    """The number of training clients. held_out: the domain for the test, None for a split."""
    if chosen.clients:
        return chosen.clients
    if chosen.partition != "user" or dataset.user is None:
        return len(dataset.domains) - (held_out is not None)
    trains = ~np.asarray(dataset.test)
    if held_out in dataset.domains:
        trains &= dataset.domain != dataset.domains.index(held_out)
    return max(1, len(np.unique(dataset.user[trains])))


def split(
    chosen: Config,
    dataset: Dataset,
    data: Examples,
    *,
    held_out: str | None,
    seed: int,
    first_row: int,
) -> Split:
    """The examples of the clients and of the test.

    dataset: the data set; its examples are the rows first_row, first_row + 1, ... of `data`.
    held_out: the domain for the test; None for the test split.

    Raises UsageError if the partition does not fit the data.
    """
    number = num_clients(chosen, dataset, held_out)
    is_by_user = chosen.partition == "user" and not chosen.clients
    try:
        partition = federation.partitioner(
            chosen.partition,
            dataset,
            number,
            alpha=chosen.alpha,
            min_size=None if chosen.min_size < 0 else chosen.min_size,
            shards_per_client=chosen.classes_per_client,
            mixing=chosen.mixing,
        )
        found = federation.split(
            dataset,
            data,
            _of_users(dataset, number) if is_by_user else partition,
            held_out=held_out,
            seed=seed,
            test_fraction=chosen.test_fraction,
            first_row=first_row,
            imbalance=chosen.imbalance,
        )
    except UsageError as error:
        where = f"--partition={chosen.partition}"
        if chosen.imbalance != 1:
            where += f" --imbalance={shown(chosen.imbalance)}"
        names = {
            "num_clients": "clients",
            "name": "partition",
            "held_out": "held_out",
            "shards_per_client": "classes_per_client",
        }
        raise in_flags(error, where, names | flag_names(Partition)) from None
    if is_by_user:  # a client without examples makes no group of domains of its own
        is_empty = np.asarray(found.train.size) == 0
        found = found._replace(domain=np.where(is_empty, found.domain[0], found.domain))
    return found


def with_wrong_labels(
    chosen: Config, dataset: Dataset, splits: Sequence[Split], seeds: Sequence[int]
) -> Mislabelled:
    """The splits with wrong labels at some clients. seeds: of the splits.

    Raises UsageError if the targets are no classes, or the flags mean no client.
    """
    if dataset.task != "classes":
        text = f"needs data with classes, these have {dataset.task}"
        raise flag_error("wrong_labels", chosen.wrong_labels, text)
    try:
        return wrong_labels.at_clients(
            splits,
            len(dataset.classes),
            share=chosen.wrong_labels,
            part=chosen.wrong_clients,
            seeds=seeds,
        )
    except UsageError as error:
        names = {"share": "wrong_labels", "part": "wrong_clients"}
        where = f"--wrong_labels={shown(chosen.wrong_labels)}"
        raise in_flags(error, where, names) from None


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
