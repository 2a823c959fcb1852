"""Run folders: whose they are, what may differ on a restart, and a log without gaps."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import msgspec
import numpy as np
import pytest

from fedjax_inv.algorithms import exit_strategy
from fedjax_inv.checks import UsageError
from fedjax_inv.communication import Traffic
from fedjax_inv.evaluation import Scores
from fedjax_inv.program import Outcome, Training
from fedjax_inv.rounds import State
from fedjax_inv_experiments.experiment import config, grid
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.experiment.grid import Cell
from fedjax_inv_experiments.parts.objective import ACCURACY, Measure
from fedjax_inv_experiments.parts.selection import RULES
from fedjax_inv_experiments.reporting import finished, report
from fedjax_inv_experiments.running import (
    checkpoints,
    files,
    launch,
    log,
    loop,
    provenance,
    records,
    selected,
    summary,
)
from fedjax_inv_experiments.running import folder as folders
from fedjax_inv_experiments.running.records import Domain, Line, Result, RunResult, Start
from fedjax_inv_experiments.running.selected import SelectedStates
from runs import line

CHOSEN = config.of(rounds=7, eval_every=3, seeds=(0, 1), resume=True)
(CELL,) = grid.cells(CHOSEN, ["75"])
EVALUATIONS = [(0, 0), (0, 1), (3, 0), (3, 1), (6, 0), (6, 1), (7, 0), (7, 1)]
START = Start("2026-01-01", None, {}, "0" * 64)


def begun(folder: Path, chosen: Config = CHOSEN) -> Path:
    """A folder in which the run has begun."""
    folders.begin(folder, chosen, CELL, START)
    return folder


def edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The folder with other flags in its config.json."""
    record = json.loads((folder / "config.json").read_text())
    change(record["flags"])
    (folder / "config.json").write_text(json.dumps(record))
    return folder


def written(folder: Path, texts: list[str]) -> Path:
    (begun(folder) / "metrics.jsonl").write_text("\n".join(texts))
    return folder


def text_of(one: Line) -> str:
    return json.dumps(one, default=msgspec.to_builtins)


LINES = [text_of(line(round, run=run)) for round, run in EVALUATIONS]


def test_the_earlier_start_says_how_far_a_log_may_be_ahead(tmp_path: Path) -> None:
    """It had written 6 of 20 rounds without a checkpoint."""
    rarely = config.changed(CHOSEN, rounds=20, checkpoint_every=18)
    folder = begun(tmp_path, config.changed(CHOSEN, rounds=20))
    (folder / "metrics.jsonl").write_text("\n".join([*LINES[:6], text_of(line(9)), ""]))
    with pytest.raises(UsageError, match="has a log up to round 9, but no checkpoint any more"):
        loop.check_reached(rarely, folder)
    folders.begin(folder, rarely, CELL, START)
    loop.check_reached(CHOSEN, folder)


def test_a_run_of_few_rounds_has_the_default_folder_of_a_longer_one() -> None:
    def name(**flags: Any) -> str:
        return folders.default(config.of(**flags), "fedavg", ()).name

    assert name(rounds=3) == name(rounds=7) == name(rounds=8, checkpoint_every=4)
    assert name(rounds=7, eval_every=3) != name(rounds=7)


def test_a_run_dir_may_be_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(config: Config, folder: Path, **others: Any) -> Any:
        raise UsageError(str(folder))

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(launch, "prepared", told)
    with pytest.raises(UsageError, match=f"^{tmp_path}/run$"):
        launch.run(CHOSEN, Path("~/run"), in_folders=False, report=lambda *results: "")


def test_a_log_is_read_up_to_a_round(tmp_path: Path) -> None:
    folder = written(tmp_path, [*LINES, ""])
    for done, count in ((0, 2), (3, 4), (6, 6), (7, 8), (None, 8)):
        read = log.read(folder, done)
        assert [(one.round, one.run) for one in read] == EVALUATIONS[:count]


def test_a_log_begins_with_round_0(tmp_path: Path) -> None:
    for damaged in ([LINES[0], *LINES[2:]], LINES[1:], ["{", *LINES[1:]]):
        with pytest.raises(UsageError, match=r"line [12] is damaged .* of round 0 and run [01]"):
            log.read(written(tmp_path, damaged), 7)


def test_a_log_of_a_run_that_diverged_has_scores_that_are_no_numbers(tmp_path: Path) -> None:
    """Errors of a regression are NaN then, which Python writes and strict JSON does not have."""
    nowhere = {"test": Domain(float("nan"), None, 4, "test")}
    text = text_of(line(3, float("nan"), run=0, diverged=True, domains=nowhere))
    assert "NaN" in text
    read = log.read(written(tmp_path, [*LINES[:2], text, LINES[3], ""]), 3)[2]
    assert text_of(read) == text
    for wrong in (text.replace('"diverged": true', '"diverged": NaN'), text + "}"):
        assert records.decoded(wrong.encode(), Line) is None


def test_round_0_is_never_selected() -> None:
    """Even where it is best by every rule, nor is its state kept."""
    one = Cell("fedavg", {}, "75", CELL.runs[:1])
    agreeing = {str(k): Domain(0.9, None, 9, "validation") for k in (0, 1)}
    lines = [line(0, 0.9, domains=agreeing), line(3, 0.2), line(6, 0.1)]
    (run,) = summary.summarise(one, lines)
    picked = {rule: each and each.round for rule, each in run.by_rule.items()}
    none = {"agreement": None, "last_if_agreed": None}
    assert picked == none | {"validation": 3, "last": 6, "oracle": 3}
    state: Any = State({"w": np.zeros((1, 2))}, (), (), np.zeros(1, np.int32), None)
    stops: Any = None
    for rule, rounds in (("validation", [0, 3, 3]), ("last", [0, 3, 6])):
        best = SelectedStates(RULES[rule], [], selected.of(Training(state, stops), False))
        for each, expected in zip(lines, rounds, strict=True):
            best.look([each], partial(Training, state, stops), False)
            assert best.served.round == [expected]
    # Not even of a run that diverged at once.
    (run,) = summary.summarise(one, [lines[0], line(3, 0.5, diverged=True)])
    assert run.diverged
    assert set(run.by_rule.values()) == {None}


def test_a_rule_that_is_newer_than_a_result_is_applied_to_its_log() -> None:
    one = Cell("fedavg", {}, "75", CELL.runs[:1])
    lines = [line(0, 0.9), line(3, 0.2), line(6, 0.1)]
    done = Result(records.Cell.of(one), summary.summarise(one, lines))
    assert summary.with_all_rules(done, []) is done
    (run,) = done.runs
    older = {name: each for name, each in run.by_rule.items() if name != "last"}
    older["oracle"] = lines[2]  # what the result has stays
    before = msgspec.structs.replace(done, runs=[run | {"by_rule": older}])
    (now,) = summary.with_all_rules(before, lines).runs
    assert now == run | {"by_rule": {**run.by_rule, "oracle": lines[2]}}


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize(
    "damage", ["cut", "blank", "missing", "twice", "no record", "types", "lacks"]
)
def test_a_gap_in_the_middle_of_a_log_is_told(tmp_path: Path, damage: str, at: int) -> None:
    replaced = {"cut": [LINES[at][:9]], "blank": [""], "missing": [], "no record": ["7"]}
    replaced["twice"] = [LINES[at], LINES[at]]
    replaced["types"] = [LINES[at].replace("0.5", '"0.5"')]
    replaced["lacks"] = [LINES[at].replace("diverged", "converged")]
    folder = written(tmp_path, [*LINES[:at], *replaced[damage], *LINES[at + 1 :], ""])
    first = at + 2 if damage == "twice" else at + 1
    expected = EVALUATIONS[at + 1 if damage == "twice" else at]
    for done in (None, 7):
        with pytest.raises(UsageError, match=f"metrics.jsonl: line {first} is damaged") as error:
            log.read(folder, done)
        assert f"round {expected[0]} and run {expected[1]}" in str(error.value)
        assert "\n" not in str(error.value)
    # What is before is whole.
    if at >= 2:
        assert len(log.read(folder, 0)) == 2


def test_a_log_that_does_not_reach_its_checkpoint_is_told(tmp_path: Path) -> None:
    for count in range(4):
        folder = written(tmp_path, LINES[:count])
        with pytest.raises(UsageError, match=f"line {count + 1} is damaged or missing"):
            log.read(folder, 6)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match="line 1 is damaged or missing"):
        log.Log(folder, 3)


def test_the_last_line_of_a_machine_that_went_down_does_not_count(tmp_path: Path) -> None:
    folder = written(tmp_path, [*LINES[:6], LINES[6][:9]])
    assert len(log.read(folder)) == 6
    going_on = log.Log(folder, 6)
    going_on.append([line(7, run=run, bytes=5) for run in (0, 1)])
    assert [one.bytes for one in going_on.lines[6:]] == [5, 5]
    assert [(one.round, one.run) for one in log.read(folder, 7)] == EVALUATIONS


def test_what_is_counted_goes_on_where_the_log_ends(tmp_path: Path) -> None:
    counted: dict[str, Any] = dict(seconds=2.5, bytes=10, dropped=1)
    lines = [line(3, run=run, diverged=run == 1, **counted) for run in (0, 1)]
    going_on = log.Log(written(tmp_path, [*LINES[:2], *map(text_of, lines)]), 3)
    assert going_on.seconds == 2.5
    added = going_on.append([line(6, run=run, bytes=5, dropped=2) for run in (0, 1)])
    assert added == log.read(tmp_path)[4:]
    for one in added:
        assert (one.bytes, one.dropped, one.diverged) == (15, 3, one.run == 1)


def test_one_process_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with folders.locked(folder):
        result_of = f"--run_dir={folder}: another process is"
        with pytest.raises(UsageError, match=result_of) as error, folders.locked(folder):
            raise AssertionError("entered")
        assert "\n" not in str(error.value)
    with folders.locked(folder):
        pass


def test_a_second_process_is_refused_without_the_lock_file(tmp_path: Path) -> None:
    with folders.locked(tmp_path):
        (tmp_path / ".lock").unlink()
        for _ in range(2):  # then the refused one has left a new file
            with pytest.raises(UsageError, match="another process is"), folders.locked(tmp_path):
                raise AssertionError("entered")


def test_a_file_system_that_locks_files_only_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flock = folders.fcntl.flock

    def only_files(handle: int, operation: int) -> None:  # as NFS does
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(handle, operation)

    def nothing(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folders.fcntl, "flock", only_files)
    with folders.locked(tmp_path), pytest.raises(UsageError), folders.locked(tmp_path):
        raise AssertionError("entered")
    assert not capsys.readouterr().err
    monkeypatch.setattr(folders.fcntl, "flock", nothing)
    with folders.locked(tmp_path):
        told = f"{tmp_path}: its file system has no locks; start no second process there\n"
        assert capsys.readouterr().err == told


def test_an_edited_missing_or_swapped_line_is_told(tmp_path: Path) -> None:
    """Even where the edited lines follow each other as lines of a log do."""
    begun(tmp_path)
    writing = log.Log(tmp_path, 0)
    for done in (0, 3, 6, 7):
        writing.append([line(done, run=run) for run in (0, 1)])
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(log.read(tmp_path)) == 8
    other = lines[2].replace("0.5", "0.6")
    cases = {3: [*lines[:2], other, *lines[3:]], 8: [*lines[:7], lines[7].replace("0.5", "0.6")]}
    # The line of a run in the place of another's.
    cases[4] = [*lines[:3], lines[2].replace('"run": 0', '"run": 1'), *lines[4:]]
    for number, texts in cases.items():
        path.write_text("".join(texts))
        for done in (None, 7):
            told = f"metrics.jsonl: line {number} is not as it was written"
            with pytest.raises(UsageError, match=told):
                log.read(tmp_path, done)
    for texts in ([*lines[:3], *lines[4:]], [lines[0], lines[2], lines[1], *lines[3:]]):
        path.write_text("".join(texts))
        with pytest.raises(UsageError, match=r"line [24] is damaged or missing"):
            log.read(tmp_path)


@pytest.mark.slow
def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path\n"
        "from fedjax_inv_experiments.running import folder\n"
        "with folder.locked(Path(sys.argv[1])): print('in', flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    with pytest.raises(UsageError), folders.locked(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with folders.locked(tmp_path):
        pass


def test_a_folder_without_a_flag_that_came_later(tmp_path: Path) -> None:
    folder = edited(begun(tmp_path), lambda result_of: [result_of.pop(n) for n in ("norm", "conv")])
    assert folders.finished(CHOSEN, CELL, folder) is None
    other = config.changed(CHOSEN, norm="batch")
    with pytest.raises(UsageError, match=r'whose norm is "none" and not "batch"; .*--norm=none'):
        folders.finished(other, CELL, folder)
    edited(folder, lambda result_of: result_of.update(fluffy=1))
    with pytest.raises(UsageError, match="was written by another version, with fluffy"):
        folders.finished(CHOSEN, CELL, folder)


def test_a_folder_of_the_first_edition(tmp_path: Path) -> None:
    """Its environments were drawn once, with a whole number."""
    folder = edited(begun(tmp_path), lambda result_of: result_of.update(data_seed=0))
    with pytest.raises(UsageError, match=r'whose data_seed is "0" and not "each"; .*--data_seed=0'):
        folders.finished(CHOSEN, CELL, folder)
    assert folders.finished(config.changed(CHOSEN, data_seed="0"), CELL, folder) is None


def test_what_has_no_effect_makes_no_other_run(tmp_path: Path) -> None:
    """The first edition kept flags that it ignored; here they could not be given again."""
    chosen = config.changed(CHOSEN, environment="none", held_out="none", optimizer="adam")
    (cell,) = grid.cells(chosen, [None])
    folders.begin(tmp_path, chosen, cell, START)
    edited(tmp_path, lambda result_of: result_of.update(data_seed=0, momentum=0.5, alpha=2.0))
    assert folders.finished(chosen, cell, tmp_path) is None
    # It has one with sgd.
    edited(tmp_path, lambda result_of: result_of.update(optimizer="sgd"))
    with pytest.raises(UsageError, match=r"whose momentum is 0\.5 and not 0\.0"):
        folders.finished(config.changed(chosen, optimizer="sgd"), cell, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "{}", '{"cell": {}}', "\x00"])
@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_a_damaged_record_is_told(tmp_path: Path, name: str, text: str) -> None:
    begun(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=rf"{name}: is damaged; .* or delete"):
        finished.open("runs", tmp_path)
    with pytest.raises(UsageError, match=rf"{name}: is damaged; .* or delete") as error:
        folders.finished(CHOSEN, CELL, tmp_path)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("--resume" if name == "result.json" else "begin anew")


def test_a_log_of_bytes_that_are_no_text_is_damaged(tmp_path: Path) -> None:
    folder = written(tmp_path, [*LINES, ""])
    text = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(text[:3] + b"\xff\xfe" + text[5:])
    with pytest.raises(UsageError, match="line 1 is damaged"):
        log.read(folder, 7)


def test_a_run_that_was_stopped_by_a_nan_may_drop_it_from_there_on(tmp_path: Path) -> None:
    drops = config.changed(CHOSEN, nonfinite="drop")
    assert folders.finished(drops, CELL, begun(tmp_path / "stops")) is None
    marks = config.changed(CHOSEN, nonfinite="mark")
    with pytest.raises(UsageError, match="whose nonfinite is mark and not drop"):
        folders.finished(drops, CELL, begun(tmp_path / "marks", marks))


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


def line_of(result_of: Outcome, length: int, drops: bool = False) -> Line:
    cell = Cell("fedavg", {}, "75", CELL.runs[:1])
    (one,) = summary.lines(
        cell, ["0"], result_of, [Traffic(4, 3)], done=3, length=length, seconds=0.0, drops=drops
    )
    return one


@pytest.mark.parametrize("measure", [ACCURACY, Measure("loss", False, False)])
def test_a_domain_without_examples_has_no_score(measure: Measure) -> None:
    cell = Cell("fedavg", {}, "75", CELL.runs[:1])
    valid = Scores(np.array([0.9, 0.0, 0.7]), np.array([0.1, 0.0, 0.3]), np.array([9, 0, 9]))
    test = Scores(np.array([0.8]), np.array([0.2]), np.array([9]))
    found = summary._by_domain(cell, measure, ["0", "15", "30"], valid, test)
    assert found["validation_score"] == pytest.approx(0.8)
    assert (found["worst_domain"], found["worst_score"]) == (
        ("30", 0.7) if measure.higher_is_better else ("0", 0.9)
    )
    shown = [report.score_on(domain) for domain in found["domains"].values()]
    np.testing.assert_array_equal(shown, [0.9, np.nan, 0.7, 0.8])
    none = valid._replace(score=np.zeros(3), size=np.zeros(3, int))
    found = summary._by_domain(cell, measure, ["0", "15", "30"], none, test)
    assert found["validation_score"] == 0
    assert (found["worst_domain"], found["worst_score"]) == ("75", 0.8)


@pytest.mark.parametrize("measure", [ACCURACY, Measure("loss", False, False)])
def test_a_score_of_nan_is_the_worst_in_any_order(measure: Measure) -> None:
    cell = Cell("fedavg", {}, "75", CELL.runs[:1])
    test = Scores(np.array([0.8]), np.array([0.2]), np.array([9]))
    for order in (["0", "15"], ["15", "0"]):
        score = np.array([np.nan if name == "15" else 0.9 for name in order])
        valid = Scores(score, np.array([0.1, 0.3]), np.array([9, 9]))
        assert summary._by_domain(cell, measure, order, valid, test)["worst_domain"] == "15"


def test_metrics_are_means_over_the_rounds_in_which_somebody_took_part() -> None:
    nan = float("nan")
    metrics = {"loss": [3.0, 2.0, nan], "body": [nan, 4.0, nan], "s": [1.0, 3.0, 8.0]}
    metrics["never"] = [nan, nan, nan]
    result_of = outcome(metrics, [-1, -1, -1], 0.1)
    one = line_of(result_of, 3)
    assert one.train_metrics == {"body": 4.0, "s": 4.0, "never": None}
    assert one.train_loss == 2.0
    # Rounds that fill up a segment do not count.
    assert line_of(result_of, 2).train_metrics == {"body": 4.0, "s": 2.0, "never": None}
    assert line_of(result_of, 2).bytes == 14
    assert line_of(outcome(metrics, [-1, -1, 4], 0.1), 3).train_loss is None


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
    one = line_of(outcome({"loss": [1.0, 1.0]}, broken, loss), 2, drops)
    assert one.diverged is diverged
    assert one.dropped == (sum(b >= 0 for b in broken) if drops else None)


def test_every_start_is_told_and_none_makes_another_run(tmp_path: Path) -> None:
    for number in (1, 2):
        folders.begin(tmp_path, CHOSEN, CELL, START | {"date": str(number)})
        assert folders.finished(CHOSEN, CELL, tmp_path) is None
        assert folders.read(tmp_path)[1] == CELL
    result_of = json.loads((tmp_path / "config.json").read_text())
    assert [start["date"] for start in result_of["starts"]] == ["1", "2"]


def test_a_start_tells_versions_commit_date_and_data(tmp_path: Path) -> None:
    result_of = provenance.record({"x": np.zeros((2, 3))})
    assert records.decoded(msgspec.json.encode(result_of), Start) == result_of
    assert result_of.versions["jax"] == jax.__version__
    assert result_of.date.endswith("+00:00")
    assert provenance.commit(tmp_path) is None

    def git(*words: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    assert provenance.commit(tmp_path) is None
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    git("tag", "-am", "t", "v1")
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
        {"x": arrays["x"]},
    ]
    same = {"y": jax.numpy.asarray(arrays["y"]), "x": np.asfortranarray(arrays["x"])}
    assert provenance.fingerprint(same) == provenance.fingerprint(arrays)
    assert len({provenance.fingerprint(each) for each in (arrays, *others)}) == 6


def test_digests_stay_what_folders_hold() -> None:
    tree = {"x": np.arange(3, dtype=np.int16), "n": np.float32(2)}
    assert provenance.fingerprint(tree)[:16] == "06e94e8d75d3c664"
    assert provenance.checksum(tree)[:16] == "369a5e573189354b"
    assert provenance.checksum(Pair(**tree)) == provenance.checksum(tree)


class Pair(NamedTuple):
    x: Any
    n: Any


LONGER = config.changed(CHOSEN, rounds=9)


def finished_run(folder: Path, chosen: Config = CHOSEN, done: int = 6) -> Path:
    """A run that is over after `done` rounds, with what `finished` looks at."""
    begun(folder, chosen)
    (folder / "checkpoints" / str(done)).mkdir(parents=True)
    last = line(done)
    runs = [RunResult(run.seed, run.hyper, False, {"validation": last}, last) for run in CELL.runs]
    files.write_json(folder / "result.json", Result(records.Cell.of(CELL), runs))
    return folder


def six(**changes: Any) -> Config:
    return config.changed(CHOSEN, rounds=6, **changes)


def test_a_finished_run_may_have_more_rounds(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, six())
    mine = records.read(folder / "result.json", Result)
    assert folders.finished(six(), CELL, folder) == mine
    assert folders.finished(LONGER, CELL, folder) is None
    with pytest.raises(UsageError, match="whose rounds is 6 and not 9; add --resume to go on"):
        folders.finished(config.changed(LONGER, resume=False), CELL, folder)
    # However the continuation ends, what there was is there until there is more.
    for chosen in (six(), LONGER):
        folders.begin(folder, chosen, CELL, START)
        marked = records.read(folder / "result.json", Result)
        assert marked == mine | {"gone_on": True}
        assert folders.finished(LONGER, CELL, folder) is None
        with pytest.raises(UsageError, match="add --resume"):
            folders.finished(config.changed(LONGER, resume=False), CELL, folder)


@pytest.mark.parametrize("rounds", [3, 5])
def test_fewer_rounds_than_are_done_are_one_line(tmp_path: Path, rounds: int) -> None:
    folder = finished_run(tmp_path, six())
    fewer = config.changed(CHOSEN, rounds=rounds)
    with pytest.raises(UsageError, match=f"^--rounds={rounds}: the run in .* has done 6; must be"):
        folders.finished(fewer, CELL, folder)


def test_an_unfinished_run_may_have_fewer_rounds_than_it_was_to(tmp_path: Path) -> None:
    begun(tmp_path, LONGER)
    (tmp_path / "checkpoints" / "6").mkdir(parents=True)
    assert folders.finished(six(), CELL, tmp_path) is None


def test_a_run_goes_on_from_an_evaluation_only(tmp_path: Path) -> None:
    """The last of its rounds was filled up to a segment, which is no round of a longer run."""
    folder = finished_run(tmp_path, CHOSEN, done=7)
    with pytest.raises(UsageError, match=r"^--rounds=9: .* ended after 7, between two evaluations"):
        folders.finished(LONGER, CELL, folder)


def test_a_cosine_over_all_rounds_cannot_be_longer(tmp_path: Path) -> None:
    for name in ("schedule", "server_schedule"):
        cosine = {name: "cosine"}
        folder = finished_run(tmp_path / name, six(**cosine))
        assert folders.finished(six(**cosine), CELL, folder) is not None
        with pytest.raises(
            UsageError, match=r"^--rounds=9: .* has a cosine schedule over its --rou"
        ):
            folders.finished(config.changed(LONGER, **cosine), CELL, folder)
        own = dict(cosine, schedule_rounds=6)
        folder = finished_run(tmp_path / f"own {name}", six(**own))
        assert folders.finished(config.changed(LONGER, **own), CELL, folder) is None


class Now(NamedTuple):
    broadcast_history: Any
    server: Any


def test_checkpoints_of_version_6_are_read_under_the_names_of_today() -> None:
    stored = {"heard": [np.arange(3.0)], "server": {"beside": np.eye(2), "params": np.ones(4)}}
    like = Now((np.zeros(3),), {"params": np.zeros(4), "side": np.zeros((2, 2))})
    restored = checkpoints._matched(stored, like)
    assert jax.tree.structure(restored) == jax.tree.structure(like)
    np.testing.assert_array_equal(restored.server["side"], np.eye(2))
    np.testing.assert_array_equal(restored.broadcast_history[0], np.arange(3.0))
    assert (restored.server["params"] == 1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heard": [np.zeros(4)]}, r"broadcast_history/0: is \(4,\), must be \(3,\)"),
        ({"heard": []}, r"broadcast_history/0: is None, must be \(3,\)"),
        ({"more": np.zeros(1)}, r"more: is \(1,\), must be None"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    stored = {"heard": [np.zeros(3)], "server": ()} | changes
    with pytest.raises(UsageError, match=message):
        checkpoints._matched(stored, Now((np.zeros(3),), ()))


def test_an_exit_strategy_that_could_not_act_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, stays = np.zeros((10, 3), bool), np.ones(3, bool)
    zeros = np.zeros((10, 3))
    assessment = exit_strategy.Assessment((), (), np.zeros(()), zeros, zeros, measured, stays)
    server = exit_strategy.Server((), assessment)
    loop._tell_who_left(tmp_path, cast(Any, None), server, rounds=2)
    assert capsys.readouterr().err == (
        f"{tmp_path}: --set=pretraining_rounds=10: no client has left, as the run ends before, "
        "after --rounds=2\n"
    )
