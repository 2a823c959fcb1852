"""Mistakes in networks and algorithms of one's own get one line, before any compute or folder."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import export, sweep, train
from fedjax_inv_experiments.experiment import assemble, command_line, config
from fedjax_inv_experiments.reporting import finished
from fedjax_inv_experiments.running import launch, loop

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

def pair(num_classes):
    init = lambda key, x: jnp.zeros((4, num_classes))
    return models.from_function(init, lambda params, x: (x @ params, x))

def untold(num_classes):
    return models.from_flax(Net(num_classes))

def reshaped(num_classes):
    init = lambda key, x: jnp.zeros((4, num_classes))
    return models.from_function(init, lambda params, x: x.reshape(-1, 784) @ params)

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
import jax.numpy as jnp
import optax
from flax import nnx

from fedjax_inv import averaging, models, servers


def own(model, work, change=lambda step: step, **said):
    gradient = averaging.gradient(model)
    usual = {"server_optimizer": optax.sgd(1.0), "weighting": "size"}
    return averaging.averaging(
        model, work, lambda visit: lambda *at: change(gradient(*at)), **(usual | said)
    )

def right(model, work, *, share=0.5):
    return own(model, work, lambda step: step._replace(average=share * step.metrics["loss"]))

def decides(model, work, *, share=0.5):
    rate = 1.0 if share > 0.3 else 0.5  # decides
    return own(model, work, server_optimizer=optax.sgd(rate))

def asks(model, work):
    def remember(visit, trained):
        return 1.0 if visit.round > 3 else 2.0  # asks
    return own(model, work, remember=remember, init_client=lambda server, who: 0.0)

def starts(model, work):
    return own(model, work, init_client=lambda server, who: server.nothing)  # starts

def forgets(model, work):
    return own(model, work, lambda step: step.grads)

def swaps(model, work):
    return own(model, work, init_client=lambda server, who: jnp.zeros(3),
               remember=lambda visit, trained: jnp.zeros(2))

def serves(model, work):
    return own(model, work)._replace(
        predict=lambda server, own, x: models.predict(model, server.variables, x)[:, :1]
    )

def types(model, work):
    return own(model, work)._replace(predict=lambda server, own, x: x @ "a")  # types

def calls(model, work):
    return own(model, work).nothing  # calls

class Classy(nnx.Module):
    def __init__(self, model, work):
        pass

def wanting(model, work, *, decay):
    return own(model, work)

def lines(model, work):
    raise TypeError("two trees differ:\\n  at .params\\n  at .stats")  # lines
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of one's own, and no run."""

    def refuse(*arguments: Any) -> NoReturn:
        raise AssertionError("computed before the input was checked")

    monkeypatch.setattr(loop, "run_cell", refuse)
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
        ("classes", "few", r"returns outputs \[B, 1\], must return \[B, 2\], one for each class"),
        ("classes", "many", r"returns outputs \[B, 3\], must return \[B, 2\], one for each class"),
        ("classes", "flat", r"returns outputs \[B\], must return \[B, 2\], one for each class"),
        ("classes", "pair", r"returns tuple, must return \[B, 2\], one for each class"),
        ("labels", "many", r"returns outputs \[B, 3\], must return \[B, 2\], one for each label"),
        ("values", "flat", r"returns outputs \[B\], must return \[B, 2\], one for each value"),
        ("classes", "untold", r"takes=\(\): must hold 'train', which Net.__call__ needs$"),
        ("classes", "reshaped", r"fails on inputs float32 \(1, 4\): cannot reshape array of shape"),
        ("classes", "silent", r"fails on inputs float32 \(1, 4\): AssertionError$"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(
    tmp_path: Path, task: str, name: str, line: str
) -> None:
    with pytest.raises(UsageError, match=f"^--model=own_networks:{name}: {line}") as error:
        train.train(chosen(tmp_path, task, model=f"own_networks:{name}"))
    if "must return" in line:
        assert str(error.value).endswith(f" of --dataset={tmp_path / task}.npz")
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
    assert assemble.assemble(chosen(tmp_path, task, **changes)).cells


def place(name: str) -> str:
    """The place of a mistake in the module of algorithms: that of its name as a comment."""
    lines = ALGORITHMS.splitlines()
    return f"own_algorithms.py:{1 + next(i for i, at in enumerate(lines) if f'# {name}' in at)}: "


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("asks", f"{place('asks')}Attempted boolean conversion of traced array"),
        ("starts", f"{place('starts')}'Server' object has no attribute 'nothing'"),
        ("calls", f"{place('calls')}'Algorithm' object has no attribute 'nothing'"),
        ("types", place("types")),
        ("lines", f"{place('lines')}two trees differ: at .params at .stats"),
        ("forgets", "the result of the gradient: is of type Halves, must be a Step"),
        (
            "swaps",
            "exchanges[0].client: returns float32[2], must return float32[3], as init_client",
        ),
        ("serves", "returns outputs [B, 1], must return [B, 2], one for each class of --dataset="),
    ],
)
def test_a_mistake_in_an_algorithm_is_told_with_its_place(
    tmp_path: Path, name: str, line: str
) -> None:
    given = chosen(tmp_path, "classes", algorithm=(f"own_algorithms:{name}",))
    line = f"^--algorithm=own_algorithms:{name}: {re.escape(line)}"
    for work in (train.train, lambda given: launch.check(given, tmp_path / "run", in_folders=True)):
        with pytest.raises(UsageError, match=line) as error:
            work(given)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_class_is_no_algorithm(tmp_path: Path) -> None:
    line = "^--{}=own_algorithms:Classy: must be a function that returns an Algorithm, not a class$"
    with pytest.raises(UsageError, match=line.format("algorithm")):
        train.train(chosen(tmp_path, "classes", algorithm=("own_algorithms:Classy",)))
    with pytest.raises(UsageError, match=line.format("describe")):
        command_line.describe("own_algorithms:Classy")


def test_a_setting_without_a_default_and_a_hint_must_be_set(tmp_path: Path) -> None:
    (row,) = command_line.describe("own_algorithms:wanting").splitlines()[4:]
    assert row.split() == ["--set=decay", "must", "be", "set"]
    given = chosen(tmp_path, "classes", algorithm=("own_algorithms:wanting",))
    with pytest.raises(UsageError, match=r"wanting: takes other arguments \(missing .* 'decay'\)$"):
        train.train(given)
    given = config.changed(given, settings=("decay=0.5",))
    launch.check(given, tmp_path / "run", in_folders=True)


def test_a_number_that_decides_is_told_with_its_values(tmp_path: Path) -> None:
    given = chosen(
        tmp_path, "classes", algorithm=("own_algorithms:decides",), settings=("share=0.1,0.5",)
    )
    line = r"^--set=share=0.1,0.5: must work as a traced array, as one program trains all values \("
    with pytest.raises(UsageError, match=line + f".*{place('decides')}Attempted boolean"):
        sweep.sweep(given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("others", [{}, {"late": "stale", "frequency": 0.5}, {"hold": "stream"}])
def test_an_algorithm_without_a_mistake_is_run(tmp_path: Path, others: dict[str, Any]) -> None:
    given = chosen(
        tmp_path,
        "classes",
        algorithm=("own_algorithms:right",),
        settings=("share=0.1,0.5",),
        **others,
    )
    launch.check(given, tmp_path / "run", in_folders=True)
    assert not (tmp_path / "run").exists()


def test_an_exported_network_names_the_arguments_of_its_factory(tmp_path: Path) -> None:
    given = chosen(tmp_path, "classes", model="own_networks:sized", hold="own")
    assert export._arguments(Saved(given, assemble.assemble(given))) == {"k": 2}


def test_data_that_are_gone_are_told_with_the_run(tmp_path: Path) -> None:
    gone = config.of(dataset=str(tmp_path / "gone.csv"))
    saved = finished.Runs("--run=r", tmp_path, gone, Undivided(""), [], None)
    line = r"^--run=r: needs the data of its training: --dataset=.*gone.csv: must be a file, there"
    with pytest.raises(UsageError, match=line):
        _ = saved.data


class Saved(NamedTuple):
    config: Any
    data: Any


class Undivided(NamedTuple):
    held_out: str
