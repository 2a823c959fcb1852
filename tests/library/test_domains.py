"""The domain of each example in a client reaches the methods that ask for it, and no others."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_inv import averaging, models, objectives, streaming
from fedjax_inv.algorithms import fedavg, irm
from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients, federation, stored, wrong_labels
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.devices import Devices
from fedjax_inv.fit import plan
from fedjax_inv.plan import Evaluations
from fedjax_inv.types import Algorithm, Array, Batch, Facts, Model, Step, Variables, Work

M = 90
RNG = np.random.default_rng(0)
DOMAIN = RNG.integers(0, 3, M).astype(np.int32)
# An input tells its domain.
DATASET = Dataset(
    np.stack([DOMAIN, RNG.normal(size=M)], 1).astype(np.float32),
    RNG.integers(0, 2, M).astype(np.int32),
    ("a", "b"),
    DOMAIN,
    ("north", "east", "south"),
    np.zeros(M, bool),
)
MIXED = federation.partitioner("mixed", DATASET, 4, mixing=0.5)


def watching(model: Model, work: Work, *, num_domains: int) -> Algorithm:
    """FedAvg that reports D, the real examples of another domain, and the domains of a batch."""
    risk_gradient = averaging.gradient(model)

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
        step = risk_gradient(variables, batch, key)
        wrong = (batch.mask & (batch.domain != batch.x[:, 0])).sum()
        seen = (batch.mask[:, None] & (batch.domain[:, None] == jnp.arange(num_domains))).any(0)
        metrics = {"wrong": 1.0 * wrong, "seen": 1.0 * seen.sum(), "of": 1.0 * num_domains}
        return step._replace(metrics={**step.metrics, **metrics})

    how: Any = {"server_optimizer": optax.sgd(1.0), "weighting": "size"}
    return averaging.averaging(model, work, lambda visit: grad_fn, **how)


watching.FACTS = Facts(needs_domains=True)  # type: ignore[attr-defined]


def pooled(model: Model, work: Work, *, num_domains: int) -> Algorithm:
    """The same of the examples of all clients."""
    return watching(model, work, num_domains=num_domains)


pooled.FACTS = Facts(pooled=True, needs_domains=True)  # type: ignore[attr-defined]
MODEL = models.mlp(2, widths=(3,))
FEW: dict[str, Any] = {"rounds": 2, "batch_size": 7, "grid": {"seed": [0, 1]}}


@pytest.mark.parametrize(
    "used", [Devices(1), Devices(1, stream=True), Devices(4, own=True)], ids=["one", "host", "own"]
)
def test_mixed_clients_keep_the_domain_of_each_example(
    used: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(streaming.Streamed.__init__.__kwdefaults__, "part_bytes", 500)
    data = clients.of_dataset(DATASET, partition=MIXED, held_out="south", validation=0.2)
    history = plan(watching, MODEL, data, devices=used, **FEW).train().history
    np.testing.assert_array_equal(history["train_wrong"], 0)
    np.testing.assert_array_equal(history["train_of"], 3)
    assert (history["train_seen"] > 1.4).all()


def test_clients_of_a_list_are_domains_and_copies_keep_theirs() -> None:
    x = DATASET.x.copy()
    parts = [np.arange(10), np.arange(10, 12), np.arange(12, M)]
    for client, part in enumerate(parts):
        x[part, 0] = client
    each = [(x[part], DATASET.y[part]) for part in parts]
    history = plan(pooled, MODEL, each, test=each[0], devices=1, **FEW).train().history
    with pytest.raises(UsageError, match="algorithm"):
        plan(watching, MODEL, each, devices=1, **FEW)
    np.testing.assert_array_equal(history["train_wrong"], 0)
    np.testing.assert_array_equal(history["train_of"], 3)
    data = federation.examples(DATASET.x, DATASET.y, DOMAIN)
    split = federation.split(DATASET, data, MIXED, held_out=None, seed=0)
    found = wrong_labels.at_clients([split], 2, share=0.5, part=0.5, seeds=[0])
    copied = found.splits[0].train.data
    assert len(found.source) > M
    np.testing.assert_array_equal(copied.domain, DOMAIN[found.source])
    rows = np.array([3, 1, 1])
    np.testing.assert_array_equal(stored.of_arrays(*copied).take(rows).domain, DOMAIN[rows])


@pytest.mark.parametrize("used", [Devices(1), Devices(1, stream=True)], ids=["one", "host"])
def test_a_score_of_groups_is_the_worst_of_all(
    used: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of clients that hold several domains, and of parts that are evaluated in turn."""
    monkeypatch.setitem(streaming.Streamed.__init__.__kwdefaults__, "part_bytes", 500)
    y = (DATASET.x[:, 1] + 0.3 * np.random.default_rng(1).normal(size=M) > 0).astype(np.int32)
    dataset = DATASET._replace(y=y)
    data = clients.of_dataset(dataset, partition=MIXED, validation=0.4)
    scored = {"evaluations": Evaluations(2, score=objectives.worst_group), "learning_rate": 0.5}
    made = plan(fedavg.fedavg, MODEL, data, devices=used, **FEW, **scored)
    shards, fitted = jax.tree.map(np.asarray, made.inputs), made.train()
    found = []
    for run in range(2):
        for kind, of in (("valid", shards.valid), ("test", shards.test)):
            order, start, size = (leaf[run] for leaf in of[:3])
            parts = zip(start, size, strict=True)
            rows = np.concatenate([order[at : at + count] for at, count in parts])
            right = fitted.predict(DATASET.x[rows], run).argmax(-1) == y[rows]
            group = 2 * DOMAIN[rows] + y[rows]
            worst = min(right[group == each].mean() for each in np.unique(group))
            np.testing.assert_allclose(fitted.history[f"{kind}_score"][run], worst, rtol=1e-6)
            found.append(worst)
    assert 0 < max(found) < 1


def without(splits: federation.Splits) -> federation.Splits:
    """The splits without domains."""
    return splits._replace(data=splits.data._replace(domain=None))


def test_who_needs_no_domains_has_none_and_who_does_must_find_several_in_a_client() -> None:
    make = functools.partial(plan, model=MODEL, rounds=1, devices=1)
    data = clients.of_dataset(DATASET, partition=MIXED)
    assert make(fedavg.fedavg, clients=data).data.domain is None
    assert make(watching, clients=data).data.domain is not None
    with pytest.raises(UsageError, match="algorithm"):
        make(watching, clients=clients.of_dataset(DATASET))
    with pytest.raises(UsageError, match="needs_domains"):  # hidden by a function around it
        make(lambda model, work: irm.irm(model, work, num_domains=3), clients=data).trace()
    with pytest.raises(UsageError, match="clients"):
        make(watching, clients=lambda seeds: without(data(seeds)))
