"""Seconds of a round of each row of FL Games' Table 1, all seeds together.

python -m benchmarks.game_rounds --data=colored_mnist --client_chunk=1 --run_chunk=1

A round of training alone, one that is watched as the row asks for, and what a row of all its rounds
takes by that, without evaluations, checkpoints and compilation. The rows take turns; medians count.
"""

import time
from typing import Any

import jax
from absl import app, flags

from benchmarks import workloads
from experiments.experiment import assemble, command_line
from experiments.flags.flag import check_known
from experiments.papers import fl_games, study
from experiments.running import chunks
from fedjax_inv import program

FLAGS = flags.FLAGS


class Row:
    """A row's program, with or without anything to watch."""

    def __init__(self, flags: list[str], watched: bool) -> None:
        self.config = config = command_line.of_arguments(flags, nonfinite="mark", may_be_idle=True)
        made = assemble.assemble(config)
        (cell,) = made.cells
        self._data, ready = made.data, made.prepare(cell)
        self._inputs = chunks.without_evaluation(ready.inputs)
        if watched:
            self._inputs = self._inputs._replace(watched=ready.inputs.watched)
        compiled = program.make(
            ready.experiment,
            client_chunk=int(config.run.client_chunk),
            run_chunk=int(config.run.run_chunk),
        )
        self._segment = compiled.segment
        self._cohorts = assemble.cohorts(config, ready.inputs, config.watching.eval_every)
        self._states = compiled.init(self._data, ready.inputs)
        self.seconds: list[float] = []

    def run(self) -> None:
        """A segment."""
        start = time.perf_counter()
        self._states, _ = jax.block_until_ready(
            self._segment(self._data, self._inputs, self._states, self._cohorts)
        )
        self.seconds.append((time.perf_counter() - start) / self.config.watching.eval_every)


def main(argv: list[str]) -> None:
    del argv
    check_known("data", FLAGS.data, fl_games.DATA)
    rows = study.select(fl_games.methods(FLAGS.data), FLAGS.rows)
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
        num_rounds = both[0].config.run.rounds
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
    flags.DEFINE_string("data", "colored_mnist", "Data set, as papers/fl_games.py names it.")
    flags.DEFINE_list("rows", [], "Which rows, by their labels; default: all.")
    flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Seeds.")
    flags.DEFINE_integer("client_chunk", 1, "Clients at once, 0: all.", lower_bound=0)
    flags.DEFINE_integer("run_chunk", 1, "Seeds at once, 0: all.", lower_bound=0)
    flags.DEFINE_integer("rounds", 6, "Rounds of a segment; a multiple of 2 and 3.", lower_bound=1)
    flags.DEFINE_integer("segments", 3, "Timed segments.", lower_bound=1)
    flags.DEFINE_string("json", "", "File for the figures.")
    app.run(main)
