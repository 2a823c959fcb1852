"""One experiment: one algorithm, one held-out domain, all seeds in one program.

python -m experiments.train --preset=rotated_digits --algorithm=fedipg --held_out=75
"""

from pathlib import Path

from absl import flags

from experiments import build, config, launch
from fedjax_inv.data.dataset import Dataset


def train(settings: config.Config) -> str:
    """Runs the flags as one run folder and returns its table.

    Raises ValueError where they ask for several runs.
    """

    def cells(dataset: Dataset) -> list[build.Cell]:
        every = build.cells(settings, build.held_out(settings, dataset.domains))
        if len(every) > 1 or len(every[0].runs) > len(settings.seeds):
            raise ValueError(
                "train runs one algorithm, held-out domain and value of each hyperparameter; "
                "for several: python -m experiments.sweep, with the same flags"
            )
        return every

    name = f"{settings.algorithm[0]}-{Path(settings.dataset).stem}-{settings.held_out or 'default'}"
    folder = Path(settings.run_dir or f"runs/{build.folder_name(name)}")
    return launch.run(settings, folder, cells, lambda cell: folder)


if __name__ == "__main__":
    config.define()
    flags.adopt_module_key_flags(config)  # for --help
    launch.main(train)
