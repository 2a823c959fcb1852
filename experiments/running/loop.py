"""Runs a cell segment by segment: progress, metrics, checkpoints, stopping and resuming.

A run folder holds config.json, metrics.jsonl, checkpoints/ and, when it is finished,
result.json. A finished run keeps its last checkpoint, which also holds the selected states.
"""

import contextlib
import functools
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Sharding

from fedjax_inv import stopping
from fedjax_inv.algorithms import exit_strategy
from fedjax_inv.checks import UsageError
from fedjax_inv.program import Inputs, Outcome, Program, Training
from fedjax_inv.types import Cohort, Examples, Tree

from .. import selection
from ..experiment import assemble
from ..experiment.config import Config
from ..experiment.grid import Cell
from ..flags.errors import Diverged
from ..parts import machine
from ..parts.objective import ACCURACY, Measure
from ..running import checkpoints as checkpoint_files
from ..running import divergence, files, records, selected, summary
from ..running.ahead import Ahead
from ..running.checkpoints import Checkpoints
from ..running.events import Events
from ..running.log import Log
from ..running.progress import Progress
from ..running.records import Line, Result
from ..running.selected import SelectedStates
from ..running.signals import Stop, Stopped


class Job(NamedTuple):
    """A cell with its program and inputs."""

    config: Config
    cell: Cell
    program: Program
    data: Examples
    inputs: Inputs
    groups: list[str]  # names of the validation groups
    personal: bool  # whether predictions need the clients' states
    measure: Measure = ACCURACY  # how to read the scores
    is_compiled: bool = False  # whether the program has been compiled before
    cohorts: Cohort | None = None  # of all rounds, filled up to whole segments; None: not drawn
    title: str = ""  # what lines of progress name the cell


def compile_ahead(job: Job) -> Job:
    """The job of a new cell with its program compiled, so that its first calls find it so."""
    program, data, inputs = job.program, job.data, job.inputs
    compiled = program.init.lower(data, inputs).compile()
    shapes = jax.eval_shape(program.init, data, inputs)

    def placed(shape: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
        if len(sharding.device_set) == 1:
            return shape  # as arrays on the only device, which are bound to no device
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    states = jax.tree.map(placed, shapes, compiled.output_shardings)
    program.traffic(data, inputs)  # which it keeps
    every = job.config.eval_every
    cohorts = _cohorts(job)
    part = _rounds(cohorts, 0, every)
    program.evaluate.lower(data, inputs, states).compile()
    program.rounds.lower(data, inputs, states, part).compile()
    return job._replace(is_compiled=True, cohorts=cohorts)


def trace(job: Job) -> None:
    """Traces the rounds and the evaluation of a cell, to find mistakes before anything is written.

    Nothing is compiled, and what comes later finds the traces.
    """
    program, data, inputs = job.program, job.data, job.inputs
    every, states = job.config.eval_every, jax.eval_shape(program.init, data, inputs)
    jax.eval_shape(program.evaluate, data, inputs, states)
    jax.eval_shape(program.rounds, data, inputs, states, _rounds(_cohorts(job), 0, every))


def _cohorts(job: Job) -> Cohort:
    """The cohorts of all rounds, filled up to whole segments."""
    return drawn(job.config, job.inputs) if job.cohorts is None else job.cohorts


def drawn(config: Config, inputs: Inputs) -> Cohort:
    """The cohorts of all rounds, filled up to whole segments."""
    rounds, every = config.rounds, config.eval_every
    whole = -(-rounds // every) * every
    # On the host, where slicing the rounds of a segment compiles nothing.
    return jax.device_get(assemble.cohorts(config, inputs, whole))


def _rounds(cohorts: Cohort, first: int, count: int) -> Cohort:
    return jax.tree.map(lambda leaf: leaf[:, first : first + count], cohorts)


def run_cell(job: Job, folder: Path, stop: Stop) -> Result:
    """Runs or continues a cell to its end, writes its result and returns it.

    folder: a folder that `folder.begin` has prepared.

    Raises Stopped after a signal, when a checkpoint is written. With --nonfinite=stop, raises
    Diverged if a client's loss or update is not finite; the last good checkpoint stays.
    """
    config, cell = job.config, job.cell
    with contextlib.ExitStack() as opened:
        checkpoints = Checkpoints(folder / "checkpoints", config.keep_checkpoints)
        opened.enter_context(contextlib.closing(checkpoints))
        done = checkpoints.latest()
        log = Log(folder, done, len(cell.runs))
        events = Events(folder, cell, log.lines, config.tensorboard, job.measure.name)
        opened.enter_context(contextlib.closing(events))
        like = job.program.shapes(job.data, job.inputs)
        shapes = selected.of(like, job.personal)
        begun_at, served = None, selected.none(shapes)
        if done:
            place = folder / "checkpoints"
            begun_at = job.program.placed(checkpoint_files.restore(place, done, like))
            served = checkpoint_files.selected(place, done, shapes)
        rule = selection.rules(job.measure)[config.select]
        best = SelectedStates(rule, log.lines, served)
        states = _advance(job, begun_at, log, events, best, checkpoints, done, stop)
        checkpoints.finish()
    _tell_who_left(folder, job.program, states.state.server, config.rounds)
    runs = summary.summarise(cell, log.lines, job.measure)
    thresholds = config.thresholds
    if thresholds:
        stops = job.program.gathered(states.stops)
        runs = [
            msgspec.structs.replace(
                run, stops=summary.stops(cell, job.groups, thresholds, stops, index, job.measure)
            )
            for index, run in enumerate(runs)
        ]
    result = Result(records.Cell.of(cell), runs, score=job.measure)
    files.write_json(folder / "result.json", result)
    return result


def _tell_who_left(folder: Path, program: Program, server: Tree, rounds: int) -> None:
    """Says on stderr if an exit strategy has left a run without clients, or could not act yet.

    server: of all runs. rounds: --rounds.
    """
    assessed = exit_strategy.server_in(server)
    if assessed is None:
        return
    phase = assessed.assessment.measured.shape[-2]
    if rounds < phase:
        text = f"no client has left, as the run ends before, after --rounds={rounds}"
        if machine.leads():
            print(f"{folder}: --set=pretraining_rounds={phase}: {text}", file=sys.stderr)
        return
    # Not the networks, which may be large.
    few = assessed.assessment._replace(gradient=(), direction=())
    try:
        exit_strategy.check_someone_stays(program.gathered(exit_strategy.Server((), few)))
    except UsageError as error:
        if machine.leads():
            print(f"{folder}: {error}", file=sys.stderr)


def _advance(
    job: Job,
    states: Training | None,
    log: Log,
    events: Events,
    best: SelectedStates,
    checkpoints: Checkpoints,
    done: int,
    stop: Stop,
) -> Training:
    """Runs the remaining rounds, and returns the last states.

    states: those after round `done`; None before the first round.
    """
    config, cell, program = job.config, job.cell, job.program
    rounds, every = config.rounds, config.eval_every
    cohorts = _cohorts(job)
    traffic = program.traffic(job.data, job.inputs)
    checkpoint_every = config.checkpoint_every or every
    start = time.monotonic() - log.seconds

    def evaluated(outcome: Outcome, done: int, length: int) -> list[Line]:
        """Writes and returns the lines of an evaluation."""
        new = summary.lines(
            cell,
            job.groups,
            outcome,
            traffic,
            done=done,
            length=length,
            seconds=time.monotonic() - start,
            drops=config.nonfinite == "drop",
            measure=job.measure,
            end_at_stop=config.after_stop == "end",
        )
        lines = log.append(new)
        events.add(lines)  # after the log: a restart writes the events anew from it
        progress.evaluated(done, lines)
        return lines

    first_work = "an evaluation" if config.eval_start else "the first network"
    evaluates_first = states is None and config.eval_start
    with contextlib.closing(Progress(job.title, rounds, done)) as progress, Ahead() as ahead:
        if states is None:
            with progress.compiling(first_work, likely=not job.is_compiled):
                states = program.init(job.data, job.inputs)
                first = (job.data, job.inputs, states, _rounds(cohorts, 0, every))
                if not job.is_compiled:
                    ahead.begin("rounds", lambda: program.rounds.lower(*first).compile())
                if evaluates_first:
                    outcome = program.evaluate(job.data, job.inputs, states)
            if evaluates_first:
                evaluated(program.gathered(outcome), 0, 0)
        last = _is_over(config, done, program.gathered(states.stops))
        likely = not (job.is_compiled or last)
        if likely and not evaluates_first:
            now = (job.data, job.inputs, states)
            ahead.begin("evaluation", lambda: program.evaluate.lower(*now).compile())
        while not last:
            part = _rounds(cohorts, done, every)
            if jax.config.values["jax_disable_jit"] or jax.config.values["jax_debug_nans"]:
                # Operations one by one cannot index a NumPy array by a loop's counter.
                part = jax.tree.map(jnp.asarray, part)
            with progress.compiling("1 round" if every == 1 else f"{every} rounds", likely):
                for name in ("rounds", "evaluation"):
                    ahead.take(name, lambda: None)
                states, outcome = program.segment(job.data, job.inputs, states, part)
            progress.start()
            outcome, likely = program.gathered(outcome), False
            stored = functools.cache(lambda now=states: program.stored(job.inputs, now))
            length = min(every, rounds - done)
            _check_finite(config, cell, outcome, done, checkpoints.latest())
            done += length
            best.look(evaluated(outcome, done, length), stored, job.personal)
            last = _is_over(config, done, outcome.stops)
            # A signal that comes while the processes agree is for the next segment.
            if asked := machine.agree(stop.signal):
                stop.signal = asked
            if last or done % checkpoint_every == 0 or asked:
                log.flush()
                checkpoints.save(done, stored(), best.served)
            if asked and not last:
                raise Stopped(f"stopped after round {done} of {rounds}")
    return states


def _is_over(config: Config, done: int, stops: stopping.Stops) -> bool:
    """Whether no rounds are left, or all runs have stopped."""
    may_end = config.after_stop == "end"
    stopped = np.asarray(stops.round) > 0
    ended = may_end and stopped.size > 0 and bool(stopped.all())  # size 0: there is no threshold
    return ended or done == config.rounds


def _check_finite(config: Config, cell: Cell, outcome: Outcome, done: int, saved: int) -> None:
    """With --nonfinite=stop, raises Diverged for a client whose loss or update is not finite.

    saved: the round of the newest checkpoint; 0 if there is none.
    """
    if config.nonfinite != "stop" or (outcome.broken < 0).all():
        return
    run, at = np.argwhere(outcome.broken >= 0)[0]
    kept = f"the checkpoint of round {saved} is kept" if saved else "there is no checkpoint yet"
    setting = ", ".join(f"{k}={v}" for k, v in cell.runs[run].hyper.items())
    raise Diverged(
        f"round {done + at + 1}, client {outcome.broken[run, at]} ({cell.label}, "
        f"seed={cell.runs[run].seed}, {setting}): its loss or its update is NaN or infinite; "
        f"{kept}. Remedy: {divergence.REMEDY}; or --resume --nonfinite=drop to leave such a client "
        "out of its round from there on"
    )
