r"""Trains one algorithm, or a grid of algorithms x held-out domains x settings.

fedjax-inv train --preset=rotated_digits --algorithm=fedipg --held_out=75 \
    --learning_rate=0.5 --set=penalty=0.01 --run_dir=runs/fedipg-digits-75
fedjax-inv train --preset=rotated_digits --held_out=all --learning_rate=0.1,0.3

All seeds and real hyperparameters train at once in one program. Of a grid each algorithm and
held-out domain has a folder in the run folder, and a restart skips the finished ones.
"""

from pathlib import Path

from absl import app, flags

from . import command_line, start
from .config import Config

_HELP = flags.DEFINE_string(
    "help_algorithm", "", "The name of an algorithm: print its settings, and train nothing."
)
flags.adopt_module_key_flags(command_line)


def folder(chosen: Config) -> Path:
    """The run folder: --run_dir, or a default name from the flags."""
    from .running import folder as folders

    name = f"{chosen.method.algorithm[0]}-{chosen.data.stem}-{chosen.data.held_out or 'default'}"
    if chosen.is_grid:
        name = f"grid-{chosen.data.stem}-{'-'.join(chosen.method.algorithm)}"
    named = ("algorithm",) if chosen.is_grid else ("algorithm", "held_out")
    return Path(chosen.output.run_dir or folders.default(chosen, name, named))


def train(chosen: Config) -> str:
    """Runs the experiment, writes its tables and figures, and returns the table."""
    from . import report
    from .running import launch

    return launch.run(chosen, folder(chosen), in_folders=chosen.is_grid, report=report.write)


@start.binary
def main(argv: list[str]) -> str:
    """Runs the experiment of the command line."""
    del argv
    from . import build, factories, machine

    if _HELP.value:
        build.check_algorithm(_HELP.value)
        return factories.settings_text(_HELP.value)
    chosen = command_line.chosen()
    machine.prepare(chosen)
    return train(chosen)


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse)
