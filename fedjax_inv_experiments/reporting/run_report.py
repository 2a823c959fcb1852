"""The report of a run or a sweep: its tables, figures, runs.csv and result.json."""

from collections.abc import Sequence
from pathlib import Path

from fedjax_inv_experiments.experiment.assemble import Assembled
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.reporting import data_figures, evaluations, report, run_figures
from fedjax_inv_experiments.running import files
from fedjax_inv_experiments.running.launch import FinishedCell


def write(assembled: Assembled, folder: Path, finished: Sequence[FinishedCell]) -> str:
    """Writes tables and figures, and returns the text to print. finished: the cells in order."""
    draw(assembled, folder, finished)
    return write_table(assembled, folder, finished)


def draw(assembled: Assembled, folder: Path, finished: Sequence[FinishedCell]) -> None:
    """Writes the figures."""
    config = assembled.config
    split = assembled.splits[assembled.cells[0].held_out][config.run.seeds[0]]
    data_figures.draw_partition(folder / "partition.png", assembled.dataset, split)
    run_figures.write(folder, finished, title=_title(config), rule=config.watching.select)


def write_table(assembled: Assembled, folder: Path, finished: Sequence[FinishedCell]) -> str:
    """Writes the tables, runs.csv and result.json, and returns the text to print."""
    config, title = assembled.config, _title(assembled.config)
    paper = dict(entry.split("=", 1) for entry in config.method.paper)
    rule = config.watching.select
    results = [(cell.label, cell.result) for cell in finished]
    text = report.write(folder, results, title=title, paper=paper, rule=rule)
    cells = [evaluations.Cell(one.label, rule, one.folder, one.result) for one in finished]
    evaluations.write(folder / "runs.csv", cells)
    if finished[0].folder != folder:  # a cell in the run folder has written its result already
        files.write_json(
            folder / "result.json", {"title": title, "cells": [cell.result for cell in finished]}
        )
    where = f"Table: {folder / 'table.md'}. Evaluations: {folder / 'runs.csv'}."
    if (folder / "curves.png").exists():  # not where every run diverged
        where += f" Curves: {folder / 'curves.png'}."
    return f"\n{title}\n\n{text}\n\n{report.explained(rule)}\n{where}"


def _title(config: Config) -> str:
    count = len(config.run.seeds)
    seeds = "one seed" if count == 1 else f"{count} seeds"
    return f"{config.title}, {config.model.model}, {config.run.rounds} rounds, {seeds}"
