"""A grid of experiments: algorithms x held-out domains x seeds x hyperparameter values.

python -m experiments.sweep --preset=rotated_digits

Seeds and real hyperparameters train at once in one program; finished parts are kept on a restart.
"""

from pathlib import Path

from absl import flags

from experiments import build, config, launch


def sweep(settings: config.Config) -> str:
    """Runs the grid of the flags, each cell in a folder of the run folder; returns the table."""
    name = f"sweep-{Path(settings.dataset).stem}-{'-'.join(settings.algorithm)}"
    folder = Path(settings.run_dir or f"runs/{build.folder_name(name)}")
    return launch.run(
        settings,
        folder,
        lambda dataset: build.cells(settings, build.held_out(settings, dataset.domains)),
        lambda cell: folder / cell.name,
    )


if __name__ == "__main__":
    config.define(nonfinite="mark")
    flags.adopt_module_key_flags(config)  # for --help
    launch.main(sweep)
