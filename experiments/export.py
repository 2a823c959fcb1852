"""Networks to take along: those of a finished run, each in a file with what it is.

python -m experiments.export --run=runs/fedipg-digits-75 --out=networks

Writes for each run (seed, hyperparameters) model.safetensors and model.json, which says of which
network, flags, versions and data, and how well it does. `fedjax_inv.models.saved.load` reads it:

    model = models.mlp(10, widths=(32,))  # model.json: network
    like = jax.eval_shape(model.init, jax.random.key(0), x[:1])
    logits = models.predict(model, models.saved.load("model.safetensors", like), x)

Of a personal algorithm that is the network of a client never seen, and clients.safetensors holds
what each client has in place of arrays of these names [C, ...]. Of an algorithm without a single
network model.safetensors holds its server.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

from experiments.experiment import config, grid
from experiments.experiment.assemble import Assembled
from experiments.flags.flag import check_place
from experiments.parts import network as networks
from experiments.reporting import finished as trained
from experiments.reporting.finished import Finished
from experiments.reporting.tables import tabulate
from experiments.running import folder as folders
from experiments.running import launch, provenance
from fedjax_inv.checks import UsageError
from fedjax_inv.models import saved
from fedjax_inv.types import Tree


class Options(NamedTuple):
    """The flags of this binary."""

    run: str
    state: str = "best"
    out: str = ""
    data_dir: str = ""


def network(server: Tree, own: Tree) -> tuple[str, dict[str, jax.Array]]:
    """(what it is, the arrays that are taken along by name). own: what a client keeps."""
    while hasattr(server, "wrapped"):  # by a rule for missing uploads, or an exit strategy
        server = server.wrapped
    if hasattr(server, "variables"):
        return "network", saved.named(server.variables) | saved.named(own)
    return "server", saved.named(server)


def about(one: Finished, made: Assembled, which: int, state: str) -> dict[str, Any]:
    """What model.json says of a run, but for its arrays."""
    told, run = one.told(which, state), one.cell.runs[which]
    assert told is not None
    data = one.starts[-1].get("data") if one.starts else None
    return {
        "run": {"folder": str(one.folder), "state": state, "round": told["round"]},
        "accuracy": {
            "validation": told["validation_accuracy"],
            "test": told["test_accuracy"],
            "by_domain": {name: each["accuracy"] for name, each in told["domains"].items()},
        },
        "network": {
            "model": one.config.model.model,
            "arguments": networks.arguments(one.config.model, made.dataset),
            "inputs": {
                name or "x": [str(leaf.dtype), *leaf.shape[1:]]
                for name, leaf in saved.named(made.dataset.x).items()
            },
            "classes": made.dataset.classes,
        },
        "algorithm": {
            "name": one.cell.algorithm,
            "settings": one.cell.settings,
            "held_out": one.cell.held_out,
            **run._asdict(),
        },
        "data": {
            "dataset": one.config.data.dataset,
            "sha256": data or provenance.fingerprint(made.data),
        },
        "trained": [{k: v for k, v in start.items() if k != "data"} for start in one.starts],
        "exported": {k: v for k, v in provenance.record(()).items() if k != "data"},
        "flags": config.to_record(one.config),
    }


def run(options: Options) -> str:
    """Writes the files, and returns a table of them.

    Raises UsageError, in one line, for what is no finished run or has no such state.
    """
    trained.check_state(options.state)
    if not options.run:
        raise UsageError("--run=: must be the folder of a finished run")
    one = trained.find("run", Path(options.run), options.data_dir)
    out = Path(options.out or one.folder / "export")
    check_place("out", out, is_folder=True)
    made = trained.assembled(one.config, one.cell)
    held = trained.served(one, made, options.state)
    algorithm = trained.algorithm(one, made, 0)
    rows: list[list[str]] = []
    lacking: list[UsageError] = []
    for which in range(len(one.cell.runs)):
        try:
            trained.check_kept(one, held, which, options.state)
        except UsageError as error:
            lacking.append(error)
            continue
        record = about(one, made, which, options.state)
        place = out / grid.folder_name(one.name(which))
        place.mkdir(parents=True, exist_ok=True)
        mine = jax.tree.map(lambda leaf, at=which: leaf[at], held)
        unseen = algorithm.init_client(mine.server, jnp.int32(0)) if algorithm.personal else ()
        what, told = network(mine.server, unseen)
        arrays = {"model.safetensors": saved.save(place / "model.safetensors", told)}
        if algorithm.personal:
            arrays["clients.safetensors"] = saved.save(place / "clients.safetensors", mine.clients)
        folders.write_json(place / "model.json", record | {"holds": what, "arrays": arrays})
        test = f"{100 * record['accuracy']['test']:.1f}"
        rows.append([str(place), str(record["run"]["round"]), test])
    if not rows:
        raise lacking[0]
    table = tabulate(rows, ["network", "of round", "test, %"], tablefmt="github")
    return "\n".join(["", table, *(f"Not written: {each}." for each in lacking)])


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags."""
    trained.define(values)
    flags.DEFINE_string("out", "", "The folder; default: export/ in that of the run.", values)


def options(values: flags.FlagValues = flags.FLAGS) -> Options:
    """The parsed flags."""
    parsed = values.flag_values_dict()
    return Options(**{name: parsed[name] for name in Options._fields})


if __name__ == "__main__":
    define()
    launch.main(run, __doc__, lambda given: options())
