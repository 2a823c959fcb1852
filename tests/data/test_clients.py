"""The examples of clients as users have them, and the splits that they become."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from grey_images import grey

from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients, environments, federation
from fedjax_inv.data.dataset import Dataset

C = 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 3))
Y = (X[:, 0] > 0).astype(int)
CLIENT = np.arange(40) % C * 10  # numbers of clients need not follow each other
PARTS = [np.flatnonzero(10 * c == CLIENT) for c in range(C)]
TEST = X[40:], Y[40:]


def test_all_forms_of_arrays_hold_the_same_clients() -> None:
    forms: list[Any] = [
        [(X[rows], Y[rows]) for rows in PARTS],
        clients.by_client(X[:40], Y[:40], CLIENT),
        clients.by_client(X[:40].tolist(), Y[:40].tolist(), CLIENT.tolist()),
        clients.by_client(jnp.asarray(X[:40], jnp.bfloat16), Y[:40], CLIENT),
    ]
    large = np.arange(40, dtype=np.uint64) % C * np.uint64(2**62) + np.uint64(5)
    forms += [clients.by_client(X[:40].astype(">f4"), Y[:40].astype(">i8"), large)]
    signed = Y[:40].astype(np.int64), Y[:40].astype(np.uint64)
    forms += [[(X[rows], signed[c % 2][rows]) for c, rows in enumerate(PARTS)]]
    for form in forms:
        x, y, parts = clients.of_arrays(form)
        assert y.dtype.kind in "iu"
        assert x.dtype.isnative
        assert y.dtype.isnative
        for part, rows in zip(parts, PARTS, strict=True):
            close = 1e-2 if x.dtype.itemsize == 2 else 1e-6
            np.testing.assert_allclose(x[part].astype(float), X[rows], rtol=close)
            np.testing.assert_array_equal(y[part], Y[rows])


def test_features_of_8_bits_are_numbers_and_images_are_scaled() -> None:
    x = (X > 0).astype(np.uint8)
    (found, *_), (number, *_) = (clients.of_arrays([(each, Y)]) for each in (x, x.astype(int)))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, number)
    image = np.zeros((2, 3, 3, 1), np.uint8)
    assert clients.of_arrays([(image, [0, 1])])[0].dtype == np.uint8
    with pytest.warns(UserWarning, match="uint8"):
        clients.of_arrays([(x * np.uint8(200), Y)])


def test_validation_is_a_part_of_each_client_and_the_test_is_of_nobody() -> None:
    x, y, parts = clients.of_arrays(clients.by_client(X[:40], Y[:40], CLIENT))
    data, splits = clients.splits_of_arrays(x, y, parts, test=TEST, validation=0.25, seeds=[0, 1])
    assert data.y.shape == (48,)
    drawn = []
    for split in splits.values():
        train, valid, (test,) = (federation.parts_of(each) for each in split[:3])
        drawn.append(np.concatenate(valid).tolist())
        assert [len(part) for part in valid] == [2] * C
        for part, *mine in zip(parts, train, valid, strict=True):
            assert sorted(np.concatenate(mine)) == part.tolist()
        assert test.tolist() == [*range(40, 48)]
    assert drawn[0] != drawn[1]
    _, splits = clients.splits_of_arrays(x, y, parts, test=None, validation=0.0, seeds=[0])
    for rows, part in zip(federation.parts_of(splits[0].train), parts, strict=True):
        np.testing.assert_array_equal(rows, part)
    assert splits[0].valid.size.tolist() == [0] * C
    assert splits[0].test.size.tolist() == [0]


DATASET = Dataset(
    X.astype(np.float32),
    Y.astype(np.int32),
    ("a", "b"),
    (np.arange(48) % 3).astype(np.int32),
    ("north", "east", "south"),
    np.zeros(48, bool),
)


def test_the_clients_of_a_data_set_are_its_users_or_domains() -> None:
    def split(dataset: Dataset, held_out: str | None) -> federation.Split:
        return clients.of_dataset(dataset, held_out=held_out, validation=0.25)([0]).of_seed[0]

    found = split(DATASET, "south")
    assert found.domain.tolist() == [0, 1]
    assert federation.parts_of(found.test)[0].size == 16
    assert split(DATASET, None).train.num_clients == 3
    selected = clients.of_dataset(DATASET, validate="north")([0]).of_seed[0]
    assert selected.domain.tolist() == [1, 2]
    users = DATASET._replace(user=(np.arange(48) % 4).astype(np.int32))
    assert split(users, None).train.num_clients == 4
    alone = DATASET._replace(domain=np.zeros(48, np.int32), domains=("all",))
    with pytest.raises(UsageError, match="partition"):
        split(alone, None)


def test_a_seed_may_fix_who_holds_what_in_all_runs() -> None:
    iid = federation.partitioner("iid", DATASET, 4)

    def rows(**how: Any) -> list[list[list[int]]]:
        made = clients.of_dataset(DATASET, partition=iid, held_out_clients=0.2, **how)
        of_seeds = made([1, 2]).of_seed.values()
        return [[part.tolist() for part in federation.parts_of(each.train)] for each in of_seeds]

    (one, two), fixed = rows(), rows(partition_seed=2)
    assert one != two
    assert fixed == [two, two]
    with pytest.raises(UsageError, match="partition_seed"):
        clients.of_dataset(DATASET, partition_seed=-1)


def test_clients_are_not_the_environments_that_were_drawn_with_their_seed() -> None:
    drawn = environments.colored(grey(600, 2, 200), flips=(0.2, 0.1), seed=5)
    iid = federation.partitioner("iid", drawn, 2)
    splits = clients.of_dataset(drawn, partition=iid, held_out=drawn.domains[-1])([5])
    assert splits.render is drawn.render
    for rows in federation.parts_of(splits.of_seed[5].train):
        shares = np.bincount(drawn.domain[rows]) / len(rows)
        assert shares.max() < 0.7  # the larger domain has a half


@pytest.mark.parametrize(
    "data",
    [
        X,
        [X, Y],
        [(X, None)],
        [(X, Y), (X[:, :2], Y)],
        [(X, Y), (X, Y[:3])],
        [(X, Y), (X, Y > 0)],
        [(X[:0], Y[:0])] * 2,
    ],
)
def test_wrong_clients(data: Any) -> None:
    with pytest.raises(UsageError, match="clients"):
        clients.of_arrays(data)


def test_wrong_numbers() -> None:
    with pytest.raises(UsageError, match="x"):
        clients.by_client(pd.DataFrame(X[:40]), Y[:40], CLIENT)
    for name, pair in {"x": (X * np.nan, Y), "y": (X, Y.astype(str))}.items():
        with pytest.raises(UsageError, match=name):
            clients.of_arrays([pair])
    for client in (CLIENT[:9], CLIENT.astype(str), CLIENT * 0.5):
        with pytest.raises(UsageError, match="client"):
            clients.by_client(X[:40], Y[:40], client)
