"""Many runs of one experiment, seeds x hyperparameters x clients, as one compiled program.

    program = Program(experiment)
    training = program.init(data, inputs)
    outcome = program.evaluate(data, inputs, training)                     # before the first round
    training, outcome = program.segment(data, inputs, training, cohorts)   # again and again

`inputs` computes the inputs on the host, and `one_run` defines a single run. `streaming` plays a
program with examples that stay on the host.
Nothing here depends on flags, files or the screen. Axis letter: R runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fedjax_inv import devices, platforms, rounds, types
from fedjax_inv.devices import Layout
from fedjax_inv.inputs import Inputs
from fedjax_inv.one_run import Experiment, OneRun, Outcome, Played, Training
from fedjax_inv.types import Array, Tree


class Jitted(NamedTuple):
    """The compiled functions of a program."""

    init: jax.stages.Wrapped
    rounds: jax.stages.Wrapped  # which takes the memory of the training that is passed
    evaluate: jax.stages.Wrapped
    start: jax.stages.Wrapped  # `init` of the first run on one device, for its shapes alone


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """R runs of an experiment, compiled once for all inputs of the same shapes.

    Of a device, `client_chunk` clients and `run_chunk` runs train at once; 0 stands for all. Data
    and inputs must be placed by `Layout.place` of the same layout; by default there is one device,
    and they may lie anywhere.

    Each record of `one_run` that the methods take or return has a leading axis R. If several
    devices share the runs, it is longer, and the last run is repeated; `gathered` and `stored` cut
    it.
    """

    experiment: Experiment
    client_chunk: int = 1
    run_chunk: int = 0
    layout: Layout = devices.ONE_DEVICE
    jitted: Jitted = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "jitted", self._jitted())

    def _jitted(self) -> Jitted:
        chunk = self.client_chunk
        axis = self.layout.axis(devices.chunked(chunk) if chunk else devices.vmapped())
        run = OneRun(self.experiment, axis)
        layout = self.layout

        def over_runs(fn: Callable[..., Tree], *arguments: Tree) -> Tree:
            with platforms.products_at(self.experiment.precision):
                return _over_settings(fn, layout.settings, self.run_chunk, *arguments)

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
        once = platforms.quick_to_compile()
        often = platforms.one_thread()
        seldom = often
        if self.experiment.quick_to_compile:
            once = seldom = often | platforms.quickest_to_compile()
            often |= platforms.quick_to_compile()
        return Jitted(
            jax.jit(layout.over(init, (), specs), compiler_options=once),
            jax.jit(
                layout.over(play, (specs, whole), (specs, runs)),
                donate_argnums=2,
                compiler_options=often,
            ),
            jax.jit(layout.over(evaluate, (specs,), runs), compiler_options=seldom),
            jax.jit(self._start),
        )

    def _start(self, data: types.Examples, inputs: Inputs) -> Training:
        if self.layout.own and self.layout.mesh is not None:
            data, inputs = devices.local_view(data, inputs)
        run = OneRun(self.experiment, devices.vmapped())
        return run.start(data, jax.tree.map(lambda leaf: leaf[0], inputs))

    def init(self, data: types.Examples, inputs: Inputs) -> Training:
        """Return the training before the first round."""
        return self.jitted.init(data, inputs)

    def rounds(
        self, data: types.Examples, inputs: Inputs, training: Training, cohorts: types.Cohort
    ) -> tuple[Training, Played]:
        """Play the rounds of cohorts [R, T, S]; the training passed is donated."""
        return self.jitted.rounds(data, inputs, training, cohorts)

    def evaluate(self, data: types.Examples, inputs: Inputs, training: Training) -> Outcome:
        """Return the outcome of no rounds (T = 0), without metrics."""
        return self.jitted.evaluate(data, inputs, training)

    def segment(
        self, data: types.Examples, inputs: Inputs, training: Training, cohorts: types.Cohort
    ) -> tuple[Training, Outcome]:
        """Play the rounds of cohorts [R, T, S], then evaluate; the training passed is donated."""
        # Two programs: the one that evaluates serves before the first round too, and algorithms
        # that predict alike share it.
        training, played = self.rounds(data, inputs, training, cohorts)
        outcome = self.evaluate(data, inputs, training)
        return training, outcome._replace(**played._asdict())

    def stored(self, inputs: Inputs, training: Training) -> Training:
        """Return training with the states of all clients [R, C, ...].

        It is the same for every layout and number of devices.
        """
        layout = self.layout
        states = layout.gather_clients(training.state.clients, inputs.train.size.shape[1])
        rest = layout.gather_runs(training._replace(state=training.state._replace(clients=())))
        return rest._replace(state=rest.state._replace(clients=states))

    def placed(self, training: Training) -> Training:
        """Return stored training as the program expects it."""
        layout = self.layout
        rest = layout.place_runs(training._replace(state=training.state._replace(clients=())))
        states = layout.place_clients(training.state.clients)
        return rest._replace(state=rest.state._replace(clients=states))

    def gathered(self, tree: Tree) -> Tree:
        """Return arrays [R, ...] of all devices on the host."""
        return jax.device_get(self.layout.gather_runs(tree))

    def shapes(self, data: types.Examples, inputs: Inputs) -> Training:
        """Return the shapes of stored training."""
        number = self.layout.num_runs if self.layout.run_devices > 1 else len(inputs.seed)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((number, *leaf.shape), leaf.dtype),
            jax.eval_shape(self.jitted.start, data, inputs),
        )


# The axes of runs that share all but their settings, in a vmap over them: None for what they share.
_SETTINGS = (
    Inputs(*[None] * len(Inputs._fields))._replace(hyper=0),  # type: ignore[arg-type]
    Training(rounds.State(0, 0, 0, None, None), 0),  # type: ignore[arg-type]
    None,  # cohorts
)


def _over_settings(fn: Callable[..., Tree], settings: int, at_once: int, *arguments: Tree) -> Tree:
    """Return `fn` of each of R runs, of (inputs, training, cohorts) or the first of these.

    Each `settings` runs that follow each other share all but their settings: their batches are
    gathered once, and their products with a batch are one. At least these train at once.
    """
    if settings == 1:
        return _over_runs(fn, at_once, *arguments)

    def grouped(axis: int | None, tree: Tree) -> Tree:
        def leaf(array: Array) -> Array:
            of_seeds = array.reshape(len(array) // settings, settings, *array.shape[1:])
            return of_seeds[:, 0] if axis is None else of_seeds

        return jax.tree.map(leaf, tree)

    axes = _SETTINGS[: len(arguments)]
    of_seeds = jax.tree.map(grouped, axes, arguments, is_leaf=lambda axis: axis is None)
    results = _over_runs(jax.vmap(fn, axes), -(-at_once // settings), *of_seeds)
    return jax.tree.map(lambda a: a.reshape(a.shape[0] * settings, *a.shape[2:]), results)


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
