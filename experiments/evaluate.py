"""How well a finished run does: by domain, class and client, on its own data or on others.

python -m experiments.evaluate --run=runs/fedipg-digits-75
python -m experiments.evaluate --run=runs/fedipg-digits-75 --dataset=new.npz --state=last

Of each seed the run with the selected hyperparameters. On its own data clients are told on their
validation examples, each served as the algorithm serves it, and classes on the test's. Other data,
whatever their domains and splits, are somebody's who was never seen; with a personal algorithm
each client's own network is told on all of them, too.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.experiment import config
from experiments.experiment.assemble import Assembled
from experiments.flags.flag import check_picture
from experiments.parts import data as data_flags
from experiments.reporting import figures, report, run_figures
from experiments.reporting import finished as trained
from experiments.reporting.finished import Finished
from experiments.reporting.tables import tabulate
from experiments.running import folder as folders
from experiments.running import launch, summary
from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import parts_of
from fedjax_inv.types import Algorithm, Tree

_BATCH = 256
_MOST_LINES = 20  # of clients in the table, and of classes in that of confusions

# (what a client keeps, x [M, ...]) -> outputs [M, K]
Predict = Callable[[Tree, Tree], np.ndarray]


class Options(NamedTuple):
    """The flags of this binary."""

    run: str
    state: str = "best"
    dataset: str = ""
    out: str = ""
    data_dir: str = ""


class Part(NamedTuple):
    """M examples that are told together."""

    domain: str
    split: str
    client: int  # whose they are; -1: somebody's who was never seen
    x: Tree  # [M, ...] as the network takes them
    y: np.ndarray  # [M] int


class Told(NamedTuple):
    """What is told of some examples."""

    examples: int
    accuracy: float
    loss: float  # mean cross-entropy in nats


def own_parts(one: Finished, made: Assembled, seed: int) -> list[Part]:
    """What training looked at: the validation examples of each client, and the test's."""
    split = made.splits[one.cell.held_out][seed]
    names = program.group_names(split)
    group = program.groups(split.domain)
    data = jax.tree.map(np.asarray, made.data)

    def part(domain: str, kind: str, client: int, rows: np.ndarray) -> Part:
        return Part(domain, kind, client, jax.tree.map(lambda a: a[rows], data.x), data.y[rows])

    (test,) = parts_of(split.test)
    clients = enumerate(parts_of(split.valid))
    parts = [part(names[group[who]], "validation", who, rows) for who, rows in clients]
    return [*parts, part(summary.test_name(one.cell, names), "test", -1, test)]


def new_parts(where: str, new: Dataset, old: Dataset) -> list[Part]:
    """Other data, domain by domain.

    Raises UsageError for inputs of another shape, and for classes that the run does not know.
    """
    if old.words or new.words:
        raise UsageError(f"{where}: must not be text, whose words every run numbers anew")
    if new.render is not None:
        raise UsageError(f"{where}: must be stored as it is seen")
    sample = jax.tree.map(lambda leaf: leaf[:1], old.x)
    seen = jax.eval_shape(old.render, sample) if old.render else sample
    here, there = np.shape(new.x)[1:], jnp.shape(seen)[1:]
    if here != there:
        raise UsageError(f"{where}: has inputs {list(here)}, must have {list(there)}, as the run")
    # By name, or where those are mere numbers, by number.
    known = dict(zip(old.classes, range(len(old.classes)), strict=True))
    if not set(new.classes) <= set(known):
        known = {str(number): number for number in range(len(old.classes))}
    for name in new.classes:
        if name not in known:
            raise UsageError(
                f"{where}: has the class {name}, must have those of the run, "
                f"{', '.join(old.classes)}, or their numbers from 0"
            )
    y = np.array([known[name] for name in new.classes])[new.y]
    groups = [(name, new.domain == index) for index, name in enumerate(new.domains)]
    return [Part(name, "new", -1, new.x[rows], y[rows]) for name, rows in groups if rows.any()]


def predictor(algorithm: Algorithm, server: Tree) -> Predict:
    """What a server's networks put out, in batches that are compiled once."""
    outputs = jax.jit(algorithm.predict)

    def predict(own: Tree, x: Tree) -> np.ndarray:
        size = len(jax.tree.leaves(x)[0])
        rows = np.resize(np.arange(size), -(-size // _BATCH) * _BATCH).reshape(-1, _BATCH)
        told = [outputs(server, own, jax.tree.map(lambda a, b=batch: a[b], x)) for batch in rows]
        return np.concatenate(told)[:size]

    return predict


def tell(outputs: np.ndarray, y: np.ndarray) -> Told:
    """Of logits [M, K] and labels [M], M above 0."""
    logits = outputs.astype(np.float64)
    highest = logits.max(1, keepdims=True)
    total = highest[:, 0] + np.log(np.exp(logits - highest).sum(1))
    loss = (total - logits[np.arange(len(y)), y]).mean()
    return Told(len(y), float((outputs.argmax(1) == y).mean()), float(loss))


def confusion(predicted: np.ndarray, y: np.ndarray, num_classes: int) -> np.ndarray:
    """[K, K] how many of a class (row) are taken for each (column)."""
    counts = np.zeros((num_classes, num_classes), int)
    np.add.at(counts, (y, predicted), 1)
    return counts


def of_run(
    algorithm: Algorithm, server: Tree, clients: Tree, parts: Sequence[Part], num_classes: int
) -> dict[str, Any]:
    """What is told of a run, as json holds it. clients: [C, ...] what they keep, () if that does
    not matter."""
    predict = predictor(algorithm, server)
    personal = algorithm.personal
    unseen = algorithm.init_client(server, jnp.int32(0)) if personal else ()

    def kept(who: int) -> Tree:
        return jax.tree.map(lambda leaf: leaf[who], clients) if personal and who >= 0 else unseen

    parts = [part for part in parts if len(part.y)]
    outputs = [predict(kept(part.client), part.x) for part in parts]
    domains, by_client = {}, []
    for name, split in dict.fromkeys((part.domain, part.split) for part in parts):
        mine = [i for i, part in enumerate(parts) if (part.domain, part.split) == (name, split)]
        y = np.concatenate([parts[i].y for i in mine])
        told = tell(np.concatenate([outputs[i] for i in mine]), y)
        domains[name] = {"split": split, **told._asdict()}
    unknown = [i for i, part in enumerate(parts) if part.client < 0]
    y = np.concatenate([parts[i].y for i in unknown])
    for part, out in zip(parts, outputs, strict=True):
        if part.client >= 0:
            about = {"client": part.client, "domain": part.domain}
            by_client.append(about | tell(out, part.y)._asdict())
    if personal and not by_client:
        for who in range(len(jax.tree.leaves(clients)[0])):
            all_of_it = np.concatenate([predict(kept(who), parts[i].x) for i in unknown])
            by_client.append({"client": who, "domain": "all", **tell(all_of_it, y)._asdict()})
    predicted = np.concatenate([outputs[i] for i in unknown]).argmax(1)
    return {
        "domains": domains,
        "clients": by_client,
        "confusion": confusion(predicted, y, num_classes).tolist(),
    }


def recalls(run: dict[str, Any]) -> list[float | None]:
    """[K] the accuracy on each class; None for one without examples."""
    counts = np.array(run["confusion"])
    return [
        right / total if total else None
        for right, total in zip(counts.diagonal(), counts.sum(1), strict=True)
    ]


def chosen(one: Finished) -> list[int]:
    """The runs with the selected hyperparameters, one of each seed.

    Those by validation where --select finds nothing. Raises UsageError if a seed of all diverged.
    """
    rule = one.config.watching.select
    picked = report.choose("", one.result, rule) or report.choose("", one.result)
    if picked is None:
        raise UsageError(f"{one.where}: a seed of every setting diverged")
    return picked.indices


def evaluate(one: Finished, options: Options) -> dict[str, Any]:
    """What is told of a run folder, as json holds it."""
    made = trained.assembled(one.config, one.cell)
    if not options.dataset:
        trained.check_data(one, made)
    held = trained.served(one, made, options.state)
    classes, which = made.dataset.classes, chosen(one)
    new: list[Part] | None = None
    if options.dataset:
        asked = dataclasses.replace(  # looked at as the run's own are
            config.of().data,
            dataset=options.dataset,
            data_dir=options.data_dir,
            image_size=one.config.data.image_size,
            stride=one.config.data.stride,
        )
        new = new_parts(f"--dataset={options.dataset}", data_flags.load(asked), made.dataset)
    algorithm = trained.algorithm(one, made, which[0])
    runs = []
    for index in which:
        trained.check_kept(one, held, index, options.state)
        seed, told = one.cell.runs[index].seed, one.told(index, options.state)
        assert told is not None
        server, clients = jax.tree.map(lambda a, at=index: a[at], (held.server, held.clients))
        parts = own_parts(one, made, seed) if new is None else new
        record = of_run(algorithm, server, clients, parts, len(classes))
        runs.append({"seed": seed, "round": told["round"], **record})
    return {
        "run": str(one.folder),
        "state": options.state,
        "dataset": options.dataset or one.config.data.dataset,
        "classes": classes,
        "hyper": one.cell.runs[which[0]].hyper,
        "runs": runs,
    }


def _over_runs(told: dict[str, Any], name: str) -> list[list[dict[str, Any]]]:
    """What a list or a dict of the runs tells, entry by entry, of all runs that have the entry."""
    listed = [run[name] for run in told["runs"]]
    if isinstance(listed[0], dict):
        keys = dict.fromkeys(key for run in listed for key in run)
        return [[run[key] for run in listed if key in run] for key in keys]
    keys = dict.fromkeys(each["client"] for run in listed for each in run)
    return [[each for run in listed for each in run if each["client"] == key] for key in keys]


def tables(told: dict[str, Any]) -> str:
    """Of what `evaluate` tells: means and standard deviations over the seeds."""

    def numbers(entries: Sequence[dict[str, Any]]) -> list[str]:
        examples = f"{np.mean([entry['examples'] for entry in entries]):g}"
        loss = np.mean([entry["loss"] for entry in entries])
        return [examples, report.percent([e["accuracy"] for e in entries]), f"{loss:.3f}"]

    domains = dict.fromkeys(name for run in told["runs"] for name in run["domains"])
    rows = [
        [name, entries[0]["split"], *numbers(entries)]
        for name, entries in zip(domains, _over_runs(told, "domains"), strict=True)
    ]
    parts = [_table(["domain", "split", "examples", "accuracy, %", "loss"], rows)]
    of_class = zip(*map(recalls, told["runs"]), strict=True)
    rows = [
        [name, report.percent([value for value in values if value is not None] or [np.nan])]
        for name, values in zip(told["classes"], of_class, strict=True)
    ]
    parts.append(_table(["class", "accuracy, %"], rows))
    clients = _over_runs(told, "clients")
    clients.sort(key=lambda entries: np.mean([entry["accuracy"] for entry in entries]))
    if clients:
        rows = [[e[0]["client"], e[0]["domain"], *numbers(e)] for e in clients[:_MOST_LINES]]
        more = f" ({_MOST_LINES} of {len(clients)})" if len(clients) > _MOST_LINES else ""
        head = f"client, the worst first{more}"
        parts.append(_table([head, "domain", "examples", "accuracy, %", "loss"], rows))
    counts = _confusion(told)
    if len(counts) <= _MOST_LINES:
        rows = [[name, *row] for name, row in zip(told["classes"], counts.tolist(), strict=True)]
        parts.append(_table(["is, taken for", *told["classes"]], rows))
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


def _confusion(told: dict[str, Any]) -> np.ndarray:
    """[K, K] of all seeds together."""
    return np.sum([run["confusion"] for run in told["runs"]], 0)


def draw(path: Path, told: dict[str, Any], title: str) -> None:
    """The confusions, and the accuracies by domain, class and client: bars of their means, a dot
    for each seed; of many clients a line through all."""
    domains = dict.fromkeys(name for run in told["runs"] for name in run["domains"])
    by_class = np.array([recalls(run) for run in told["runs"]], float).T
    clients = _over_runs(told, "clients")
    groups = [
        (
            "domain",
            list(domains),
            [[e["accuracy"] for e in d] for d in _over_runs(told, "domains")],
        ),
        ("class", list(told["classes"]), by_class.tolist()),
        (
            "client",
            [str(entries[0]["client"]) for entries in clients],
            [[entry["accuracy"] for entry in entries] for entries in clients],
        ),
    ]
    groups = [group for group in groups if group[1]]
    figure = Figure(figsize=(12, 2.6 * len(groups) + 0.6), layout="constrained")
    grid = figure.add_gridspec(len(groups), 2)
    for row, (what, names, values) in enumerate(groups):
        axis = figure.add_subplot(grid[row, 1])
        if what == "client" and len(names) > run_figures.MOST_DOTS:
            served = [{e["client"]: e["accuracy"] for e in run["clients"]} for run in told["runs"]]
            of_seeds = [[run.get(int(name), np.nan) for name in names] for run in served]
            run_figures.draw_quantiles(axis, 100 * np.array(of_seeds), 0)
            what = "clients, the worst first, %"
        else:
            at = np.arange(len(names))
            means = [100 * np.mean([v for v in of if v == v] or [0]) for of in values]
            axis.bar(at, means, color="0.8")
            for x, of in zip(at, values, strict=True):
                axis.plot([x] * len(of), 100 * np.array(of), "o", ms=3, color="C0")
            figures.name_x(axis, names, 5.2)
        axis.set(ylim=(0, 102), xlabel=what, ylabel="accuracy, %")
    counts = _confusion(told)
    share = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axis = figure.add_subplot(grid[:, 0])
    picture = axis.imshow(share, cmap="Blues", vmin=0, vmax=100)
    figure.colorbar(picture, ax=axis, label="of the class, %", shrink=0.8)
    figures.name_x(axis, told["classes"], 4.0)
    figures.name_y(axis, told["classes"], 4.0)
    axis.set(xlabel="taken for", ylabel="is")
    if len(counts) <= _MOST_LINES:
        for is_, as_ in np.argwhere(counts):
            color = "white" if share[is_, as_] > 60 else "black"
            axis.text(as_, is_, str(counts[is_, as_]), ha="center", va="center", size=8, c=color)
    if len(told["runs"]) > 1:
        title += f"\nmeans over {len(told['runs'])} seeds, with a dot or a band for how they differ"
    figures.entitle(figure, title)
    figures.save(figure, path)


def run(options: Options) -> str:
    """Writes the picture and the json, and returns the tables and where they are.

    Raises UsageError, in one line, for what is no finished run, has no such state, or other data
    that do not fit it.
    """
    trained.check_state(options.state)
    if not options.run:
        raise UsageError("--run=: must be the folder of a finished run")
    one = trained.find("run", Path(options.run), options.data_dir, options.dataset)
    name = f"evaluation-{options.state}"
    name += f"-{Path(options.dataset).stem}.png" if options.dataset else ".png"
    out = check_picture("out", options.out or str(one.folder / name))
    told = evaluate(one, options)
    rounds = ", ".join(str(run["round"]) for run in told["runs"])
    title = f"{one.cell.label}, held out: {one.cell.held_out or 'test split'}, after round {rounds}"
    title += f"; on {options.dataset}" if options.dataset else ""
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(out, told, title)
    folders.write_json(out.with_suffix(".json"), told)
    where = f"Picture: {out}. Numbers: {out.with_suffix('.json')}."
    return f"\n{title}\n\n{tables(told)}\n\n{where}"


def define(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags."""
    trained.define(values)
    for name, text in (
        (
            "dataset",
            "Other data, as --dataset of train; default: the run's own, dealt as they were.",
        ),
        ("out", "The picture, a .png file; the numbers go beside it, as .json."),
    ):
        flags.DEFINE_string(name, "", text, values)


def options(values: flags.FlagValues = flags.FLAGS) -> Options:
    """The parsed flags."""
    parsed = values.flag_values_dict()
    return Options(**{name: parsed[name] for name in Options._fields})


if __name__ == "__main__":
    define()
    launch.main(run, __doc__, lambda given: options())
