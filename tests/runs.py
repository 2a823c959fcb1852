"""What the tests of the binaries share: runs stopped on demand, and what is in a run folder."""

import contextlib
import dataclasses
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import orbax.checkpoint as ocp
import pytest
from absl.testing import flagsaver

from fedjax_inv.ahead import Ahead
from fedjax_inv.fitted import Fitted
from fedjax_inv.one_run import Training
from fedjax_inv_experiments import command_line, config, sheet
from fedjax_inv_experiments import paper as paper_binary
from fedjax_inv_experiments import run as launching
from fedjax_inv_experiments import train as train_binary
from fedjax_inv_experiments.assembly import experiment
from fedjax_inv_experiments.config import Config
from fedjax_inv_experiments.folder import log, provenance, records, run_folder
from fedjax_inv_experiments.folder.interrupt import Interrupt
from fedjax_inv_experiments.folder.recorder import Job, Recorder
from fedjax_inv_experiments.folder.records import Domain, Line, Result
from fedjax_inv_experiments.folder.selected import SelectedStates
from fedjax_inv_experiments.folder.selection import Rule
from fedjax_inv_experiments.report import figures, report
from fedjax_inv_experiments.studies import study


class Ran(NamedTuple):
    """A run folder, and the job that made it: its program may run again without compiling."""

    folder: Path
    job: Job

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The results of the runs, as result.json has them."""
        return json.loads((self.folder / "result.json").read_text())["runs"]


class StopAfterOne(Interrupt):
    """Asks for a stop when the first segment is over."""

    def __enter__(self) -> "StopAfterOne":
        super().__enter__()
        self.signal = 15
        return self


@contextlib.contextmanager
def no_figures() -> Iterator[None]:
    """Where nobody looks at figures, they are not drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", lambda *given, **options: None)
        yield


@contextlib.contextmanager
def jobs() -> Iterator[list[Job]]:
    """The jobs that are run meanwhile."""
    seen: list[Job] = []

    def listening(job: Job, *others: Any) -> Recorder:
        seen.append(job)
        return Recorder(job, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "Recorder", listening)
        yield seen


def train(
    chosen: Config,
    folder: Path | None = None,
    *,
    in_folders: bool | None = None,
    write: launching.WriteReport = report.write,
) -> str:
    """Runs an experiment as the command `train` does."""
    place = folder or run_folder.path_of(chosen)
    in_folders = chosen.is_grid if in_folders is None else in_folders
    with Ahead() as ahead:
        return launching.prepare(chosen, place, in_folders=in_folders).run(write, ahead)


def ran(chosen: Config) -> Ran:
    """A finished run of `train`, without figures."""
    with jobs() as seen, no_figures():
        train(chosen)
    (job,) = seen
    return Ran(Path(chosen.output.run_dir), job)


def train_job(job: Job, folder: Path, interrupt: Interrupt) -> tuple[Fitted, Result | None]:
    """Trains or continues a job in its folder; without a result if a signal has ended it."""
    recorder = Recorder(job, folder, interrupt)
    with recorder.in_words():
        fitted = job.plan.train(recorder.callbacks)
    return fitted, recorder.finish(fitted)


def start_of(job: Job) -> records.Provenance:
    """The record of a start; the job's own data are padded."""
    return provenance.record(experiment.make(job.config).loaded, job.config.network)


def with_flags(chosen: Config, **values: Any) -> Config:
    """The configuration with other values of some flags."""
    return config.of(**sheet.flat(chosen) | values)


def others(chosen: Config, names: Collection[str]) -> dict[str, Any]:
    """The flags of a configuration but these."""
    return {name: value for name, value in sheet.flat(chosen).items() if name not in names}


def changed(job: Job, **values: Any) -> Job:
    """The job with other flags that leave its program as it is."""
    chosen = with_flags(job.config, **values)
    plan = dataclasses.replace(experiment.make(chosen).plan(job.cell), program=job.plan.program)
    return job._replace(config=chosen, plan=dataclasses.replace(plan.placed(), is_compiled=True))


def halved(job: Job, folder: Path) -> Path:
    """A folder in which the job was stopped after its first segment."""
    run_folder.begin(folder, job.config, job.cell, start_of(job))
    with StopAfterOne() as stop:
        _, result = train_job(job, folder, stop)
    assert result is None
    return folder


def go_on(job: Job, folder: Path) -> Path:
    """Runs a job in a folder, from its newest checkpoint on, to the end."""
    run_folder.begin(folder, job.config, job.cell, start_of(job))
    with Interrupt() as stop:
        train_job(job, folder, stop)
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without the time that they took."""
    lines = map(msgspec.to_builtins, log.read(folder))
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def states(folder: Path, step: int, item: str = "default") -> dict[str, Any]:
    """An item of a checkpoint, as orbax reads it: the last states, or the selected ones."""
    place = (folder / "checkpoints").absolute()
    with ocp.CheckpointManager(place, item_names=(item,)) as manager:
        asked = ocp.args.Composite(**{item: ocp.args.StandardRestore()})
        return manager.restore(step, args=asked)[item]


def selecting(
    rule: Rule, lines: Sequence[Line], shapes: Training, personal: bool
) -> SelectedStates:
    """The callback that selects states, of a run whose log has lines; shapes: of its states."""
    program = SimpleNamespace(shapes=lambda data, inputs: shapes)
    plan = SimpleNamespace(
        program=program,
        data=None,
        inputs=None,
        runs=[SimpleNamespace(hyper={})],
        build=lambda hyper: SimpleNamespace(personal=personal),
    )
    made = SelectedStates(rule, cast(Any, SimpleNamespace(lines=lines)))
    made.begin(cast(Any, SimpleNamespace(plan=plan)))
    return made


def line(round: int, accuracy: float = 0.5, **fields: Any) -> Line:
    """A line of a log; fields that are left out hold something."""
    test = fields.get("test_score", accuracy)
    others: dict[str, Any] = dict(
        run=0,
        seed=0,
        hyper={},
        train_loss=None,
        domains={
            "test": Domain(test, None, 4, "test"),
            "valid": Domain(accuracy, None, 4, "validation"),
        },
        validation_score=accuracy,
        test_score=test,
        worst_domain="test",
        worst_score=test,
        diverged=False,
        seconds=1.0,
        bytes=0,
    )
    return Line(round=round, **(others | fields))


@contextlib.contextmanager
def parsed(*words: str, most: int = 1, command: ModuleType = train_binary) -> Iterator[list[str]]:
    """The words of a command line that are no flags, at most `most`; its flags are set."""
    with flagsaver.flagsaver():
        yield command_line.parse(["", *words], most, command.__name__)[1:]


def run(binary: ModuleType, *words: str) -> str:
    """The text of a binary on a command line, in this process."""
    with parsed(*words, command=binary) as others:
        return binary.main.__wrapped__(others)


def options(paper: study.Paper, *words: str) -> study.StudyOptions:
    """The options of a paper's command line."""
    with parsed(*words, command=paper_binary):
        return study.options(paper)
