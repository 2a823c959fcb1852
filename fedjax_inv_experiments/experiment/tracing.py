"""A trace of one round of the algorithms from outside, before anything is compiled or written.

It finds the mistakes in code of others. It takes half a second, so the algorithms of this project,
whose tests trace them, go without.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_inv import devices, own_objectives, program, tree
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Cohort, Examples
from fedjax_inv_experiments.experiment.assemble import Assembled, Prepared
from fedjax_inv_experiments.experiment.grid import Cell
from fedjax_inv_experiments.flags.flag import flag_error, in_flags, shown
from fedjax_inv_experiments.flags.outside import in_module, is_outside
from fedjax_inv_experiments.parts import method, network


def check(assembled: Assembled, cells: Sequence[Cell]) -> None:
    """Raises UsageError for code from outside that does not do its part.

    An algorithm must play a round and serve a network; a loss and a score must be means.
    """
    _check_objective(assembled)
    for cell in {cell.label: cell for cell in cells}.values():  # held-out domains do not matter
        if is_outside(cell.algorithm):
            _check_round(assembled, cell)


def _check_objective(assembled: Assembled) -> None:
    chosen, task = assembled.config.objective, assembled.task
    functions = {"loss": (chosen.loss, task.loss), "score": (chosen.score, task.score.function)}
    for flag_name, (name, function) in functions.items():
        if is_outside(name):
            own, data = assembled.config.model, assembled.dataset
            model = network.make(own, data)
            outputs, _ = network.outputs(own, model, network.shapes(own, model, data), data)
            own_objectives.check_mean(f"--{flag_name}={name}", function, outputs, data.y[:1])


def _check_round(assembled: Assembled, cell: Cell) -> None:
    config, name = assembled.config, cell.algorithm
    # The data of the first seed may be all that is assembled.
    ready = assembled.prepare(cell._replace(runs=cell.runs[:1]))
    run = program.OneRun(ready.experiment, devices.vmapped())
    slots = (config.participation.slots(ready.inputs.train.size.shape[1]),)
    number: Any = jax.ShapeDtypeStruct(slots, jnp.int32)
    present: Any = jax.ShapeDtypeStruct(slots, bool)
    cohort = Cohort(number, present, number)

    def outputs(data: Examples, inputs: program.Inputs, cohort: Cohort) -> Array:
        """The outputs for one example after a round of the first run."""
        first = jax.tree.map(lambda leaf: leaf[0], inputs)
        state, _ = run.round(data, first, run.state(data, first), cohort)
        serving = run.algorithm(first)
        own = tree.take(state.clients, 0) if serving.personal else ()
        return serving.predict(state.server, own, jax.tree.map(lambda leaf: leaf[:1], data.x))

    for setting in ready.inputs.hyper:
        if setting in method.setting_flags(name):
            _check_number(ready, cell, setting)
    try:
        with in_module("algorithm", name):
            found = jax.eval_shape(outputs, ready.data, ready.inputs, cohort)
    except UsageError as error:
        raise in_flags(error, f"--algorithm={name}", method.setting_flags(name)) from None
    if not is_outside(config.objective.loss):  # which may need other outputs
        dataset, source = assembled.dataset, config.data.dataset
        network.check_outputs("algorithm", name, found, dataset, source)


def _check_number(ready: Prepared, cell: Cell, setting: str) -> None:
    """Raises UsageError if the algorithm's factory does not take a setting as a traced array."""

    def build(value: Array) -> None:
        hyper: dict[str, Any] = cell.runs[0].hyper
        ready.experiment.algorithm({**hyper, setting: value})

    try:
        jax.eval_shape(build, jax.ShapeDtypeStruct((), jnp.float32))
    except UsageError as error:
        values = shown(tuple(dict.fromkeys(run.hyper[setting] for run in cell.runs)))
        text = f"must work as a traced array, as one program trains all values ({error})"
        raise flag_error("set", f"{setting}={values}", text) from None
