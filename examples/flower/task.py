"""What both sides have in common: settings.toml as a network and an algorithm; a node's rows.

python task.py node0.npz node1.npz simulates the run, and prints how far results/ lies from it.
"""

import importlib
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import fit, laws, models, types
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation, sources
from fedjax_inv.fit import LOCAL, LocalTraining

SETTINGS = tomllib.loads(Path(__file__).with_name("settings.toml").read_text())
RUN, NAME, INPUT = SETTINGS["run"], SETTINGS["algorithm"], SETTINGS["input"]

factory = getattr(importlib.import_module(f"fedjax_inv.algorithms.{NAME}"), NAME)
work = LocalTraining(optax.sgd, 32, 1, None).work({**LOCAL, **SETTINGS["local"]})
model = models.mlp(len(SETTINGS["classes"]), widths=SETTINGS["widths"])
algorithm = factory(model, work, **SETTINGS["method"])
example = types.Examples(jnp.zeros((1, *INPUT["shape"]), INPUT["dtype"]), jnp.zeros(1, jnp.int32))


def _rows(path: str, *, test: bool) -> types.Examples:
    data = sources.load(path)
    if data.classes != tuple(SETTINGS["classes"]):
        raise UsageError("data", path, f"must have the classes {', '.join(SETTINGS['classes'])}")
    rows = np.flatnonzero(data.test == test)
    return federation.examples(data.x[rows], data.y[rows])


def examples(node: Mapping[str, Any]) -> types.Examples:
    """Return the training rows of a node, whose --node-config has data="path"."""
    return _rows(node["data"], test=False)


def validation(node: Mapping[str, Any]) -> types.Examples:
    """Return its test rows."""
    return _rows(node["data"], test=True)


def main(paths: list[str]) -> None:
    """Simulate the run, with the data of a node for each client."""
    rows = [_rows(path, test=False) for path in paths]
    clients = [(each.x, each.y) for each in rows]
    settings = {**SETTINGS["method"], **SETTINGS["local"], "seed": RUN["seed"]}
    fitted = fit(factory, model, clients, rounds=RUN["rounds"], callbacks=(), **settings)
    deployed = models.saved.load("results/model.safetensors", fitted.network())
    apart = laws.largest_difference(deployed, fitted.network())
    print(f"simulated and deployed networks differ by {apart:.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
