"""A grid of experiments: algorithms x held-out domains x seeds x hyperparameter values.

python -m experiments.sweep --preset=rotated_digits

Seeds and real hyperparameters train at once in one program; finished parts are kept on a restart.
"""

from pathlib import Path

from experiments.experiment import command_line
from experiments.experiment.groups import Config
from experiments.running import folder as folders
from experiments.running import launch


def folder(config: Config) -> Path:
    """Where the results go."""
    name = f"sweep-{config.data.stem}-{'-'.join(config.method.algorithm)}"
    return Path(config.run.run_dir or folders.default(config, name, ("algorithm",)))


def sweep(config: Config) -> str:
    """Runs the grid of the flags, each cell in a folder of the run folder; returns the table."""
    return launch.run(config, folder(config), in_folders=True)


if __name__ == "__main__":
    command_line.define(nonfinite="mark")
    launch.main(sweep, __doc__)
