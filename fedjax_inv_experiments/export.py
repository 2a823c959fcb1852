"""Exports the networks of finished runs as files, each with a description.

fedjax-inv export --run=runs/fedipg-digits-75 --out=networks

It writes two files for each run (a seed with hyperparameters). model.safetensors holds the arrays;
model.json describes the network, flags, versions, data and scores. `fedjax_inv.models.saved.load`
reads the arrays:

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
import msgspec

from fedjax_inv import averaging, wrapping
from fedjax_inv.checks import UsageError
from fedjax_inv.models import saved
from fedjax_inv.types import Algorithm, Tree
from fedjax_inv_experiments.experiment import config, grid
from fedjax_inv_experiments.flags import command, names
from fedjax_inv_experiments.flags.flag import check_place, flag
from fedjax_inv_experiments.flags.outside import Named
from fedjax_inv_experiments.parts import network as networks
from fedjax_inv_experiments.parts import selection
from fedjax_inv_experiments.reporting import finished, report
from fedjax_inv_experiments.reporting.finished import OneRun, Runs
from fedjax_inv_experiments.reporting.tables import table
from fedjax_inv_experiments.running import files, provenance
from fedjax_inv_experiments.running.records import Line


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


def network(algorithm: Algorithm, server: Tree, own: Tree) -> tuple[str, dict[str, jax.Array]]:
    """("network" or "server", the exported arrays by name). own: the state of a client."""
    if algorithm.network:
        return "network", saved.named(algorithm.network(server)) | saved.named(_own(own))
    *_, innermost = wrapping.layers(server)
    return "server", saved.named(innermost)


def _own(state: Tree) -> Tree:
    """The part of clients' states that has the names of their networks."""
    return state.variables if isinstance(state, averaging.Own) else state


def _of_clients(clients: Tree, unseen: Tree) -> Tree:
    """The clients' arrays [C, ...]; one without a turn yet has those of a new client, `unseen`."""
    if not isinstance(unseen, averaging.Own):
        return _own(clients)
    return jax.vmap(lambda own: averaging.kept(own, unseen.variables))(clients)


def description(one: OneRun) -> dict[str, Any]:
    """The content of model.json, except for the arrays."""
    runs, line = one.runs, one.line()
    start = msgspec.to_builtins(runs.start)
    return {
        "run": {"folder": str(runs.path), "state": one.state, "round": line.played},
        "selected": _selected(one, line),
        "scores": {
            "name": runs.result.score.name,
            "higher_is_better": runs.result.score.higher_is_better,
            "validation": line.validation_score,
            "test": line.test_score,
            "by_domain": {
                name: domain.score for name, domain in line.domains.items() if domain.examples
            },
        },
        "network": {
            "model": runs.config.model.model,
            "arguments": _arguments(runs),
            "inputs": {
                name or "x": [str(leaf.dtype), *leaf.shape[1:]]
                for name, leaf in saved.named(runs.data.dataset.x).items()
            },
            **meaning(one),
            **_features(one),
        },
        "algorithm": {
            "name": runs.cell.algorithm,
            "settings": runs.cell.settings,
            "held_out": runs.cell.held_out,
            **one.run._asdict(),
        },
        "data": {"dataset": runs.config.data.dataset},
        "trained": start,
        "exported": {"commit": provenance.commit(), "versions": provenance.versions()},
        "flags": config.to_record(runs.config),
    }


def _features(one: OneRun) -> dict[str, Any]:
    """The features of a table, and the shift and scale of the inputs, which the network applies."""
    data, held_out = one.runs.data, one.runs.cell.held_out
    scaling = data.scaling_record(held_out)
    columns = {"features": data.dataset.features} if data.dataset.columns else {}
    return columns | ({} if scaling is None else {"scaling": scaling["seeds"][str(one.run.seed)]})


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


def _selected(one: OneRun, line: Line) -> dict[str, Any]:
    """What the rule of selection picks, and whether that is the exported network."""
    runs, rule = one.runs, one.runs.config.watching.select
    picked = selection.picked(runs.result.runs[one.index], rule)
    chosen = report.choose("", runs.result, rule)
    return {
        "rule": rule,
        "round": picked and picked.played,  # of this run
        "setting": chosen and runs.cell.runs[chosen.indices[0]].hyper,
        "is_exported": bool(
            picked and chosen and line.round == picked.round and one.index in chosen.indices
        ),
    }


def export(one: OneRun, out: Path) -> Written:
    """Writes the files of a run into its own folder; raises UsageError if it lacks the state."""
    record, served = description(one), one.served()
    place = out / grid.folder_name(one.name)
    place.mkdir(parents=True, exist_ok=True)
    algorithm = one.algorithm()
    unseen = finished.unseen(algorithm, served.server)
    holds, named = network(algorithm, served.server, unseen)
    trees = {"model.safetensors": named}
    if algorithm.personal:
        trees["clients.safetensors"] = _of_clients(served.clients, unseen)
    files.remove(place / "model.json")  # it would describe the network before
    arrays = {}
    about = {name: json.dumps(value) for name, value in meaning(one).items()}
    for name, tree in trees.items():
        with files.replacing(place / name) as file:
            arrays[name] = saved.save(file.name, tree, about)
    files.write_json(place / "model.json", record | {"holds": holds, "arrays": arrays})
    return Written(place, record["run"]["round"], record["scores"]["test"])


def run(options: Options) -> str:
    """Writes the files, and returns a table of them.

    Raises UsageError for a folder without a finished run, or if no run has the state.
    """
    if not options.run:
        raise UsageError("--run=", ..., "must be the folder of a finished run")
    runs = finished.open("run", Path(options.run), named=options.outside, data_dir=options.data_dir)
    out = Path(os.path.expanduser(options.out) or runs.path / "export")
    each = [runs.run(index, options.state) for index in range(len(runs.cell.runs))]
    check_place("out", out, is_folder=True)
    written: list[Written] = []
    lacking: list[UsageError] = []
    for one in each:
        try:
            written.append(export(one, out))
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
