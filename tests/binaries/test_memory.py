"""What an experiment needs at least, by arithmetic: against the arrays that there are."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from fedjax_inv import program
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments.experiment import assemble, config, memory
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.parts import machine
from fedjax_inv_experiments.reporting import run_report
from fedjax_inv_experiments.running import disk, launch

NETWORK = 4 * (64 * 8 + 8 + 8 * 10 + 10)  # bytes of an mlp of 8 units on digits


def error(assembled: assemble.Assembled) -> str:
    """Why an experiment does not fit; empty if it does."""
    try:
        memory.check(assembled)
    except UsageError as error:
        return str(error)
    return ""


def chosen(**changes: object) -> Config:
    return config.of(**(dict(widths=(8,), environment="none", clients=3, batch_size=4) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(algorithm=("scaffold",), seeds=(0, 1)),
        dict(algorithm=("erm",), learning_rate=(0.1, 0.2)),
        dict(algorithm=("fl_games",)),
    ],
)
def test_a_state_is_as_large_as_that_of_the_program(changes: dict[str, object]) -> None:
    assembled = assemble.assemble(chosen(**changes))
    (cell,) = assembled.cells
    ready = assembled.prepare(cell)
    whole = jax.eval_shape(program.make(ready.experiment).init, assembled.data, ready.inputs).state
    expected = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(whole))
    assert len(cell.runs) * memory._of_run(assembled, cell) == expected


@pytest.mark.parametrize(("hold", "num_states"), [("own", 2), ("all", 4)])
def test_a_device_may_hold_the_states_of_its_own_clients_alone(hold: str, num_states: int) -> None:
    shared: dict[str, object] = dict(algorithm=("scaffold",), clients=4, seeds=(0,))
    assembled = assemble.assemble(chosen(**shared, devices="2", hold=hold))
    (cell,) = assembled.cells
    state = memory._of_run(assembled, cell)
    alone = assemble.assemble(chosen(**shared))
    whole = memory._of_run(alone, cell)
    of_one = NETWORK  # its control variate
    assert state == whole - (4 - num_states) * of_one


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_auto_takes_as_many_devices_as_have_room_for_examples_and_states(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Four clients of one run are shared by four devices, or two, or none."""
    monkeypatch.setattr(machine, "cores", lambda: 4)
    flags: dict[str, object] = dict(algorithm=(algorithm,), clients=4, widths=(256,), seeds=(0,))
    flags["hold"] = "own"  # or examples that do not fit would be streamed
    assembled = assemble.assemble(chosen(**flags, devices="auto"))
    (cell,) = assembled.cells
    kept = assembled.kept(cell)
    assert (kept.client > 0) == (algorithm == "scaffold")
    examples = sum(leaf.nbytes for leaf in jax.tree.leaves(assembled.data))

    def needed(count: int) -> int:
        return examples + count * (kept.server + 4 // count * kept.client)

    def taken(there: int) -> int:
        monkeypatch.setattr(machine, "memory", lambda: there)
        return assembled.layout(cell).client_devices

    assert min(needed(2), needed(4)) > 2 * examples  # of which half the memory is for examples
    assert [taken(needed(4)), taken(needed(4) - 1)] == [4, 2]
    assert [taken(needed(2)), taken(needed(2) - 1)] == [2, 1]
    # A number that is asked for is refused in a line.
    asked = assemble.assemble(chosen(**flags, devices="4"))
    monkeypatch.setattr(machine, "memory", lambda: needed(4) - examples - 1)
    line = r"--devices=4: needs .* for the states of runs on 4 devices \(--devices=1 needs less\)"
    assert re.match(line, error(asked))
    monkeypatch.setattr(machine, "memory", lambda: needed(4) - examples)
    assert not error(asked)


@pytest.mark.parametrize(
    ("changes", "needed", "flag"),
    [
        ({}, 2 * NETWORK, "--widths=8: .* a network and its gradient"),
        (dict(batch_size=1000), 1000 * (64 + 4), "--batch_size=1000: .* a batch"),
        (dict(rounds=10**6), 9 * 10**6 * 3, "--rounds=1000000: .* the clients that attend"),
        (
            dict(late="stale", frequency=0.5, longest_delay=99),
            100 * NETWORK,
            "--longest_delay=99: .* for 100 broadcasts",
        ),
        (dict(slow=("0:50",)), 50 * NETWORK, "--slow=0:50: .* for 50 broadcasts"),
    ],
)
def test_what_is_needed_must_be_there(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], needed: int, flag: str
) -> None:
    assembled = assemble.assemble(chosen(**changes))
    monkeypatch.setattr(machine, "memory", lambda: needed)
    assert not error(assembled).startswith(flag.partition(":")[0])  # but another part may need more
    monkeypatch.setattr(machine, "memory", lambda: needed - 1)
    assert re.match(flag, error(assembled))


def test_steps_are_counted_in_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: 10**12)
    assembled = assemble.assemble(chosen(local_epochs=2**24, batch_size=1))
    with pytest.raises(UsageError, match=r"^--local_epochs=16777216: makes \d+ steps"):
        memory.check(assembled)
    memory.check(assemble.assemble(chosen(local_steps=2**24, batch_size=1)))


def test_a_paper_looks_at_memory_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "memory", lambda: 100)
    folder = tmp_path / "run"
    with pytest.raises(UsageError, match="of memory"):
        launch.check(chosen(), folder, in_folders=False)
    with pytest.raises(UsageError, match="of memory"):
        launch.run(chosen(), folder, in_folders=False, report=run_report.write)
    assert not list(tmp_path.iterdir())


def test_the_disk_is_looked_at_for_all_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assembled = assemble.assemble(chosen(rounds=12, eval_every=5, seeds=(0, 1)))
    (cell,) = assembled.cells
    ready = assembled.prepare(cell)
    states = jax.eval_shape(program.make(ready.experiment).init, assembled.data, ready.inputs)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(states))
    size += 2 * (NETWORK + 4)  # the selected networks of two seeds and their rounds
    left: list[int] = []
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=left[-1]))

    def look(count: str, free: int) -> None:
        left.append(free)
        kept = config.changed(assembled.config, keep_checkpoints=count)
        disk.check(assembled._replace(config=kept), tmp_path, {cell.name: tmp_path}, [cell])

    def needs(count: str, needed: int) -> None:
        look(count, needed)
        message = f"^--keep_checkpoints={count}: needs up to .* of disk, but .* left; "
        with pytest.raises(UsageError, match=message):
            look(count, needed - 1)

    look("1", 0)  # the last one alone is not looked at
    needs("2", 2 * size)
    needs("all", 3 * size)  # after 5, 10 and 12 rounds
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    needs("all", size)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(disk, "_LARGE", size)
    look("all", size)
    assert capsys.readouterr().err.startswith(f"{tmp_path}: checkpoints need up to ")
