"""Networks of finished runs as files: the arrays, and a description that holds the flags."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_inv import averaging, wrapping
from fedjax_inv.models import saved
from fedjax_inv.types import Algorithm, Array, Tree

from . import config, outputs
from .assembly import factories, grid, network
from .finished import Runs
from .folder import files


def _arguments(runs: Runs) -> dict[str, Any]:
    """The arguments of the network's factory, which may call its first one as it likes."""
    given = network.arguments(runs.config.network, runs.data.seen)
    first = next(iter(factories.signature(factories.network(runs.config.network.model)).parameters))
    return {first if name == "num_classes" else name: value for name, value in given.items()}


def arrays(algorithm: Algorithm, server: Tree, own: Tree) -> dict[str, Array]:
    """The exported arrays by name. own: the state of a client."""
    if algorithm.network:
        return saved.named(algorithm.network(server)) | saved.named(_own(own))
    *_, innermost = wrapping.layers(server)
    return saved.named(innermost)


def _own(state: Tree) -> Tree:
    """The part of clients' states that has the names of their networks."""
    return state.variables if isinstance(state, averaging.Own) else state


def _of_clients(clients: Tree, unseen: Tree) -> Tree:
    """The clients' arrays [C, ...]; one without a turn yet has those of a new client, `unseen`."""
    if not isinstance(unseen, averaging.Own):
        return _own(clients)
    return jax.vmap(lambda own: averaging.variables_of(own, unseen.variables))(clients)


# The outputs of a network, by the kind of targets.
_OUTPUTS = {
    "classes": "logits [B, K] of the classes; their softmax are probabilities",
    "labels": "logits [B, K] of the labels; their sigmoids are probabilities",
    "values": "values [B, K]",
}


def meaning(runs: Runs) -> dict[str, Any]:
    """The meaning of the outputs: the kind of targets, and the names of the K outputs."""
    dataset = runs.data.dataset
    name = runs.cell.algorithm
    text = _OUTPUTS[dataset.task]
    if runs.fitted.algorithm().own_outputs:
        text += f"; {name} computes them in a way of its own and not as `models.predict` does"
    return {"task": dataset.task, "outputs": text, "classes": dataset.classes}


def description(runs: Runs, index: int) -> dict[str, Any]:
    """The content of model.json of a run."""
    line = runs.line(index)
    dataset = runs.data.seen
    algorithm = runs.fitted.algorithm(index)
    inputs = saved.named(dataset.x).items()
    score = {"name": runs.result.score.name, "validation": line.validation_score}
    return {
        "written by": outputs.mark("evaluate"),
        "run": {"folder": str(runs.path), "state": runs.state, "round": line.played},
        "score": {**score, "test": line.test_score},
        "algorithm": {"name": runs.cell.algorithm, "held_out": runs.cell.held_out}
        | {"settings": runs.cell.settings, **runs.cell.runs[index]._asdict()},
        "holds": "network" if algorithm.network else "server",
        "network": {
            "model": runs.config.network.model,
            "arguments": _arguments(runs),
            "inputs": {name or "x": [str(x.dtype), *x.shape[1:]] for name, x in inputs},
            "features": dataset.features if dataset.columns else [],
            **meaning(runs),
        },
        "flags": config.to_record(runs.config),
    }


def files_of(runs: Runs, index: int, out: Path) -> list[Path]:
    """The files of a run, in its own folder in `out`; the last one of personal algorithms alone."""
    place = out / grid.folder_name(runs.name(index))
    return [place / name for name in ("model.json", "model.safetensors", "clients.safetensors")]


def export(runs: Runs, index: int, out: Path) -> Path:
    """Writes the files of a run into its own folder in `out`, and returns that.

    model.safetensors holds the network of a new client, or the server's state if there is no single
    network; model.json is its description. With a personal algorithm clients.safetensors holds each
    client's own arrays [C, ...] by the same names.
    """
    record = description(runs, index)
    state = runs.fitted.state(index)
    algorithm = runs.fitted.algorithm(index)
    about_json, of_network, of_clients = files_of(runs, index, out)
    of_network.parent.mkdir(parents=True, exist_ok=True)
    unseen: Tree = ()
    if algorithm.personal:
        unseen = algorithm.init_client(state.server, jnp.int32(0))
    about = {name: json.dumps(value) for name, value in meaning(runs).items()}
    about["written by"] = outputs.mark("evaluate")
    content = arrays(algorithm, state.server, unseen)
    if body := runs.data.frozen:
        content |= saved.named(body.variables)
    saved.save(of_network, content, about)
    if algorithm.personal:
        saved.save(of_clients, _of_clients(state.clients, unseen), about)
    files.write_json(about_json, record)
    return of_network.parent
