"""Programs that are compiled for devices that are not there, and how their texts are read."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks import hlo
from fedjax_inv import platforms

ROOT = Path(__file__).parents[1]
TPU = ROOT / ".venv" / "accelerators"  # where `make test` puts libtpu, away from all other programs

STATE = "(s32[], f32[1000,8]{1,0}, /*index=2*/f32[8,2]{1,0})"
TEXT = f"""HloModule jit_run, is_scheduled=true

%gemm (p0: f32[4,8], p1: f32[8,2]) -> f32[4,2] {{
  %p0 = f32[4,8]{{1,0}} parameter(0)
  %p1 = f32[8,2]{{1,0}} parameter(1)
  ROOT %dot.1 = f32[4,2]{{1,0}} dot(%p0, %p1), lhs_contracting_dims={{1}}
}}

%body (arg: {STATE}) -> {STATE} {{
  %arg = {STATE} parameter(0)
  %turn = s32[] get-tuple-element(%arg), index=0
  %x = f32[4,8]{{1,0}} get-tuple-element(%arg), index=1
  %w = f32[8,2]{{1,0}} get-tuple-element(%arg), index=2
  %product = f32[4,2]{{1,0}} fusion(%x, %w), calls=%gemm, backend_config={{"estimated_cycles":"56"}}
  %sum = f32[4,2]{{1,0}} all-reduce(%product), to_apply=%add
  %next = s32[]{{:T(128)S(6)}} add(%turn, %turn)
  ROOT %tuple = {STATE} tuple(%turn, %x, %w)
}}

%condition (arg.1: {STATE}) -> pred[] {{
  %turn.1 = s32[]{{:T(128)}} get-tuple-element(%arg.1), index=0
  %last = s32[]{{:T(128)}} constant(5)
  ROOT %lt = pred[]{{:T(512)}} compare(%turn.1, %last), direction=LT
}}

ENTRY %main (start: {STATE}) -> {STATE} {{
  %start = {STATE} parameter(0)
  ROOT %w.1 = {STATE} while(%start), condition=%condition, body=%body, metadata={{op_name="steps"}}
}}
"""


def test_a_text_is_read_as_launches_loops_and_collectives() -> None:
    read = hlo.Program(TEXT)
    assert read.loops() == [read.named("steps")] == [hlo.Loop("body", 5, "steps")]
    assert [(one.name, one.cycles) for one in read.launches("body")] == [
        ("product", 56),
        ("sum", 0),
    ]
    assert [one.num_bytes for one in hlo.collectives(read)] == [4 * 2 * 4]
    assert len(read.of("", "dot")) == 1
    unknown = hlo.Program(TEXT.replace("constant(5)", "get-tuple-element(%arg.1), index=0"))
    assert [loop.turns for loop in unknown.loops()] == [None]


@cache
def before_passes(algorithm: str, platform: str) -> tuple[hlo.Program, hlo.Loop]:
    """A preset's program for a platform, as XLA gets it, and its loop of local steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())  # into which the benchmark writes
        from benchmarks import accelerators

    work = accelerators.of_presets(f"rotated_digits_small:{algorithm}")
    with platforms.traced_for(platform):
        traced = work.trace(None, 0)
        lowered = traced.function.trace(*traced.arguments).lower()
    read = hlo.Program(lowered.as_text("hlo", debug_info=True))
    steps = read.named("local_steps")
    assert steps is not None
    return read, steps


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
@pytest.mark.parametrize("algorithm", ["fedcfa", "fedmix"])
def test_what_is_ordered_is_counted_on_accelerators(algorithm: str) -> None:
    read, steps = before_passes(algorithm, "gpu")
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
