"""The file states of a run folder: the clients' states of a run with --hold=stream.

A checkpoint of such a run holds the places of the states in it (`fedjax_inv.program.kept`). Of
several processes the leading one writes this file. Each of the others reads and writes a copy of
its own, which is made anew at each start and has no name.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_inv.checks import UsageError
from fedjax_inv.program import Kept, Places
from fedjax_inv.types import Tree
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.experiment.grid import Cell
from fedjax_inv_experiments.flags.flag import flag_error
from fedjax_inv_experiments.parts import machine
from fedjax_inv_experiments.running import checkpoints, files

NAME = "states"


def check_hold(folder: Path, config: Config, *, streams: bool) -> None:
    """Raises UsageError if a run whose clients keep states began with another --hold.

    streams: whether the states come from the host now.
    """
    before = (folder / NAME).exists()
    if before == streams or not checkpoints.rounds(folder / "checkpoints"):
        return
    began = "with --hold=stream" if before else "without --hold=stream"
    text = f"the run in {folder} began {began}, and so are its checkpoints; must be "
    raise flag_error("hold", config.run.hold, text + ("stream" if before else "own or all"))


def opened(folder: Path, config: Config, cell: Cell, like: Tree, num_clients: int) -> Kept:
    """The file of a run that begins or goes on. like: the shapes of one client's state.

    Raises UsageError if a checkpoint refers to a file that is not there any more.
    """
    place, path = folder / "checkpoints", folder / NAME
    there = checkpoints.rounds(place)
    if there and not path.exists():
        text = "is gone, and the checkpoints refer to it; put a copy in its place"
        raise UsageError(str(path), ..., text)
    if not there:
        files.write(path, "")  # of a run that died before its first checkpoint
    shape = len(cell.runs), num_clients
    if machine.leads():
        file = open(path, "r+b")  # noqa: SIM115
    else:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        if there:
            with open(path, "rb") as source:
                shutil.copyfileobj(source, file)
            file.flush()
    machine.agree(0)  # no state is written before all have copied
    if not machine.leads():
        return Kept(file, like, shape, reuses=1)  # no checkpoint refers to it
    kept = config.run.keep_checkpoints
    reuses = 0 if kept == "all" else max(2, int(kept)) + 1
    before = [
        found
        for done in (there if reuses else ())
        for item in checkpoints.ITEMS
        if (found := _places(checkpoints.plain(place, done, item))) is not None
    ]
    return Kept(file, like, shape, reuses=reuses, before=before)


def _places(tree: dict[str, Any]) -> Places | None:
    """The places in an item of a checkpoint."""
    clients = tree.get("state", tree).get("clients")
    return None if not isinstance(clients, dict) else Places(**clients)


def read(folder: Path, places: Places, first: Tree, run: int) -> Tree:
    """The states [C, ...] of all clients of a run that has them in a file, on the host.

    first: the states of clients that have never attended, [C, ...].
    """
    shape = np.shape(places.record)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), first)
    with open(folder / NAME, "rb") as file:
        kept = Kept(file, one, (shape[0], shape[1]))
        kept.begin(places)
        states = jax.tree.map(np.array, first)
        known = np.flatnonzero(kept.known(run, np.arange(shape[1])))
        kept.read(run, known, states, known)
        return states
