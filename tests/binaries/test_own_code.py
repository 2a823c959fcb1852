"""A mistake in one's own network or algorithm is an error before any compute."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest

import runs
from fedjax_inv.checks import UsageError
from fedjax_inv.plan import Plan
from fedjax_inv_experiments import config, export, finished
from fedjax_inv_experiments.assembly import experiment
from fedjax_inv_experiments.run import prepare
from runs import with_flags

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
TARGETS = {
    "classes": (X[:, 0] > 0).astype(np.int32),
    "labels": X[:, :2] > 0,
    "values": X[:, :2],
    "value": X[:, 0],
}

NETWORKS = """
import flax.linen as nn
import jax.numpy as jnp

from fedjax_inv import models, objectives


class Net(nn.Module):
    outputs: int
    axis: int | None = None

    @nn.compact
    def __call__(self, x, train):
        y = nn.Dense(self.outputs)(x)
        return y if self.axis is None else y[:, self.axis]


def net(outputs, axis=None):
    return models.from_flax(Net(outputs, axis), takes=("train",))

def right(num_classes):
    return net(num_classes)

def few(num_classes):
    return net(num_classes - 1)

def many(num_classes):
    return net(num_classes + 1)

def flat(num_classes):
    return net(num_classes, 0)

def untold(num_classes):
    return models.from_flax(Net(num_classes))

def sized(k):
    return net(k)

def silent(num_classes):
    def init(key, x):
        assert x.shape == (1, 784)
    return models.from_function(init, lambda params, x: x)


def loss(outputs, y, mask):
    return objectives.masked_mean(((outputs - y[..., None]) ** 2).mean(-1), mask)
"""

ALGORITHMS = """
import optax
from flax import nnx

from fedjax_inv import averaging


def own(model, work, **said):
    gradient = averaging.gradient(model)
    usual = {"server_optimizer": optax.sgd(1.0), "weighting": "size"}
    return averaging.averaging(model, work, lambda visit: gradient, **(usual | said))

def wrong(model, work):
    return own(model, work)._replace(predict=lambda server, own, x: server.nothing)

class Classy(nnx.Module):
    def __init__(self, model, work):
        pass

def wanting(model, work, *, decay):
    return own(model, work)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of one's own, and no run."""

    def refuse(*arguments: Any) -> NoReturn:
        raise AssertionError("computed before the input was checked")

    monkeypatch.setattr(Plan, "train", refuse)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_networks.py").write_text(NETWORKS)
    (tmp_path / "own_algorithms.py").write_text(ALGORITHMS)
    for task, y in TARGETS.items():
        np.savez(tmp_path / f"{task}.npz", x=X, y=y, domain=np.arange(60) % 3)
    yield
    for name in ("own_networks", "own_algorithms"):
        sys.modules.pop(name, None)


def chosen(folder: Path, task: str, **changes: Any) -> config.Config:
    given = dict(dataset=str(folder / f"{task}.npz"), run_dir=str(folder / "run"), rounds=2)
    return config.of(**given, eval_every=1, **changes)


@pytest.mark.parametrize(
    ("task", "name", "line"),
    [
        ("classes", "few", r"must return \[B, 2\]"),
        ("values", "flat", r"must return \[B, 2\]"),
        ("classes", "untold", r"fails on inputs float32 \(1, 4\): .*'train'"),
        ("classes", "silent", r"fails on inputs float32 \(1, 4\): AssertionError$"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(
    tmp_path: Path, task: str, name: str, line: str
) -> None:
    with pytest.raises(UsageError, match=f"^--model=own_networks:{name}: {line}"):
        runs.train(chosen(tmp_path, task, model=f"own_networks:{name}"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("classes", {"model": "own_networks:right"}),
        ("labels", {"model": "own_networks:right"}),
        ("value", {"model": "own_networks:flat"}),
        # A loss of one's own says itself which outputs it takes.
        ("classes", {"model": "own_networks:many", "loss": "own_networks:loss"}),
    ],
)
def test_a_network_that_fits_is_not_refused(
    tmp_path: Path, task: str, changes: dict[str, Any]
) -> None:
    assert experiment.make(chosen(tmp_path, task, **changes)).cells


def test_a_class_is_no_algorithm(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^--algorithm=own_algorithms:Classy: must be a function$"
    ):
        runs.train(chosen(tmp_path, "classes", algorithm=("own_algorithms:Classy",)))


def test_a_setting_without_a_default_and_a_hint_must_be_set(tmp_path: Path) -> None:
    given = chosen(tmp_path, "classes", algorithm=("own_algorithms:wanting",))
    with pytest.raises(UsageError, match=r"wanting: takes other arguments \(missing .* 'decay'\)$"):
        runs.train(given)
    given = with_flags(given, set=("decay=0.5",))
    prepare(given, tmp_path / "run", in_folders=True)


def test_a_mistake_in_an_algorithm_comes_before_its_run(tmp_path: Path) -> None:
    given = chosen(tmp_path, "classes", algorithm=("own_algorithms:wrong",))
    with pytest.raises(AttributeError, match="nothing"):
        runs.train(given)
    assert not (tmp_path / "run" / "config.json").exists()


def test_an_exported_network_names_the_arguments_of_its_factory(tmp_path: Path) -> None:
    given = chosen(tmp_path, "classes", model="own_networks:sized", hold="own")
    assert export._arguments(Saved(given, experiment.make(given))) == {"k": 2}


def test_data_that_are_gone_are_told_with_the_run(tmp_path: Path) -> None:
    gone = config.of(dataset=str(tmp_path / "gone.csv"))
    line = r"^--run=r: needs the data of its training: --dataset=.*gone.csv: must be a file, there"
    with pytest.raises(UsageError, match=line):
        finished._data("--run=r", gone, "")


class Saved(NamedTuple):
    config: Any
    data: Any
