"""A check that an experiment fits into memory, from shapes, before anything is allocated.

It is a lower bound: a compiled program may need more.
"""

import jax
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.experiment.assemble import Assembled
from fedjax_inv_experiments.experiment.grid import Cell
from fedjax_inv_experiments.flags.flag import flag_error, in_flags
from fedjax_inv_experiments.flags.names import facts
from fedjax_inv_experiments.parts import machine

_MOST_STEPS = 2**31  # steps are counted in int32
_SLOT = 9  # bytes of a slot in a cohort: the client, whether it is present, and its delay


def check(assembled: Assembled) -> None:
    """Raises UsageError if memory cannot hold an experiment, or int32 cannot count its steps."""
    config, cells = assembled.config, assembled.cells
    split = next(iter(assembled.splits[cells[0].held_out].values()))
    num_clients, largest = len(split.domain), int(np.asarray(split.train.size).max())
    num_runs = max(len(cell.runs) for cell in cells)
    batch, epochs = config.clients.batch_size, config.clients.local_epochs
    steps = epochs * -(-largest // (batch or largest))
    if steps >= _MOST_STEPS and not config.clients.local_steps:
        text = f"makes {steps} steps a round, must make fewer than 2^31"
        raise flag_error("local_epochs", epochs, text)
    example = sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(assembled.data))
    _check("batch_size", batch, batch * example, "a batch")
    attendance = config.participation
    slots, total = num_runs * attendance.slots(num_clients), config.run.rounds
    _check("rounds", total, _SLOT * total * slots, "the clients that attend each")
    widths = config.model.widths
    name, value = ("widths", widths) if widths else ("model", config.model.model)
    _check(name, value, 2 * assembled.num_bytes, "a network and its gradient")
    history, flag = attendance.history, attendance.history_flag
    for cell in {cell.label: cell for cell in cells}.values():  # held-out domains do not matter
        layout = assembled.layout(cell)
        runs = layout.runs_per_device(len(cell.runs))
        state = _of_run(assembled, cell)
        owners = f"server and {num_clients} clients of {cell.label}"
        _check("clients", num_clients, state, f"the {owners}")
        _check("seeds", config.run.seeds, runs * state, f"{runs} runs, each with {owners}")
        if history > 1:
            what = f"{history} broadcasts of {runs} runs"
            _check(
                flag, getattr(attendance, flag), runs * history * assembled.kept(cell).sent, what
            )
        count = layout.run_devices * layout.client_devices
        if count > 1 and jax.default_backend() == "cpu":  # whose devices have one memory
            what = f"the states of runs on {count} devices (--devices=1 needs less)"
            _check("devices", config.run.devices, count * runs * state, what)


def _check(name: str, value: object, needed: int, what: str) -> None:
    """Raises UsageError if `needed` bytes for `what` exceed the memory. name: the flag to blame."""
    try:
        checks.memory(name, value, needed, machine.memory(), f" for {what}")
    except UsageError as error:
        raise in_flags(error, "", {name: name}) from None


def _of_run(assembled: Assembled, cell: Cell) -> int:
    """The bytes of a run's state on a device."""
    kept = assembled.kept(cell)
    if assembled.layout(cell).streams:
        return kept.server
    split = next(iter(assembled.splits[cell.held_out].values()))
    number = 1 if facts(cell.algorithm).pooled else len(split.domain)
    return kept.server + kept.client * assembled.layout(cell).clients_per_device(number)
