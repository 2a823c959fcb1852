"""Programs compiled for GPUs and TPUs without a device: kernels, loops, memory and collectives.

python -m benchmarks.accelerators --targets=h100,v5e --programs=rotated_mnist_5:fedipg
python -m benchmarks.accelerators --targets=h200 --programs=a,fedcfa --columns="kernels a step"

Needs the extra `accelerators` (libtpu, and jax's plugin for CUDA). A program is a segment of one
run: presets joined by +, the algorithm after the colon. Several devices share the clients, and each
trains as many at once as fit into its memory. Or it is the rounds of one of workloads.JOBS, for one
device. Nothing is run.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Set before JAX starts, since plugins would look for their devices, and tuning would run kernels.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding

from benchmarks import frame, hlo, workloads
from benchmarks.frame import Row, flag
from experiments import command_line
from experiments.assembly import experiment, method
from fedjax_inv import platforms, program
from fedjax_inv.checks import UsageError
from fedjax_inv.devices import Layout
from fedjax_inv.types import Tree

_USABLE = 0.7  # the part of a device's memory that a program may take


class Target(NamedTuple):
    """A device."""

    platform: str  # "gpu" or "tpu"
    memory: float  # bytes of a device
    describe: Callable[[], Any]  # returns its topology for the compiler


def _gpu(name: str, cores: int, capability: int, memory: float, bandwidth: float) -> Any:
    """The description of a GPU that its compiler needs."""
    shared = {8: 164, 9: 228}[capability]  # KiB of an SM
    features = " feature_extension: ACCELERATED_FEATURES" if capability == 9 else ""
    text = f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32
          shared_memory_per_block: 49152 shared_memory_per_core: {shared * 1024}
          shared_memory_per_block_optin: {(shared - 1) * 1024}
          threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {64 * (capability - 7)}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory:.0f}
          l2_cache_size: {40 + 10 * (capability - 8)}000000 clock_rate_ghz: 1.5
          cuda_compute_capability {{ major: {capability} minor: 0{features} }}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          device_vendor: "NVIDIA Corporation" name: "{name}" dnn_version: "9.10.0"
          runtime_version: "13.0.0" driver_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
        }}
        platform_name: "CUDA" device_description_str: "{name}"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}"""
    return topologies.get_topology_desc("", "cuda", target_config=text, topology="1x1x1")


def _tpu(kind: str, accelerator: str, shape: str) -> Any:
    os.environ["TPU_ACCELERATOR_TYPE"] = accelerator
    return topologies.get_topology_desc(f"{kind}:{shape}", platform="tpu")


TARGETS = {
    "a100": Target("gpu", 80e9, lambda: _gpu("A100", 108, 8, 80e9, 2.04e12)),
    "h100": Target("gpu", 80e9, lambda: _gpu("H100", 132, 9, 80e9, 3.35e12)),
    "h200": Target("gpu", 141e9, lambda: _gpu("H200", 132, 9, 141e9, 4.8e12)),
    "v5e": Target("tpu", 16e9, lambda: _tpu("v5e", "v5litepod-1", "1x1")),
    "v5e-4": Target("tpu", 16e9, lambda: _tpu("v5e", "v5litepod-4", "2x2")),
    "v5e-256": Target("tpu", 16e9, lambda: _tpu("v5e", "v5litepod-256", "16x16")),
    "v6e": Target("tpu", 32e9, lambda: _tpu("v6e", "v6e-1", "1x1")),
    "v5p": Target("tpu", 95e9, lambda: _tpu("v5p", "v5p-8", "2x2x1")),
}


class Traced(NamedTuple):
    """A program before it is compiled."""

    function: jax.stages.Wrapped
    arguments: tuple[Tree, ...]


class Work(NamedTuple):
    """A program to compile for any device."""

    trace: Callable[[Mesh | None, int], Traced]  # from (devices, clients at once on each; 0: all)
    num_slots: int  # clients of a round


def shapes(tree: Tree, where: Sharding) -> Tree:
    """The shapes of a tree of arrays that lie on devices which need not be there."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree
    )


def of_presets(name: str) -> Work:
    """The segment of the first run of presets "name+name:algorithm".

    Raises UsageError if the presets do not exist or their data are missing.
    """
    presets, _, algorithm = name.partition(":")
    asked = [f"--preset={presets.replace('+', ',')}"]
    asked += [f"--algorithm={algorithm}"] if algorithm else []
    config = command_line.of_arguments(asked)
    setup = experiment.make(config, config.training.seeds[:1])
    cell = setup.cells[0]._replace(runs=setup.cells[0].runs[:1])
    num_clients = setup.plan(cell).inputs.train.size.shape[1]
    slots = method.slots(config.participation, num_clients)

    def trace(mesh: Mesh | None, chunk: int) -> Traced:
        ready = setup.plan(cell)  # for each target, as it depends on the platform
        layout = Layout(mesh, own=mesh is not None and slots == num_clients > 1)
        data, inputs = layout.place(setup.data, ready.inputs, shapes)
        compiled = program.Program(ready.experiment, client_chunk=chunk, run_chunk=0, layout=layout)
        training = jax.eval_shape(compiled.jitted.init, data, inputs)
        if mesh is not None:
            own = shapes(training.state.clients, NamedSharding(mesh, layout.client_spec))
            training = training._replace(state=training.state._replace(clients=own))
        return Traced(compiled.jitted.rounds, (data, inputs, training, ready.part(0)))

    return Work(trace, slots)


def of_job(name: str) -> Work:
    """The rounds of one of workloads.JOBS."""
    job = workloads.JOBS[name]

    def trace(mesh: Mesh | None, chunk: int) -> Traced:
        if mesh is not None:
            raise UsageError("program", name, "must be of presets for several devices")
        start, advance = workloads.parts(job._replace(at_once=chunk))
        data, cohort = workloads.noise(job), workloads.cohorts(job, job.num_rounds)
        keys = jax.random.split(jax.random.key(1), job.num_seeds)
        state = jax.eval_shape(start, keys, data)
        return Traced(jax.jit(advance, donate_argnums=0), (state, cohort, data))

    return Work(trace, job.workload.cohort)


class Compiled(NamedTuple):
    """A program compiled for a target."""

    program: jax.stages.Compiled
    devices: int
    at_once: int  # clients of each device
    share: int  # clients of a round that a device trains in all
    seconds: float  # for compiling, of all cores together


def compiled_for(target: Target, work: Work) -> Compiled:
    """Compiles a program in which as many clients train at once on a device as fit."""
    described = target.describe()
    count = len(described.devices)
    mesh: Mesh | None = None
    place: Sharding = SingleDeviceSharding(described.devices[0])
    if count > 1:
        mesh = topologies.make_mesh(described, (count,), ("clients",))
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,))
        place = NamedSharding(mesh, jax.sharding.PartitionSpec())

    def shaped(leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    platform = "cuda" if target.platform == "gpu" else "tpu"
    at_once = share = -(-work.num_slots // count)
    while True:
        with platforms.traced_for(target.platform):
            traced = work.trace(mesh, 0 if at_once == share else at_once)
            began = time.process_time()
            known = traced.function.trace(*jax.tree.map(shaped, traced.arguments))
            compiled = known.lower(lowering_platforms=(platform,)).compile()
        if at_once == 1 or needed(compiled) <= _USABLE * target.memory:
            return Compiled(compiled, count, at_once, share, time.process_time() - began)
        at_once = -(-at_once // 2)


def needed(compiled: jax.stages.Compiled) -> int:
    """Bytes of a device's memory that a program takes."""
    size: Any = compiled.memory_analysis()
    own = size.argument_size_in_bytes + size.output_size_in_bytes - size.alias_size_in_bytes
    return own + size.temp_size_in_bytes + size.generated_code_size_in_bytes


def figures(target: Target, compiled: Compiled) -> Row:
    """The row of a compiled program."""
    read = hlo.Program(compiled.program.as_text() or "")
    size: Any = compiled.program.memory_analysis()
    turn, step, loops = read.named("rounds"), read.named("local_steps"), read.loops()
    in_round = read.launches(turn.body) if turn else []
    # A single step has no loop.
    in_step = [one for one in in_round if "local_steps" in one.scope]
    in_step = read.launches(step.body) if step else in_step
    step_bytes = hlo.bytes_moved(read, step.body) if step else 0
    of_round = hlo.collectives(read, turn.body) if turn else []
    return {
        "devices": compiled.devices,
        "at once": compiled.at_once if compiled.at_once < compiled.share else "all",
        "of clients": compiled.share,
        "processor s": compiled.seconds,
        "temporaries GB": size.temp_size_in_bytes / 1e9,
        "of memory %": 100 * needed(compiled.program) / target.memory,
        "kernels a step": len(in_step),
        "around it": len(in_round) - len(in_step) if turn else 0,
        "MB a step": step_bytes / 1e6,
        "MB around it": (hlo.bytes_moved(read, turn.body) - step_bytes if turn else 0) / 1e6,
        "steps": step.turns if step else 1,  # nothing where they are known only at run time
        "loops": len(loops),
        "of unknown length": sum(loop.turns is None for loop in loops),
        "grouped convolutions": sum(one.is_grouped for one in read.everything()),
        "sorts": len(read.of("", "sort")),
        "scatters of a step": len(read.of(step.body, "scatter")) if step else 0,
        "host transfers": len(read.of("", *hlo.HOST)),
        "all-gathers": sum("all-gather" in one.opcode for one in read.everything()),
        "collectives": len(of_round),
        "collectives MB": sum(one.num_bytes for one in of_round) / 1e6,
    }


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    targets: tuple[str, ...] = flag(("h100", "v5e"), "Devices.", TARGETS)
    programs: tuple[str, ...] = flag(
        ("rotated_mnist_5:fedipg",), "Presets with an algorithm, or jobs."
    )
    columns: tuple[str, ...] = flag((), "Columns to print beside the first; none: all.")


def rows(options: Options) -> Iterator[Row]:
    """A row for each program on each target, with the reason if it does not compile."""
    for name in options.programs:
        try:
            work = of_job(name) if name in workloads.JOBS else of_presets(name)
        except UsageError as error:
            yield {"program": name, "target": "", "compiles": str(error)}
            continue
        for target in options.targets:
            row: Row = {"program": name, "target": target, "compiles": "yes"}
            try:
                row |= figures(TARGETS[target], compiled_for(TARGETS[target], work))
            except Exception as error:  # compilers raise many kinds
                row["compiles"] = f"no: {frame.line(error)}"
            shown = ("program", "target", *(options.columns or row))
            yield {column: row.get(column, "") for column in shown}


if __name__ == "__main__":
    frame.main(rows, Options, __doc__)
