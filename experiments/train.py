r"""Trains one algorithm, or a grid of algorithms x held-out domains x settings.

fedjax-inv train --preset=rotated_digits --algorithm=fedipg --held_out=75 \
    --learning_rate=0.5 --set=penalty=0.01 --run_dir=runs/fedipg-digits-75
fedjax-inv train --preset=rotated_digits --held_out=all --learning_rate=0.1,0.3

All seeds and real hyperparameters train at once in one program. Of a grid each algorithm and
held-out domain has a folder in the run folder, and a restart skips the finished ones.
"""

from collections.abc import Callable

from absl import app, flags

from . import command_line, start

_HELP = flags.DEFINE_string(
    "help_algorithm", "", "The name of an algorithm: print its settings, and train nothing."
)
for _name in command_line.OF_TRAINING:
    flags.declare_key_flag(_name)


@start.binary
def main(argv: list[str]) -> str:
    """Runs the experiment of the command line, writes its tables and figures, returns the table."""
    del argv
    from fedjax_inv.ahead import Ahead

    from . import run
    from .assembly import factories, machine, method
    from .folder import run_folder

    if _HELP.value:
        method.check_algorithm(_HELP.value)
        return factories.settings_text(_HELP.value)
    chosen = command_line.chosen()
    machine.prepare(chosen.machine)
    launch = run.prepare(chosen, run_folder.path_of(chosen), in_folders=chosen.is_grid)
    with Ahead() as ahead:
        ahead.begin("report", _report)  # while programs compile
        return launch.run(lambda *done: ahead.take("report", _report)(*done), ahead)


def _report() -> Callable[..., str]:
    """The function that writes tables and figures; its packages take a second to import."""
    from .report import report

    return report.write


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse)
