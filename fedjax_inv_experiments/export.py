"""Exports the networks of finished runs as files, each with a description.

fedjax-inv export --run=runs/fedipg-digits-75 --out=networks

It writes two files for each run (a seed with hyperparameters). model.safetensors holds the arrays;
model.json holds the flags, the round, its scores, and what a user of the network must know.
`fedjax_inv.models.saved.load` reads the arrays:

    model = models.mlp(10, widths=(32,))  # model.json: network
    like = jax.eval_shape(model.init, jax.random.key(0), x[:1])
    logits = models.predict(model, models.saved.load("model.safetensors", like), x)
    models.saved.about("model.safetensors")  # what the outputs mean: task, outputs, classes

For a personal algorithm model.safetensors holds the network of a new client, and
clients.safetensors each client's own arrays [C, ...] by the same names. For an algorithm without a
single network model.safetensors holds the server's state.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_inv import averaging, wrapping
from fedjax_inv.checks import UsageError
from fedjax_inv.models import saved
from fedjax_inv.types import Algorithm, Array, Tree
from fedjax_inv_experiments.experiment import config, grid
from fedjax_inv_experiments.flags import command, names
from fedjax_inv_experiments.flags.flag import check_place, flag
from fedjax_inv_experiments.flags.outside import Named
from fedjax_inv_experiments.parts import network as networks
from fedjax_inv_experiments.reporting import finished, report
from fedjax_inv_experiments.reporting.finished import OneRun, Runs
from fedjax_inv_experiments.reporting.tables import table
from fedjax_inv_experiments.running import files


@dataclasses.dataclass(frozen=True)
class Options(Named):
    """The flags of this binary."""

    run: str = finished.run_flag()
    state: str = finished.state_flag("best")
    out: str = flag("", "The folder; default: export/ in that of the run.")
    data_dir: str = finished.data_dir_flag()


class Written(NamedTuple):
    """The files of a run."""

    folder: Path
    round: int
    test: float  # score


def _arguments(runs: Runs) -> dict[str, Any]:
    """The arguments of the network's factory, which may call its first one as it likes."""
    given = networks.arguments(runs.config.model, runs.data.dataset)
    first = next(iter(names.signature(names.network(runs.config.model.model)).parameters))
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
    return jax.vmap(lambda own: averaging.kept(own, unseen.variables))(clients)


# The outputs of a network, by the kind of targets.
_OUTPUTS = {
    "classes": "logits [B, K] of the classes; their softmax are probabilities",
    "labels": "logits [B, K] of the labels; their sigmoids are probabilities",
    "values": "values [B, K]",
}


def meaning(one: OneRun) -> dict[str, Any]:
    """The meaning of the outputs: the kind of targets, and the names of the K outputs."""
    dataset, name = one.runs.data.dataset, one.runs.cell.algorithm
    outputs = _OUTPUTS[dataset.task]
    if one.algorithm().own_outputs:
        outputs += f"; {name} computes them in a way of its own and not as `models.predict` does"
    return {"task": dataset.task, "outputs": outputs, "classes": dataset.classes}


def description(one: OneRun) -> dict[str, Any]:
    """The content of model.json."""
    runs, line, dataset = one.runs, one.line(), one.runs.data.dataset
    inputs = saved.named(dataset.x).items()
    score = {"name": runs.result.score.name, "validation": line.validation_score}
    return {
        "run": {"folder": str(runs.path), "state": one.state, "round": line.played},
        "score": {**score, "test": line.test_score},
        "algorithm": {"name": runs.cell.algorithm, "held_out": runs.cell.held_out}
        | {"settings": runs.cell.settings, **one.run._asdict()},
        "holds": "network" if one.algorithm().network else "server",
        "network": {
            "model": runs.config.model.model,
            "arguments": _arguments(runs),
            "inputs": {name or "x": [str(x.dtype), *x.shape[1:]] for name, x in inputs},
            "features": dataset.features if dataset.columns else [],
            **meaning(one),
        },
        "flags": config.to_record(runs.config),
    }


def export(one: OneRun, out: Path) -> Written:
    """Writes the files of a run into its own folder; raises UsageError if it lacks the state."""
    record, served, algorithm = description(one), one.served(), one.algorithm()
    place = out / grid.folder_name(one.name)
    place.mkdir(parents=True, exist_ok=True)
    unseen = finished.unseen(algorithm, served.server)
    about = {name: json.dumps(value) for name, value in meaning(one).items()}
    saved.save(place / "model.safetensors", arrays(algorithm, served.server, unseen), about)
    if algorithm.personal:
        saved.save(place / "clients.safetensors", _of_clients(served.clients, unseen), about)
    files.write_json(place / "model.json", record)
    return Written(place, record["run"]["round"], record["score"]["test"])


def run(options: Options) -> str:
    """Writes the files, and returns a table of them.

    Raises UsageError for a folder without a finished run, or if no run has the state.
    """
    if not options.run:
        raise UsageError("--run=", ..., "must be the folder of a finished run")
    runs = finished.open("run", Path(options.run), named=options.outside, data_dir=options.data_dir)
    out = Path(os.path.expanduser(options.out) or runs.path / "export")
    check_place("out", out, is_folder=True)
    written: list[Written] = []
    lacking: list[UsageError] = []
    for index in range(len(runs.cell.runs)):
        try:
            written.append(export(runs.run(index, options.state), out))
        except UsageError as error:
            lacking.append(error)
    if not written:
        raise lacking[0]
    score = runs.result.score
    columns = {
        "network": lambda each: each.folder,
        "of round": lambda each: each.round,
        f"test{score.unit}": lambda each: report.text_of(score)([each.test]),
    }
    text = table(written, columns, align="decimal")
    return "\n".join(["", text, *(f"Not written: {each}." for each in lacking)])


BINARY = command.of(run, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
