"""Runs a cell segment by segment: progress, metrics, checkpoints, stopping and resuming.

A run folder holds config.json, metrics.jsonl, checkpoints/ and, once finished, result.json.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

from experiments import build, devices
from experiments.build import Cell
from experiments.config import Config
from fedjax_inv import checks, stopping
from fedjax_inv.evaluation import Scores
from fedjax_inv.program import Inputs, Outcome, Program, Training
from fedjax_inv.types import Examples, Tree

# Flags that say where and how, not what; and those that the cell stands for.
_NOT_COMPARED = {
    *("run_dir", "data_dir", "resume", "checkpoint_every", "client_chunk", "run_chunk"),
    *("devices", "coordinator_address", "num_processes", "process_id", "paper"),
    *("algorithm", "settings", "held_out", "learning_rate", "server_learning_rate", "seeds"),
}


class Diverged(Exception):
    """A client's loss became NaN or infinite."""


class Stop:
    """While entered, SIGINT and SIGTERM ask for a stop at the end of the segment.

    A second SIGINT interrupts at once.
    """

    signal = 0  # which one came, 0 if none did

    def __enter__(self) -> "Stop":
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number
        tqdm.write("stopping at the end of this segment; press Ctrl-C again to stop at once")


class Stopped(Exception):
    """A run stopped on demand, with a checkpoint written."""


def finished(config: Config, cell: Cell, folder: Path) -> dict[str, Any] | None:
    """The result that the folder holds, None if the cell is still to be run or continued.

    Raises ValueError if the folder holds something else, or an unfinished run without --resume.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    where = f"--run_dir={folder}"
    try:
        there = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        raise ValueError(f"{where}: is neither empty nor a run; choose another") from None
    _check_same(where, there, description(config, cell))
    if (folder / "result.json").exists():
        return json.loads((folder / "result.json").read_text())
    if not config.resume:
        raise ValueError(f"{where}: holds an unfinished run; add --resume to continue it")
    return None


def description(config: Config, cell: Cell) -> dict[str, Any]:
    """All flags and the cell, as json holds them."""
    record = {"flags": dataclasses.asdict(config), "cell": cell._asdict()}
    record["cell"]["runs"] = [run._asdict() for run in cell.runs]
    return json.loads(json.dumps(record))


def _check_same(where: str, there: dict[str, Any], here: dict[str, Any]) -> None:
    def compared(record: dict[str, Any]) -> dict[str, Any]:
        flags = {k: v for k, v in record["flags"].items() if k not in _NOT_COMPARED}
        return {**flags, **record["cell"]}

    old, new = compared(there), compared(here)
    for name in new:
        if old.get(name) != new[name]:
            raise ValueError(
                f"{where}: holds another run, whose {name} is {_short(old.get(name))} and not "
                f"{_short(new[name])}; choose another --run_dir"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Job(NamedTuple):
    """A cell and all that it runs on."""

    config: Config
    cell: Cell
    program: Program
    data: Examples
    inputs: Inputs
    groups: list[str]  # names of the validation groups


def run_cell(job: Job, folder: Path, stop: Stop) -> dict[str, Any]:
    """Runs or continues a cell to its end and returns its result, which is also result.json.

    Raises Stopped after a signal, with a checkpoint written; Diverged, with the last good
    checkpoint kept, if a client's loss is not finite and --nonfinite=stop.
    """
    cell = job.cell
    write_json(folder / "config.json", description(job.config, cell))
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        done = checkpoints.latest()
        log = Log(folder / "metrics.jsonl", done)
        if done:
            like = jax.eval_shape(job.program.init, job.data, job.inputs)
            states = checkpoints.restore(done, like)
            states = devices.replicated(states, devices.mesh(job.config))
        else:
            states = job.program.init(job.data, job.inputs)
        states = _advance(job, states, log, checkpoints, done, stop)
    runs = summarise(cell, log.lines)
    if job.config.stop_below:
        stops = jax.device_get(states.stops)
        for index, run in enumerate(runs):
            run["stops"] = _stops(job, stops, index)
    result = {"cell": description(job.config, cell)["cell"], "runs": runs}
    write_json(folder / "result.json", result)
    return result


def _advance(
    job: Job,
    states: Training,
    log: "Log",
    checkpoints: "Checkpoints",
    done: int,
    stop: Stop,
) -> Training:
    config, cell, program = job.config, job.cell, job.program
    segments = -(-config.rounds // config.eval_every)
    # On the host, where each segment's part is cut out without compiling for it.
    cohorts = jax.device_get(build.cohorts(config, job.inputs, segments * config.eval_every))
    traffic = program.traffic(job.data, job.inputs)
    checkpoint_every = config.checkpoint_every or config.eval_every
    start = time.monotonic() - log.seconds
    title = f"{cell.label}, held out {cell.held_out or 'test split'}"
    last = _is_over(config, done, states.stops)
    with tqdm(
        total=config.rounds, initial=done, desc=title, unit="round", disable=not devices.leads()
    ) as bar:
        while not last:
            part = jax.tree.map(lambda a, at=done: a[:, at : at + config.eval_every], cohorts)
            states, outcome = program.segment(job.data, job.inputs, states, part)
            outcome = jax.device_get(outcome)
            length = min(config.eval_every, config.rounds - done)
            _check_finite(config, cell, outcome, done)
            done += length
            lines = _lines(job, outcome, done, length, traffic, time.monotonic() - start)
            log.append(lines)
            bar.update(length)
            bar.set_postfix(
                loss=_mean(line["train_loss"] for line in lines),
                valid=_mean(line["validation_accuracy"] for line in lines),
                test=_mean(line["test_accuracy"] for line in lines),
            )
            last = _is_over(config, done, outcome.stops)
            stop.signal = devices.agree(stop.signal)
            if last or done % checkpoint_every == 0 or stop.signal:
                checkpoints.save(done, states)
            if stop.signal and not last:
                raise Stopped(f"stopped after round {done} of {config.rounds}")
    return states


def _is_over(config: Config, done: int, stops: stopping.Stops) -> bool:
    """Whether there are no rounds left, or no run has any."""
    ended = config.after_stop == "end" and bool((np.asarray(stops.round) > 0).all())
    return ended or done == config.rounds


def _mean(values: Any) -> str:
    finite = [value for value in values if value is not None]
    return f"{np.mean(finite):.3f}" if finite else "nan"


def _check_finite(config: Config, cell: Cell, outcome: Outcome, done: int) -> None:
    if config.nonfinite != "stop" or (outcome.broken < 0).all():
        return
    run, at = np.argwhere(outcome.broken >= 0)[0]
    setting = ", ".join(f"{k}={v}" for k, v in cell.runs[run]._asdict()["hyper"].items())
    raise Diverged(
        f"round {done + at + 1}, client {outcome.broken[run, at]} ({cell.label}, "
        f"seed={cell.runs[run].seed}, {setting}): its loss or its update is NaN or infinite; "
        "the last good checkpoint is kept. Lower --learning_rate, or --nonfinite=drop to leave "
        "such a client out of its round"
    )


def _lines(
    job: Job, outcome: Outcome, done: int, length: int, traffic: list[int], seconds: float
) -> list[dict[str, Any]]:
    """One record per run: what metrics.jsonl says after a segment."""
    records = []
    for index, run in enumerate(job.cell.runs):
        means = {k: _number(v[index, length - 1]) for k, v in outcome.metrics.items()}
        watched = {
            f"{name}_by_round": [round(float(value), 5) for value in values[index, :length]]
            for name, values in outcome.watched.items()
        }
        valid, test = jax.tree.map(lambda a, i=index: a[i], (outcome.valid, outcome.test))
        records.append(
            {
                "round": done,
                "run": index,
                "seed": run.seed,
                "hyper": run.hyper,
                "train_loss": means.pop("loss"),
                **({"train_metrics": means} if means else {}),
                **watched,
                **_by_domain(job, valid, test),
                "segment_bytes": int(outcome.attended[index, :length].sum(0) @ np.array(traffic)),
                "diverged": bool((outcome.broken[index] >= 0).any()),
                "seconds": round(seconds, 3),
            }
        )
    return records


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None  # json has no NaN


def _by_domain(job: Job, valid: Scores, test: Scores) -> dict[str, Any]:
    """What is told of an evaluation. valid: each [groups]. test: each [1]."""
    scores = [(name, "validation", valid, index) for index, name in enumerate(job.groups)]
    scores.append((job.cell.held_out or "test", "test", test, 0))
    domains: dict[str, dict[str, Any]] = {
        name: {
            "accuracy": float(of.score[index]),
            "loss": _number(of.loss[index]),
            "split": split,
        }
        for name, split, of, index in scores
    }
    accuracy = {name: domain["accuracy"] for name, domain in domains.items()}
    worst = min(accuracy, key=lambda name: accuracy[name])
    return {
        "domains": domains,
        "validation_accuracy": float(np.mean(valid.score)),
        "test_accuracy": float(test.score[0]),
        "worst_domain": worst,
        "worst_accuracy": accuracy[worst],
    }


def _stops(job: Job, stops: stopping.Stops, run: int) -> list[dict[str, Any]]:
    """Per threshold of --stop_below what there was at the stop; round None if there was none."""
    records = []
    for index, threshold in enumerate(job.config.stop_below):
        record: dict[str, Any] = {"threshold": threshold, "round": None}
        train, valid, test = jax.tree.map(lambda a, i=index: a[run, i], stops.scores)
        if stops.round[run, index]:
            record |= {
                "round": int(stops.round[run, index]),
                "train_accuracy": float(train.score[0]),
                **_by_domain(job, valid, test),
            }
        records.append(record)
    return records


def summarise(cell: Cell, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per run the evaluation with the best validation accuracy (the first such), and the last.

    A run that diverged is told as such and its later evaluations do not count.
    """
    results = []
    for index, run in enumerate(cell.runs):
        mine = [line for line in lines if line["run"] == index]
        good = [line for line in mine if not line["diverged"]]
        chosen = max(good, key=lambda line: line["validation_accuracy"], default=None)
        results.append(
            {
                "seed": run.seed,
                "hyper": run.hyper,
                "diverged": len(good) < len(mine),
                "selected": chosen,
                "last": mine[-1],
            }
        )
    return results


class Log:
    """metrics.jsonl: a line per evaluation and run, kept in step with the checkpoints."""

    def __init__(self, path: Path, done: int) -> None:
        """Keeps the lines up to round `done`; what was written after the checkpoint goes."""
        self._path = path
        kept = Log.read(path) if path.exists() else []
        self.lines = [line for line in kept if line["round"] <= done]
        self.seconds = self.lines[-1]["seconds"] if self.lines else 0.0
        _write(path, "".join(json.dumps(line) + "\n" for line in self.lines))

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """All whole lines of a metrics.jsonl."""
        lines = []
        for text in path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:  # the machine went down amid a line
                break
        return lines

    def append(self, lines: list[dict[str, Any]]) -> None:
        """Adds the lines of one evaluation, with the bytes and the divergence so far."""
        before = {line["run"]: line for line in self.lines[-len(lines) :]}
        for line in lines:
            last = before.get(line["run"], {"bytes": 0, "diverged": False})
            line["bytes"] = last["bytes"] + line.pop("segment_bytes")
            line["diverged"] |= last["diverged"]
        self.lines += lines
        if devices.leads():
            with self._path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


class Checkpoints:
    """The states of a cell's runs, by round, through orbax; the last two are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest(self) -> int:
        """The round of the newest checkpoint, 0 if there is none."""
        return self._manager.latest_step() or 0

    def save(self, done: int, states: Training) -> None:
        """Writes a checkpoint; the file work goes on in the background."""
        self._manager.save(done, args=ocp.args.StandardSave(_plain(states)))

    def restore(self, done: int, like: Training) -> Training:
        """The states after round `done`, wherever they were when they were saved.

        like: states of this run, or their shapes. Raises ValueError if there are others.
        """
        # Arrays of NumPy, or orbax asks for the devices that they lay on.
        plain = jax.eval_shape(_plain, like)
        target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), plain)
        try:
            restored: Tree = self._manager.restore(done, args=ocp.args.StandardRestore(target))
            # Which orbax does not look at, where it makes arrays of NumPy.
            checks.same_shapes(target=target, restored=restored)
        except Exception as error:  # orbax raises many kinds, for one reason
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{self._folder / str(done)}: corrupt, or not a checkpoint of this run "
                f"({reason[:100]}); delete it to continue from the one before"
            ) from None
        restored = jax.tree.map(
            lambda got, leaf: jnp.asarray(got if leaf.size else np.empty(leaf.shape, leaf.dtype)),
            restored,
            jax.eval_shape(_numbers, like),
        )
        key = jax.random.wrap_key_data(restored.state.key)
        return restored._replace(state=restored.state._replace(key=key))

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()


def _numbers(states: Training) -> Training:
    """The states with keys as numbers."""
    key = jax.random.key_data(states.state.key)
    return states._replace(state=states.state._replace(key=key))


def _plain(states: Training) -> Training:
    """The states as orbax takes them: keys as numbers, and no array without elements."""
    return jax.tree.map(
        lambda leaf: leaf if leaf.size else np.zeros(1, leaf.dtype), _numbers(states)
    )


def _write(path: Path, text: str) -> None:
    """Writes a file whole or not at all; only the leading process does."""
    if not devices.leads():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Writes a json file whole or not at all; only the leading process does."""
    _write(path, json.dumps(value, indent=1) + "\n")
