"""Many runs of one experiment, seeds x hyperparameters x clients, as one compiled program.

    compiled = make(experiment)
    training = compiled.init(data, inputs)
    outcome = compiled.evaluate(data, inputs, training)                     # before the first round
    training, outcome = compiled.segment(data, inputs, training, cohorts)   # again and again

`inputs` computes the inputs on the host, and `one_run` defines a single run. `streaming` plays a
program with examples that stay on the host.
Nothing here depends on flags, files or the screen. Axis letter: R runs.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fedjax_inv import devices, platforms, rounds, types
from fedjax_inv.communication import Traffic
from fedjax_inv.devices import Layout
from fedjax_inv.inputs import Inputs
from fedjax_inv.one_run import Experiment, OneRun, Outcome, Played, Training
from fedjax_inv.types import Array, Tree

T = TypeVar("T")


class Program(NamedTuple):
    """The functions of an experiment for R runs, compiled once for all inputs of the same shapes.

    Each record of `one_run` that they take or return has a leading axis R. If several devices share
    the runs, it is longer, and the last run is repeated; `gathered` and `stored` cut it.
    """

    # jitted: (data, inputs) -> the training before the first round
    init: jax.stages.Wrapped
    # jitted: (data, inputs, training, cohorts [R, T, S]) -> (training, `Played`); plays T rounds;
    # donates the training that is passed
    rounds: jax.stages.Wrapped
    # jitted: (data, inputs, training) -> the outcome of no rounds (T = 0), without metrics
    evaluate: jax.stages.Wrapped
    # (data, inputs) -> the bytes that a client downloads and uploads in each exchange
    traffic: Callable[[types.Examples, Inputs], list[Traffic]]
    # (inputs, training) -> training with the states of all clients [R, C, ...], the same for every
    # layout and number of devices
    stored: Callable[[Inputs, Training], Training]
    placed: Callable[[Training], Training]  # stored training -> training as the program expects it
    gathered: Callable[[Tree], Tree]  # arrays [R, ...] of all devices, on the host
    # (data, inputs) -> the shapes of stored training
    shapes: Callable[[types.Examples, Inputs], Training]

    def segment(
        self, data: types.Examples, inputs: Inputs, training: Training, cohorts: types.Cohort
    ) -> tuple[Training, Outcome]:
        """Play the rounds of cohorts [R, T, S], then evaluate; the training passed is donated."""
        # Two programs: the one that evaluates serves before the first round too, and algorithms
        # that predict alike share it.
        training, played = self.rounds(data, inputs, training, cohorts)
        outcome = self.evaluate(data, inputs, training)
        return training, outcome._replace(**played._asdict())


def make(
    experiment: Experiment,
    *,
    client_chunk: int = 1,
    run_chunk: int = 0,
    layout: Layout | None = None,
) -> Program:
    """Return the program of an experiment.

    Of a device, `client_chunk` clients and `run_chunk` runs train at once; 0 stands for all. Data
    and inputs must be placed by `Layout.place` of the same layout; by default there is one device,
    and they may lie anywhere.
    """
    layout = Layout() if layout is None else layout
    axis = layout.axis(devices.chunked(client_chunk) if client_chunk else devices.vmapped())
    run = OneRun(experiment, axis)

    def over_runs(fn: Callable[..., Tree], *arguments: Tree) -> Tree:
        return _over_runs(fn, run_chunk, *arguments)

    def init(data: types.Examples, inputs: Inputs) -> Training:
        return over_runs(lambda one: run.start(data, one), inputs)

    def play(
        data: types.Examples, inputs: Inputs, training: Training, cohorts: types.Cohort
    ) -> tuple[Training, Played]:
        mine = layout.my_runs(cohorts, len(inputs.seed))
        return over_runs(lambda *one: run.advance(data, *one), inputs, training, mine)

    def evaluate(data: types.Examples, inputs: Inputs, training: Training) -> Outcome:
        return over_runs(lambda *one: run.assess(data, *one), inputs, training)

    whole: Any = PartitionSpec()
    runs: Any = layout.run_spec
    specs = Training(rounds.State(runs, layout.client_spec, runs, runs, runs), runs)
    # `init` runs once, and in a short run `evaluate` seldom.
    once, often = platforms.quick_to_compile(), platforms.one_thread()
    seldom = often
    if experiment.quick_to_compile:
        once = seldom = often | platforms.quickest_to_compile()
        often |= platforms.quick_to_compile()
    return Program(
        jax.jit(layout.over(init, (), specs), compiler_options=once),
        jax.jit(
            layout.over(play, (specs, whole), (specs, runs)),
            donate_argnums=2,
            compiler_options=often,
        ),
        jax.jit(layout.over(evaluate, (specs,), runs), compiler_options=seldom),
        *_uncompiled(experiment, layout),
    )


def _uncompiled(experiment: Experiment, layout: Layout) -> tuple[Any, ...]:
    """Return the functions of a `Program` that are not compiled, from `traffic` on."""
    # Shapes and bytes are counted for one device; more devices do not change them.
    alone = OneRun(experiment, devices.vmapped())

    def first(data: types.Examples, inputs: Inputs) -> tuple[types.Examples, Inputs]:
        if layout.own and layout.mesh is not None:
            data, inputs = devices.local_view(data, inputs)
        return data, jax.tree.map(lambda leaf: leaf[0], inputs)

    @_by_shapes
    def traffic(data: types.Examples, inputs: Inputs) -> list[Traffic]:
        data, one = jax.eval_shape(first, data, inputs)
        hyper = {name: np.asarray(layout.gather_runs(of))[0] for name, of in inputs.hyper.items()}
        return alone.traffic(data, one._replace(hyper=hyper))

    def stored(inputs: Inputs, training: Training) -> Training:
        states = layout.gather_clients(training.state.clients, inputs.train.size.shape[1])
        rest = layout.gather_runs(training._replace(state=training.state._replace(clients=())))
        return rest._replace(state=rest.state._replace(clients=states))

    def placed(training: Training) -> Training:
        rest = layout.place_runs(training._replace(state=training.state._replace(clients=())))
        states = layout.place_clients(training.state.clients)
        return rest._replace(state=rest.state._replace(clients=states))

    def gathered(tree: Tree) -> Tree:
        return jax.device_get(layout.gather_runs(tree))

    @_by_shapes
    def shapes(data: types.Examples, inputs: Inputs) -> Training:
        one = jax.eval_shape(alone.start, *jax.eval_shape(first, data, inputs))
        number = layout.num_runs if layout.run_devices > 1 else len(inputs.seed)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((number, *leaf.shape), leaf.dtype), one
        )

    return traffic, stored, placed, gathered, shapes


def _by_shapes(fn: Callable[[types.Examples, Inputs], T]) -> Callable[[types.Examples, Inputs], T]:
    """Return `fn`, which is computed once for all arguments of the same shapes."""
    known: dict[Hashable, T] = {}

    @functools.wraps(fn)
    def of(data: types.Examples, inputs: Inputs) -> T:
        shapes, structure = jax.tree.flatten(jax.eval_shape(lambda *both: both, data, inputs))
        key = *shapes, structure
        if key not in known:
            known[key] = fn(data, inputs)
        return known[key]

    return of


def _over_runs(fn: Callable[..., Tree], at_once: int, *arguments: Tree) -> Tree:
    """Return `fn` of each of R runs, computed for about `at_once` runs at a time (0: all).

    All chunks have the same size, the smallest that needs no more chunks than `at_once` does.
    """
    num_runs = jax.tree.leaves(arguments)[0].shape[0]
    if num_runs == 1:  # without vmap, under which convolutions are slower
        alone = fn(*jax.tree.map(lambda array: array[0], arguments))
        return jax.tree.map(lambda array: array[None], alone)
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
