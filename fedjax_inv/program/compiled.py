"""The compiled program of R runs of an experiment, and where its arrays lie on devices."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fedjax_inv import checks, devices, platforms, rounds
from fedjax_inv.devices import Layout
from fedjax_inv.program.host_inputs import Inputs
from fedjax_inv.program.one_run import Experiment, OneRun, Outcome, Training
from fedjax_inv.types import Array, Cohort, Examples, Model, Tree

_LEVEL = "xla_backend_optimization_level"


class Program(NamedTuple):
    """The functions of an experiment for R runs, compiled once for all inputs of the same shapes.

    Each record of `one_run` that they take or return has a leading axis R.
    """

    # jitted: (data, inputs) -> the training before the first round
    init: jax.stages.Wrapped
    # jitted: (data, inputs, training, cohorts [R, T, S]) -> (training, outcome); plays T rounds and
    # evaluates; donates the training that is passed
    segment: jax.stages.Wrapped
    # jitted: (data, inputs, training) -> the outcome of no rounds (T = 0), without metrics
    evaluate: jax.stages.Wrapped
    # (data, inputs) -> the bytes that a client downloads and uploads, summed, in each exchange
    traffic: Callable[[Examples, Inputs], list[int]]
    # (inputs, training) -> training with the states of all clients [R, C, ...], the same for every
    # layout and number of devices; works for shapes too
    stored: Callable[[Inputs, Training], Training]
    placed: Callable[[Training], Training]  # stored training -> training as the program expects it


def make(
    experiment: Experiment,
    *,
    client_chunk: int = 1,
    run_chunk: int = 0,
    layout: Layout | None = None,
) -> Program:
    """Return the program of an experiment.

    Args:
      experiment: the settings of all runs.
      client_chunk: how many clients of a device train at once; 0 for all.
      run_chunk: how many runs train at once; 0 for all.
      layout: the devices that share the clients. Data and inputs must be placed by `Layout.place`.
        By default there is one device, and data and inputs may lie anywhere.

    Raises:
      UsageError: if a chunk is negative, or for settings that are not allowed.
    """
    _check(experiment)
    if layout is not None:
        checks.record("layout", layout, Layout)
    checks.integer("client_chunk", client_chunk, 0)
    checks.integer("run_chunk", run_chunk, 0)

    axis = devices.chunked(client_chunk) if client_chunk else devices.vmapped()
    run = (
        OneRun(experiment, layout.axis(axis), layout.num_parts)
        if layout
        else OneRun(experiment, axis)
    )

    def init(data: Examples, inputs: Inputs) -> Training:
        return _over_runs(lambda one: run.start(data, one), run_chunk, inputs)

    def segment(
        data: Examples, inputs: Inputs, training: Training, cohorts: Cohort
    ) -> tuple[Training, Outcome]:
        return _over_runs(
            lambda *one: run.advance(data, *one), run_chunk, inputs, training, cohorts
        )

    def evaluate(data: Examples, inputs: Inputs, training: Training) -> Outcome:
        return _over_runs(lambda *one: run.assess(data, *one), run_chunk, inputs, training)

    def traffic(data: Examples, inputs: Inputs) -> list[int]:
        """Return the bytes, computed for one device; more devices do not change them."""

        def first(data: Examples, inputs: Inputs) -> tuple[Examples, Inputs]:
            if layout and layout.own:
                data, inputs = devices.local_view(data, inputs)
            return data, jax.tree.map(lambda leaf: leaf[0], inputs)

        data, one = jax.eval_shape(first, data, inputs)
        hyper = {name: np.asarray(values)[0] for name, values in inputs.hyper.items()}
        alone = OneRun(experiment, devices.vmapped())
        return alone.traffic(data, one._replace(hyper=hyper))

    # `init` runs once, and for less time than LLVM's slow passes take.
    is_chosen = _LEVEL in os.environ.get("XLA_FLAGS", "")
    options = {_LEVEL: 1} if platforms.on_cpu() and not is_chosen else None
    if layout is None:
        return Program(
            *(
                jax.jit(init, compiler_options=options),
                jax.jit(segment, donate_argnums=2),
                jax.jit(evaluate),
                traffic,
            ),
            stored=lambda inputs, training: training,
            placed=lambda training: training,
        )

    def stored(inputs: Inputs, training: Training) -> Training:
        states = layout.gather_clients(training.state.clients, inputs.train.size.shape[1])
        return training._replace(state=training.state._replace(clients=states))

    def placed(training: Training) -> Training:
        rest = layout.replicate(training._replace(state=training.state._replace(clients=())))
        states = layout.place_clients(training.state.clients)
        return rest._replace(state=rest.state._replace(clients=states))

    whole: Any = PartitionSpec()
    specs = Training(rounds.State(whole, layout.client_spec, whole, whole, whole), whole)
    return Program(
        jax.jit(layout.over(init, (), specs), compiler_options=options),
        jax.jit(layout.over(segment, (specs, whole), (specs, whole)), donate_argnums=2),
        jax.jit(layout.over(evaluate, (specs,), whole)),
        traffic,
        stored,
        placed,
    )


def _check(experiment: Experiment) -> None:
    checks.record("experiment", experiment, Experiment)
    checks.record("model", experiment.model, Model)
    for name in ("algorithm", "loss", "score"):
        checks.function(name, getattr(experiment, name))
    for name in ("num_groups", "history"):
        checks.integer(name, getattr(experiment, name))
    for name in ("stop_above", "end_at_stop", "drop_nonfinite", "watch_gradients", "pooled"):
        checks.boolean(name, getattr(experiment, name))
    if len(experiment.thresholds):
        checks.each("thresholds", experiment.thresholds, _check_threshold)
    for name, schedule in experiment.schedules.items():
        checks.function(f"schedules[{name!r}]", schedule)
    checks.one_of("precision", experiment.precision, platforms.PRECISIONS)


def _check_threshold(name: str, threshold: float) -> None:
    checks.number(name, threshold, "that is finite", lambda number: True)


def _over_runs(fn: Callable[..., Tree], at_once: int, *arguments: Tree) -> Tree:
    """Return `fn` of each of R runs, computed for about `at_once` runs at a time (0: all).

    All chunks have the same size, the smallest that needs no more chunks than `at_once` does.
    """
    num_runs = jax.tree.leaves(arguments)[0].shape[0]
    count = -(-num_runs // (at_once or num_runs))
    if count == 1:
        return jax.vmap(fn)(*arguments)
    if count == num_runs:
        return jax.lax.map(lambda one: fn(*one), arguments)
    size = -(-num_runs // count)

    # Not the batch_size of lax.map, which fails on arrays without elements.
    def chunked(array: Array) -> Array:
        whole = jnp.concatenate([array, array[: count * size - num_runs]])
        return whole.reshape(count, size, *array.shape[1:])

    results = jax.lax.map(lambda chunk: jax.vmap(fn)(*chunk), jax.tree.map(chunked, arguments))
    return jax.tree.map(lambda a: a.reshape(count * size, *a.shape[2:])[:num_runs], results)
