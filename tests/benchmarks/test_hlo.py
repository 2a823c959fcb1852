"""The reading of compiled programs, on programs whose content is known."""

import functools
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import hlo
from fedjax_inv import platforms

ROOT = Path(__file__).parents[2]
TPU = ROOT / ".venv" / "accelerators"  # where `make test` puts libtpu, away from all other programs

STATE = "(s32[], f32[1000,8]{1,0}, s32[4,1]{1,0}, /*index=3*/f32[8,2]{1,0})"
TEXT = f"""HloModule jit_run, is_scheduled=true

%gemm (p0: f32[4,8], p1: f32[8,2]) -> f32[4,2] {{
  %p0 = f32[4,8]{{1,0}} parameter(0)
  %p1 = f32[8,2]{{1,0}} parameter(1)
  ROOT %dot.1 = f32[4,2]{{1,0}} dot(%p0, %p1), lhs_contracting_dims={{1}}
}}

%rows (p0.1: f32[1000,8], p1.1: s32[4,1]) -> f32[4,8] {{
  %p0.1 = f32[1000,8]{{1,0}} parameter(0)
  %p1.1 = s32[4,1]{{1,0}} parameter(1)
  ROOT %gather.1 = f32[4,8]{{1,0}} gather(%p0.1, %p1.1), slice_sizes={{1,8}}
}}

%body (arg: {STATE}) -> {STATE} {{
  %arg = {STATE} parameter(0)
  %turn = s32[] get-tuple-element(%arg), index=0
  %all = f32[1000,8]{{1,0}} get-tuple-element(%arg), index=1
  %index = s32[4,1]{{1,0}} get-tuple-element(%arg), index=2
  %w = f32[8,2]{{1,0}} get-tuple-element(%arg), index=3
  %x = f32[4,8]{{1,0}} fusion(%all, %index), kind=kLoop, calls=%rows
  %product = f32[4,2]{{1,0}} fusion(%x, %w), kind=kCustom, calls=%gemm
  %next = s32[]{{:T(128)S(6)}} add(%turn, %turn)
  %call = f32[4,2]{{1,0}} custom-call(%product), custom_call_target="library"
  ROOT %tuple = {STATE} tuple(%turn, %all, %index, /*index=3*/%w)
}}

%condition (arg.1: {STATE}) -> pred[] {{
  %arg.1 = {STATE} parameter(0)
  %turn.1 = s32[]{{:T(128)}} get-tuple-element(%arg.1), index=0
  %last = s32[]{{:T(128)}} constant(5)
  ROOT %lt = pred[]{{:T(512)}} compare(%turn.1, %last), direction=LT
}}

ENTRY %main (start: {STATE}) -> {STATE} {{
  %start = {STATE} parameter(0)
  ROOT %w.1 = {STATE} while(%start), condition=%condition, body=%body, metadata={{op_name="LOCAL"}}
}}
""".replace("LOCAL", "jit(run)/vmap(local_steps)/while")


def test_a_text_is_read_as_launches_loops_and_bytes() -> None:
    read = hlo.Program(TEXT)
    (loop,) = read.loops()
    assert read.named("rounds") is None
    assert (
        loop == read.named("local_steps") == hlo.Loop("body", 5, "jit(run)/vmap(local_steps)/while")
    )
    assert [one.name for one in read.launches("body")] == ["x", "product", "call"]
    # Rows that are gathered, not all that could be: read and written, with their numbers.
    x, product, call = 2 * 4 * 8 * 4 + 4 * 4, (4 * 8 + 8 * 2 + 4 * 2) * 4, 2 * 4 * 2 * 4
    assert hlo.bytes_moved(read) == 5 * (x + product + call)
    assert [len(read.of("body", kind)) for kind in ("gather", "dot", "sort")] == [1, 1, 0]
    assert not hlo.collectives(read) + hlo.host_transfers(read) + hlo.grouped_convolutions(read)


@pytest.mark.parametrize(
    "put",
    [
        "dynamic-update-slice(%p0, %p1, %p2, %p2)",
        "scatter(%p0, %p2, %p1), to_apply=%sum",
    ],
)
def test_of_what_is_changed_in_place_only_the_rows_move(put: str) -> None:
    text = f"""
%rows (p0: f32[1000,8], p1: f32[4,8], p2: s32[]) -> f32[1000,8] {{
  %p0 = f32[1000,8]{{1,0}} parameter(0)
  %p1 = f32[4,8]{{1,0}} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %put = f32[1000,8]{{1,0}} {put}
}}

ENTRY %main (all: f32[1000,8], some: f32[4,8], first: s32[]) -> f32[1000,8] {{
  %all = f32[1000,8]{{1,0}} parameter(0)
  %some = f32[4,8]{{1,0}} parameter(1)
  %first = s32[] parameter(2)
  ROOT %changed = f32[1000,8]{{1,0}} PUT
}}
"""
    fused = "fusion(%all, %some, %first), kind=kLoop, calls=%rows"
    alone = put.replace("%p0", "%all").replace("%p1", "%some").replace("%p2", "%first")
    for put in (fused, alone):
        moved = hlo.bytes_moved(hlo.Program(text.replace("PUT", put)))
        assert 2 * 4 * 8 * 4 <= moved <= 2 * 4 * 8 * 4 + 2 * 4  # and where they belong


def test_the_cycles_of_a_launch_are_those_that_the_compiler_estimates() -> None:
    known, unknown = (
        hlo.Instruction("x", "fusion", "f32[4]", f"%y), backend_config={{{entry}}}")
        for entry in ('"estimated_cycles":"5604","flag":true', '"flag":true')
    )
    assert (hlo.cycles(known), hlo.cycles(unknown)) == (5604, 0)


def test_only_what_passes_through_the_main_memory_of_a_tpu_is_moved() -> None:
    text = """
ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0:T(8,128)} parameter(0)
  %start = (f32[4,8]{1,0:T(8,128)S(1)}, f32[4,8]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %near = f32[4,8]{1,0:T(8,128)S(1)} copy-done(%start)
  %some = ((f32[4,8]{1,0}), f32[1,8]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:1]}
  %row = f32[1,8]{1,0:S(1)} slice-done(%some)
  %sum = f32[4,8]{1,0:T(8,128)S(1)} add(%near, %row)
  ROOT %back = f32[4,8]{1,0:T(8,128)} tanh(%sum)
}
"""
    read = hlo.Program(text)
    assert hlo.bytes_moved(read) == (4 * 8 + 8 + 4 * 8) * 4
    assert [one.name for one in read.launches("main")] == ["start", "some", "sum", "back"]


def test_a_loop_whose_end_is_an_argument_is_of_unknown_length() -> None:
    unknown = TEXT.replace("constant(5)", "get-tuple-element(%arg.1), index=0")
    read = hlo.Program(unknown)
    assert [loop.turns for loop in read.loops()] == [None]
    once, of_five = (hlo.bytes_moved(hlo.Program(text)) for text in (unknown, TEXT))
    assert of_five == 5 * once
    for scope, turns in (("local_steps", 3.5), ("rounds", 1)):
        assert hlo.bytes_moved(hlo.Program(unknown, {scope: 3.5})) == turns * once


def test_operations_of_products_and_convolutions_are_counted_turn_by_turn() -> None:
    def run(x: jax.Array, w: jax.Array, images: jax.Array, kernel: jax.Array) -> jax.Array:
        def turn(_: int, x: jax.Array) -> jax.Array:
            return jnp.tanh(jnp.einsum("bij,bjk->bik", x, w))

        outputs = jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.lax.fori_loop(0, 7, turn, x).sum() + outputs.sum()

    shapes = ((3, 4, 5), (3, 5, 5), (2, 6, 6, 3), (3, 3, 3, 8))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    read = hlo.Program(jax.jit(run).lower(*arguments).as_text("hlo"))
    products, convolution = 7 * 2 * 3 * 4 * 5 * 5, 2 * (2 * 4 * 4 * 8) * (3 * 3 * 3)
    assert hlo.flops(read) == products + convolution


@functools.cache
@cache
def before_passes(algorithm: str, platform: str) -> hlo.Program:
    """A preset's program for a platform, as XLA gets it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())  # into which the benchmark writes
        from benchmarks import accelerators

    work = accelerators.of_presets(f"rotated_digits_small:{algorithm}")
    with platforms.traced_for(platform):
        traced = work.trace(None, 0)
        lowered = traced.function.trace(*traced.arguments).lower()
    return hlo.Program(lowered.as_text("hlo", debug_info=True))


@pytest.mark.slow
def test_presets_are_prepared_for_the_platform_that_they_are_compiled_for() -> None:
    """Their clients have as many batches each, which a program for a CPU need not know."""
    for platform, known in (("cpu", False), ("gpu", True)):
        steps = before_passes("fedavg", platform).named("local_steps")
        assert steps is not None
        assert (steps.turns is not None) == known


@pytest.mark.slow
def test_the_products_of_local_steps_have_the_precision_that_the_algorithm_needs() -> None:
    for algorithm, is_highest in (("fedavg", False), ("fedipg", True)):
        steps = before_passes(algorithm, "gpu").named("local_steps")
        assert steps is not None
        products = before_passes(algorithm, "gpu").of(steps.body, "dot", "convolution")
        assert len(products) > 3
        for one in products:
            assert ("operand_precision={highest,highest}" in one.text) == is_highest, one.text


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedcfa", "fedmix"])
def test_what_is_ordered_is_counted_on_accelerators(algorithm: str) -> None:
    read = before_passes(algorithm, "gpu")
    steps = read.named("local_steps")
    assert steps is not None
    assert not read.of("", "sort", "topk")
    assert not read.of(steps.body, "scatter")


@pytest.mark.slow
@pytest.mark.skipif(not (TPU / "libtpu").exists(), reason="libtpu is not installed")
def test_algorithms_compile_for_tpus_that_are_not_there() -> None:
    programs = [f"rotated_digits_small:{name}" for name in ("fedavg", "fedipg", "scaffold")]
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


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", "v5e-8"])
def test_eight_devices_that_share_a_sweep_of_64_runs_send_each_other_nothing(target: str) -> None:
    if target != "cpu" and not (TPU / "libtpu").exists():
        pytest.skip("libtpu is not installed")
    path = os.pathsep.join([str(ROOT), *([] if target == "cpu" else [str(TPU)])])
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "compiled_sweep.py", target],
        env=os.environ
        | {"PYTHONPATH": path, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        | ({} if target == "cpu" else {"XLA_FLAGS": ""}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loops, collectives = done.stdout.splitlines()
    number, has_rounds = loops.split()
    assert int(number) > 1
    assert has_rounds == "True"
    assert collectives == ""
