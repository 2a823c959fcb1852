r"""One experiment: one algorithm, one held-out domain, all seeds in one program.

fedjax-inv train --preset=rotated_digits --algorithm=fedipg --held_out=75 \
    --learning_rate=0.5 --set=penalty=0.01 --run_dir=runs/fedipg-digits-75
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
    name = f"{config.algorithm[0]}-{config.stem}-{config.held_out or 'default'}"
    return Path(config.run_dir or folders.default(config, name, ("algorithm", "held_out")))


def train(config: Config) -> str:
    """Runs the experiment in one run folder, and returns its table.

    Raises UsageError if the flags ask for several cells.
    """
    return launch.run(config, folder(config), in_folders=False, report=report.write)


BINARY = command_line.binary(train, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
