"""No random key feeds two things: each is derived in one place, and drawn from once."""

import collections
import functools
import importlib
import traceback
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

import slow
from fedjax_inv import algorithms, fit, keys, models, schedules
from fedjax_inv.algorithms import fedcfa
from fedjax_inv.types import Algorithm, Array, Model, Work


def counterfactual(model: Model, work: Work, **others: Any) -> Algorithm:
    return fedcfa.fedcfa(model, work, rows=2)


DRAWS = ("bits", "bernoulli", "normal", "permutation", "randint", "uniform")
SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedmix": {},
    "fedcfa": {"rows": 2, "chunk": 3},
    "fedcfa, paper": {"rows": 2, "combining": "paper", "statistics": "all"},
    "exit_strategy": {"pretraining_rounds": 2, "wrapped": counterfactual},
    "cafe": {"momentum": 0.9},
    "ditto": {},
    "fediir": {},
    "fedipg": {},
    "fedproto": {},
    "fedsr": {},
    "fl_games": {},
    "moon": {},
}


class Uses:
    """Where keys are derived and drawn from, by their bits, while a program runs."""

    def __init__(self) -> None:
        self.derived: dict[bytes, set[str]] = collections.defaultdict(set)
        self.parents: set[bytes] = set()
        self.drawn: dict[bytes, list[str]] = collections.defaultdict(list)

    def recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `jax.random` that records its key."""

        @functools.wraps(function)
        def record(key: Array, *others: Any, **named: Any) -> Any:
            result, place = function(key, *others, **named), _place()
            if name in DRAWS:
                jax.debug.callback(functools.partial(self._draw, place), jax.random.key_data(key))
            else:
                both = jax.random.key_data(key), jax.random.key_data(result)
                jax.debug.callback(functools.partial(self._derive, place), *both)
            return result

        return record

    def _draw(self, place: str, key: np.ndarray) -> None:
        self.drawn[np.asarray(key).tobytes()].append(place)

    def _derive(self, place: str, key: np.ndarray, results: np.ndarray) -> None:
        self.parents.add(np.asarray(key).tobytes())
        for result in np.asarray(results).reshape(-1, key.shape[-1]):
            self.derived[result.tobytes()].add(place)

    def faults(self) -> set[str]:
        """Return what is wrong, in words."""
        found = {f"derived twice: {sorted(at)}" for at in self.derived.values() if len(at) > 1}
        found |= {f"drawn from twice: {at}" for at in self.drawn.values() if len(at) > 1}
        both = self.drawn.keys() & self.parents
        return found | {f"drawn from and derived from: {self.drawn[key]}" for key in both}


def _place() -> str:
    """Return the line of the library that uses a key."""
    stack = [frame for frame in traceback.extract_stack() if "/fedjax_inv/" in frame.filename]
    outside = [frame for frame in stack if frame.filename != keys.__file__]
    return f"{outside[-1].filename.rpartition('/')[2]}:{outside[-1].lineno}"


class Dropped(nn.Module):
    """Dropout before a dense layer."""

    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(self.width)(x)


def network() -> Model:
    return models.from_blocks([Dropped(3), Dropped(2)], 1)


def clients() -> list[tuple[np.ndarray, np.ndarray]]:
    """Five clients of six examples."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(6, 4)).astype(np.float32), np.arange(6) % 2) for _ in range(5)]


@pytest.mark.parametrize("name", slow.after(5, [*SETTINGS]))
def test_no_key_feeds_two_things(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds of a cohort, some of which drop out; the network drops units in both halves."""
    listed, settings, uses = name.split(", ")[0], dict(SETTINGS[name]), Uses()
    for function in (*DRAWS, "fold_in", "split"):
        recorded = uses.recorded(function, getattr(jax.random, function))
        monkeypatch.setattr(jax.random, function, recorded)
    factory = getattr(importlib.import_module(f"{algorithms.__name__}.{listed}"), listed)
    schedule = schedules.attending(3, dropout=0.3)
    how: dict[str, Any] = {"rounds": 3, "batch_size": 3, "schedule": schedule, "devices": 1}
    fit(factory, network(), clients(), callbacks=(), **how, **settings)
    jax.effects_barrier()
    assert len(uses.drawn) > 20
    assert not uses.faults()
