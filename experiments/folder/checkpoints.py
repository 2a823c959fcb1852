"""The states of a cell's runs on disk, by round, through orbax.

A checkpoint holds the states after its round and the states selected so far, written together: a
process that dies leaves a whole checkpoint or none.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fedjax_inv.callbacks import Callback
from fedjax_inv.checks import UsageError
from fedjax_inv.fitted import Fitted
from fedjax_inv.one_run import Training
from fedjax_inv.types import Tree

from ..assembly import machine
from ..start import CONTINUES
from .log import Log
from .selected import SelectedStates, ServingState, of

_STATES = "default"
_SELECTED = "kept"  # folders in a checkpoint
ITEMS = (_STATES, _SELECTED)


class Resume(Callback):
    """Continues from the newest checkpoint; stands before the callbacks that read the round."""

    def __init__(self, folder: Path, best: SelectedStates) -> None:
        """folder: of the checkpoints. best: gets the states that were selected until then."""
        self._folder = folder
        self._best = best

    def begin(self, fitted: Fitted) -> None:
        """Restores the states. Raises UsageError if they cannot be read."""
        done = max(rounds(self._folder), default=0)
        if done:
            plan = fitted.plan
            like = plan.program.shapes(plan.data, plan.inputs)
            personal = plan.build(plan.runs[0].hyper).personal
            fitted.restore(restore(self._folder, done, like), done)
            self._best.served = selected(self._folder, done, of(like, personal))


class Checkpoints(Callback):
    """The checkpoints of a cell's runs; stands after the callbacks whose work they must not lack.

    While the cell runs, those of the last two rounds stay on the disk, or more with
    --keep_checkpoints.
    """

    def __init__(self, folder: Path, keep: str, every: int, log: Log, best: SelectedStates) -> None:
        """keep: --keep_checkpoints. every: rounds between them.

        Raises UsageError if the folder cannot hold checkpoints.
        """
        self._folder = folder
        self._every = every
        self._log = log
        self._best = best
        self._kept = None if keep == "all" else int(keep)  # None: all

    def begin(self, fitted: Fitted) -> None:
        """Opens the folder."""
        most = None if self._kept is None else max(2, self._kept)
        with _written(self._folder):
            for half in _halves(self._folder) if machine.leads() else []:
                shutil.rmtree(self._folder / str(half))
            self._manager = ocp.CheckpointManager(
                self._folder.absolute(),
                options=ocp.CheckpointManagerOptions(max_to_keep=most),
                item_names=ITEMS,
            )

    def evaluated(self, fitted: Fitted) -> None:
        """Writes a checkpoint in the background, if it is time or the training ends here."""
        is_end = fitted.is_over or bool(fitted.stopped)
        if not fitted.round or not (is_end or fitted.round % self._every == 0):
            return
        self._log.flush()
        # From the host: of an array on several devices orbax saves slices, and compiles each.
        states = _plain(_numbers(fitted.stored()))
        served = _plain(self._best.served)
        items = jax.device_get({_STATES: states, _SELECTED: served})
        saved = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        with _written(self._folder):
            self._manager.save(fitted.round, args=ocp.args.Composite(**saved))

    def end(self, fitted: Fitted) -> None:
        """Waits until all checkpoints are written; at the end deletes those that shall not stay."""
        with _written(self._folder), contextlib.closing(self._manager):
            self._manager.wait_until_finished()
            there = sorted(self._manager.all_steps()) if fitted.is_over else []
            for done in there[: -self._kept] if self._kept else []:
                self._manager.delete(done)


def rounds(folder: Path) -> list[int]:
    """The rounds of the complete checkpoints in a folder, in ascending order."""
    if not folder.is_dir():
        return []
    return sorted({*ocp.utils.checkpoint_steps(folder.absolute())} - {*_halves(folder)})


def _halves(folder: Path) -> list[int]:
    """The rounds of checkpoints of which a process that died has deleted a part."""
    steps = ocp.utils.checkpoint_steps(folder.absolute()) if folder.is_dir() else []
    return [at for at in steps if not all((folder / str(at) / item).is_dir() for item in ITEMS)]


def restore(folder: Path, done: int, like: Training) -> Training:
    """The states after round `done`, independent of the devices that saved them.

    like: states of this run, or their shapes. Raises UsageError if they cannot be read.
    """
    found = _restored(folder, done, _STATES, jax.eval_shape(_numbers, like))
    restored: Training = jax.tree.map(jnp.asarray, found)
    key = jax.random.wrap_key_data(restored.state.key)
    return restored._replace(state=restored.state._replace(key=key))


def selected(folder: Path, done: int, like: ServingState) -> ServingState:
    """The states that were selected until round `done`, on the host.

    like: their shapes. Raises UsageError if they cannot be read.
    """
    found: ServingState = _restored(folder, done, _SELECTED, like)
    return found


def plain(folder: Path, done: int, item: str = _STATES) -> Tree:
    """An item of a checkpoint of any run, as dicts of NumPy arrays [R, ...].

    Raises UsageError if it cannot be read.
    """
    place = folder.absolute() / str(done) / item
    try:
        with contextlib.closing(ocp.StandardCheckpointHandler()) as reader:
            shapes = reader.metadata(place).tree
            # Arrays of NumPy, or orbax asks for the devices that they were saved from.
            target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
            return reader.restore(place, args=ocp.args.StandardRestore(target))
    except Exception as error:  # orbax raises many kinds, for one reason
        raise _corrupt(folder, done, _short(error)) from None


def _restored(folder: Path, done: int, item: str, like: Tree) -> Tree:
    """An item of a checkpoint as the tree `like` of shapes, on the host."""
    arrays = plain(folder, done, item)
    found = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)}
    saved = jax.eval_shape(_plain, like)
    paths, structure = jax.tree_util.tree_flatten_with_path(saved)
    needed = {_name(path): leaf for path, leaf in paths}
    for name in {**needed, **found}:
        there, here = (tree[name].shape if name in tree else None for tree in (found, needed))
        if there != here:
            raise _corrupt(folder, done, f"{name} is {there}, must be {here}")
    restored = jax.tree.unflatten(structure, [found[name] for name in needed])
    return jax.tree.map(
        lambda got, leaf: got if leaf.size else np.empty(leaf.shape, leaf.dtype), restored, like
    )


def _corrupt(folder: Path, done: int, why: str) -> UsageError:
    text = f"corrupt, or not a checkpoint of this run ({why}); delete it to use the one before"
    return UsageError(str(folder / str(done)), ..., text)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


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
