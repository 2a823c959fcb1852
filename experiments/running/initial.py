"""Networks to start from: the global ones of another run, for --init_from."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from experiments.experiment.grid import Cell
from experiments.experiment.groups import Network
from experiments.flags.flag import shown
from experiments.running import checkpoints, provenance, records
from experiments.running import folder as folders
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Tree, Variables

# Flags of a network that make it another one of the same shapes.
_SAME = ("activation", "weights")
_BEGUN = "start.json"  # in a run folder: what its runs started from


def variables(chosen: Network, like: Variables, seeds: Sequence[int]) -> dict[int, Variables]:
    """The networks that --init_from names, by seed: of the same seed, else of the run's first.

    like: shapes of what the new run's network is made of. Raises UsageError, in one line, if there
    is no such checkpoint, it holds several networks of a seed or none, one that is not finite, or
    another one than `like`.
    """
    where = f"--init_from={chosen.init_from}"
    folder, checkpoint = _place(chosen)
    if not (folder / "config.json").is_file():
        cells = sorted(place.parent.name for place in folder.glob("*/config.json"))
        one_of = f" of this sweep, one of {', '.join(cells)}" if cells else ""
        raise UsageError(f"{where}: must be the folder of a run{one_of}, or a checkpoint in it")
    try:
        config, cell = folders.read(folder)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    for name in _SAME:
        there, here = getattr(config.model, name), getattr(chosen, name)
        if there != here:
            raise UsageError(
                f"{where}: is of --{name}={shown(there)}, must be of --{name}={shown(here)}, as "
                "this run"
            )
    rounds = checkpoints.rounds(folder / "checkpoints")
    if checkpoint is not None and checkpoint not in rounds:
        raise UsageError(f"{where}: must be one of the checkpoints there, of rounds {rounds}")
    if not rounds:
        raise UsageError(f"{where}: has no checkpoint yet; must have one")
    done = rounds[-1] if checkpoint is None else checkpoint
    try:
        place = folder / "checkpoints"
        server = checkpoints.plain(place, done, config, cell)["state"]["server"]
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    while "wrapped" in server:  # by a rule for missing uploads
        server = server["wrapped"]
    if "variables" not in server:
        raise UsageError(
            f"{where}: is of --algorithm={cell.algorithm}, which has no single network to start "
            "from"
        )
    held = _matched(where, server["variables"], like)
    return {seed: _finite(where, held, _row(where, cell, seed)) for seed in seeds}


def is_gone(chosen: Network) -> bool:
    """Whether what --init_from names is no run any more."""
    return bool(chosen.init_from) and not (_place(chosen)[0] / "config.json").is_file()


def _place(chosen: Network) -> tuple[Path, int | None]:
    """The folder of the run that --init_from names, and the round of the checkpoint if it does."""
    path = Path(chosen.init_from).expanduser()
    if path.name.isdecimal() and path.parent.name == "checkpoints":
        return path.parent.parent, int(path.name)
    return path, None


def record(folder: Path, networks: Mapping[int, Variables]) -> None:
    """Notes in a run folder what its runs start from."""
    folders.write_json(folder / _BEGUN, {"networks": _checksum(networks)})


def check_same(chosen: Network, folder: Path, networks: Mapping[int, Variables]) -> None:
    """Raises UsageError where the runs of a folder have started from other networks.

    What --init_from names may have been trained on, or made anew, since then.
    """
    path = folder / _BEGUN
    if not path.exists():
        return
    remedy = "delete it if --init_from is what it was"
    if records.read(path, records.Networks, remedy).networks != _checksum(networks):
        raise UsageError(
            f"--init_from={chosen.init_from}: has other networks by now than those that the run in "
            f"{folder} started from; choose another --run_dir, or delete that run"
        )


def _checksum(networks: Mapping[int, Variables]) -> str:
    """The SHA-256 of all bits of networks by seed."""
    return provenance.digest(
        (str(seed) if number == 0 else "", leaf)
        for seed, variables in networks.items()
        for number, leaf in enumerate(jax.tree.leaves(variables))
    )


def _row(where: str, cell: Cell, seed: int) -> int:
    """Which of the runs is of a seed; of one that there is not, which is of the first."""
    seeds = [run.seed for run in cell.runs]
    taken = seed if seed in seeds else seeds[0]
    if seeds.count(taken) > 1:
        raise UsageError(
            f"{where}: holds {seeds.count(taken)} runs of seed {taken}, must hold one, with one "
            "value of each hyperparameter"
        )
    return seeds.index(taken)


def _finite(where: str, held: Variables, row: int) -> Variables:
    """One of R networks [R, ...]."""
    taken = jax.tree.map(lambda leaf: leaf[row], held)
    for path, leaf in jax.tree_util.tree_leaves_with_path(taken):
        if not np.isfinite(leaf).all():
            raise UsageError(f"{where}: has a network whose {_name(path)} is not finite")
    return taken


def _matched(where: str, held: Tree, like: Variables) -> Variables:
    """The arrays [R, ...] of a checkpoint in the structure of `like` [...]."""
    theirs = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(held)}
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    ours = {_name(path): leaf for path, leaf in paths}
    for name in (*ours, *theirs):
        here = ours[name].shape if name in ours else "none"
        there = theirs[name].shape[1:] if name in theirs else "none"
        if here != there:
            raise UsageError(
                f"{where}: is of another network, whose {name} is {there}, must be {here}"
            )
    leaves = [np.asarray(theirs[name], leaf.dtype) for name, leaf in ours.items()]
    return jax.tree.unflatten(structure, leaves)


def _name(path: tuple[jax.tree_util.KeyEntry, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
