"""The states of a cell's runs on disk, by round, through orbax.

A checkpoint holds the states after its round, the states selected so far, and a note with its run
and checksums. They are written together: a process that dies leaves a whole checkpoint or none.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import orbax.checkpoint as ocp

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.program import Training
from fedjax_inv.types import Tree
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.experiment.grid import Cell
from fedjax_inv_experiments.flags.errors import CONTINUES
from fedjax_inv_experiments.flags.flag import check_place
from fedjax_inv_experiments.running import files, provenance, records
from fedjax_inv_experiments.running import folder as folders
from fedjax_inv_experiments.running.records import About
from fedjax_inv_experiments.running.selected import Served

_STATES, _SELECTED, _ABOUT = "default", "kept", "about"  # folders in a checkpoint
ITEMS = (_STATES, _SELECTED)

# Fields in checkpoints of version 0.6 -> their names today.
_RENAMED = {"heard": "broadcast_history", "beside": "side"}


class Checkpoints:
    """The checkpoints of a cell's runs.

    While the cell runs, those of the last two rounds stay on the disk, or more with
    --keep_checkpoints.
    """

    def __init__(self, folder: Path, config: Config, cell: Cell, *, reads: bool = False) -> None:
        """config, cell: those of the runs. reads: whether the folder is only read.

        Raises UsageError if the folder cannot hold checkpoints.
        """
        self._folder, self._config, self._cell = folder, config, cell
        for path in (folder, *folder.glob("[0-9]*")):
            if path.is_file():
                raise UsageError(str(path), ..., "is a file, must be a folder; delete it")
        files.check_readable(folder)
        if not reads:
            files.check_no_links_in(folder)
            check_place("run_dir", folder, is_folder=True)
        kept = config.run.keep_checkpoints
        self._kept = None if kept == "all" else int(kept)  # None: all
        most = None if self._kept is None else max(2, self._kept)
        options = ocp.CheckpointManagerOptions(max_to_keep=most, read_only=reads)
        with _written(folder):
            self._manager = ocp.CheckpointManager(
                folder.absolute(), options=options, item_names=(*ITEMS, _ABOUT)
            )

    def latest(self) -> int:
        """The round of the newest checkpoint, 0 if there is none."""
        return self._manager.latest_step() or 0

    def save(self, done: int, states: Training, served: Served) -> None:
        """Writes a checkpoint, in the background."""
        # From the host: of an array on several devices orbax saves slices, and compiles each.
        items = jax.device_get({_STATES: _plain(_numbers(states)), _SELECTED: _plain(served)})
        saved = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        sums = {name: provenance.checksum(tree) for name, tree in items.items()}
        about = About(done, sums, *folders.description(self._config, self._cell))
        with _written(self._folder):
            note = ocp.args.JsonSave(msgspec.to_builtins(about))
            self._manager.save(done, args=ocp.args.Composite(**saved, **{_ABOUT: note}))

    def restore(self, done: int, like: Training) -> Training:
        """The states after round `done`, independent of the devices that saved them.

        like: states of this run, or their shapes. Raises UsageError if the shapes differ.
        """
        restored = self._restore(done, _STATES, jax.eval_shape(_numbers, like))
        restored = jax.tree.map(jnp.asarray, restored)
        key = jax.random.wrap_key_data(restored.state.key)
        return restored._replace(state=restored.state._replace(key=key))

    def selected(self, done: int, like: Served) -> Served:
        """The states that were selected until round `done`, on the host.

        like: their shapes. Raises UsageError if the shapes differ.
        """
        return self._restore(done, _SELECTED, like)

    def _restore(self, done: int, item: str, like: Tree) -> Tree:
        """An item of a checkpoint as arrays of NumPy. like: its shapes."""
        remedy = "delete it to continue from the one before"
        try:
            about = _about(self._folder, done, self._config, self._cell)
            arrays = _read(self._folder, done, item)
            _check_sum(about, item, arrays)
            remedy = "the version that wrote it may read it"
            restored = _matched(arrays, jax.eval_shape(_plain, like))
        except Exception as error:  # orbax raises many kinds, for one reason
            raise UsageError(
                str(self._folder / str(done)),
                ...,
                f"corrupt, or not a checkpoint of this run ({_short(error)}); {remedy}",
            ) from None
        return jax.tree.map(
            lambda got, leaf: got if leaf.size else np.empty(leaf.shape, leaf.dtype), restored, like
        )

    def finish(self) -> None:
        """Waits until the newest checkpoint is written, and deletes those that shall not stay."""
        with _written(self._folder):
            self._manager.wait_until_finished()
        there = sorted(self._manager.all_steps())
        for done in there[: -self._kept] if self._kept else []:
            self._manager.delete(done)

    def close(self) -> None:
        """Waits until all checkpoints are written."""
        with _written(self._folder):
            self._manager.close()


def rounds(folder: Path) -> list[int]:
    """The rounds of the checkpoints in a folder, in ascending order. Writes nothing."""
    if not folder.is_dir():
        return []
    return sorted(ocp.utils.checkpoint_steps(folder.absolute()))


def plain(folder: Path, done: int, config: Config, cell: Cell, item: str = _STATES) -> Tree:
    """A checkpoint of any run, as dicts of NumPy arrays [R, ...]. Writes nothing.

    config, cell: those of that run. item: one of ITEMS, by default the states. Raises UsageError if
    the checkpoint cannot be read, or is another run's.
    """
    try:
        files.check_readable(folder)
        about = _about(folder, done, config, cell)
        arrays = _read(folder, done, item)
        _check_sum(about, item, arrays)
        return arrays
    except Exception as error:  # orbax raises many kinds, for one reason
        raise UsageError(str(folder / str(done)), ..., f"corrupt ({_short(error)})") from None


def _read(folder: Path, done: int, item: str) -> Tree:
    """An item of a checkpoint as dicts of NumPy arrays, under the names on the disk."""
    place = folder.absolute() / str(done) / item
    with contextlib.closing(ocp.StandardCheckpointHandler()) as reader:
        shapes = reader.metadata(place).tree
        # Files of a few bytes may stand for arrays of any size.
        sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)]
        checks.memory(str(place), ..., sum(sizes))
        # Arrays of NumPy, or orbax asks for the devices that they were saved from.
        target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
        return reader.restore(place, args=ocp.args.StandardRestore(target))


def _matched(arrays: Tree, like: Tree) -> Tree:
    """Dicts of arrays as the tree `like` of shapes; raises UsageError where they do not fit it."""
    found = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)}
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    needed = {_name(path): leaf for path, leaf in paths}
    for name in {**needed, **found}:
        there, here = (tree[name].shape if name in tree else None for tree in (found, needed))
        if there != here:
            raise UsageError(name, ..., f"is {there}, must be {here}")
    return jax.tree.unflatten(structure, [found[name] for name in needed])


def _name(path: jax.tree_util.KeyPath) -> str:
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return "/".join(_RENAMED.get(name, name) for name in names)


def _about(folder: Path, done: int, config: Config, cell: Cell) -> About:
    """The note in a checkpoint; raises UsageError if it is another run's."""
    try:
        about = records.read(folder / str(done) / _ABOUT / "metadata", About)
    except (OSError, UsageError):
        raise UsageError(f"{_ABOUT}/metadata is damaged") from None
    if about.round != done:
        raise UsageError(f"is of round {about.round}")
    # --rounds may differ.
    flags = about.flags | {"rounds": config.run.rounds}
    differs = folders.difference(flags, about.cell, config, cell)
    if differs is not None:
        raise UsageError(f"of a run whose {differs.what}")
    return about


def _check_sum(about: About, item: str, restored: Tree) -> None:
    if about.sha256.get(item) != provenance.checksum(restored):
        raise UsageError(f"the checksum of {item} is another")


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Turns orbax's errors about a folder into one-line errors."""
    try:
        yield
    except Exception as error:  # orbax raises many kinds, for one reason
        raise UsageError(
            str(folder),
            ...,
            f"a checkpoint could not be written ({_short(error)}); mend that, then {CONTINUES} "
            "from the one before",
        ) from None


def _short(error: Exception) -> str:
    """The first line of an error's message; of a long line the beginning and the end."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 160 else f"{text[:60]} ... {text[-95:]}"


def _numbers(states: Training) -> Training:
    """The states with the random key as numbers."""
    key = jax.random.key_data(states.state.key)
    return states._replace(state=states.state._replace(key=key))


def _plain(tree: Tree) -> Tree:
    """A tree that orbax can save: each empty array is replaced by an array of one zero."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else np.zeros(1, leaf.dtype), tree)
