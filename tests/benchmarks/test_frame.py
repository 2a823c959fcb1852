"""The frame of all benchmarks, and the flags of each."""

import dataclasses
import importlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from absl import flags

import benchmarks
from benchmarks import frame
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.flags.command import Binary
from fedjax_inv_experiments.flags.flag import at_least, flag

(_FOLDER,) = benchmarks.__path__
NAMES = sorted(
    path.stem for path in Path(_FOLDER).glob("*.py") if "command.main(BINARY)" in path.read_text()
)


@dataclasses.dataclass(frozen=True)
class Options:
    count: int = flag(2, "Rows.", at_least(1))
    json: str = flag("", "File.")


def tables(options: Options) -> Iterator[frame.Table]:
    for index in range(options.count):
        yield frame.Table(f"table {index}", [{"x|y": index, "all": [1, 2]}], ".2f")


def call(binary: Binary, *words: str) -> str:
    values = flags.FlagValues()
    binary.define(values)
    return binary.run(binary.read(["", *words], values))


def test_calls_take_turns_and_the_warm_up_is_left_out() -> None:
    order: list[str] = []

    def called(name: str) -> int:
        order.append(name)
        return len(order)

    calls = {name: (lambda name=name: called(name)) for name in "ab"}
    assert frame.in_turns(calls, 2, 1) == {"a": [3, 5], "b": [4, 6]}
    assert "".join(order) == "ababab"
    assert frame.in_turns({"c": lambda: 1}, 3, 0) == {"c": [1, 1, 1]}


def test_wall_time_passes_while_a_call_sleeps_and_processor_time_does_not() -> None:
    seconds = frame.timed(lambda: time.sleep(0.2))
    assert seconds.wall >= 0.2
    assert seconds.processor < seconds.wall


def test_tables_are_printed_and_all_rows_are_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "fresh", lambda: None)
    binary = frame.binary(tables, Options, "About.")
    place = tmp_path / "rows.json"
    assert call(binary, "--count=3", f"--json={place}") == ""
    text = capsys.readouterr().out
    assert text.startswith("device: ")
    assert all(f"\ntable {index}\n" in text for index in range(3))
    assert "[1, 2]" not in text  # nested values are in the file alone
    assert json.loads(place.read_text()) == [{"x|y": i, "all": [1, 2]} for i in range(3)]
    with pytest.raises(UsageError, match=r"^--count=0: must be at least 1"):
        call(binary, "--count=0")


def test_every_benchmark_is_found() -> None:
    assert len(NAMES) == 10


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_has_help_and_defaults_that_are_allowed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())  # accelerators writes into it
    module = importlib.import_module(f"benchmarks.{name}")
    values = flags.FlagValues()
    module.BINARY.define(values)
    assert module.BINARY.read([""], values) == module.Options()
    text = module.BINARY.answer(["", "--help"], values)
    assert text.startswith(module.__doc__.strip())
    for field in dataclasses.fields(module.Options):
        assert f"--{field.name}=" in text
