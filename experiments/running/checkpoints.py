"""The states of a cell's runs on disk, by round, through orbax.

A checkpoint holds the states after its round and, beside them and written with them, what is kept
of the rounds before: a process that dies leaves both or neither.
"""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from experiments.running import kept
from experiments.running.kept import Served
from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.program import Training
from fedjax_inv.types import Tree

_STATES, _KEPT = "default", "kept"  # folders of a checkpoint; the first was once the only one


class Checkpoints:
    """The states of a cell's runs, by round, through orbax; the last two are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(
            folder.absolute(), options=options, item_names=(_STATES, _KEPT)
        )

    def latest(self) -> int:
        """The round of the newest checkpoint, 0 if there is none."""
        return self._manager.latest_step() or 0

    def save(self, done: int, states: Training, served: Served) -> None:
        """Writes a checkpoint; the file work goes on in the background."""
        items = {_STATES: _plain(_numbers(states)), _KEPT: _plain(served)}
        saved = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        self._manager.save(done, args=ocp.args.Composite(**saved))

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
        if not (self._folder / str(done) / _KEPT).is_dir():
            return kept.none(like)
        return self._restore(done, _KEPT, like)

    def _restore(self, done: int, item: str, like: Tree) -> Tree:
        """An item as arrays of NumPy. like: its shapes."""
        # Arrays of NumPy, or orbax asks for the devices that they lay on.
        plain = jax.eval_shape(_plain, like)
        target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), plain)
        asked = ocp.args.Composite(**{item: ocp.args.StandardRestore(target)})
        try:
            restored: Tree = self._manager.restore(done, args=asked)[item]
            # Which orbax does not look at, where it makes arrays of NumPy.
            checks.same_shapes(target=target, restored=restored)
        except Exception as error:  # orbax raises many kinds, for one reason
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"{self._folder / str(done)}: corrupt, or not a checkpoint of this run "
                f"({reason[:100]}); delete it to continue from the one before"
            ) from None
        return jax.tree.map(
            lambda got, leaf: got if leaf.size else np.empty(leaf.shape, leaf.dtype), restored, like
        )

    def finish(self) -> None:
        """Leaves the newest checkpoint alone, once it is whole."""
        self._manager.wait_until_finished()
        for done in self._manager.all_steps():
            if done != self.latest():
                self._manager.delete(done)

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()


def rounds(folder: Path) -> list[int]:
    """The rounds of the checkpoints that a folder holds, the newest last; nothing is written."""
    if not folder.is_dir():
        return []
    return sorted(ocp.utils.checkpoint_steps(folder.absolute()))


def plain(folder: Path, done: int) -> Tree:
    """A checkpoint of whatever run, as dicts of NumPy arrays [R, ...]; nothing is written.

    Raises UsageError if it cannot be read.
    """
    place = folder.absolute() / str(done) / _STATES
    try:
        with contextlib.closing(ocp.StandardCheckpointHandler()) as reader:
            told = reader.metadata(place).tree
            # Arrays of NumPy, or orbax asks for the devices that they lay on.
            target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), told)
            return reader.restore(place, args=ocp.args.StandardRestore(target))
    except Exception as error:  # orbax raises many kinds, for one reason
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{folder / str(done)}: corrupt ({reason[:100]})") from None


def _numbers(states: Training) -> Training:
    """The states with keys as numbers."""
    key = jax.random.key_data(states.state.key)
    return states._replace(state=states.state._replace(key=key))


def _plain(tree: Tree) -> Tree:
    """A tree as orbax takes it: no array without elements."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else np.zeros(1, leaf.dtype), tree)
