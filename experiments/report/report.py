"""The report of a run or a sweep: its tables, figures, runs.csv, metrics.csv and result.json."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import parts_of

from .. import finished, predictions
from ..assembly import aggregation
from ..assembly.experiment import Assembly
from ..assembly.metrics import ACCURACY, LOWER_IS_BETTER
from ..config import Config
from ..folder import files, log, provenance, records, run_folder, selection
from ..folder.records import Origin, Result, Sweep
from ..run import FinishedCell
from . import data_figures, figures, forms, names, run_figures, runs_csv, tables
from .forms import Part


def write(assembled: Assembly, folder: Path, cells: Sequence[FinishedCell]) -> str:
    """Writes tables and figures, and returns the text to print. cells: in order."""
    config = assembled.config
    shown = data_figures.shown(assembled, assembled.cells[0].held_out)
    figures.draw(folder / "partition.png", data_figures.paint, *shown, key=(shown[-1], config))
    drawn = [_cell(config, cell) for cell in cells]
    run_figures.write(folder, drawn, _title(config))
    return write_table(assembled, folder, cells)


def write_table(assembled: Assembly, folder: Path, cells: Sequence[FinishedCell]) -> str:
    """Writes the tables, runs.csv and result.json, and returns the text to print."""
    config, title = assembled.config, _title(assembled.config)
    more: list[Part] = []
    if config.evaluation.metrics:
        more = _metrics(assembled, folder, cells)
    else:
        files.remove(folder / "metrics.csv")
    if config.network.head_from and config.network.model == "cosine":
        more = [*_zero_shot(assembled, cells), *more]
    constants = _constants(assembled, cells)
    record = folder / "result.json"
    is_one = cells[0].folder == folder
    # The report of finished runs gets the data of the first seed alone.
    kind: type[Result | Sweep] = Result if is_one else Sweep
    known = records.decoded(record.read_bytes(), kind) if record.exists() else None
    before = known.constants if known else {}
    for name, of_seed in constants.items():
        of = before.get(name, {}).items()
        constants[name] = {
            seed: one for seed, one in of if int(seed) in config.training.seeds
        } | of_seed
    finished = [
        _cell(config, cell, constants.get(selection.held_out_of(cell.result), {})) for cell in cells
    ]
    more += [text] if (text := aggregation.budget(config)) else []
    more += unseen_norms(assembled)
    text = tables.write(folder / "table", finished, _main(config, finished), title=title, more=more)
    runs_csv.write(folder / "runs.csv", finished)
    if is_one:
        files.write_json(record, cells[0].result | {"constants": constants})
    else:
        files.write_json(record, Sweep(title, [cell.result for cell in cells], constants))
    where = f"Table: {folder / 'table.md'}. Evaluations: {folder / 'runs.csv'}."
    if (folder / "curves.png").exists():  # not where every run diverged
        where += f" Curves: {folder / 'curves.png'}."
    if others := _others(folder, cells):
        where += f" Of the runs in {folder}, these tables leave out {', '.join(others)}."
    return f"\n{title}\n\n{text}\n\n{selection.explained(config.evaluation.select)}\n{where}"


# The statistics of BatchNorm by --unseen_norms.
_NORMS = {
    "mean": "the mean of the clients' running statistics",
    "batch": "the statistics of each batch (--unseen_norms=batch)",
    "estimated": "the statistics of all their inputs (--unseen_norms=estimated)",
}


def unseen_norms(assembled: Assembly, *, is_new: bool = False) -> list[str]:
    """A line on BatchNorm where unseen domains are evaluated. is_new: whether other data are."""
    has_unseen = is_new or any(map(assembled.tests_unseen, assembled.cells))
    if not (assembled.has_running_norms and has_unseen):
        return []
    return [f"BatchNorm on unseen domains: {_NORMS[assembled.config.evaluation.unseen_norms]}."]


def _cell(
    config: Config, cell: FinishedCell, constant: tables.Constant = MappingProxyType({})
) -> tables.TableCell:
    """A cell for tables and figures."""
    return tables.TableCell(
        cell.label,
        cell.result,
        config.evaluation.select,
        cell.folder,
        constant,
        name=names.named(cell.label),
    )


def _main(config: Config, cells: Sequence[tables.TableCell]) -> tables.Main | None:
    """The table that compares methods, with the numbers of --paper; None if there is none."""
    of_algorithm = dict(entry.split("=", 1) for entry in config.output.paper)
    labels = dict.fromkeys(cell.label for cell in cells)
    numbers = {label: of_algorithm.get(label.split()[0], "") for label in labels}
    return tables.main_table(
        cells,
        numbers={"paper": numbers} if of_algorithm else {},
    )


def _constants(assembled: Assembly, cells: Sequence[FinishedCell]) -> records.Constants:
    """The accuracies of answers that are always the same, for the seeds whose splits are known."""
    if assembled.objective.measure != ACCURACY or assembled.dataset.task != "classes":
        return {}
    y = np.asarray(assembled.data.y)
    found: records.Constants = {}
    for cell in cells:
        of_seed = found.setdefault(selection.held_out_of(cell.result), {})
        for seed, split in assembled.splits[cell.result.cell.held_out].items():
            of_both = (np.concatenate(parts_of(each)) for each in (split.train, split.test))
            train, test = (np.bincount(y[rows], minlength=y.max() + 1) for rows in of_both)
            parts = test / test.sum()
            of_seed[str(seed)] = float(parts[train.argmax()]), parts[test > 0].tolist()
    return found


def _zero_shot(assembled: Assembly, cells: Sequence[FinishedCell]) -> list[Part]:
    """A table of the test scores of untrained class vectors: rules of selection leave out round 0.

    They are the mean over the seeds, whose tests may differ.
    """
    measure = assembled.objective.measure
    row = {}
    for cell in cells:
        start = [line.test_score for line in log.read(cell.folder) if line.round == 0]
        if start:
            row[selection.held_out_of(cell.result)] = float(np.mean(start))
    if len(row) > 1:
        row["mean"] = float(np.mean([*row.values()]))
    if not row:
        return []
    form = forms.text_of(measure)
    shown = {name: [form([score])] for name, score in row.items()}
    return [pd.DataFrame({f"round 0, {measure.heading()}": ["zero-shot"], **shown})]


def _others(folder: Path, cells: Sequence[FinishedCell]) -> list[str]:
    """The names of the folders in a sweep's that hold cells of an earlier, wider sweep."""
    of_this = {cell.folder for cell in cells}
    if folder in of_this:  # a run of `train` has no folders of cells
        return []
    there = {path.parent for path in folder.glob("*/config.json")}
    return sorted(path.name for path in there - of_this)


def _title(config: Config) -> str:
    count = len(config.training.seeds)
    seeds = "one seed" if count == 1 else f"{count} seeds"
    rounds = "1 round" if config.training.rounds == 1 else f"{config.training.rounds} rounds"
    return f"{config.title}, {config.network.model}, {rounds}, {seeds}"


def _metrics(assembled: Assembly, folder: Path, cells: Sequence[FinishedCell]) -> list[Part]:
    """Writes metrics.csv, and returns the table of --metrics: on the test and the worst domain.

    A line below the table names each run whose state is not there any more.
    """
    config = assembled.config
    classes = assembled.dataset.classes
    rows: list[dict[str, Any]] = []
    lacking: list[str] = []
    for cell in cells:
        chosen = selection.choose(cell.label, cell.result, config.evaluation.select)
        if chosen is None:
            continue
        of_state = {
            state: finished.of_folder(cell.folder, state, assembled) for state in finished.STATES
        }
        about = {"algorithm": cell.label, "held_out": chosen.held_out}
        of = "" if len(cells) == 1 else f" of {cell.label}, held out {chosen.held_out}"
        for index in chosen.indices:
            run = cell.result.runs[index]
            picked = selection.picked_or_last(run, config.evaluation.select)
            # Another rule may have kept another state than this one's, but the last is there.
            runs = of_state["last"]
            if picked.round != runs.round:
                runs = of_state["best"]
            try:
                found = predictions.predicted(runs, index, predictions.own_parts(runs, index))
            except UsageError as error:
                lacking.append(f"The metrics leave out seed {run.seed}{of}: {error}.")
                continue
            rows += [
                about | row
                for row in predictions.rows(
                    found, assembled.objective, classes, config.evaluation.metrics
                )
            ]
    frame = pd.DataFrame(rows)
    files.write(folder / "metrics.csv", frame.to_csv(index=False))
    parts: list[Part] = ["\n".join(lacking)] if lacking else []
    if not rows:
        return parts
    of_domains = frame[frame["by"] == "domain"].astype(
        dict.fromkeys(config.evaluation.metrics, float)
    )
    keys = ["algorithm", "held_out"]
    form = forms.known(lambda of: forms.spread(of, ".4g"))
    # A test split of several domains counts with their mean.
    tests = of_domains[of_domains["split"] == "test"].groupby([*keys, "seed"], sort=False)
    runs = of_domains.groupby([*keys, "seed"], sort=False)
    columns = {}
    for name in config.evaluation.metrics:
        worst = runs[name].max() if name in LOWER_IS_BETTER else runs[name].min()
        columns[name] = tests[name].mean().groupby(keys, sort=False).agg(form)
        columns[f"{name}, worst domain"] = worst.groupby(keys, sort=False).agg(form)
    table = pd.DataFrame(columns).reset_index()
    heads = {"algorithm": "metrics where selected", "held_out": "held out"}
    return [table.rename(columns=heads), *parts]


_LEFT_OUT = ("resume",)  # how often a run was started


def origin(words: Sequence[str], cells: Sequence[tuple[Path, Result]]) -> Origin:
    """The record of a table: how it came about, from the provenance of its runs.

    words: of the command. cells: the folders of the runs, with their results; at least one.
    """
    start = provenance.merged(run_folder.record_of(folder).start for folder, _ in cells)
    return Origin(
        command=command(words),
        seeds=sorted({run.seed for _, result in cells for run in result.runs}),
        date=start.date[:10],
        commit=start.commit,
        data=start.data,
        versions=start.versions,
        processor=start.processor,
        # The runs of a cell train at the same time.
        seconds=round(sum(max(run.last.seconds for run in result.runs) for _, result in cells), 1),
    )


def command(words: Sequence[str]) -> str:
    """A command line of fedjax-inv. A path shows its last part alone, as others lie elsewhere."""
    shown = ["fedjax-inv"]
    for word in words:
        name, equals, value = word.partition("=")
        parts = [Path(x).name if x.startswith(("/", "~", ".")) else x for x in value.split(",")]
        if name.lstrip("-") not in _LEFT_OUT:
            shown.append(name + equals + ",".join(parts))
    return shlex.join(shown)
