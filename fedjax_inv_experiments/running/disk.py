"""A check that the checkpoints of --keep_checkpoints fit on the disk, before anything runs."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from fedjax_inv import devices
from fedjax_inv.program.one_run import OneRun
from fedjax_inv_experiments.experiment.assemble import Assembled
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.experiment.grid import Cell
from fedjax_inv_experiments.flags.flag import flag_error
from fedjax_inv_experiments.parts import machine
from fedjax_inv_experiments.running import checkpoints, selected

_LARGE = 10**9  # bytes that are stated


def check(
    assembled: Assembled, folder: Path, places: Mapping[str, Path], cells: Sequence[Cell]
) -> None:
    """States on stderr how much disk the checkpoints of cells need, if it is much.

    folder: that of the experiment. places: the folder of each cell, by the cell's name. cells:
    those that will run.

    Raises UsageError if the disk has less. The last checkpoint alone is not checked.
    """
    config = assembled.config
    if config.run.keep_checkpoints == "1":
        return
    sizes: dict[str, int] = {}  # of a checkpoint, by the cell's label
    needed, place = 0, folder.absolute()
    for cell in cells:
        if cell.label not in sizes:
            sizes[cell.label] = _size(assembled, cell)
        needed += sizes[cell.label] * _new_checkpoints(config, places[cell.name])
    free = shutil.disk_usage(next(each for each in (place, *place.parents) if each.exists())).free
    if needed > free:
        text = (
            f"needs up to {_shown(needed)} of disk, but {folder} has {_shown(free)} left; must be "
            "fewer, or --checkpoint_every larger"
        )
        raise flag_error("keep_checkpoints", config.run.keep_checkpoints, text)
    if needed >= _LARGE and machine.leads():
        text = f"checkpoints need up to {_shown(needed)} of the {_shown(free)} that are left"
        print(f"{folder}: {text} on the disk", file=sys.stderr)


def _size(assembled: Assembled, cell: Cell) -> int:
    """The bytes of a checkpoint before compression: all states, and the selected ones."""
    ready = assembled.prepare(cell)
    first = jax.tree.map(lambda leaf: leaf[0], ready.inputs)
    run = OneRun(ready.experiment, devices.vmapped())
    states = jax.eval_shape(run.start, assembled.data, first)
    leaves = jax.tree.leaves((states, selected.of(states, personal=True)))
    return len(cell.runs) * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _new_checkpoints(config: Config, place: Path) -> int:
    """How many more checkpoints a cell writes and keeps."""
    done = max([0, *checkpoints.rounds(place / "checkpoints")])
    every = config.run.checkpoint_every or config.watching.eval_every
    written = -(-(config.run.rounds - done) // every)
    kept = config.run.keep_checkpoints
    return written if kept == "all" else min(written, int(kept))


def _shown(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 10**8 else f"{size / 1e6:.1f} MB"
