"""The initial networks of --init_from: the global networks of another run."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.types import Tree, Variables

from ..config import Network
from ..errors import flag_error, shown
from . import checkpoints, records, run_folder

# The flags that change a network but not its shapes.
_SAME = ("activation", "weights")


def variables(network: Network, like: Variables, seeds: Sequence[int]) -> dict[int, Variables]:
    """The networks of --init_from, by seed; a seed that it lacks gets the first run's network.

    like: the shapes of the new run's variables.

    Raises UsageError if there is no such checkpoint, or if it has no single network for a seed, a
    network that is not finite, or a network of other shapes.
    """
    folder, checkpoint = _place(network)
    if not (folder / "config.json").is_file():
        cells = sorted(place.parent.name for place in folder.glob("*/config.json"))
        one_of = f" of this sweep, one of {', '.join(cells)}" if cells else ""
        raise _error(network, f"must be the folder of a run{one_of}, or a checkpoint in it")
    rounds = checkpoints.rounds(folder / "checkpoints")
    if not rounds or checkpoint not in (None, *rounds):
        raise _error(network, f"must have such a checkpoint; there are those of rounds {rounds}")
    done = rounds[-1] if checkpoint is None else checkpoint
    try:
        record = run_folder.record_of(folder)
        server = checkpoints.plain(folder / "checkpoints", done)["state"]["server"]
    except UsageError as error:
        raise _error(network, str(error)) from None
    for name in _SAME:
        theirs = record.flags.get(name)
        ours = getattr(network, name)
        if theirs != ours:
            text = f"is of --{name}={shown(theirs)}, must be of --{name}={shown(ours)}, as this run"
            raise _error(network, text)
    while "wrapped" in server:  # an algorithm inside a rule for missing uploads
        if "frozen" in server:
            raise _error(network, "trained a part of its network (--train_only), must train all")
        server = server["wrapped"]
    if "variables" not in server:
        text = f"is of --algorithm={record.cell.algorithm}, which has no single network"
        raise _error(network, text)
    networks = _matched(network, server["variables"], like)
    return {seed: _finite(network, networks, _row(network, record.cell, seed)) for seed in seeds}


def _error(network: Network, text: str) -> UsageError:
    return flag_error("init_from", network.init_from, text)


def _place(network: Network) -> tuple[Path, int | None]:
    """The run folder that --init_from names, and the checkpoint's round if it names one."""
    path = Path(network.init_from).expanduser()
    if path.name.isdecimal() and path.parent.name == "checkpoints":
        return path.parent.parent, int(path.name)
    return path, None


def _row(network: Network, cell: records.CellRecord, seed: int) -> int:
    """The index of the run with this seed, or with the first run's seed if there is none."""
    seeds = [run.seed for run in cell.runs if not run.left_out]
    nearest = seed if seed in seeds else seeds[0]
    count = seeds.count(nearest)
    if count > 1:
        text = f"holds {count} runs of seed {nearest}, must hold one, with one value of each"
        raise _error(network, f"{text} hyperparameter")
    return seeds.index(nearest)


def _finite(network: Network, networks: Variables, row: int) -> Variables:
    """The network in a row of networks [R, ...]; raises UsageError if it is not finite."""
    one: Variables = jax.tree.map(lambda leaf: leaf[row], networks)
    for path, leaf in jax.tree_util.tree_leaves_with_path(one):
        if not np.isfinite(leaf).all():
            raise _error(network, f"has a network whose {_name(path)} is not finite")
    return one


def _matched(network: Network, networks: Tree, like: Variables) -> Variables:
    """The arrays [R, ...] of a checkpoint in the structure of `like` [...].

    Raises UsageError if their shapes differ.
    """
    theirs = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(networks)}
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    ours = {_name(path): leaf for path, leaf in paths}
    for name in (*ours, *theirs):
        our_shape = ours[name].shape if name in ours else "none"
        their_shape = theirs[name].shape[1:] if name in theirs else "none"
        if our_shape != their_shape:
            text = f"is of another network, whose {name} is {their_shape}, must be {our_shape}"
            raise _error(network, text)
    leaves = [np.asarray(theirs[name], leaf.dtype) for name, leaf in ours.items()]
    matched: Variables = jax.tree.unflatten(structure, leaves)
    return matched


def _name(path: tuple[jax.tree_util.KeyEntry, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
