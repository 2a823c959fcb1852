"""Federations: who holds which rows, and what is held out."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import federations
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation, sources
from fedjax_inv.types import Federation


def make_dataset(num: int = 120, num_domains: int = 3, num_test: int = 0) -> sources.Dataset:
    rows = np.arange(num)
    return sources.Dataset(
        np.broadcast_to((rows % 256).astype(np.uint8)[:, None, None, None], (num, 2, 2, 1)),
        (rows % 4).astype(np.int32),
        tuple("abcd"),
        (rows * 7 % num_domains).astype(np.int32),
        tuple(f"d{i}" for i in range(num_domains)),
        rows >= num - num_test,
    )


def all_rows(part: Federation) -> np.ndarray:
    return np.concatenate(federation.parts_of(part))


def data_of(dataset: sources.Dataset) -> federation.Examples:
    return federation.examples(dataset.x, dataset.y)


def split(dataset, name="iid", num_clients=4, partition=None, **kwargs) -> federation.Split:
    return federation.split(
        dataset,
        data_of(dataset),
        partition or federation.partitioner(name, dataset, num_clients, alpha=1.0),
        **({"held_out": None, "seed": 0} | kwargs),
    )


def test_examples_keep_their_type_and_may_be_trees():
    dataset = make_dataset()
    data = data_of(dataset)
    assert (data.x.dtype, data.y.dtype) == (jnp.uint8, jnp.int32)
    np.testing.assert_array_equal(data.x, dataset.x)
    np.testing.assert_array_equal(data.y, dataset.y)
    x = {"image": np.zeros((3, 2), np.uint8), "code": np.arange(3)}
    data = federation.examples(x, (np.ones((3, 2), np.float32), np.arange(3)))[:2]
    assert jax.tree.map(jnp.shape, data) == (({"image": (3, 2), "code": (3,)}), ((3, 2), (3,)))


TWENTY = federation.examples(np.zeros((20, 2)), np.zeros(20, np.int32))


@given(
    parts=st.lists(st.lists(st.integers(0, 19), max_size=9), min_size=1, max_size=6),
    as_arrays=st.booleans(),
)
def test_of_parts_is_what_was_dealt_in_that_order(parts, as_arrays):
    given_ = [np.array(part, np.int64) for part in parts] if as_arrays else parts
    dealt = federation.of_parts(TWENTY, given_)
    assert dealt.num_clients == len(parts)
    assert [part.tolist() for part in federation.parts_of(dealt)] == parts
    # Nobody's rows are not stored, but for one that can be looked at where nobody has any.
    assert dealt.order.shape == (max(1, sum(map(len, parts))),)
    assert dealt.start.shape == dealt.size.shape == (len(parts),)
    assert {leaf.dtype for leaf in dealt[1:4]} == {jnp.dtype("int32")}
    assert dealt.data is TWENTY


@pytest.mark.parametrize("name", ["domain", "iid", "dirichlet"])
@pytest.mark.parametrize("held_out", [None, "d1"])
@pytest.mark.parametrize("num_test", [0, 30])
def test_split_deals_every_row_to_one_place(name, held_out, num_test):
    dataset = make_dataset(num_test=num_test)
    result = split(dataset, name, held_out=held_out)
    train, valid, test = map(all_rows, (result.train, result.valid, result.test))
    dealt = np.concatenate([train, valid, test])
    assert len(np.unique(dealt)) == len(dealt)
    if held_out is None:
        assert len(dealt) == 120
        np.testing.assert_array_equal(result.test_domain, [-1])
        if num_test:
            np.testing.assert_array_equal(np.sort(test), np.flatnonzero(dataset.test))
        else:
            assert len(test) == 24  # a fifth
            assert set(test) != set(range(24))
            assert set(test) != set(range(96, 120))
    else:
        np.testing.assert_array_equal(np.sort(test), np.flatnonzero(dataset.domain == 1))
        others = (dataset.domain != 1) & ~dataset.test
        np.testing.assert_array_equal(
            np.sort(np.concatenate([train, valid])), np.flatnonzero(others)
        )
        np.testing.assert_array_equal(result.test_domain, [1])
    assert result.domains == dataset.domains
    assert result.train.data is result.valid.data is result.test.data
    # One order of all examples, whoever holds them, so that all splits are of one shape.
    np.testing.assert_array_equal(np.sort(result.train.order), np.arange(120))
    for other in (result.valid, result.test):
        np.testing.assert_array_equal(other.order, result.train.order)
    assert (result.train.num_clients, result.valid.num_clients) == (4, 4)
    assert result.test.num_clients == 1


@pytest.mark.parametrize("held_out", [None, "d1"])
@pytest.mark.parametrize("num_test", [0, 30])
def test_what_is_unseen_is_in_no_other_place(held_out, num_test):
    dataset = make_dataset(num=160, num_domains=4, num_test=num_test)
    dataset = dataset._replace(user=(np.arange(160) % 9).astype(np.int32))
    how = {"held_out": held_out, "validate": "d2", "held_out_clients": 0.3}
    result = split(dataset, "user", 9, **how)
    assert (result.train.num_clients, len(result.domain)) == (6, 6)
    unseen = {name: all_rows(each) for name, each in result.unseen.items()}
    assert {*unseen} == {"unseen_domain", "unseen_clients"}
    np.testing.assert_array_equal(
        np.sort(unseen["unseen_domain"]), np.flatnonzero(dataset.domain == 2)
    )
    of_clients = [all_rows(each) for each in (result.train, result.valid)]
    users, others = (dataset.user[rows] for rows in (unseen["unseen_clients"], of_clients[0]))
    assert (len({*users}), len({*others}), {*users} & {*others}) == (3, 6, set())
    dealt = np.concatenate([*of_clients, all_rows(result.test), *unseen.values()])
    assert len(np.unique(dealt)) == len(dealt)
    if held_out is None:
        assert len(dealt) == 160  # nobody is left out
    # Who is held out depends on the seed; the others do not depend on whether anybody is.
    drawn = {
        frozenset(
            dataset.user[
                all_rows(split(dataset, "user", 9, **how | {"seed": seed}).unseen["unseen_clients"])
            ]
        )
        for seed in range(5)
    }
    assert len(drawn) > 1
    alone = split(dataset, "user", 9, **how | {"held_out_clients": 0.0})
    np.testing.assert_array_equal(all_rows(alone.test), all_rows(result.test))


def test_a_domain_to_select_by_is_none_that_trains_or_tests():
    dataset = make_dataset()
    for domain in ("d1", "no such domain"):
        with pytest.raises(UsageError, match="validate"):
            split(dataset, held_out="d1", validate=domain)
    with pytest.raises(UsageError, match="held_out_clients"):
        split(dataset, num_clients=1, held_out_clients=0.5)


def test_split_names_the_domain_of_each_client():
    dataset = make_dataset()
    by_domain = split(dataset, "domain", 5, held_out="d0")
    assert sorted(set(by_domain.domain)) == [1, 2]
    for domain, *held in zip(
        by_domain.domain, *map(federation.parts_of, by_domain[:2]), strict=True
    ):
        assert (dataset.domain[np.concatenate(held)] == domain).all()
    np.testing.assert_array_equal(split(dataset, "iid", 3).domain, [-1, -1, -1])
    np.testing.assert_array_equal(split(make_dataset(num_domains=1), "iid", 3).domain, [0, 0, 0])


def test_validation_part_of_a_client():
    """Rounded, but at least an example, and not all, of who has several."""
    sizes = np.array([14, 16, 2, 1, 0, 67])
    for validation, expected in (
        (0.1, [1, 2, 1, 0, 0, 7]),
        (0.99, [13, 15, 1, 0, 0, 66]),
        (0.0, [0] * 6),
    ):
        result = split(
            make_dataset(num_test=20),
            partition=lambda rows, rng: np.split(rows, np.cumsum(sizes)[:-1]),
            validation=validation,
        )
        np.testing.assert_array_equal(result.valid.size, expected)
        np.testing.assert_array_equal(result.train.size, sizes - expected)


def test_the_first_examples_of_everybody_are_a_random_sample():
    """Of sorted rows, the first of each are spread over all; what is held out is too."""
    dataset = make_dataset(1000, num_test=200)

    def partition(rows, rng):
        return [rows[:400], rows[400:]]

    results = [split(dataset, partition=partition, validation=0.5, seed=seed) for seed in (0, 1)]
    for result in results:
        parts = [*map(federation.parts_of, result[:3])]
        for rows, low in (
            (parts[0][0], 0),
            (parts[0][1], 400),
            (parts[1][0], 0),
            (parts[2][0], 800),
        ):
            span, first = (200 if low == 800 else 400), rows[: len(rows) // 2]
            # The mean of n of N numbers in a row has the variance (N + 1) (N - n) / 12 n.
            spread = np.sqrt((span + 1) * (span - len(first)) / (12 * len(first)))
            assert abs(first.mean() - (low + (span - 1) / 2)) < 6 * spread
            assert len(set(first)) == len(first)
    # The official test lies in one order for every seed; the clients' examples do not.
    one, other = ([all_rows(part).tolist() for part in result[:3]] for result in results)
    assert one[2] == other[2]
    assert one[0] != other[0]
    assert set(one[1]) != set(other[1])


@pytest.mark.parametrize("row", [3, 110, 120, -1])
def test_a_partition_must_deal_what_it_is_given_and_once(row):
    with pytest.raises(ValueError, match=f"partition: .* row {row}"):
        split(make_dataset(num_test=20), partition=lambda rows, rng: [rows, [row]])


def test_a_partition_need_not_deal_everything():
    result = split(
        make_dataset(num_test=20), partition=lambda rows, rng: [rows[:7], rows[50:50], rows[9:20]]
    )
    assert (result.train.size + result.valid.size).tolist() == [7, 0, 11]
    assert result.train.order.shape == (120,)


def test_pooled_holds_what_all_hold():
    result = split(make_dataset(), num_clients=7)
    layouts = [federations.federation(), federations.relaid(federations.federation())]
    for one, other in zip(*map(federation.parts_of, layouts), strict=True):
        np.testing.assert_array_equal(one, other)
    for everybody in (result.train, result.valid, result.test, *layouts):
        together = federation.pooled(everybody)
        (rows,) = federation.parts_of(together)
        np.testing.assert_array_equal(rows, all_rows(everybody))
        assert together.data is everybody.data
    # Of a split, whose clients lie one after the other, without another order.
    assert federation.pooled(result.train).order is result.train.order


def test_an_imbalance_leaves_examples_with_nobody_and_is_drawn_anew():
    dataset = make_dataset(480, num_test=80)
    plain, long, again, other = (
        split(dataset, imbalance=imbalance, seed=seed)
        for imbalance, seed in ((1.0, 0), (10.0, 0), (10.0, 0), (10.0, 1))
    )
    assert_same = np.testing.assert_array_equal
    for name in ("order", "start", "size"):
        assert_same(getattr(long.train, name), getattr(again.train, name))
    held = [np.concatenate([all_rows(of.train), all_rows(of.valid)]) for of in (long, other)]
    assert set(held[0]) != set(held[1])
    assert np.bincount(dataset.y[held[0]]).tolist() == [100, 46, 21, 10]
    assert_same(all_rows(long.test), all_rows(plain.test))
    assert len(long.train.order) == len(plain.train.order)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.2])
def test_a_rare_domain_is_that_share_of_what_clients_hold(share):
    dataset = make_dataset(480, num_test=80)
    rare = dataset.domains[1]
    made = split(dataset, "domain", rare=(rare, share))
    held = np.concatenate([all_rows(made.train), all_rows(made.valid)])
    assert abs((dataset.domain[held] == 1).mean() - share) <= 0.5 / len(held)
    others = np.flatnonzero(~dataset.test & (dataset.domain != 1))
    assert set(held) >= set(others)
    assert len(held) == len(set(held))
    np.testing.assert_array_equal(all_rows(made.test), all_rows(split(dataset, "domain").test))
    with pytest.raises(UsageError, match="rare"):
        split(dataset, "domain", rare=(rare, 0.9))


@pytest.mark.parametrize("few", [1, 2, 3])
def test_a_rare_domain_has_its_share_of_clients_of_one_size(few):
    dataset = make_dataset(1800, num_test=300)
    made = split(dataset, "domain", num_clients=15, rare=("d2", few / 15))
    assert (made.domain == 2).sum() == few
    sizes = made.train.size + made.valid.size
    assert sizes.max() - sizes.min() <= 0.35 * sizes.mean()


def test_classes_and_shards_of_the_test_are_made_of_its_rows():
    dataset = make_dataset(480, num_test=80)
    made = split(dataset, "dirichlet", imbalance=5.0)
    classes = federation.parts_of(federation.by_class(made.test, 4))
    assert [set(dataset.y[rows]) for rows in classes] == [{0}, {1}, {2}, {3}]
    assert set(np.concatenate(classes)) == set(all_rows(made.test))
    shards = federation.parts_of(federation.test_shards(made, 4, seed=0))
    assert set(np.concatenate(shards)) <= set(all_rows(made.test))
    for rows, mine in zip(shards, federation.parts_of(made.train), strict=True):
        counts, own = (np.bincount(dataset.y[part], minlength=4) for part in (rows, mine))
        assert (np.abs(counts - own * len(rows) / len(mine)) <= 1).all()


@pytest.mark.parametrize("name", ["domain", "iid"])  # clients of one domain, and of several
@pytest.mark.parametrize("first_row", [0, 30])
def test_without_a_domain_its_examples_are_the_test(name, first_row):
    dataset = make_dataset(90, num_test=9)
    domain_of = np.concatenate([np.full(first_row, 7), dataset.domain])
    partition = federation.partitioner(name, dataset, 5)
    x, y = (np.concatenate([leaf[:first_row], leaf]) for leaf in (dataset.x, dataset.y))
    data = federation.examples(x, y, domain_of)
    whole = federation.split(
        dataset, data, partition, held_out="d0", seed=3, validation=0.3, first_row=first_row
    )
    left = federation.without(whole, "d2")
    gone = []
    for kind in ("train", "valid"):
        before, after = (federation.parts_of(getattr(each, kind)) for each in (whole, left))
        for old, new in zip(before, after, strict=True):
            assert new.tolist() == [row for row in old if domain_of[row] != 2]
            gone += [row for row in old if domain_of[row] == 2]
    assert gone
    assert sorted(all_rows(left.test)) == sorted(gone) != all_rows(left.test).tolist()
    assert left.test_domain == [2]
    np.testing.assert_array_equal(left.domain, whole.domain)
    every = first_row + np.arange(90)
    np.testing.assert_array_equal(np.sort(left.train.order), every)
    np.testing.assert_array_equal(left.train.order, left.test.order)
