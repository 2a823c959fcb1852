"""R runs that are ready to train: their program and its inputs, and the training itself."""

import contextlib
import dataclasses
import functools
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import callbacks as acting
from fedjax_inv import checks, communication, evaluation, platforms, types, unseen_norms
from fedjax_inv.ahead import Ahead
from fedjax_inv.callbacks import Callback
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation, stored
from fedjax_inv.devices import Devices, Layout
from fedjax_inv.fitted import Diverged, Fitted, NonfiniteWarning
from fedjax_inv.inputs import Inputs, Run, by_seed
from fedjax_inv.one_run import Experiment, Outcome, first_network
from fedjax_inv.program import Program
from fedjax_inv.streaming import Streamed
from fedjax_inv.task import Task

_SHARED_BYTES = 2**18  # of a network on a CPU whose settings share their batches, by measurement


class Evaluations(NamedTuple):
    """When runs are evaluated, by what, and when a run stops.

    The stop rule is that of `stopping`; with no threshold nothing stops.
    """

    every: int = 1  # how many rounds lie between evaluations, a segment; in 1..T
    start: bool = False  # whether there is one before the first round, too
    # What is measured beside the loss; None: that of `objectives.DEFAULTS` for the targets. Of a
    # function, a higher value is better.
    score: Any = None
    # An update that holds NaN or infinity: "mark" warns of the first, and it reaches the network;
    # "drop" leaves it out; "stop" raises `Diverged`.
    nonfinite: str = "mark"
    by_class: bool = False  # also class by class, and in the proportions of each client's classes
    # Whether the test examples whose client is known are scored by its own network; if none is
    # known, examples in the proportions of each client's classes (`inputs.own_tests`). None: for
    # algorithms with personal networks, as other ones have one network for all.
    by_client: bool | None = None
    # The statistics of BatchNorm where an unseen domain is evaluated (`unseen_norms`): the "mean"
    # of clients', those of each "batch", or those "estimated" of the domain's inputs.
    unseen_norms: str = "mean"
    watched: int = 0  # about how many examples of training and test are evaluated in every round
    warm_start: Callable[[np.ndarray], int] = lambda sizes: 0  # sizes [C] -> rounds before a stop
    thresholds: tuple[float, ...] = ()  # these three as in `one_run.Experiment`
    stop_above: bool = False
    end_at_stop: bool = False

    def check(self, rounds: int) -> None:
        """Raise UsageError for a field that is out of range, or has no effect in T rounds."""
        checks.integer("evaluations.every", self.every, 1, rounds, ", the rounds")
        checks.one_of("evaluations.nonfinite", self.nonfinite, ("mark", "drop", "stop"))
        checks.one_of("evaluations.unseen_norms", self.unseen_norms, unseen_norms.RULES)
        checks.integer("evaluations.watched", self.watched, 0)
        checks.function("evaluations.warm_start", self.warm_start)
        if not isinstance(self.thresholds, tuple | list):
            raise UsageError("evaluations.thresholds", self.thresholds, "must be several numbers")
        for threshold in self.thresholds:
            checks.real("evaluations.thresholds", threshold, -np.inf)
        for name in ("start", "by_class", "by_client", "stop_above", "end_at_stop"):
            if name != "by_client" or self.by_client is not None:
                checks.truth(f"evaluations.{name}", getattr(self, name))
        if self.thresholds and not self.watched:
            text = "need examples to look at, as evaluations.watched counts them"
            raise UsageError("evaluations.thresholds", self.thresholds, text)
        for name in ("stop_above", "end_at_stop"):
            if getattr(self, name) and not self.thresholds:
                raise UsageError(f"evaluations.{name}", True, "needs evaluations.thresholds")


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """R runs that are ready to be compiled and trained."""

    runs: tuple[Run, ...]  # their seeds, and the hyperparameters of the grid
    rounds: int  # T
    evaluations: Evaluations
    experiment: Experiment
    program: Program | Streamed
    layout: Layout
    data: types.Examples
    inputs: Inputs
    cohorts: types.Cohort  # [R, T, S], on the host
    groups: list[str]  # the names of the validation groups
    task: Task  # the loss and the score
    num_classes: int  # 0 if the loss takes targets that are no classes
    own_rule: str  # of `inputs.own_tests`: which test examples clients' own networks serve
    streams: bool  # whether the examples stay on the host, but for those of the next rounds
    sample: types.Examples  # the shapes of the examples [M, ...]
    is_placed: bool = False
    is_compiled: bool = False  # whether the program is known to be

    @classmethod
    def of(
        cls,
        experiment: Experiment,
        devices: Devices,
        runs: Sequence[Run],
        data: types.Examples,
        inputs: Inputs,
        cohorts: types.Cohort,
        **others: Any,
    ) -> "Plan":
        """Return a plan with the program of an experiment, for devices of a choice.

        The examples are on the host or on a device; `others` are further fields of the plan.
        """
        num_clients = inputs.train.size.shape[1]
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(data))
        layout = devices.layout(len(runs), cohorts.who.shape[2], num_clients, num_bytes)
        streams = devices.streams(num_clients, num_bytes)
        if not streams and devices.run_chunk is None:
            layout = _sharing(layout, experiment, runs, data, inputs)
        at_once = 1 if platforms.on_cpu() else 0
        program = Program(
            experiment,
            client_chunk=at_once if devices.client_chunk is None else devices.client_chunk,
            run_chunk=at_once if devices.run_chunk is None else devices.run_chunk,
            layout=layout,
        )
        return cls(
            runs=tuple(runs),
            rounds=cohorts.who.shape[1],
            experiment=experiment,
            program=program,
            layout=layout,
            data=data,
            inputs=inputs,
            cohorts=cohorts,
            streams=streams,
            sample=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), data),
            **others,
        )

    @property
    def build(self) -> Callable[[Mapping[str, Any]], types.Algorithm]:
        """The function from the hyperparameters of a run to its algorithm."""
        return self.experiment.algorithm

    def placed(self) -> "Plan":
        """Return the plan with its data and inputs on the devices, or read from the host."""
        if self.is_placed:
            return self
        place = functools.partial(dataclasses.replace, self, is_placed=True)
        if self.streams and self.evaluations.unseen_norms == "estimated":
            text = "needs all examples of a domain at once, these are read in parts"
            raise UsageError("evaluations.unseen_norms", "estimated", text)
        if self.streams:
            assert not isinstance(self.program, Streamed)
            source = stored.of_arrays(*self.data)
            every = self.evaluations.every
            program = Streamed(self.program, source, self.inputs, self.cohorts, every=every)
            # Its programs are compiled by its first calls, which read the examples, too.
            return place(program=program, is_compiled=True)
        data, inputs = self.layout.place(self.data, self.inputs)
        if self.layout.mesh is None:
            data = federation.on_device(data)
        return place(data=data, inputs=inputs)

    def part(self, first: int) -> types.Cohort:
        """Return the cohorts of the segment that begins with a round.

        It ends at a multiple of `every`, or with the last round.
        """
        every = self.evaluations.every
        end = first - first % every + every
        part = jax.tree.map(lambda leaf: leaf[:, first:end], self.cohorts)
        flags: Any = jax.config
        if flags.jax_disable_jit or flags.jax_debug_nans:
            # Operations one by one cannot index a NumPy array by a loop's counter.
            part = jax.tree.map(jnp.asarray, part)
        return part

    def _parts(self, first: int = 0) -> dict[int, types.Cohort]:
        """Return, by their first rounds, segments of each length that lie after a round."""
        every = self.evaluations.every
        starts = (first, first - first % every + every, self.rounds - self.rounds % every)
        parts = {at: self.part(at) for at in starts if first <= at < self.rounds}
        by_length = {part.who.shape[1]: at for at, part in reversed(parts.items())}
        return {at: parts[at] for at in sorted(by_length.values())}

    def compile(self) -> "Plan":
        """Return the plan, placed, with its programs compiled, so that its first calls find it so.

        Nothing is computed.
        """
        plan = self.placed()
        if isinstance(plan.program, Streamed):
            return plan
        jitted = plan.program.jitted
        data = plan.data
        inputs = plan.inputs
        compiled = jitted.init.lower(data, inputs).compile()

        def placed(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
            if len(sharding.device_set) == 1:
                return shape  # as arrays on the only device, which are bound to no device
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        shapes = jax.eval_shape(jitted.init, data, inputs)
        states = jax.tree.map(placed, shapes, compiled.output_shardings)
        jitted.evaluate.lower(data, inputs, states).compile()
        for part in plan._parts().values():
            jitted.rounds.lower(data, inputs, states, part).compile()
        return dataclasses.replace(plan, is_compiled=True)

    def trace(self) -> None:
        """Trace the rounds and the evaluation, to find mistakes before anything is computed."""
        plan = self.placed()
        if isinstance(plan.program, Streamed):
            return
        jitted = plan.program.jitted
        arguments = (plan.data, plan.inputs)
        states = jax.eval_shape(jitted.init, *arguments)
        jax.eval_shape(jitted.evaluate, *arguments, states)
        jax.eval_shape(jitted.rounds, *arguments, states, plan.part(0))

    def train(self, callbacks: Sequence[Callback | Callable[[Fitted], object]] = ()) -> Fitted:
        """Train all runs, and return them.

        Args:
          callbacks: as in `fit`.

        Raises:
          Diverged: with `nonfinite="stop"`, at an update that is not finite.
        """
        called, plan = acting.of(callbacks), self.placed()
        fitted = Fitted(plan)
        with contextlib.ExitStack() as begun:
            for callback in called:
                callback.begin(fitted)
                begun.callback(callback.end, fitted)
            try:
                plan._train(fitted, called)
            except KeyboardInterrupt:
                if not fitted.round:
                    raise
                fitted.stopped = "interrupt"
        fitted.plan = dataclasses.replace(
            plan, data=plan.sample
        )  # a result does not hold the examples
        return fitted

    def _train(self, fitted: Fitted, callbacks: Sequence[Callback]) -> None:
        program = self.program
        data = self.data
        inputs = self.inputs
        is_new = fitted.training is None
        if fitted.training is None:
            fitted.training = program.init(data, inputs)
        with Ahead() as ahead:
            if not (self.is_compiled or fitted.is_over):
                self._compile_ahead(ahead, fitted)
            if is_new and self.evaluations.start:
                ahead.take("evaluation", lambda: None)
                outcome = program.evaluate(data, inputs, fitted.training)
                fitted.add(self._gathered(outcome), 0)
                _act(callbacks, fitted)
            while not (fitted.is_over or fitted.stopped):
                for name in (fitted.round, "evaluation"):
                    ahead.take(name, lambda: None)
                with _interrupted_at_end():
                    part = self.part(fitted.round)
                    fitted.training, outcome = program.segment(data, inputs, fitted.training, part)
                    outcome = self._gathered(outcome)
                    self._look_for_nonfinite(outcome, fitted)
                    fitted.add(outcome, part.who.shape[1])
                    _act(callbacks, fitted)

    def _gathered(self, outcome: Outcome) -> Outcome:
        """Return an outcome on the host, with the scores of all examples of each test."""
        outcome = self.program.gathered(outcome)
        tests = {"test": outcome.test, **outcome.unseen}
        for name, own in outcome.own_tests.items():
            equally = name == "test" and self.own_rule == "proportions"
            whole = evaluation.of_clients_and_others(own, tests[name], equally=equally)
            tests[name] = jax.device_get(whole)
        return outcome._replace(test=tests.pop("test"), unseen=tests)

    def _compile_ahead(self, ahead: Ahead, fitted: Fitted) -> None:
        """Compile the programs in threads: each one while those before it compute."""
        if jax.process_count() > 1:  # processes must compile in the same order
            return
        assert not isinstance(self.program, Streamed)  # which its first calls compile
        _, rounds, evaluate, _ = self.program.jitted
        arguments = self.data, self.inputs, fitted.training

        def compile_rounds(part: types.Cohort) -> None:
            rounds.lower(*arguments, part).compile()

        for at, part in self._parts(fitted.round).items():
            ahead.begin(at, functools.partial(compile_rounds, part))
            # After the first rounds, and before those of other lengths; it begins once.
            ahead.begin("evaluation", lambda: evaluate.lower(*arguments).compile())

    def _look_for_nonfinite(self, outcome: Outcome, fitted: Fitted) -> None:
        """Warn of the first update that is not finite, or raise `Diverged`."""
        broken = np.asarray(outcome.broken)
        if fitted.is_broken or (broken < 0).all():
            return
        at, index = np.argwhere(broken.T >= 0)[0].tolist()  # the first round comes first
        error = Diverged(fitted.round + at + 1, int(broken[index, at]), index, self.runs[index])
        if self.evaluations.nonfinite == "stop":
            raise error
        fitted.is_broken = True
        warnings.warn(str(error), NonfiniteWarning, stacklevel=5)


def _sharing(
    layout: Layout,
    experiment: Experiment,
    runs: Sequence[Run],
    data: types.Examples,
    inputs: Inputs,
) -> Layout:
    """Return the layout in which runs of a seed share their batches, if the network is small.

    The caches of a CPU hold the arrays of one run of a larger network, but not those of several.
    """
    table = by_seed(runs)
    if table.shape[1] == 1:
        return layout
    if platforms.on_cpu():

        def network(inputs: Inputs, x: Any) -> types.Variables:
            return first_network(experiment, jax.tree.map(lambda leaf: leaf[0], inputs), x)

        if communication.size(jax.eval_shape(network, inputs, data.x)) > _SHARED_BYTES:
            return layout
    return layout.sharing(table)


def _act(callbacks: Sequence[Callback], fitted: Fitted) -> None:
    """Call the callbacks after an evaluation. An error gets the result so far as `fitted`."""
    for callback in callbacks:
        try:
            answer = callback.evaluated(fitted)
            if not isinstance(answer, bool | np.bool_ | str | None):
                text = (
                    f"one answered {checks.shown(answer)}, must answer True or a text to end the "
                )
                raise UsageError("callbacks", ..., f"{text}training, None or False to go on")
            if answer and not fitted.stopped:
                fitted.stopped = answer if isinstance(answer, str) else "callback"
        except Exception as error:
            error.fitted = fitted  # type: ignore[attr-defined]
            raise


@contextlib.contextmanager
def _interrupted_at_end() -> Iterator[None]:
    """Let Ctrl-C act at the end of the block, which therefore runs as a whole."""
    is_main = threading.current_thread() is threading.main_thread()  # it alone gets signals
    if not is_main or signal.getsignal(signal.SIGINT) is None:  # None: no handler of Python
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(signal.SIGINT, None)  # by default it raises KeyboardInterrupt
