"""The states of a cell's runs on disk, by round, through orbax.

A checkpoint holds the states after its round and, beside them and written with them, what is kept
of the rounds before, and whose they are, with a checksum: a process that dies leaves all or none.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from experiments.experiment.config import Config
from experiments.experiment.grid import Cell
from experiments.flags.flag import check_place
from experiments.running import folder as folders
from experiments.running import kept, records
from experiments.running.kept import Served
from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.program import Training
from fedjax_inv.types import Tree

_STATES, _KEPT = "default", "kept"  # folders of a checkpoint; the first was once the only one
ITEMS = (_STATES, _KEPT)
_ABOUT = "about"  # likewise; earlier versions wrote none
_KIND = {"round": int, "sha256": {_STATES: str, _KEPT: str}, **records.CONFIG}


class Checkpoints:
    """The states of a cell's runs, by round, through orbax; the last two are kept."""

    def __init__(self, folder: Path, config: Config, cell: Cell, *, reads: bool = False) -> None:
        """config, cell: whose they are. reads: nothing is written.

        Raises UsageError if the folder cannot hold any.
        """
        self._folder, self._config, self._cell = folder, config, cell
        for path in (folder, *folder.glob("[0-9]*")):
            if path.is_file():
                raise UsageError(f"{path}: is a file, must be a folder; delete it")
        if not reads:
            check_place("run_dir", folder, is_folder=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, read_only=reads)
        with _written(folder):
            self._manager = ocp.CheckpointManager(
                folder.absolute(), options=options, item_names=(*ITEMS, _ABOUT)
            )

    def latest(self) -> int:
        """The round of the newest checkpoint, 0 if there is none."""
        return self._manager.latest_step() or 0

    def save(self, done: int, states: Training, served: Served) -> None:
        """Writes a checkpoint; the file work goes on in the background."""
        items = {_STATES: _plain(_numbers(states)), _KEPT: _plain(served)}
        saved = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        about = {
            "round": done,
            "sha256": {name: _checksum(tree) for name, tree in items.items()},
            **folders.description(self._config, self._cell),
        }
        with _written(self._folder):
            self._manager.save(
                done, args=ocp.args.Composite(**saved, **{_ABOUT: ocp.args.JsonSave(about)})
            )

    def restore(self, done: int, like: Training) -> Training:
        """The states after round `done`, wherever they were when they were saved.

        like: states of this run, or their shapes. Raises UsageError if there are others.
        """
        restored = self._restore(done, _STATES, jax.eval_shape(_numbers, like))
        restored = jax.tree.map(jnp.asarray, restored)
        key = jax.random.wrap_key_data(restored.state.key)
        return restored._replace(state=restored.state._replace(key=key))

    def kept(self, done: int, like: Served) -> Served:
        """What had been kept until round `done`, on the host; nothing by earlier versions.

        like: its shapes. Raises UsageError if it is of others.
        """
        place = self._folder / str(done)
        if not any((place / item).is_dir() for item in (_KEPT, _ABOUT)):
            return kept.none(like)
        return self._restore(done, _KEPT, like)

    def _restore(self, done: int, item: str, like: Tree) -> Tree:
        """An item as arrays of NumPy. like: its shapes."""
        # Arrays of NumPy, or orbax asks for the devices that they lay on.
        plain = jax.eval_shape(_plain, like)
        target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), plain)
        asked = ocp.args.Composite(**{item: ocp.args.StandardRestore(target)})
        try:
            about = _about(self._folder, done, self._config, self._cell)
            restored: Tree = self._manager.restore(done, args=asked)[item]
            # Which orbax does not look at, where it makes arrays of NumPy.
            checks.same_shapes(target=target, restored=restored)
            _check_sum(about, item, restored)
        except Exception as error:  # orbax raises many kinds, for one reason
            raise UsageError(
                f"{self._folder / str(done)}: corrupt, or not a checkpoint of this run "
                f"({_short(error)}); delete it to continue from the one before"
            ) from None
        return jax.tree.map(
            lambda got, leaf: got if leaf.size else np.empty(leaf.shape, leaf.dtype), restored, like
        )

    def finish(self) -> None:
        """Leaves the newest checkpoint alone, once it is whole."""
        with _written(self._folder):
            self._manager.wait_until_finished()
        for done in self._manager.all_steps():
            if done != self.latest():
                self._manager.delete(done)

    def close(self) -> None:
        """Waits for what is being written."""
        with _written(self._folder):
            self._manager.close()


def rounds(folder: Path) -> list[int]:
    """The rounds of the checkpoints that a folder holds, the newest last; nothing is written."""
    if not folder.is_dir():
        return []
    return sorted(ocp.utils.checkpoint_steps(folder.absolute()))


def plain(folder: Path, done: int, config: Config, cell: Cell, item: str = _STATES) -> Tree:
    """A checkpoint of whatever run, as dicts of NumPy arrays [R, ...]; nothing is written.

    config, cell: of that run. item: of ITEMS, by default the states. Raises UsageError if it cannot
    be read, or is another run's.
    """
    place = folder.absolute() / str(done) / item
    try:
        about = _about(folder, done, config, cell)
        with contextlib.closing(ocp.StandardCheckpointHandler()) as reader:
            told = reader.metadata(place).tree
            # Arrays of NumPy, or orbax asks for the devices that they lay on.
            target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), told)
            restored = reader.restore(place, args=ocp.args.StandardRestore(target))
            _check_sum(about, item, restored)
            return restored
    except Exception as error:  # orbax raises many kinds, for one reason
        raise UsageError(f"{folder / str(done)}: corrupt ({_short(error)})") from None


def _about(folder: Path, done: int, config: Config, cell: Cell) -> dict[str, Any] | None:
    """Whose a checkpoint is; None of one by an earlier version.

    Raises UsageError if that is another run.
    """
    place = folder / str(done) / _ABOUT
    if not place.is_dir():
        return None
    try:
        about = records.read(place / "metadata", _KIND)
    except (OSError, UsageError):
        raise UsageError(f"{_ABOUT}/metadata is damaged") from None
    if about["round"] != done:
        raise UsageError(f"is of round {about['round']}")
    # How far its run was to go does not matter.
    flags = about["flags"] | {"rounds": config.run.rounds}
    differs = folders.difference(about | {"flags": flags}, config, cell)
    if differs is not None:
        raise UsageError(f"of a run whose {differs.what}")
    return about


def _check_sum(about: dict[str, Any] | None, item: str, restored: Tree) -> None:
    if about is not None and about["sha256"][item] != _checksum(restored):
        raise UsageError(f"the checksum of {item} is another")


def _checksum(tree: Tree) -> str:
    """SHA-256 of arrays by name, whatever holds them: of their types, shapes and bits."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    digest = hashlib.sha256()
    for name, leaf in sorted(named.items()):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Tells in one line what keeps orbax from writing, or from reading what lies there."""
    try:
        yield
    except Exception as error:  # orbax raises many kinds, for one reason
        raise UsageError(
            f"{folder}: a checkpoint could not be written ({_short(error)}); mend that, and add "
            "--resume to continue from the one before"
        ) from None


def _short(error: Exception) -> str:
    """What an error tells, of which the end of a long line says why."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 160 else f"{text[:60]} ... {text[-95:]}"


def _numbers(states: Training) -> Training:
    """The states with keys as numbers."""
    key = jax.random.key_data(states.state.key)
    return states._replace(state=states.state._replace(key=key))


def _plain(tree: Tree) -> Tree:
    """A tree as orbax takes it: no array without elements."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else np.zeros(1, leaf.dtype), tree)
