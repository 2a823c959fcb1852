"""Compares the rows of a file: labels with flags of their own, in one table.

fedjax-inv compare rows.toml --run_dir=runs/mine

    preset = "first_look_rotated"
    [flags]                          # of all rows
    seeds = [0, 1, 2]
    [rows.FedAvg]
    algorithm = "fedavg"
    [rows."FedIPG, large"]           # its own flags replace those of all rows
    algorithm = "fedipg"
    set = { penalty = [1.0, 100.0] }

The table has a row for each label, with paired differences from the first. Flags on the command
line replace those of [flags], not a row's own. All rows see the same draws of the data. Each row
has a folder in the run folder, and a restart skips the finished ones; rows of another file join
them. docs/compare.md has all keys.
"""

import functools
import os
from pathlib import Path

from absl import app, flags

from . import command_line, start

for _name in (*command_line.OF_TRAINING, "rows", "data"):
    flags.declare_key_flag(_name)


@start.binary
def main(argv: list[str]) -> str:
    """Runs the rows of the file that the first word names, and returns their table."""
    from fedjax_inv.checks import UsageError

    from .studies import row_runs, rows

    if not argv:
        raise UsageError("compare", ..., "name a file of rows, such as rows.toml")
    file = rows.read(Path(os.path.expanduser(argv[0])))
    folder = Path(os.path.expanduser(flags.FLAGS.run_dir or f"runs/{file.path.stem}"))
    return row_runs.compare(file, folder, flags.FLAGS.data, flags.FLAGS.rows)


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(command_line.parse, words=1))
