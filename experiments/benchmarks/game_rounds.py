"""Seconds of a round of each row of FL Games' Table 1, all seeds together.

python -m experiments.benchmarks.game_rounds --data=colored_mnist --client_chunk=1 --run_chunk=1

A round of training alone, one that is watched as the row asks for, and what a row of all its rounds
takes by that, without evaluations, checkpoints and compilation. The rows take turns; medians count.
"""

import time
from typing import Any

import jax
from absl import app, flags

from experiments import build, config, fl_games_tables, launch, registry, tune
from experiments.benchmarks import workloads
from fedjax_inv import program

FLAGS = flags.FLAGS


class Row:
    """A row's program, with or without anything to watch."""

    def __init__(self, flags: list[str], watched: bool) -> None:
        self.settings = settings = config.from_arguments(flags, nonfinite="mark")
        dataset = build.dataset(settings)
        (cell,) = build.cells(settings, build.held_out(settings, dataset.domains))
        self._data, splits = launch.deal(settings, dataset, [cell.held_out])
        ready = launch.prepare(
            settings, cell, build.model(settings, dataset), splits[cell.held_out]
        )
        self._inputs = tune.without_evaluation(ready.inputs)
        if watched:
            self._inputs = self._inputs._replace(watched=ready.inputs.watched)
        made = program.make(
            ready.experiment,
            client_chunk=int(settings.client_chunk),
            run_chunk=int(settings.run_chunk),
        )
        self._segment = made.segment
        self._cohorts = build.cohorts(settings, ready.inputs, settings.eval_every)
        self._states = made.init(self._data, ready.inputs)
        self.seconds: list[float] = []

    def run(self) -> None:
        """A segment."""
        start = time.perf_counter()
        self._states, _ = jax.block_until_ready(
            self._segment(self._data, self._inputs, self._states, self._cohorts)
        )
        self.seconds.append((time.perf_counter() - start) / self.settings.eval_every)


def main(argv: list[str]) -> None:
    del argv
    registry.check_known("data", FLAGS.data, fl_games_tables.DATA)
    rows = fl_games_tables.select(fl_games_tables.methods(FLAGS.data), FLAGS.rows)
    extra = [
        *(f"--client_chunk={FLAGS.client_chunk}", f"--run_chunk={FLAGS.run_chunk}"),
        *(f"--seeds={','.join(FLAGS.seeds)}", f"--eval_every={FLAGS.rounds}"),
        "--after_stop=continue",  # rounds after the end take no time
    ]
    programs = {
        row.label: [Row([*row.flags, *extra], watched) for watched in (False, True)] for row in rows
    }
    for _ in range(1 + FLAGS.segments):
        for both in programs.values():
            for one in both:
                one.run()
    table: list[dict[str, Any]] = []
    for label, both in programs.items():
        alone, watched = (workloads.median(one.seconds[1:]) for one in both)
        num_rounds = both[0].settings.rounds
        table.append(
            {
                "row": label,
                "training, s a round": alone,
                "watched, s a round": watched,
                "rounds": num_rounds,
                "all rounds, minutes": watched * num_rounds / 60,
            }
        )
    workloads.show(f"{FLAGS.data}, {len(FLAGS.seeds)} seeds", table)
    workloads.save(FLAGS.json, table)


if __name__ == "__main__":
    flags.DEFINE_string("data", "colored_mnist", "Data set, as fl_games_tables names it.")
    flags.DEFINE_list("rows", [], "Which rows, by their labels; default: all.")
    flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Seeds.")
    flags.DEFINE_integer("client_chunk", 1, "Clients at once, 0: all.", lower_bound=0)
    flags.DEFINE_integer("run_chunk", 1, "Seeds at once, 0: all.", lower_bound=0)
    flags.DEFINE_integer("rounds", 6, "Rounds of a segment; a multiple of 2 and 3.", lower_bound=1)
    flags.DEFINE_integer("segments", 3, "Timed segments.", lower_bound=1)
    flags.DEFINE_string("json", "", "File for the figures.")
    app.run(main)
