"""One experiment: one algorithm, one held-out domain, all seeds in one program.

python -m experiments.train --preset=rotated_digits --algorithm=fedipg --held_out=75
"""

from pathlib import Path

from experiments import command_line, grid, launch
from experiments.groups import Config


def train(config: Config) -> str:
    """Runs the flags as one run folder and returns its table.

    Raises UsageError where they ask for several runs.
    """
    name = f"{config.method.algorithm[0]}-{config.data.stem}-{config.data.held_out or 'default'}"
    folder = Path(config.run.run_dir or f"runs/{grid.folder_name(name)}")
    return launch.run(config, folder, in_folders=False)


if __name__ == "__main__":
    command_line.define()
    launch.main(train, __doc__)
