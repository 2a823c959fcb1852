"""The states of a cell's runs on disk, by round, through orbax."""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.program import Training
from fedjax_inv.types import Tree


class Checkpoints:
    """The states of a cell's runs, by round, through orbax; the last two are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int:
        """The round of the newest checkpoint, 0 if there is none."""
        return self._manager.latest_step() or 0

    def save(self, done: int, states: Training) -> None:
        """Writes a checkpoint; the file work goes on in the background."""
        self._manager.save(done, args=ocp.args.StandardSave(_plain(states)))

    def restore(self, done: int, like: Training) -> Training:
        """The states after round `done`, wherever they were when they were saved.

        like: states of this run, or their shapes. Raises UsageError if there are others.
        """
        # Arrays of NumPy, or orbax asks for the devices that they lay on.
        plain = jax.eval_shape(_plain, like)
        target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), plain)
        try:
            restored: Tree = self._manager.restore(done, args=ocp.args.StandardRestore(target))
            # Which orbax does not look at, where it makes arrays of NumPy.
            checks.same_shapes(target=target, restored=restored)
        except Exception as error:  # orbax raises many kinds, for one reason
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(
                f"{self._folder / str(done)}: corrupt, or not a checkpoint of this run "
                f"({reason[:100]}); delete it to continue from the one before"
            ) from None
        restored = jax.tree.map(
            lambda got, leaf: jnp.asarray(got if leaf.size else np.empty(leaf.shape, leaf.dtype)),
            restored,
            jax.eval_shape(_numbers, like),
        )
        key = jax.random.wrap_key_data(restored.state.key)
        return restored._replace(state=restored.state._replace(key=key))

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
    place = folder.absolute() / str(done) / "default"  # where the manager puts what has no name
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


def _plain(states: Training) -> Training:
    """The states as orbax takes them: keys as numbers, and no array without elements."""
    return jax.tree.map(
        lambda leaf: leaf if leaf.size else np.zeros(1, leaf.dtype), _numbers(states)
    )
