"""What every example of a data set is used for in a run: nothing is lost without a word.

Axis letter: D domains.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import UNSEEN, Split, parts_of
from fedjax_inv.types import Tree

# The uses, those between as in UNSEEN, and why an example has none.
USES = (
    "training",
    "validation",
    "unseen domain",
    "unseen clients",
    "test of known domains",
    "test",
)
_TESTS = USES[-2:]
NOTHING = ("nothing: in the test split, but the test is a domain", "nothing: dealt to no client")


class Uses(NamedTuple):
    """How many examples of each domain have which use; all fields are values of JSON."""

    domains: list[str]
    counts: dict[str, list[int]]  # [D] by each of USES and NOTHING
    # How many test examples have the inputs of an example to train on; None: not counted
    repeated: int | None
    new_classes: dict[str, int]  # of no example to train on -> examples of the test

    def total(self, *uses: str) -> int:
        """Return how many examples have one of the uses."""
        return sum(sum(self.counts[use]) for use in uses)

    def lines(self) -> list[str]:
        """Return one to three lines: the uses; domains that do not train; a test that is odd."""
        by_use = [f"{self.total(use):,} {use}" for use in USES if self.total(use)]
        for use in NOTHING:
            names = [name for index, name in enumerate(self.domains) if self.counts[use][index]]
            where = f" (of {_listed(names)})" if len(self.domains) > 1 else ""
            by_use += [f"{self.total(use):,} {use}{where}"] if names else []
        found = [f"{self.total(*USES, *NOTHING):,} examples: {', '.join(by_use)}"]
        idle: dict[str, list[str]] = {}
        for index, name in enumerate(self.domains):
            uses = [use for use in self.counts if self.counts[use][index]]
            if uses and "training" not in uses and uses != ["unseen domain"]:
                idle.setdefault(" and ".join(uses), []).append(name)
        if idle:
            parts = [f"{_listed(names)} ({use})" for use, names in idle.items()]
            found.append(f"domains that train nothing: {'; '.join(parts)}")
        odd = []
        if self.repeated:
            text = f"{self.repeated:,} of {self.total(*_TESTS):,} test examples have the inputs of"
            odd.append(f"{text} training examples")
        if self.new_classes:
            names = [f"{name} ({count:,})" for name, count in self.new_classes.items()]
            odd.append(f"classes that only the test has: {_listed(names)}")
        return [*found, *(["; ".join(odd)] if odd else [])]


def of_split(
    dataset: Dataset, split: Split, *, first_row: int = 0, count_repeated: bool = True
) -> Uses:
    """Return what the examples of a data set are used for in one of its splits.

    Args:
      dataset: M examples on the host.
      split: of these examples, as `federation.split` makes it.
      first_row: the row of the split's examples at which the data set begins.
      count_repeated: whether test examples are compared with those to train on, by exact hashes;
        inputs that are mapped from a file never are.
    """
    held = split.train, split.valid, *(split.unseen.get(kind) for kind in UNSEEN), split.test
    rows = [
        np.zeros(0, int) if each is None else np.concatenate(parts_of(each)) - first_row
        for each in held
    ]
    is_free = np.ones(len(dataset.y), bool)
    is_free[np.concatenate(rows)] = False
    rows += [np.flatnonzero(is_free & dataset.test), np.flatnonzero(is_free & ~dataset.test)]
    number = len(dataset.domains)
    counts = [np.bincount(dataset.domain[of_use], minlength=number).tolist() for of_use in rows]
    train, test = rows[0], np.concatenate(rows[len(USES) - len(_TESTS) : len(USES)])
    are_mapped = any(isinstance(leaf, np.memmap) for leaf in jax.tree.leaves(dataset.x))
    repeated = None
    if count_repeated and not are_mapped:
        known = set(_hashes(dataset.x, train))
        repeated = sum(each in known for each in _hashes(dataset.x, test))
    new: dict[str, int] = {}
    if dataset.task == "classes":
        for label in np.setdiff1d(dataset.y[test], dataset.y[train]).tolist():
            new[dataset.classes[label]] = int((dataset.y[test] == label).sum())
    by_use = dict(zip((*USES, *NOTHING), counts, strict=True))
    return Uses(list(dataset.domains), by_use, repeated, new)


def _hashes(x: Tree, rows: np.ndarray) -> list[bytes]:
    """Return a hash of the inputs of each row."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(x)]
    return [
        hashlib.blake2b(b"".join(leaf[row].tobytes() for leaf in leaves), digest_size=16).digest()
        for row in rows
    ]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(names[:12]) + more
