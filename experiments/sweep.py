"""A grid of experiments: algorithms x held-out domains x seeds x hyperparameter values.

python -m experiments.sweep --preset=rotated_digits

Seeds and real hyperparameters train at once in one program; finished parts are kept on a restart.
"""

from pathlib import Path

from experiments import command_line, grid, launch
from experiments.groups import Config


def sweep(config: Config) -> str:
    """Runs the grid of the flags, each cell in a folder of the run folder; returns the table."""
    name = f"sweep-{config.data.stem}-{'-'.join(config.method.algorithm)}"
    folder = Path(config.run.run_dir or f"runs/{grid.folder_name(name)}")
    return launch.run(config, folder, in_folders=True)


if __name__ == "__main__":
    command_line.define(nonfinite="mark")
    launch.main(sweep, __doc__)
