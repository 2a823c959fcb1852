"""Programs that are compiled for devices that are not there."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks import hlo

ROOT = Path(__file__).parents[1]
TPU = ROOT / ".venv" / "accelerators"  # where `make test` puts libtpu, away from all other programs


LOWERED = """
from benchmarks import accelerators
from fedjax_inv import platforms

work = accelerators.of_presets("rotated_digits_small:{algorithm}")
with platforms.traced_for("{platform}"):
    traced = work.trace(None, 0)
    print(traced.function.trace(*traced.arguments).lower().as_text("hlo", debug_info=True))
"""


@cache
def before_passes(algorithm: str, platform: str) -> tuple[hlo.Program, hlo.Loop]:
    """A preset's program for a platform, as XLA gets it, and its loop of local steps.

    In a process of its own, as benchmarks import the commands by another name than tests.
    """
    code = LOWERED.format(algorithm=algorithm, platform=platform)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read = hlo.Program(done.stdout)
    steps = read.named("local_steps")
    assert steps is not None
    return read, steps


# A row is taken from a large array, put into another one, and all of the latter is added up.
COMPILED = """
%taken (param_0: f32[100,10], param_1: s32[]) -> f32[1,10] {
  %param_0 = f32[100,10]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  ROOT %dynamic-slice.1 = f32[1,10]{1,0} dynamic-slice(%param_0, %param_1, %param_1)
}

%added (param_2: f32[50,10]) -> f32[10] {
  %param_2 = f32[50,10]{1,0} parameter(0)
  ROOT %reduce.1 = f32[10]{0} reduce(%param_2), dimensions={0}
}

ENTRY %main (a: f32[100,10], b: f32[50,10], i: s32[]) -> f32[10] {
  %a = f32[100,10]{1,0} parameter(0)
  %b = f32[50,10]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %row = f32[1,10]{1,0} fusion(%a, %i), kind=kLoop, calls=%taken
  %put = f32[50,10]{1,0} dynamic-update-slice(%b, %row, %i, %i)
  ROOT %sum = f32[10]{0} fusion(%put), kind=kInput, calls=%added
}
"""


def test_bytes_are_those_of_rows_where_only_rows_are_taken_or_put() -> None:
    taken = 40 + 40 + 4  # the row read and written, and its index
    put = 40 + 40 + 4 + 4
    added = 2000 + 40
    assert hlo.bytes_moved(hlo.Program(COMPILED), "main") == taken + put + added


@pytest.mark.slow
def test_presets_are_prepared_for_the_platform_that_they_are_compiled_for() -> None:
    """Their clients have as many batches each, which a program for a CPU need not know."""
    for platform, known in (("cpu", False), ("gpu", True)):
        assert (before_passes("fedavg", platform)[1].turns is not None) == known


@pytest.mark.slow
def test_the_products_of_local_steps_have_the_precision_that_the_algorithm_needs() -> None:
    for algorithm, is_highest in (("fedavg", False), ("fedipg", True)):
        read, steps = before_passes(algorithm, "gpu")
        products = read.of(steps.body, "dot", "convolution")
        assert len(products) > 3
        for one in products:
            assert ("operand_precision={highest,highest}" in one.text) == is_highest, one.text


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "platform"), [("fedcfa", "tpu"), ("fedmix", "gpu")])
def test_what_is_ordered_is_counted_on_accelerators(algorithm: str, platform: str) -> None:
    read, steps = before_passes(algorithm, platform)
    assert not read.of("", "sort", "topk")
    assert not read.of(steps.body, "scatter")


@pytest.mark.slow
@pytest.mark.skipif(not (TPU / "libtpu").exists(), reason="libtpu is not installed")
def test_algorithms_compile_for_tpus_that_are_not_there() -> None:
    programs = [f"rotated_digits_small:{name}" for name in ("fedipg", "scaffold")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.accelerators"),
            *("--targets=v5e-4", f"--programs={','.join(programs)}"),
        ],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": str(TPU), "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    table = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()]
    table = [row for row in table if len(row) > 5]
    rows = [dict(zip(table[0], row, strict=True)) for row in table[2:]]
    assert [one["program"] for one in rows] == programs
    for one in rows:
        assert one["compiles"] == "yes"
        for name in ("sorts", "host transfers", "all-gathers", "grouped convolutions"):
            assert float(one[name]) == 0, (one["program"], name)
        assert float(one["collectives"]) > 0
