"""A check that an experiment fits into memory, from shapes, before anything is allocated.

It is a lower bound: a compiled program may need more.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks, rounds
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Federation, Tree, Variables
from fedjax_inv_experiments.experiment import assemble
from fedjax_inv_experiments.experiment.assemble import Assembled
from fedjax_inv_experiments.experiment.grid import Cell
from fedjax_inv_experiments.flags.flag import flag_error, in_flags
from fedjax_inv_experiments.flags.names import facts
from fedjax_inv_experiments.parts import machine, method, network
from fedjax_inv_experiments.parts.training import Sizes

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
    sample = network.sample(assembled.data.x)
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(assembled.model.init, key, sample)
    widths = config.model.widths
    name, value = ("widths", widths) if widths else ("model", config.model.model)
    _check(name, value, 2 * _bytes(variables), "a network and its gradient")
    history, flag = attendance.history, attendance.history_flag
    for cell in {cell.label: cell for cell in cells}.values():  # held-out domains do not matter
        layout = assembled.layout(cell)
        runs = layout.runs_per_device(len(cell.runs))
        state, broadcast = _of_run(assembled, cell, variables, num_clients)
        owners = f"server and {num_clients} clients of {cell.label}"
        _check("clients", num_clients, state, f"the {owners}")
        _check("seeds", config.run.seeds, runs * state, f"{runs} runs, each with {owners}")
        if history > 1:
            what = f"{history} broadcasts of {runs} runs"
            _check(flag, getattr(attendance, flag), runs * history * broadcast, what)
        count = layout.run_devices * layout.client_devices
        if count > 1 and jax.default_backend() == "cpu":  # whose devices have one memory
            what = f"{runs} runs on each of {count} devices; --devices=1 needs less"
            _check("devices", config.run.devices, count * runs * state, what)


def _check(name: str, value: object, needed: int, what: str) -> None:
    """Raises UsageError if `needed` bytes for `what` exceed the memory. name: the flag to blame."""
    try:
        checks.memory(name, value, needed, machine.memory(), f" for {what}")
    except UsageError as error:
        raise in_flags(error, "", {name: name}) from None


def _of_run(
    assembled: Assembled, cell: Cell, variables: Variables, num_clients: int
) -> tuple[int, int]:
    """The bytes of a run's state on a device, and of the broadcasts in one round.

    variables: the shapes of the network's variables. Raises UsageError if the algorithm's settings
    do not fit the network.
    """
    config = assembled.config
    hyper, task = cell.runs[0].hyper, assembled.task
    algorithm = assemble.algorithm(config, cell, assembled.model, task, hyper, Sizes())
    number = 1 if facts(cell.algorithm).pooled else num_clients
    sizes = jax.ShapeDtypeStruct((number,), jnp.int32)

    def init(variables: Variables, size: Array, key: Array) -> Tree:
        federation = Federation(assembled.data, jnp.zeros(1, jnp.int32), size, size)
        return rounds.init(algorithm, variables, federation, key)

    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        with warnings.catch_warnings(action="ignore"):  # these sizes cause an error below
            state = jax.eval_shape(init, variables, sizes, key)
            sent = [jax.eval_shape(each.broadcast, state.server) for each in algorithm.exchanges]
    except UsageError as error:
        names = method.setting_flags(cell.algorithm)
        names["model"] = "model" if config.model.cut < 0 else "cut"
        raise in_flags(error, f"--algorithm={cell.algorithm}", names) from None
    except OverflowError as error:  # an index is too large
        text = f"needs arrays larger than int32 counts: {error}"
        raise flag_error("algorithm", cell.label, text) from None
    of_clients = _bytes(state.clients) // number
    of_clients *= assembled.layout(cell).clients_per_device(number)
    return _bytes(state._replace(clients=())) + of_clients, _bytes(sent)


def _bytes(shapes: Tree) -> int:
    """The bytes of arrays with these shapes."""
    return sum(
        int(np.prod(leaf.shape, dtype=object)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )
