"""Run folders: whose they are, what may differ on a restart, and their logs."""

import json
import subprocess
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fedjax_inv.algorithms import exit_strategy
from fedjax_inv.checks import UsageError
from fedjax_inv.communication import Traffic
from fedjax_inv.evaluation import Scores
from fedjax_inv.one_run import Outcome, Training
from fedjax_inv.rounds import State
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import factories, grid, method
from fedjax_inv_experiments.assembly.grid import Cell
from fedjax_inv_experiments.assembly.metrics import ACCURACY, Measure
from fedjax_inv_experiments.config import Config
from fedjax_inv_experiments.folder import checkpoints, files, log, provenance, records, summary
from fedjax_inv_experiments.folder import recorder as cells
from fedjax_inv_experiments.folder import run_folder as folders
from fedjax_inv_experiments.folder.records import Domain, Line, Provenance, Result, RunResult
from fedjax_inv_experiments.folder.selection import RULES
from fedjax_inv_experiments.report import tables
from runs import line, selecting, with_flags

CHOSEN = config.of(rounds=6, eval_every=3, seeds=(0, 1), resume=True)
(CELL,) = grid.cells(CHOSEN, ["75"])
START = Provenance("2026-01-01", None, {}, None, "0" * 64)


def finished(folder: Path, chosen: Config = CHOSEN, cell: Cell = CELL) -> Result | None:
    return folders.finished(chosen, cell, folder, lambda: START)


def finished_run(folder: Path, chosen: Config = CHOSEN, done: int = 6) -> Path:
    """A run that is over after `done` rounds, with what `finished` looks at."""
    folders.begin(folder, chosen, CELL, START)
    for item in checkpoints.ITEMS:
        (folder / "checkpoints" / str(done) / item).mkdir(parents=True)
    last = line(done)
    runs = [RunResult(run.seed, run.hyper, False, {"validation": last}, last) for run in CELL.runs]
    files.write_json(folder / "result.json", Result(records.CellRecord.of(CELL), runs))
    return folder


def test_a_run_of_few_rounds_has_the_default_folder_of_a_longer_one() -> None:
    def name(**flags: Any) -> str:
        return folders.default(config.of(**flags), "fedavg", ()).name

    assert name(rounds=3) == name(rounds=7) == name(rounds=8, checkpoint_every=4)
    assert name(rounds=7, eval_every=3) != name(rounds=7)


def begun(folder: Path, done: int, num_runs: int) -> log.Log:
    """The log of a cell that goes on after a round."""
    made = log.Log(folder, CELL, ACCURACY)
    made.begin(cast(Any, SimpleNamespace(round=done, plan=None, runs=[None] * num_runs)))
    return made


def test_what_is_counted_goes_on_where_the_log_ends(tmp_path: Path) -> None:
    counted: dict[str, Any] = dict(seconds=2.5, bytes=10, dropped=1)
    writing = begun(tmp_path, 0, 2)
    writing.append([line(0, run=run) for run in (0, 1)])
    writing.append([line(3, run=run, diverged=run == 1, **counted) for run in (0, 1)])
    writing.append([line(6, run=run) for run in (0, 1)])
    going_on = begun(tmp_path, 3, 2)
    going_on.append([line(6, run=run, bytes=5, dropped=2) for run in (0, 1)])
    added = going_on.new
    assert [each.round for each in log.read(tmp_path)] == [0, 0, 3, 3, 6, 6]
    assert added == log.read(tmp_path)[4:]
    for one in added:
        assert (one.diverged, one.dropped) == (one.run == 1, 3)
    assert [one.bytes for one in going_on.lines] == [0, 0, 10, 10, 15, 15]


def test_a_log_that_lost_lines_is_refused(tmp_path: Path) -> None:
    writing = begun(tmp_path, 0, 2)
    for done in (0, 3, 6):
        writing.append([line(done, run=run) for run in (0, 1)])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    assert len(log.read(tmp_path, 6)) == 6
    for lines in ([], whole[:-1], whole[:2] + whole[3:], [*whole[:-1], whole[-1][:9]]):
        path.write_text("".join(lines))
        with pytest.raises(UsageError, match=r"metrics.jsonl: lacks lines of round"):
            log.read(tmp_path, 6)
    path.unlink()
    with pytest.raises(UsageError, match=r"metrics.jsonl: lacks lines of round"):
        log.read(tmp_path, 6)


def test_a_log_of_a_run_that_diverged_has_scores_that_are_no_numbers(tmp_path: Path) -> None:
    """Errors of a regression are NaN then, which Python writes and strict JSON does not have."""
    nowhere = {"test": Domain(float("nan"), None, 4, "test")}
    begun(tmp_path, 0, 1).append([line(3, float("nan"), diverged=True, domains=nowhere)])
    (read,) = log.read(tmp_path)
    assert np.isnan(read.domains["test"].score)


def test_round_0_is_never_selected() -> None:
    """Even where it is best by every rule, nor is its state kept."""
    one = Cell("fedavg", {}, "75", CELL.runs[:1])
    agreeing = {str(k): Domain(0.9, None, 9, "validation") for k in (0, 1)}
    validated = {"0": Domain(0.2, None, 9, "validation")}
    lines = [line(0, 0.9, domains=agreeing)]
    lines += [line(3, 0.2, domains=validated), line(6, 0.1, domains=validated)]
    (run,) = summary.summarise(one, lines)
    picked = {rule: each and each.round for rule, each in run.by_rule.items()}
    none = dict.fromkeys(("leave_one_out", "agreement", "last_if_agreed", "unseen_domain"))
    assert picked == none | {"validation": 3, "last": 6, "oracle": 3}
    state: Any = State({"w": np.zeros((1, 2))}, (), (), np.zeros(1, np.int32), None)
    stops: Any = None
    for rule, rounds in (("validation", [0, 3, 3]), ("last", [0, 3, 6])):
        best = selecting(RULES[rule], [], Training(state, stops), personal=False)
        for each, expected in zip(lines, rounds, strict=True):
            best.look([each], partial(Training, state, stops))
            assert best.served.round == [expected]
    # Not even of a run that diverged at once.
    (run,) = summary.summarise(one, [lines[0], line(3, 0.5, diverged=True)])
    assert run.diverged
    assert set(run.by_rule.values()) == {None}


def test_one_process_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with folders.locked(folder), pytest.raises(UsageError), folders.locked(folder):
        raise AssertionError("entered")
    # What a process that was killed has left is removed, and no file of a user.
    for name in (".0123456789abcdef.tmp", "mine.tmp", ".mine.tmp"):
        (folder / name).write_text("")
    with folders.locked(folder):
        assert {path.name for path in folder.iterdir()} == {".lock", "mine.tmp", ".mine.tmp"}


def test_a_folder_holds_the_run_of_its_flags(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    assert finished(folder) == records.read(folder / "result.json", Result)
    assert finished(tmp_path / "none") is None
    with pytest.raises(UsageError, match=r"--norm=none and not --norm=batch"):
        finished(folder, with_flags(CHOSEN, norm="batch"))
    for cell in (
        CELL._replace(algorithm="fedprox"),
        CELL._replace(held_out="60"),
        CELL._replace(settings={"a": 1}),
        CELL._replace(runs=CELL.runs[:1]),
        CELL._replace(runs=CELL.runs[::-1]),
        CELL._replace(runs=(*CELL.runs, CELL.runs[0]._replace(seed=9))),
    ):
        with pytest.raises(UsageError, match="holds another run"):
            finished(folder, cell=cell)
    for name in ("data", "weights", "networks"):
        other = START | {name: "1" * 64}
        with pytest.raises(UsageError, match="has begun"):
            folders.finished(CHOSEN, CELL, folder, lambda other=other: other)
    # A flag that came later has its default.
    path = folder / "config.json"
    record = json.loads(path.read_text())
    del record["flags"]["norm"]
    path.write_text(json.dumps(record))
    assert finished(folder) is not None
    with pytest.raises(UsageError, match=r"--norm=none and not --norm=batch"):
        finished(folder, with_flags(CHOSEN, norm="batch"))


def test_a_run_that_was_stopped_by_a_nan_may_drop_it_from_there_on(tmp_path: Path) -> None:
    drops = with_flags(CHOSEN, nonfinite="drop")
    folders.begin(tmp_path / "stops", CHOSEN, CELL, START)
    assert finished(tmp_path / "stops", drops) is None
    folders.begin(tmp_path / "marks", with_flags(CHOSEN, nonfinite="mark"), CELL, START)
    with pytest.raises(UsageError, match="--nonfinite=mark and not --nonfinite=drop"):
        finished(tmp_path / "marks", drops)


def test_a_finished_run_may_have_more_rounds(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    longer = with_flags(CHOSEN, rounds=9)
    assert finished(folder, longer) is None
    for chosen in (CHOSEN, longer):
        with pytest.raises(UsageError, match="add --resume"):
            finished(folder, with_flags(longer, resume=False))
        folders.begin(folder, chosen, CELL, START)
        assert not (folder / "result.json").exists()
    with pytest.raises(UsageError, match=r"^--rounds=3: .* has done 6"):
        finished(folder, with_flags(CHOSEN, rounds=3))
    assert finished(folder, CHOSEN) is None  # of a run that has not come to 9 rounds
    # Of fewer rounds than lie between evaluations of the longer run.
    two = with_flags(CHOSEN, rounds=2, eval_every=2)
    assert finished(finished_run(tmp_path / "two", two, done=2), longer) is None
    streams = with_flags(longer, hold="stream")
    with pytest.raises(UsageError, match=r"^--rounds=9: .* between two evaluations"):
        finished(finished_run(tmp_path / "streams", two, done=2), streams)
    cosine = with_flags(CHOSEN, schedule="cosine")
    folder = finished_run(tmp_path / "cosine", cosine)
    with pytest.raises(UsageError, match=r"^--rounds=9: .* cosine schedule"):
        finished(folder, with_flags(cosine, rounds=9))


def test_the_starts_of_a_run_are_one_record(tmp_path: Path) -> None:
    first = START | {"commit": "a", "versions": {"jax": "1", "numpy": "2"}}
    second = START | {"date": "2026-01-02", "commit": "b", "versions": {"jax": "1", "numpy": "3"}}
    for start in (first, second):
        folders.begin(tmp_path, CHOSEN, CELL, start)
    found = folders.record_of(tmp_path).start
    assert (found.date, found.commit) == ("2026-01-02", "several")
    assert found.versions == {"jax": "1", "numpy": "several"}
    assert folders.read(tmp_path)[1] == CELL


def test_a_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert provenance.commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    assert provenance.commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "a").write_text("2")
    assert provenance.commit(tmp_path) == git("rev-parse", "HEAD") + "-dirty"
    # What lies in somebody's repository is not of it.
    (tmp_path / "below").mkdir()
    assert provenance.commit(tmp_path / "below") is None


def test_a_fingerprint_is_of_all_that_arrays_are() -> None:
    arrays = {"x": np.arange(6, dtype=np.int32).reshape(2, 3), "y": np.zeros(0, np.int32)}
    others: list[Any] = [
        arrays | {"x": arrays["x"].reshape(3, 2)},
        arrays | {"x": arrays["x"].view(np.float32)},
        arrays | {"x": arrays["x"] + (np.arange(6).reshape(2, 3) == 5)},
        {"x": arrays["x"], "z": arrays["y"]},
    ]
    same = {"y": arrays["y"], "x": np.asfortranarray(arrays["x"])}
    assert provenance.fingerprint(same) == provenance.fingerprint(arrays)
    assert len({provenance.fingerprint(each) for each in (arrays, *others)}) == 5


def outcome(metrics: dict[str, list[float]], broken: list[int], loss: float) -> Outcome:
    """What a segment of one run tells, with a validation group and the test."""
    scores = Scores(np.full((1, 1), 0.5), np.full((1, 1), loss), np.ones((1, 1)))
    result_of: dict[str, Any] = dict(
        metrics={name: np.array([values]) for name, values in metrics.items()},
        attended=np.ones((1, len(broken), 1), int),
        broken=np.array([broken]),
        watched={},
        valid=scores,
        test=scores,
        stops=None,
    )
    return Outcome(**result_of)


def line_of(result_of: Outcome, drops: bool = False) -> Line:
    cell = Cell("fedavg", {}, "75", CELL.runs[:1])
    (one,) = summary.lines(
        cell, ["0"], result_of, [Traffic(4, 3)], done=3, seconds=0.0, drops=drops
    )
    return one


@pytest.mark.parametrize("measure", [ACCURACY, Measure("loss", False, False)])
def test_a_domain_without_examples_has_no_score(measure: Measure) -> None:
    cell = Cell("fedavg", {}, "75", CELL.runs[:1])
    valid = Scores(np.array([0.9, 0.0, 0.7]), np.array([0.1, 0.0, 0.3]), np.array([9, 0, 9]))
    test = Scores(np.array([0.8]), np.array([0.2]), np.array([9]))
    found = summary._by_domain(cell, measure, ["0", "15", "30"], valid, test, {})
    assert found["validation_score"] == pytest.approx(0.8)
    assert (found["worst_domain"], found["worst_score"]) == (
        ("30", 0.7) if measure.higher_is_better else ("0", 0.9)
    )
    shown = [tables.score_on(domain) for domain in found["domains"].values()]
    np.testing.assert_array_equal(shown, [0.9, np.nan, 0.7, 0.8])
    none = valid._replace(score=np.zeros(3), size=np.zeros(3, int))
    found = summary._by_domain(cell, measure, ["0", "15", "30"], none, test, {})
    assert found["validation_score"] == 0
    assert (found["worst_domain"], found["worst_score"]) == ("75", 0.8)


@pytest.mark.parametrize("measure", [ACCURACY, Measure("loss", False, False)])
def test_a_score_of_nan_is_the_worst_in_any_order(measure: Measure) -> None:
    cell = Cell("fedavg", {}, "75", CELL.runs[:1])
    test = Scores(np.array([0.8]), np.array([0.2]), np.array([9]))
    for order in (["0", "15"], ["15", "0"]):
        score = np.array([np.nan if name == "15" else 0.9 for name in order])
        valid = Scores(score, np.array([0.1, 0.3]), np.array([9, 9]))
        assert summary._by_domain(cell, measure, order, valid, test, {})["worst_domain"] == "15"


def test_metrics_are_means_over_the_rounds_in_which_somebody_took_part() -> None:
    nan = float("nan")
    metrics = {"loss": [3.0, 2.0, nan], "body": [nan, 4.0, nan], "s": [1.0, 3.0, 8.0]}
    metrics["never"] = [nan, nan, nan]
    result_of = outcome(metrics, [-1, -1, -1], 0.1)
    one = line_of(result_of)
    assert one.train_metrics == {"body": 4.0, "s": 4.0, "never": None}
    assert one.train_loss == 2.0
    assert one.bytes == 21
    assert line_of(outcome(metrics, [-1, -1, 4], 0.1)).train_loss is None


def test_no_domain_is_called_as_the_test_split_is() -> None:
    cell = Cell("fedavg", {}, None, ())
    assert summary.test_name(cell, ["a"]) == "test"
    assert summary.test_name(cell, ["a", "test"]) == "test split"
    assert summary.test_name(cell, ["test split", "test"]) == "test split 2"
    names = ["test", "test split", "test split 2"]
    assert summary.test_name(cell, names) == "test split 3"
    assert summary.test_name(cell._replace(held_out="test"), names) == "test"


@pytest.mark.parametrize(
    ("broken", "loss", "drops", "diverged"),
    [
        ([-1, -1], 0.1, False, False),
        ([-1, 5], 0.1, False, True),
        ([-1, 5], 0.1, True, False),
        ([5, 5], float("nan"), True, True),
        # The server's step alone may not be finite.
        ([-1, -1], float("nan"), False, True),
        ([-1, -1], float("inf"), False, True),
    ],
)
def test_a_run_diverged_unless_what_is_not_finite_was_dropped(
    broken: list[int], loss: float, drops: bool, diverged: bool
) -> None:
    one = line_of(outcome({"loss": [1.0, 1.0]}, broken, loss), drops)
    assert one.diverged is diverged
    assert one.dropped == (sum(b >= 0 for b in broken) if drops else None)


def test_an_exit_strategy_that_could_not_act_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, stays = np.zeros((10, 3), bool), np.ones(3, bool)
    zeros = np.zeros((10, 3))
    assessment = exit_strategy.Assessment((), (), np.zeros(()), zeros, zeros, measured, stays)
    server = exit_strategy.Server((), assessment)
    cells._tell_who_left(tmp_path, cast(Any, SimpleNamespace(rounds=2)), server)
    assert capsys.readouterr().err == (
        f"{tmp_path}: --set=pretraining_rounds=10: no client has left, as the run ends before, "
        "after --rounds=2\n"
    )


def test_code_is_what_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("from .core import make")
    core = tmp_path / "own_package" / "core.py"
    core.write_text("import own_helper\nfrom fedjax_inv import models\nmake = models.mlp")
    helper = tmp_path / "own_helper.py"
    helper.write_text("SIZE = 1")
    name = "own_package:make"
    factories.imported("model", name)
    helper.write_text("SIZE = 2")  # while the old code runs
    before = factories.digests([name])
    assert before == {
        "own_package": sha256(b"from .core import make").hexdigest(),
        "own_package.core": sha256(core.read_bytes()).hexdigest(),
        "own_helper": sha256(b"SIZE = 1").hexdigest(),
    }
    assert factories.digests([]) == {}
    # A module that only one start has imported is no difference.
    first = START | {"code": before | {"late": "0"}}
    changed = START | {"code": before | {"own_helper": sha256(b"SIZE = 2").hexdigest()}}
    assert provenance.changed_code(first, START | {"code": before}) == ""
    folders.begin(tmp_path / "run", CHOSEN, CELL, first)
    with pytest.raises(UsageError, match="code of one's own in own_helper than"):
        folders.finished(CHOSEN, CELL, tmp_path / "run", lambda: changed)
    folders.begin(tmp_path / "run", CHOSEN, CELL, START | {"code": before})
    assert folders.record_of(tmp_path / "run").start.code == before | {"late": "0"}


def test_a_table_says_that_methods_weigh_clients_differently(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    result = records.read(tmp_path / "run" / "result.json", Result)
    cells = []
    for name in ("fedavg", "fediir", "afl", "erm", "fedprox"):
        weighting = method.weighting(CHOSEN, name, {})
        folders.begin(tmp_path / name, CHOSEN, CELL, START, None, weighting)
        cells.append(tables.TableCell(name, result, folder=tmp_path / name))
    (text,) = tables._weights(cells)
    assert "fedavg, erm, fedprox by their size; fediir equally; afl by rules of" in text
    assert method.weighting(CHOSEN, "fediir", {"weighting": "size"}) == "size"
    folders.begin(tmp_path / "fediir", CHOSEN, CELL, START)  # of clients of one size
    assert tables._weights([cells[0], *cells[:2]]) == []


def test_files_of_weights_are_one_digest(tmp_path: Path) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    one.write_bytes(b"1")
    other.write_bytes(b"2")
    both = provenance.of_files(str(one), str(other))
    assert both != provenance.of_files(str(one), "") != provenance.of_files("", "") == ""
    other.write_bytes(b"3")
    assert both != provenance.of_files(str(one), str(other))


def test_a_table_names_the_states_of_the_library(tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    result = records.read(tmp_path / "run" / "result.json", Result)
    cells = []
    for label, library in (("a", "1" * 64), ("b", "2" * 64)):
        folder = tmp_path / label
        folders.begin(folder, CHOSEN, CELL, START | {"library": library})
        cells.append(tables.TableCell(label, result, folder=folder))
    (text,) = tables._sources(cells)
    assert "a on " in text
    assert "(sources 11111111); b on " in text
    assert tables._sources([cells[0], cells[0]]) == []
