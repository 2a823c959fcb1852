"""The seconds of a round of each row in FL Games' Table 1, for all seeds together.

python -m benchmarks.game_rounds --data=colored_mnist --client_chunk=1 --run_chunk=1

The benchmark measures a round of training alone, and a round with watching by the row's flags. From
these it computes the time of a whole row without evaluations, checkpoints and compilation. The rows
take turns; medians count.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import frame
from fedjax_inv import program
from fedjax_inv_experiments.experiment import assemble, command_line
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.flag import at_least, flag
from fedjax_inv_experiments.papers import fl_games, study


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    data: str = flag(
        "colored_mnist", "Data set, as papers/fl_games.py names it.", choices=fl_games.DATA
    )
    rows: tuple[str, ...] = flag((), "Which rows, by their labels; default: all.", kind=str)
    seeds: tuple[int, ...] = flag((0, 1, 2, 3, 4), "Seeds.")
    client_chunk: int = flag(1, "Clients at once, 0: all.", at_least(0))
    run_chunk: int = flag(1, "Seeds at once, 0: all.", at_least(0))
    rounds: int = flag(6, "Rounds of a segment; a multiple of 2 and 3.", at_least(1))
    segments: int = flag(3, "Timed segments.", at_least(1))
    json: str = flag("", "File for the figures.")


class Row:
    """The program of a row, with or without watching."""

    def __init__(self, flags: list[str], watched: bool) -> None:
        self.config = config = command_line.of_arguments(flags, nonfinite="mark")
        assembled = assemble.assemble(config)
        (cell,) = assembled.cells
        self._data, ready = assembled.data, assembled.prepare(cell)
        self._inputs = ready.inputs if watched else ready.inputs._replace(watched=None)
        compiled = program.make(
            ready.experiment,
            client_chunk=int(config.run.client_chunk),
            run_chunk=int(config.run.run_chunk),
        )
        self._rounds = compiled.rounds
        self._cohorts = assemble.cohorts(config, ready.inputs, config.watching.eval_every)
        self._states = compiled.init(self._data, ready.inputs)

    def play(self) -> float:
        """Plays the rounds of a segment; returns the seconds of a round."""

        def run() -> None:
            self._states, _ = jax.block_until_ready(
                self._rounds(self._data, self._inputs, self._states, self._cohorts)
            )

        return frame.timed(run).wall / self.config.watching.eval_every


def tables(options: Options) -> Iterator[frame.Table]:
    rows = study.labelled(fl_games.methods(options.data), options.rows)
    extra = [
        *(f"--client_chunk={options.client_chunk}", f"--run_chunk={options.run_chunk}"),
        *(f"--seeds={','.join(map(str, options.seeds))}", f"--eval_every={options.rounds}"),
        "--after_stop=continue",  # rounds after the end take no time
    ]
    programs = {
        (row.label, watched): Row([*row.flags, *extra], watched)
        for row in rows
        for watched in (False, True)
    }
    calls = {key: program.play for key, program in programs.items()}
    seconds = frame.in_turns(calls, options.segments)
    table: list[dict[str, Any]] = []
    for row in rows:
        alone, watched = (frame.median(seconds[row.label, each]) for each in (False, True))
        num_rounds = programs[row.label, False].config.run.rounds
        table.append(
            {
                "row": row.label,
                "training, s a round": alone,
                "watched, s a round": watched,
                "rounds": num_rounds,
                "all rounds, minutes": watched * num_rounds / 60,
            }
        )
    yield frame.Table(f"{options.data}, {len(options.seeds)} seeds", table)


BINARY = frame.binary(tables, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
