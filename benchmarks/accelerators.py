"""Programs compiled for GPUs and TPUs without a device: kernels, loops, memory and a roofline.

python -m benchmarks.accelerators --targets=h100,v5e --programs=a,rotated_mnist_5:fedipg

Needs the extra `accelerators` (libtpu, and jax's plugin for CUDA). A program is
- ten rounds of a workload (a, b, c: `workloads`),
- a segment of one run, with its evaluation: presets joined by +, the algorithm after the colon;
  --programs=all is every algorithm at the size of its presets,
- two rounds of three clients of a ResNet-18 with batches of 32, resnet18_64:fedavg (its image size,
  and fedavg or fedipg); --at_once=1 and --effort=O1 compile it sooner,
- ten steps of twelve clients on a single convolution, im2col:64x28x28x1:3x64/2 (the lowering,
  the batch, the window, features, and the stride).
Several devices share the clients, and each trains as many at once as --client_chunk=auto would
choose there. Nothing is run, so the roofline of a round's local steps is an estimate: the longer of
the time for their arithmetic at peak speed and the time for the bytes of their kernels at the
memory's bandwidth. If the number of steps is known only at run time, the number of the client with
the most steps counts.
"""

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# Set before JAX starts, since plugins would look for their devices, and tuning would run kernels.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from benchmarks import frame, hlo, workloads
from fedjax_inv import communication, local, models, platforms, program, rounds, schedules
from fedjax_inv.algorithms import fedavg, fedipg
from fedjax_inv.checks import UsageError
from fedjax_inv.devices import ClientShards, Layout, chunked, vmapped
from fedjax_inv.models import lowerings
from fedjax_inv.types import Array, Cohort, Examples, Federation, Tree
from fedjax_inv_experiments.experiment import assemble, command_line
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.flags import command, names
from fedjax_inv_experiments.flags.flag import at_least, flag
from fedjax_inv_experiments.parts import machine


class Target(NamedTuple):
    """A device, by its maker's data sheet."""

    platform: str  # "gpu" or "tpu"
    memory: float  # bytes of a device
    bandwidth: float  # bytes a second
    peak: float  # operations a second of float32 products at the default precision
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


# NVIDIA's data sheets (dense TF32 for products in float32) and Google Cloud's pages on TPUs (the
# peak in bfloat16, in which products of float32 are computed by default).
TARGETS = {
    "a100": Target("gpu", 80e9, 2.04e12, 156e12, lambda: _gpu("A100", 108, 8, 80e9, 2.04e12)),
    "h100": Target("gpu", 80e9, 3.35e12, 494e12, lambda: _gpu("H100", 132, 9, 80e9, 3.35e12)),
    "h200": Target("gpu", 141e9, 4.8e12, 494e12, lambda: _gpu("H200", 132, 9, 141e9, 4.8e12)),
    "v5e": Target("tpu", 16e9, 0.82e12, 197e12, lambda: _tpu("v5e", "v5litepod-1", "1x1")),
    "v5e-4": Target("tpu", 16e9, 0.82e12, 197e12, lambda: _tpu("v5e", "v5litepod-4", "2x2")),
    "v5e-8": Target("tpu", 16e9, 0.82e12, 197e12, lambda: _tpu("v5e", "v5litepod-8", "2x4")),
    "v5e-256": Target("tpu", 16e9, 0.82e12, 197e12, lambda: _tpu("v5e", "v5litepod-256", "16x16")),
    "v6e": Target("tpu", 32e9, 1.64e12, 918e12, lambda: _tpu("v6e", "v6e-1", "1x1")),
    "v5p": Target("tpu", 95e9, 2.77e12, 459e12, lambda: _tpu("v5p", "v5p-8", "2x2x1")),
}


class Traced(NamedTuple):
    """A program before it is compiled."""

    function: jax.stages.Wrapped
    arguments: tuple[Tree, ...]
    steps: float  # local steps in a round of the client with the most
    upload: int  # bytes that a client sends in a round


class Work(NamedTuple):
    """A program to compile for any device."""

    trace: Callable[[Mesh | None, int], Traced]  # from (devices, clients at once on each; 0: all)
    num_slots: int  # clients of a round
    precision: str = "default"  # of products, for --precision=auto


def of_workload(name: str) -> Work:
    """Ten rounds of a workload."""
    workload = workloads.WORKLOADS[name]
    num_batches = -(-workload.num_examples // workload.batch_size)

    def trace(mesh: Mesh | None, chunk: int) -> Traced:
        model = workloads.model_of(workload, "auto")
        work = local.epochs(
            optax.sgd(workload.learning_rate),
            batch_size=workload.batch_size,
            num_epochs=workload.num_epochs,
            num_batches=num_batches,
        )
        algorithm = fedavg.fedavg(model, work)
        axis = chunked(chunk) if chunk else vmapped()
        layout = Layout(mesh, mesh is not None and workload.cohort == workload.num_clients)
        axis = layout.axis(axis)

        def advance(data: Examples, shards: ClientShards, state: Tree, cohort: Tree) -> Tree:
            federation = Federation(data, *(leaf[0] for leaf in shards))
            return rounds.run(algorithm, state, cohort, federation, axis=axis)

        def start(data: Tree) -> Tree:
            variables = model.init(jax.random.key(0), data.data.x[:1])
            return rounds.init(algorithm, variables, data, jax.random.key(1))

        noise = workloads.noise(workload)
        state = jax.eval_shape(start, noise)
        upload = sum(each.up for each in communication.traffic(algorithm, state, noise))
        schedule = schedules.sampled(jax.random.key(2), workload.num_clients, workload.cohort, 10)
        examples, shards = noise.data, ClientShards(*(leaf[None] for leaf in noise[1:4]))
        examples, shards = layout.place(examples, shards, shapes)
        on_all = layout.over(advance, (PartitionSpec(), PartitionSpec()), PartitionSpec())
        arguments = examples, shards, state, schedule
        jitted = jax.jit(on_all, donate_argnums=2)
        return Traced(jitted, arguments, workload.num_epochs * num_batches, upload)

    return Work(trace, workload.cohort)


def shapes(tree: Tree, where: Sharding) -> Tree:
    """The shapes of a tree of arrays that lie on devices which need not be there."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree
    )


# Every algorithm, at the size of its presets.
EVERY = (
    *(f"rotated_mnist_5:{name}" for name in ("fedipg", "fediir")),
    "exit_mnist:exit_strategy",
    *("colored_mnist_f+games_parallel", "colored_mnist_v+games_sequential"),
    *(f"colored_mnist_f+games_{name}" for name in ("fedavg", "fedbn", "fedprox")),
    *(
        f"fedcfa_paper+cifar10_dir60:{name}"
        for name in ("erm", "fedavg", "scaffold", "fedpvr", "qfedavg", "fedmix", "fedcfa")
    ),
    *(f"cafe_paper+fashion_mnist_cafe:{name}" for name in ("cafe", "moon", "fedproto")),
)


def of_presets(name: str, precision: str = "auto") -> Work:
    """The segment of the first run of presets "name+name:algorithm". precision: --precision.

    Raises UsageError if the presets do not exist or their data are missing.
    """
    presets, _, algorithm = name.partition(":")
    asked = [f"--preset={presets.replace('+', ',')}"]
    asked += [f"--algorithm={algorithm}"] if algorithm else []
    asked += [f"--precision={precision}"]
    config = command_line.of_arguments(asked)
    assembled = assemble.assemble(config, config.run.seeds[:1])
    cell = assembled.cells[0]._replace(runs=assembled.cells[0].runs[:1])

    def trace(mesh: Mesh | None, chunk: int) -> Traced:
        ready = assembled.prepare(cell)  # for each target, as it depends on the platform
        data, inputs = assembled.data, ready.inputs
        cohort = assemble.cohorts(config, inputs, config.watching.eval_every)
        slots = config.participation.slots(num_clients)
        share = mesh.size if mesh else 1
        layout = Layout(mesh, machine.holds_own(config.run, num_clients, slots, share))
        data, inputs = layout.place(data, inputs, shapes)
        compiled = program.make(ready.experiment, client_chunk=chunk, run_chunk=0, layout=layout)
        training = jax.eval_shape(compiled.init, data, inputs)
        if mesh is not None:
            own = shapes(training.state.clients, NamedSharding(mesh, layout.client_spec))
            training = training._replace(state=training.state._replace(clients=own))
        hyper, shards = jax.tree.map(lambda leaf: leaf[0], (ready.inputs.hyper, ready.inputs.train))
        state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), training.state
        )
        exchanges = communication.traffic(
            ready.experiment.algorithm(hyper), state, Federation(assembled.data, *shards)
        )
        upload = sum(each.up for each in exchanges)
        arguments = data, inputs, training, cohort
        return Traced(compiled.rounds, arguments, _steps(config, ready.inputs, cohort), upload)

    num_clients = assembled.prepare(cell).inputs.train.size.shape[1]
    return Work(trace, config.participation.slots(num_clients))


def _steps(config: Config, inputs: program.Inputs, cohort: Cohort) -> float:
    """The local steps of the client with the most, on average over rounds."""
    training = config.clients
    if training.local_steps or not training.batch_size:
        return training.local_steps or training.local_epochs
    size = np.asarray(inputs.train.size)[0][np.asarray(cohort.who)[0]] * cohort.present[0]
    return float(training.local_epochs * (-(-size // training.batch_size)).max(1).mean())


_USABLE = 0.7  # the part of a device's memory that a program may take
_RESNET = re.compile(r"resnet18_(64|224):(fedavg|fedipg)")
_RESNET_CLIENTS, _RESNET_BATCH, _RESNET_BATCHES = 3, 32, 4


def of_resnet(name: str) -> Work:
    """Two rounds of a ResNet-18 whose norms are frozen, as in the presets of PACS and VLCS."""
    match = _RESNET.fullmatch(name)
    assert match
    side, chosen = int(match.group(1)), match.group(2)

    def trace(mesh: Mesh | None, chunk: int) -> Traced:
        if mesh is not None:
            raise UsageError(f"--programs={name}", ..., "must be for one device")
        model = models.resnet18(7, image_size=side, norm="frozen")
        optimizer = optax.sgd(0.0025, momentum=0.9)
        work = local.epochs(optimizer, batch_size=_RESNET_BATCH, num_batches=_RESNET_BATCHES)
        algorithm = (
            fedavg.fedavg(model, work)
            if chosen == "fedavg"
            else fedipg.fedipg(model, work, penalty=1e-3)
        )
        axis = chunked(chunk) if chunk else vmapped()

        def advance(data: Federation, state: Tree, cohort: Cohort) -> Tree:
            return rounds.run(algorithm, state, cohort, data, axis=axis)

        def start(data: Federation) -> Tree:
            variables = model.init(jax.random.key(0), data.data.x[:1])
            return rounds.init(algorithm, variables, data, jax.random.key(1))

        count = _RESNET_CLIENTS * _RESNET_BATCH * _RESNET_BATCHES
        x = jax.ShapeDtypeStruct((count, side, side, 3), jnp.uint8)
        y: Any = jax.ShapeDtypeStruct((count,), jnp.int32)
        who: Any = jax.ShapeDtypeStruct((_RESNET_CLIENTS,), jnp.int32)
        data = Federation(Examples(x, y), y, who, who)
        state = jax.eval_shape(start, data)
        upload = sum(each.up for each in communication.traffic(algorithm, state, data))
        schedule = schedules.sampled(jax.random.key(2), _RESNET_CLIENTS, _RESNET_CLIENTS, 2)
        jitted = jax.jit(advance, donate_argnums=1)
        return Traced(jitted, (data, state, schedule), _RESNET_BATCHES, upload)

    return Work(trace, _RESNET_CLIENTS, names.facts(chosen).precision)


_LAYER = re.compile(r"(\w+):(\d+)x(\d+)x(\d+)x(\d+):(\d+)x(\d+)/(\d+)")
_LAYER_CLIENTS, _LAYER_STEPS = 12, 10
_COLOURS = 3  # the most channels of images; images need no gradient


def of_layer(name: str) -> Work:
    """Gradient descent on the mean square of a convolution's outputs.

    It descends along the kernel, and along the inputs unless they are images.
    """
    match = _LAYER.fullmatch(name)
    assert match
    batch, height, width, channels, window, features, stride = map(int, match.groups()[1:])
    conv = lowerings.lowering(match.group(1))
    half = window // 2

    def risk(x: Array, kernel: Array) -> Array:
        outputs = conv(
            x,
            kernel,
            (stride, stride),
            ((half, half), (half, half)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.square(outputs).mean()

    def step(x: Array, kernel: Array) -> tuple[Array, Array]:
        if channels <= _COLOURS:
            return x, kernel - jax.grad(risk, 1)(x, kernel)
        return jax.tree.map(jnp.subtract, (x, kernel), jax.grad(risk, (0, 1))(x, kernel))

    def run(x: Array, kernel: Array) -> tuple[Array, Array]:
        with jax.named_scope("local_steps"):
            return jax.lax.fori_loop(
                0, _LAYER_STEPS, lambda _, both: jax.vmap(step)(*both), (x, kernel)
            )

    def trace(mesh: Mesh | None, chunk: int) -> Traced:
        if mesh is not None or chunk:
            allowed = "must be for one device, and fit into its memory"
            raise UsageError(f"--programs={name}", ..., allowed)
        shapes = (batch, height, width, channels), (window, window, channels, features)
        arguments = [jax.ShapeDtypeStruct((_LAYER_CLIENTS, *s), jnp.float32) for s in shapes]
        return Traced(jax.jit(run, donate_argnums=(0, 1)), tuple(arguments), _LAYER_STEPS, 0)

    return Work(trace, _LAYER_CLIENTS)


class Compiled(NamedTuple):
    """A program compiled for a target."""

    program: jax.stages.Compiled
    traced: Traced
    before: hlo.Program  # before XLA's passes
    devices: int
    at_once: int  # clients of each device
    share: int  # clients of a round that a device trains in all
    seconds: float  # for compiling


def compiled_for(
    target: Target, work: Work, *, precision: str = "auto", at_once: int = 0
) -> Compiled:
    """Compiles a program.

    precision: one of `platforms.PRECISIONS`, or auto for the one that the program needs.
    at_once: the clients that train at once on a device; 0: all, halved until they fit into memory.
    """
    described = target.describe()
    count = len(described.devices)
    mesh: Mesh | None = None
    place: Sharding = SingleDeviceSharding(described.devices[0])
    if count > 1:
        mesh = topologies.make_mesh(described, (count,), ("clients",))
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,))
        place = NamedSharding(mesh, PartitionSpec())
    share = -(-work.num_slots // count)

    def shaped(leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    @cache
    def of(at_once: int) -> Compiled:
        with platforms.traced_for(target.platform):
            traced = work.trace(mesh, 0 if at_once == share else at_once)
            began = time.perf_counter()
            with platforms.products_at(work.precision if precision == "auto" else precision):
                known = traced.function.trace(*jax.tree.map(shaped, traced.arguments))
            platform = "cuda" if target.platform == "gpu" else "tpu"
            lowered = known.lower(lowering_platforms=(platform,))
            compiled = lowered.compile()
        seconds = time.perf_counter() - began
        before = hlo.Program(lowered.as_text("hlo", debug_info=True), {"local_steps": traced.steps})
        return Compiled(compiled, traced, before, count, at_once, share, seconds)

    def fits(at_once: int) -> bool:
        try:
            return _needed_bytes(of(at_once).program) <= _USABLE * target.memory
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return False  # a TPU's compiler refuses what its device cannot hold

    if at_once:
        return of(at_once)
    most = share
    while most > 1 and not fits(most):
        most = -(-most // 2)
    return of(most)


def _needed_bytes(program: jax.stages.Compiled) -> int:
    """The memory that a compiled program needs, with its arguments and results."""
    memory: Any = program.memory_analysis()
    of_results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + of_results


def figures(target: Target, compiled: Compiled) -> dict[str, Any]:
    """The row of a compiled program."""
    traced = compiled.traced
    read = hlo.Program(compiled.program.as_text() or "", {"local_steps": traced.steps})
    memory: Any = compiled.program.memory_analysis()
    turn, step, loops = read.named("rounds"), read.named("local_steps"), read.loops()
    in_round = read.launches(turn.body) if turn else []
    # A single step has no loop.
    in_step = (
        read.launches(step.body) if step else [i for i in in_round if "local_steps" in i.scope]
    )

    def count(loop: hlo.Loop | None, *opcodes: str) -> int:
        return len(read.of(loop.body, *opcodes)) if loop else 0

    crossing = hlo.collectives(read)
    of_round = hlo.collectives(read, turn.body) if turn else []
    before = compiled.before.named("rounds")
    flops = hlo.flops(compiled.before, before.body if before else "", "local_steps")
    moved = hlo.bytes_moved(read, turn.body if turn else "", "local_steps")
    return {
        "devices": compiled.devices,
        "at once": compiled.at_once if compiled.at_once < compiled.share else "all",
        "of clients": compiled.share,
        "seconds": compiled.seconds,
        "arguments MB": memory.argument_size_in_bytes / 1e6,
        "temporaries MB": memory.temp_size_in_bytes / 1e6,
        "of memory %": 100 * _needed_bytes(compiled.program) / target.memory,
        "kernels a step": len(in_step),
        "around it": len(in_round) - len(in_step) if turn else 0,
        "steps": step.turns if step and step.turns is not None else traced.steps,
        "steps known": not step or step.turns is not None,
        "loops": len(loops),
        "of unknown length": sum(loop.turns is None for loop in loops),
        "of them in a step": sum(loop.turns is None for loop in read.loops(step.body))
        if step
        else 0,
        "grouped convolutions": len(hlo.grouped_convolutions(read)),
        "sorts": len(read.of("", "sort")),
        "scatters of a step": count(step, "scatter"),
        "scatters of a round": count(turn, "scatter"),
        "gathers of a step": count(step, "gather"),
        "host transfers": len(hlo.host_transfers(read)),
        "all-gathers": sum("all-gather" in one.opcode for one in crossing),
        "collectives": len(of_round),
        "collectives MB": sum(one.num_bytes for one in of_round) / 1e6,
        "upload MB": traced.upload / 1e6,
        # By the compiler's own estimate, which a TPU's writes beside each kernel, in one step.
        "megacycles a step": sum(map(hlo.cycles, in_step)) / 1e6,
        "GFLOP": flops / 1e9,
        "GB moved": moved / 1e9,
        "roofline ms": 1e3 * max(flops / target.peak, moved / target.bandwidth),
        "all loops": [(loop.scope, loop.turns) for loop in loops],
        "all collectives": [(one.scope, one.shape) for one in of_round],
    }


def _of(name: str, precision: str) -> Work:
    if name in workloads.WORKLOADS:
        return of_workload(name)
    if _RESNET.fullmatch(name):
        return of_resnet(name)
    return of_layer(name) if _LAYER.fullmatch(name) else of_presets(name, precision)


def measure(options: "Options") -> list[dict[str, Any]]:
    """A row for each program on each target, with the reason if it does not compile."""
    programs = EVERY if options.programs == ("all",) else options.programs
    targets, texts = options.targets, options.texts
    rows = []
    for name in programs:
        try:
            work = _of(name, options.precision)
        except UsageError as error:
            rows.append({"program": name, "target": "", "compiles": str(error)})
            continue
        for target in targets:
            row: dict[str, Any] = {"program": name, "target": target}
            try:
                compiled = compiled_for(
                    TARGETS[target], work, precision=options.precision, at_once=options.at_once
                )
            except Exception as error:  # compilers raise many kinds
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                rows.append(row | {"compiles": f"no: {reason[:150]}"})
                continue
            rows.append(row | {"compiles": "yes"} | figures(TARGETS[target], compiled))
            if texts:
                place = Path(texts).expanduser()
                place.mkdir(parents=True, exist_ok=True)
                (place / f"{name}_{target}.txt").write_text(compiled.program.as_text() or "")
            print({key: value for key, value in rows[-1].items() if value}, flush=True)
    return rows


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    targets: tuple[str, ...] = flag(("h100", "v5e"), "Devices.", choices=TARGETS)
    programs: tuple[str, ...] = flag(
        ("a", "b", "c"), "Workloads (a, b, c), presets or convolutions; or all."
    )
    precision: str = flag("auto", "As in train and sweep.", choices=("auto", *platforms.PRECISIONS))
    at_once: int = flag(0, "Clients that a device trains at once; 0: as many as fit.", at_least(0))
    effort: str = flag(
        "default",
        "The compiler's effort; O1 compiles a TPU's convolutions in a quarter of the time, for "
        "programs that are slower.",
        choices=("default", "O1"),
    )
    json: str = flag("", "A file for all figures.")
    texts: str = flag("", "A folder for the compiled programs' texts.")


def tables(options: Options) -> Iterator[frame.Table]:
    if options.effort != "default":
        jax.config.update("jax_optimization_level", options.effort)
    rows = measure(options)
    yield frame.Table("Programs that were compiled, not run; the roofline is an estimate", rows)


BINARY = frame.binary(tables, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
