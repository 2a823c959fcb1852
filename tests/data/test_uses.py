"""What every example is used for: nothing is lost, and an odd test is told."""

import json
from typing import Any

import numpy as np
import pytest

from fedjax_inv.data import clients, federation, uses
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.uses import NOTHING, USES, Uses

X = np.random.default_rng(0).normal(size=(120, 2)).astype(np.float32)
DOMAIN = (np.arange(120) % 4).astype(np.int32)
Y = (np.arange(120) // 4 % 2).astype(np.int32)
NONE = np.zeros(120, bool)
DATA = Dataset(X, Y, ("no", "yes"), DOMAIN, ("a", "b", "c", "d"), NONE)


def used(dataset: Dataset, name: str = "iid", number: int = 3, **how: Any) -> Uses:
    data = federation.examples_on_host(dataset.x, dataset.y)
    deal = federation.partitioner(name, dataset, number)
    split = federation.split(dataset, data, deal, **{"held_out": None, "seed": 0} | how)
    found = uses.of_split(dataset, split)
    assert Uses(**json.loads(json.dumps(found._asdict()))) == found
    every = np.array([found.counts[use] for use in (*USES, *NOTHING)])
    assert every.sum(0).tolist() == np.bincount(dataset.domain, minlength=4).tolist()
    assert 1 <= len(found.lines()) <= 3
    return found


@pytest.mark.parametrize(
    ("test", "how", "expected"),
    [
        (NONE, {}, (87, 9, 0, 0, 0, 24, 0, 0)),
        (NONE, {"held_out": "d"}, (81, 9, 0, 0, 0, 30, 0, 0)),
        (NONE, {"held_out": "d", "validate": "a"}, (54, 6, 30, 0, 0, 30, 0, 0)),
        (NONE, {"held_out": "d", "held_out_clients": 0.3}, (54, 6, 0, 30, 0, 30, 0, 0)),
        # The test split of other domains than the one that is held out is used for nothing.
        (DOMAIN == 1, {"held_out": "d"}, (54, 6, 0, 0, 0, 30, 30, 0)),
        (NONE, {"held_out": "d", "imbalance": 9.0}, None),
    ],
)
def test_each_example_has_a_use_or_none(test: Any, how: Any, expected: Any) -> None:
    found = used(DATA._replace(test=test), **how)
    if expected is None:
        assert found.total(NOTHING[1]) == 40  # of the second of two classes a ninth stays
    else:
        assert tuple(found.total(use) for use in (*USES, *NOTHING)) == expected
    told = " ".join(found.lines())
    assert (NOTHING[0] in told) == (found.total(NOTHING[0]) > 0)
    assert ("domains that train nothing" in told) == (test is not NONE or "held_out" in how)


def test_domains_of_the_test_alone_are_no_clients() -> None:
    dataset = DATA._replace(test=DOMAIN > 1)
    assert federation.dealt(dataset).tolist() == (DOMAIN < 2).tolist()
    (split,) = clients.of_dataset(dataset)([0]).of_seed.values()
    assert split.train.size.tolist() == [30, 30]
    found = used(dataset, "domain", 2)
    assert found.counts["test"] == [0, 0, 30, 30]
    assert found.lines()[1] == "domains that train nothing: c, d (test)"


def test_the_validation_of_a_domain_that_nobody_trains_is_that_of_an_unseen_domain() -> None:
    """As in WILDS, whose hospital of the validation is none of those that train."""
    valid = (DOMAIN == 2) | (np.arange(120) < 8)
    dataset = DATA._replace(test=DOMAIN == 3, valid=valid)
    found = used(dataset, "domain", 2)
    assert found.counts["unseen domain"] == [0, 0, 30, 0]
    assert found.counts["validation"] == [2, 2, 0, 0]
    assert found.counts["training"] == [28, 28, 0, 0]
    (split,) = clients.of_dataset(dataset)([0]).of_seed.values()
    assert split.train.size.tolist() == [28, 28]


def test_a_test_that_repeats_the_training_or_has_other_classes_is_told() -> None:
    """In every form of inputs: features, images, texts, and trees that are rendered."""
    test = np.arange(120) >= 80
    twice = np.where(test, np.arange(120) - 80, np.arange(120))  # the test repeats the first 40
    y = np.where(test & (DOMAIN == 0), 2, Y).astype(np.int32)
    images = np.random.default_rng(0).integers(0, 9, (120, 4, 4, 3), np.uint8)
    for x in (
        X,
        images,
        {"image": images, "angle": X[:, 0]},
        (images[:, :, 0, 0]).astype(np.int32),
    ):
        of_twice = {k: v[twice] for k, v in x.items()} if isinstance(x, dict) else x[twice]
        dataset = DATA._replace(x=of_twice, y=y, classes=("no", "yes", ">50K."), test=test)
        found = used(dataset)
        assert 30 <= (found.repeated or 0) <= 40  # but for those that validate
        assert found.new_classes == {">50K.": 10}
        assert ">50K. (10)" in found.lines()[-1]
        assert used(dataset._replace(x=x)).repeated == 0
    assert used(DATA._replace(x=X.view(np.memmap))).repeated is None
