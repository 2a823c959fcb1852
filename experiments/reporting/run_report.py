"""The report of a run or a sweep: its tables, figures, runs.csv and result.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedjax_inv.checks import UsageError

from ..experiment.assemble import Assembled
from ..experiment.config import Config
from ..parts import selection
from ..reporting import (
    data_figures,
    evaluations,
    figures,
    predictions,
    report,
    run_figures,
)
from ..reporting.finished import NotSaved
from ..reporting.tables import Part
from ..running import files
from ..running.launch import FinishedCell
from ..running.records import Sweep


def write(assembled: Assembled, folder: Path, finished: Sequence[FinishedCell]) -> str:
    """Writes tables and figures, and returns the text to print. finished: the cells in order."""
    draw(assembled, folder, finished)
    return write_table(assembled, folder, finished)


def draw(assembled: Assembled, folder: Path, finished: Sequence[FinishedCell]) -> None:
    """Writes the figures."""
    config = assembled.config
    partition = folder / "partition.png"
    begun = max((cell.folder / "config.json").stat().st_mtime for cell in finished)
    held_out, seed = assembled.cells[0].held_out, config.seeds[0]
    title = data_figures.title_of(config.title, held_out, seed)
    # A figure of the same cell stays.
    is_there = partition.exists() and partition.stat().st_mtime >= begun
    if not (is_there and figures.title_in(partition) == title):
        dataset, split = assembled.as_seen(held_out, seed)
        is_wrong = dataset.y != assembled.dataset.y
        data_figures.draw_partition(partition, dataset, split, is_wrong, title=title)
    run_figures.write(folder, finished, title=_title(config), rule=config.select)


def write_table(assembled: Assembled, folder: Path, finished: Sequence[FinishedCell]) -> str:
    """Writes the tables, runs.csv and result.json, and returns the text to print."""
    config, title = assembled.config, _title(assembled.config)
    paper = dict(entry.split("=", 1) for entry in config.paper)
    rule = config.select
    results = [(cell.label, cell.result) for cell in finished]
    more: list[Part] = []
    if config.metrics:
        more = metrics_parts(assembled, folder, finished)
    else:
        files.remove(folder / "metrics.csv")
    text = report.write(folder, results, title=title, paper=paper, rule=rule, more=more)
    cells = [evaluations.Cell(one.label, rule, one.folder, one.result) for one in finished]
    evaluations.write(folder / "runs.csv", cells)
    if finished[0].folder != folder:  # a cell in the run folder has written its result already
        results_of_all = Sweep(title, [cell.result for cell in finished])
        files.write_json(folder / "result.json", results_of_all)
    where = f"Table: {folder / 'table.md'}. Evaluations: {folder / 'runs.csv'}."
    if (folder / "curves.png").exists():  # not where every run diverged
        where += f" Curves: {folder / 'curves.png'}."
    if others := _others(folder, finished):
        where += f" Of the runs in {folder}, these tables leave out {', '.join(others)}."
    return f"\n{title}\n\n{text}\n\n{report.explained(rule)}\n{where}"


def _others(folder: Path, finished: Sequence[FinishedCell]) -> list[str]:
    """The names of the folders in a sweep's that hold cells of an earlier, wider sweep."""
    of_this = {cell.folder for cell in finished}
    if folder in of_this:  # a run of `train` has no folders of cells
        return []
    return sorted(
        {path.parent.name for path in folder.glob("*/config.json") if path.parent not in of_this}
    )


def metrics_parts(
    assembled: Assembled, folder: Path, finished: Sequence[FinishedCell]
) -> list[Part]:
    """Writes metrics.csv, and returns the table of --metrics: a row for each cell and domain.

    A line below the table names each run whose state is not there any more.
    """
    config, classes = assembled.config, assembled.dataset.classes
    rows: list[dict[str, Any]] = []
    lacking: list[str] = []
    is_alone = len(finished) == 1
    for cell in finished:
        chosen = report.choose(cell.label, cell.result, config.select)
        if chosen is None:
            continue
        runs = predictions.of_folder(cell.folder, assembled)
        algorithm = runs.algorithm(chosen.indices[0])
        for index in chosen.indices:
            picked = selection.picked_or_last(runs.result.runs[index], config.select)
            # Another rule may have kept another state than this one's, but the last is there.
            is_last = picked.round == runs.result.runs[index].last.round
            one = runs.run(index, "last" if is_last else "best")
            own = predictions.own_parts(runs, one.run.seed)
            try:
                found = predictions.predicted(one, algorithm, own)
            except UsageError as error:
                of = "" if is_alone else f" of {cell.label}, held out {chosen.held_out}"
                why = f"its {error.why}" if isinstance(error, NotSaved) else str(error)
                lacking.append(f"The metrics leave out seed {one.run.seed}{of}: {why}.")
                continue
            about = {"algorithm": cell.label, "held_out": chosen.held_out}
            scores = predictions.rows(found, assembled.task, classes, config.metrics)
            rows += [about | row for row in scores]
    frame = pd.DataFrame(rows)
    files.write(folder / "metrics.csv", frame.to_csv(index=False))
    parts = ["\n".join(lacking)] if lacking else []
    if not rows:
        return [*parts]
    keys = ["algorithm", "held_out", "domain", "split"]
    of_domains = frame[frame["by"] == "domain"].groupby(keys, sort=False)
    table = of_domains[[*config.metrics]].agg(report.metric_text).reset_index()
    heads = {"algorithm": "metrics where selected", "held_out": "held out"}
    return [table.rename(columns=heads), *parts]


def _title(config: Config) -> str:
    count = len(config.seeds)
    seeds = "one seed" if count == 1 else f"{count} seeds"
    rounds = "1 round" if config.rounds == 1 else f"{config.rounds} rounds"
    return f"{config.title}, {config.model}, {rounds}, {seeds}"
