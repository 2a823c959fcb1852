"""Whether an experiment fits into memory: by arithmetic on shapes, before anything is made of them.

What is counted here is needed however a program is compiled. Not all that is needed is counted.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from experiments.experiment import build
from experiments.experiment.grid import Cell
from experiments.experiment.groups import Participation
from experiments.flags.flag import in_flags, shown
from experiments.flags.names import facts, hyperparameters
from experiments.parts import devices
from fedjax_inv import checks, rounds
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Federation, Tree, Variables

_MOST_STEPS = 2**31  # which are counted in int32
_SLOT = 9  # bytes of a client in a round: who it is, whether it is there, and its delay


def check(made: build.Assembled) -> None:
    """Raises UsageError, which names the flag, for what memory cannot hold, or int32 not count."""
    config = made.config
    split = next(iter(made.splits[made.cells[0].held_out].values()))
    num_clients, largest = len(split.domain), int(split.train.size.max())
    num_runs = max(len(cell.runs) for cell in made.cells)
    batch, epochs = config.clients.batch_size, config.clients.local_epochs
    steps = epochs * -(-largest // (batch or largest))
    if steps >= _MOST_STEPS and not config.clients.local_steps:
        raise UsageError(
            f"--local_epochs={epochs}: makes {steps} steps a round, must make fewer than 2^31"
        )
    example = sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(made.data))
    _check("batch_size", batch, batch * example, "a batch")
    attending = num_runs * config.participation.slots(num_clients)
    total = config.run.rounds
    _check("rounds", total, _SLOT * total * attending, "who attends in each")
    x = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), made.data.x
    )
    network = jax.eval_shape(made.model.init, jax.eval_shape(lambda: jax.random.key(0)), x)
    sized = "widths" if config.model.widths else "model"
    _check(sized, getattr(config.model, sized), 2 * _bytes(network), "a network and its gradient")
    history = build.history(config.participation)
    delay = _delay(config.participation)
    kept = getattr(config.participation, delay)
    for cell in {cell.label: cell for cell in made.cells}.values():  # domains make no difference
        runs = len(cell.runs)
        state, broadcast = _of_run(made, cell, network, num_clients)
        held = f"server and {num_clients} clients of {cell.label}"
        _check("clients", num_clients, state, f"the {held}")
        _check("seeds", config.run.seeds, runs * state, f"{runs} runs, each with {held}")
        if history > 1:
            _check(delay, kept, runs * history * broadcast, f"{history} broadcasts of {runs} runs")


def _delay(chosen: Participation) -> str:
    """The flag that says how many broadcasts are kept."""
    if chosen.late == "stale" or ":" in chosen.delay:
        return "longest_delay"
    return "delay" if int(chosen.delay) else "slow"


def _check(name: str, value: object, needed: int, what: str) -> None:
    checks.memory(f"--{name}={shown(value)}", ..., needed, devices.memory(), f" for {what}")


def _of_run(
    made: build.Assembled, cell: Cell, network: Variables, num_clients: int
) -> tuple[int, int]:
    """Bytes of (what a run of a cell carries on a device from round to round, what is broadcast in
    one).

    Raises UsageError where the algorithm's settings do not fit the network.
    """
    algorithm = build.algorithm(made.config, cell, made.model, cell.runs[0].hyper, build.Sizes())
    of_clients = jax.ShapeDtypeStruct(
        (1 if facts(cell.algorithm).pooled else num_clients,), jnp.int32
    )

    def init(variables: Variables, size: Array, key: Array) -> Tree:
        federation = Federation(made.data, jnp.zeros(1, jnp.int32), size, size)
        return rounds.init(algorithm, variables, federation, key)

    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        with warnings.catch_warnings(action="ignore"):  # of sizes that are refused below
            state = jax.eval_shape(init, network, of_clients, key)
            sent = [jax.eval_shape(each.broadcast, state.server) for each in algorithm.exchanges]
    except UsageError as error:
        names = {name: f"set={name}" for name in hyperparameters(cell.algorithm)}
        raise in_flags(error, f"--algorithm={cell.algorithm}", names) from None
    except OverflowError as error:  # of an index
        raise UsageError(
            f"--algorithm={cell.label}: needs arrays larger than int32 counts: {error}"
        ) from None
    held_by_all, number = _bytes(state.clients), of_clients.shape[0]
    layout = devices.layout(made.config, number)
    held = held_by_all // number * (layout.clients_per_device(number) if layout else number)
    return _bytes(state._replace(clients=())) + held, _bytes(sent)


def _bytes(shapes: Tree) -> int:
    """Of arrays of these shapes."""
    return sum(
        int(np.prod(leaf.shape, dtype=object)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(shapes)
    )
