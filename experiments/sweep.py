"""A grid of experiments: algorithms x held-out domains x seeds x hyperparameter values.

fedjax-inv sweep --preset=rotated_digits

Seeds and real hyperparameters train at once in one program. A restart skips finished cells.
"""

from pathlib import Path

from . import report
from .experiment import command_line
from .experiment.config import Config
from .flags import command
from .running import folder as folders
from .running import launch


def folder(config: Config) -> Path:
    """The run folder: --run_dir, or a default name from the flags."""
    name = f"sweep-{config.stem}-{'-'.join(config.algorithm)}"
    return Path(config.run_dir or folders.default(config, name, ("algorithm",)))


def sweep(config: Config) -> str:
    """Runs the grid, each cell in a folder of the run folder, and returns the table."""
    return launch.run(config, folder(config), in_folders=True, report=report.write)


BINARY = command_line.binary(sweep, __doc__, nonfinite="mark")

if __name__ == "__main__":
    command.main(BINARY)
