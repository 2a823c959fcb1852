"""The test of personal methods: who serves which examples, against predictions one by one."""

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score

from fedjax_inv import Evaluations, fit, models, objectives
from fedjax_inv.algorithms import ditto, fedavg
from fedjax_inv.data import clients, federation
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.devices import Devices
from fedjax_inv.fitted import Fitted

RNG = np.random.default_rng(0)
SIZE, CLIENTS = 240, 4
X = RNG.normal(size=(SIZE, 3)).astype(np.float32)
USER = RNG.integers(0, CLIENTS, SIZE).astype(np.int32)
Y = ((X[:, 0] > 0) ^ (USER % 2 == 1)).astype(np.int32)  # half of the clients differ
TEST = np.arange(SIZE) % 3 == 0
DATA = Dataset(X, Y, ("n", "y"), np.zeros(SIZE, np.int32), ("all",), TEST, user=USER)
NEW = RNG.random(SIZE) < 0.2  # test examples of users that never train
FLAT: dict[str, Any] = {"rounds": 6, "epochs": 3, "learning_rate": 0.3, "callbacks": ()}
NET = models.mlp(2, widths=(8,))


def run(data: Any, algorithm: Any = ditto.ditto, **more: Any) -> Fitted:
    return fit(algorithm, NET, data, **FLAT | more)


def right(fitted: Fitted, rows: np.ndarray, client: int | None) -> np.ndarray:
    return fitted.predict(X[rows], client=client).argmax(-1) == Y[rows]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["user", "domain"])
def test_known_clients_are_served_by_their_own_networks(by: str, stream: bool) -> None:
    """And examples of others by the network of a new client."""
    who = np.where(NEW & TEST, CLIENTS, USER).astype(np.int32)
    data = DATA._replace(user=who)
    if by == "domain":
        names = tuple("abcde")
        data = DATA._replace(user=None, domain=who, domains=names)
    fitted = run(data, devices=Devices(1, stream=stream))
    test = np.flatnonzero(TEST)
    parts = [(client, test[who[test] == client]) for client in range(CLIENTS)]
    hits = [right(fitted, rows, client) for client, rows in parts]
    hits.append(right(fitted, test[who[test] == CLIENTS], None))
    expected = np.concatenate(hits).mean()
    np.testing.assert_allclose(fitted.history["test_score"][0, -1], expected, rtol=1e-5)
    assert expected > right(fitted, test, None).mean() + 0.1
    assert "own network" in fitted.served


def test_without_owners_clients_have_examples_in_the_proportions_of_their_classes() -> None:
    data = DATA._replace(user=None, test=np.zeros(SIZE, bool))
    deal = federation.partitioner("dirichlet", data, CLIENTS, alpha=0.5)
    splits = clients.of_dataset(data, partition=deal)
    made = splits([0])
    fitted = run(lambda seeds: made)
    shards = federation.test_shards(made.of_seed[0], 2, 0)
    scores = [right(fitted, rows, c).mean() for c, rows in enumerate(federation.parts_of(shards))]
    np.testing.assert_allclose(fitted.history["test_score"][0, -1], np.mean(scores), rtol=1e-5)
    assert "proportions" in fitted.served
    # Other methods are compared on the same examples.
    plain = run(lambda seeds: made, fedavg.fedavg, evaluations=Evaluations(by_client=True))
    of_parts = [right(plain, rows, None).mean() for rows in federation.parts_of(shards)]
    np.testing.assert_allclose(plain.history["test_score"][0, -1], np.mean(of_parts), rtol=1e-5)


def test_unseen_domains_are_served_as_a_new_client() -> None:
    data = DATA._replace(domain=USER, domains=tuple("abcd"), user=None, test=np.zeros(SIZE, bool))
    fitted = run(clients.of_dataset(data, held_out="d"))
    rows = np.flatnonzero(USER == 3)
    expected = right(fitted, rows, None).mean()
    np.testing.assert_allclose(fitted.history["test_score"][0, -1], expected, rtol=1e-5)
    assert "never seen" in fitted.served
    held = run(clients.of_dataset(data, held_out="d"), evaluations=Evaluations(by_client=False))
    np.testing.assert_array_equal(held.history["test_score"], fitted.history["test_score"])


def test_a_score_of_sums_is_that_of_all_examples_together() -> None:
    evaluations = Evaluations(score=objectives.macro_f1)
    fitted = run(DATA, evaluations=evaluations)
    test = np.flatnonzero(TEST)
    predicted = np.zeros(SIZE, int)
    for client in range(CLIENTS):
        rows = test[USER[test] == client]
        predicted[rows] = fitted.predict(X[rows], client=client).argmax(-1)
    expected = f1_score(Y[test], predicted[test], average="macro")
    np.testing.assert_allclose(fitted.history["test_score"][0, -1], expected, rtol=1e-5)
