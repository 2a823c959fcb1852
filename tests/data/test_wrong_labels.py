"""Wrong labels: who has them, how many there are, and that nothing else changes."""

import jax
import numpy as np

from fedjax_inv.data import federation, wrong_labels
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Split, parts_of

K, M, C = 4, 600, 6
ROWS = np.arange(M)


def dataset_of(first: int) -> Dataset:
    """M examples that tell their own row, from `first` on, in three domains."""
    return Dataset(
        {"row": (first + ROWS).astype(np.int32), "odd": ROWS % 2},
        (ROWS * 5 % K).astype(np.int32),
        tuple("abcd"),
        (ROWS % 3).astype(np.int32),
        ("d0", "d1", "d2"),
        np.zeros(M, bool),
    )


# Two draws of the data in a row, which share one copy on the device.
DRAWS = [dataset_of(0), dataset_of(M)]
DATA = federation.examples(
    jax.tree.map(lambda *leaves: np.concatenate(leaves), *(each.x for each in DRAWS)),
    np.concatenate([each.y for each in DRAWS]),
)


def split(seed: int, held_out: str | None = None, draw: int = 0, name: str = "iid") -> Split:
    partition = federation.partitioner(name, DRAWS[draw], C)
    return federation.split(
        DRAWS[draw], DATA, partition, held_out=held_out, seed=seed, first_row=draw * M
    )


def mislabelled(splits: list[Split], seeds: list[int], share: float = 0.4, part: float = 0.5):
    return wrong_labels.at_clients(splits, K, share=share, part=part, seeds=seeds)


def seen(of: Split) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows that examples tell, labels) of each client in training, in validation, and the test."""
    return [
        (np.asarray(each.data.x["row"])[rows], np.asarray(each.data.y)[rows])
        for each in (of.train, of.valid, of.test)
        for rows in parts_of(each)
    ]


def right(rows: np.ndarray) -> np.ndarray:
    return rows % M * 5 % K


def wrong_rows(of: Split) -> set[int]:
    return {int(row) for rows, y in seen(of) for row in rows[y != right(rows)]}


PLACES = [(0, None, 0), (0, "d1", 0), (5, None, 1), (5, "d2", 1), (0, None, 1)]
PLAIN = [split(*place) for place in PLACES]
SEEDS = [seed for seed, *_ in PLACES]
MADE = mislabelled(PLAIN, SEEDS)


def test_only_labels_change_and_only_at_some_clients():
    for before, after in zip(PLAIN, MADE.splits, strict=True):
        old, new = seen(before), seen(after)
        for (rows, _), (others, _) in zip(old, new, strict=True):
            np.testing.assert_array_equal(rows, others)  # everybody holds what he held, in order
        shares = np.array([(y != right(rows)).mean() for rows, y in new])
        training, validation, test = shares[:C], shares[C : 2 * C], shares[2 * C]
        assert test == 0
        is_wrong = training > 0
        assert is_wrong.sum() == C / 2
        np.testing.assert_array_equal(is_wrong, validation > 0)
        count = sum(len(rows) for (rows, _), wrong in zip(new, is_wrong, strict=False) if wrong)
        spread = np.sqrt(0.4 * 0.6 / count)
        assert abs(training[is_wrong].mean() - 0.4) < 5 * spread
        np.testing.assert_array_equal(before.domain, after.domain)


def test_all_splits_share_data_that_tell_their_source():
    data = MADE.splits[0].train.data
    for of in MADE.splits:
        for each in (of.train, of.valid, of.test):
            assert each.data is data
            np.testing.assert_array_equal(each.order, of.train.order)
    assert len(MADE.source) == len(data.y)
    np.testing.assert_array_equal(MADE.source[: 2 * M], np.arange(2 * M))
    np.testing.assert_array_equal(data.x["row"], MADE.source)
    np.testing.assert_array_equal(data.x["odd"], MADE.source % 2)
    np.testing.assert_array_equal(np.asarray(data.y)[: 2 * M], DATA.y)
    # Splits of one seed and draw share their copies, whatever domain is held out.
    alone = mislabelled(PLAIN[:1], SEEDS[:1])
    both = mislabelled(PLAIN[:2], SEEDS[:2])
    np.testing.assert_array_equal(alone.source, both.source)
    assert (alone.splits[0].train.data.y == both.splits[1].train.data.y).all()


def test_a_split_alone_has_the_labels_that_it_has_beside_others():
    for place, of, seed, plain in zip(PLACES, MADE.splits, SEEDS, PLAIN, strict=True):
        (alone,) = mislabelled([plain], [seed]).splits
        for (_, y), (_, other) in zip(seen(of), seen(alone), strict=True):
            np.testing.assert_array_equal(y, other, err_msg=str(place))


def test_more_wrong_labels_include_fewer():
    (plain,) = PLAIN[:1]
    found = {
        (share, part): wrong_rows(mislabelled([plain], [3], share, part).splits[0])
        for share in (0.2, 0.6)
        for part in (0.34, 0.67)
    }
    least = found.pop((0.2, 0.34))
    assert all(least < more for more in found.values())
    assert found[0.2, 0.67] & found[0.6, 0.34] == least
    assert wrong_rows(mislabelled([plain], [4], 0.2, 0.34).splits[0]) != least


def test_all_labels_of_all_clients_may_be_wrong_and_none():
    (plain,) = PLAIN[:1]
    (of,) = mislabelled([plain], [0], 1.0, 1.0).splits
    assert all((y != right(rows)).all() for rows, y in seen(of)[: 2 * C])
    none = mislabelled([plain], [0], 0.0, 1.0)
    assert wrong_rows(none.splits[0]) == set()
    assert len(none.source) == 2 * M


def test_examples_stay_on_the_host_if_they_are_there():
    host = jax.tree.map(np.asarray, DATA)
    partition = federation.partitioner("iid", DRAWS[0], C)
    of = federation.split(DRAWS[0], host, partition, held_out=None, seed=0)
    (made,) = mislabelled([of], [0]).splits
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(made.train.data))


def test_the_other_class_is_drawn_uniformly():
    labels = np.repeat(np.arange(K), 3000)
    found = wrong_labels.replaced(labels, K, 0.5, np.random.default_rng(0))
    counts = np.zeros((K, K))
    np.add.at(counts, (labels, found), 1)
    expected = np.where(np.eye(K, dtype=bool), 1500, 500)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_test_shards_count_right_labels():
    """A client's test examples have the right classes of its training examples."""

    def by_label(rows: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        return [rows[DRAWS[0].y[rows] == label] for label in range(K)]

    plain = federation.split(DRAWS[0], DATA, by_label, held_out=None, seed=0)
    made = mislabelled([plain], [0], 0.5, 1.0)
    with_right, with_wrong = (
        federation.test_shards(made.splits[0], K, 0, source=source)
        for source in (made.source, None)
    )
    for label, rows in enumerate(parts_of(with_right)):
        assert (np.asarray(made.splits[0].test.data.y)[rows] == label).all()
    assert any(len(np.unique(DRAWS[0].y[rows % M])) > 1 for rows in parts_of(with_wrong))
