"""Statistics of an unseen domain against a forward pass by hand, in float64."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

from fedjax_inv import Evaluations, fit, models, unseen_norms
from fedjax_inv.algorithms import erm, fedavg, fedbn
from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.devices import Devices
from fedjax_inv.fitted import Fitted
from fedjax_inv.inputs import Run
from fedjax_inv.types import Array

RNG = np.random.default_rng(0)
SIZE = 600
DOMAIN = (np.arange(SIZE) % 3).astype(np.int32)
RAW = RNG.normal(size=(SIZE, 3))
Y = (RAW[:, 0] > 0).astype(np.int32)
X = np.where(DOMAIN[:, None] == 2, 5 * RAW + 7, RAW).astype(np.float32)  # other units there
DATA = Dataset(X, Y, ("n", "y"), DOMAIN, ("a", "b", "c"), np.zeros(SIZE, bool))
FLAT: dict[str, Any] = {"rounds": 4, "epochs": 2, "learning_rate": 0.3, "callbacks": ()}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        x = models.BatchNorm(name="first")(nn.Dense(4, name="a")(x), mask, train)
        return nn.Dense(2, name="b")(nn.relu(x))


class Nnx(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(3, 4, rngs=rngs)
        self.first = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.b = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Array, mask: Array) -> Array:
        return self.b(nnx.relu(self.first(self.a(x), mask=mask[:, None])))


LINEN = models.from_flax(Linen(), takes=("mask", "train"))
NETWORKS = {"linen": LINEN, "nnx": models.from_nnx(lambda rngs: Nnx(rngs=rngs))}


def run(rule: str, model: Any = LINEN, algorithm: Any = fedavg.fedavg, **more: Any) -> Fitted:
    data = clients.of_dataset(DATA, held_out="c")
    evaluations = Evaluations(unseen_norms=rule)
    return fit(algorithm, model, data, evaluations=evaluations, **FLAT | more)


def by_hand(fitted: Fitted, rows: np.ndarray, size: int) -> float:
    """The accuracy where each `size` rows are normalised by their own mean and variance."""
    p: Any = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), fitted.network().params.head)
    right = []
    for at in range(0, len(rows), size):
        some = rows[at : at + size]
        h = X[some] @ p["a"]["kernel"] + p["a"]["bias"]
        h = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5) * p["first"]["scale"] + p["first"]["bias"]
        right.append((np.maximum(h, 0) @ p["b"]["kernel"] + p["b"]["bias"]).argmax(1) == Y[some])
    return float(np.concatenate(right).mean())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("devices", [1, 2])
def test_statistics_are_those_of_the_unseen_domain(name: str, devices: int) -> None:
    split = clients.of_dataset(DATA, held_out="c")([0]).of_seed[0]
    rows = np.asarray(split.test.order)[np.asarray(split.test.start[0]) :][
        : int(split.test.size[0])
    ]
    plain = run("mean", NETWORKS[name], devices=Devices(devices))
    scores = {}
    for rule, size in (("batch", unseen_norms.BATCH), ("estimated", len(rows))):
        found = run(rule, NETWORKS[name], devices=Devices(devices))
        scores[rule] = found.history["test_score"][0, -1]
        if devices == 1 or rule == "estimated":  # devices have batches of their parts
            assert scores[rule] == pytest.approx(by_hand(found, rows, size), abs=2 / len(rows))
            outputs = found.predict(X[rows], unseen=True)
            assert (outputs.argmax(1) == Y[rows]).mean() == pytest.approx(scores[rule])
        for one, other in zip(*(jax.tree.leaves(f.network()) for f in (plain, found)), strict=True):
            np.testing.assert_array_equal(one, other)  # the training is the same
    assert min(scores.values()) > 0.85 > plain.history["test_score"][0, -1]


def test_no_client_has_an_unseen_domain() -> None:
    fitted = run("estimated", rounds=1)
    with pytest.raises(UsageError, match="client=0"):
        fitted.predict(X, client=0, unseen=True)


def test_only_unseen_domains_have_their_own() -> None:
    """Not a test split of the domains that train; but the domain that a run leaves out."""
    runs = [Run(0, {}), Run(0, {}, "c")]
    data = DATA._replace(test=np.arange(SIZE) % 5 == 0)
    deal = clients.of_dataset(data)
    mean, own = (
        fit(
            fedavg.fedavg,
            LINEN,
            deal,
            grid=runs,
            evaluations=Evaluations(unseen_norms=rule),
            **FLAT,
        ).history["test_score"][:, -1]
        for rule in ("mean", "estimated")
    )
    assert own[0] == mean[0]
    assert own[1] > mean[1] + 0.1
    selected = clients.of_dataset(
        DATA, held_out="b", validate="c", partition=lambda rows, rng: [rows]
    )
    found = fit(
        erm.erm, LINEN, selected, evaluations=Evaluations(unseen_norms="batch"), **FLAT
    ).history
    assert found["unseen_domain_score"][0, -1] > 0.85


def test_fedbn_has_statistics_of_an_unseen_domain() -> None:
    found = run("estimated", algorithm=fedbn.fedbn).history
    assert found["test_score"][0, -1] > 0.85


def test_what_has_no_statistics_is_refused() -> None:
    with pytest.raises(UsageError, match="unseen_norms"):
        run("own")
    with pytest.raises(UsageError, match=r"unseen_norms.*BatchNorm"):
        run("batch", models.mlp(2))
    with pytest.raises(UsageError, match="in parts"):
        run("estimated", devices=Devices(1, stream=True))
