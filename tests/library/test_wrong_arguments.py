"""Wrong calls of the public functions: an error that names the argument, before any training."""

import functools
import importlib
from typing import Any

import numpy as np
import optax
import pytest

from fedjax_inv import local, models
from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients, federation
from fedjax_inv.data.dataset import Dataset, check_dataset

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Y = (X[:, 0] > 0).astype(int)
DATASET = Dataset(
    X.astype(np.float32),
    Y.astype(np.int32),
    ("a", "b"),
    (np.arange(40) % 3).astype(np.int32),
    ("north", "east", "south"),
    np.zeros(40, bool),
)


@pytest.mark.parametrize(
    "changes",
    [
        {"x": DATASET.x[:9]},
        {"x": DATASET.x * np.inf},
        {"y": DATASET.y + 1},
        {"domain": DATASET.domain[:9]},
        {"domain": DATASET.domain + 1},
        {"classes": ("a", "a")},
        {"test": np.zeros(9, bool)},
    ],
)
def test_a_field_of_a_data_set(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(UsageError, match=name):
        check_dataset(DATASET._replace(**changes))


def test_a_partition_is_a_function() -> None:
    with pytest.raises(UsageError, match=r"^partition='iid'.*partitioner"):
        clients.of_dataset(DATASET, partition="iid")  # type: ignore[arg-type]


def test_rows_of_clients_are_rows_of_the_examples() -> None:
    examples = federation.examples(X, Y)
    with pytest.raises(UsageError, match="parts"):
        federation.of_parts(examples, [[0, 40], [3]])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("afl", {"step_size": -1.0}),
        ("cafe", {"alpha": -0.1}),
        ("ditto", {"proximal": -1.0}),
        ("exit_strategy", {"share": -1.0}),
        ("fedavg", {"weighting": "sizes"}),
        ("fedcfa", {"rows": 0}),
        ("feddg_ga", {"step_size": -1.0}),
        ("feddyn", {"alpha": -1.0}),
        ("fedgma", {"agreement": 2.0}),
        ("fediir", {"decay": 2.0}),
        ("fedipg", {"penalty": -1.0}),
        ("fedipg", {"estimator": "no"}),
        ("fedmix", {"ratio": 2.0}),
        ("fednova", {"proximal": -1.0}),
        ("fedomg", {"kappa": -1.0}),
        ("fedproto", {"penalty": -1.0}),
        ("fedprox", {"proximal": -1.0}),
        ("fedsam", {"rho": -1.0}),
        ("fedsr", {"l2r": -1.0}),
        ("fl_games", {"memory": -1}),
        ("moon", {"temperature": 0.0}),
        ("qfedavg", {"q": -1.0}),
        ("vrex", {"beta": -1.0}),
    ],
)
def test_a_hyperparameter_of_a_factory(name: str, settings: dict[str, Any]) -> None:
    module = importlib.import_module(f"fedjax_inv.algorithms.{name}")
    work = local.epochs(optax.sgd(0.1, 0.9), batch_size=2, momentum=0.9)._replace(learning_rate=0.1)
    factory = functools.partial(getattr(module, name), models.mlp(3, widths=(2,)), work)
    factory()
    with pytest.raises(ValueError, match=next(iter(settings))):
        factory(**settings)
