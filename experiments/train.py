r"""Trains one algorithm, or a grid of algorithms x held-out domains x settings.

fedjax-inv train --preset=rotated_digits --algorithm=fedipg --held_out=75 \
    --learning_rate=0.5 --set=penalty=0.01 --run_dir=runs/fedipg-digits-75
fedjax-inv train --preset=rotated_digits --held_out=all --learning_rate=0.1,0.3

All seeds and real hyperparameters train at once in one program. Of a grid each algorithm and
held-out domain has a folder in the run folder, and a restart skips the finished ones.
"""

from pathlib import Path

from absl import app, flags

from . import config, start
from . import flags as shared
from .config import Config

flags.adopt_module_key_flags(shared)


def folder(chosen: Config) -> Path:
    """The run folder: --run_dir, or a default name from the flags."""
    from .running import folder as folders

    name = f"{chosen.algorithm[0]}-{chosen.stem}-{chosen.held_out or 'default'}"
    if chosen.is_grid:
        name = f"grid-{chosen.stem}-{'-'.join(chosen.algorithm)}"
    named = ("algorithm",) if chosen.is_grid else ("algorithm", "held_out")
    return Path(chosen.run_dir or folders.default(chosen, name, named))


def train(chosen: Config) -> str:
    """Runs the experiment, writes its tables and figures, and returns the table."""
    from . import report
    from .running import launch

    return launch.run(chosen, folder(chosen), in_folders=chosen.is_grid, report=report.write)


@start.binary
def main(argv: list[str]) -> str:
    """Runs the experiment of the command line."""
    del argv
    from . import machine

    chosen = config.chosen()
    machine.prepare(chosen)
    return train(chosen)


if __name__ == "__main__":
    app.run(main, flags_parser=config.parse)
