"""The library on one GPU in at most eight minutes: gpu.json and gpu.md, written after each section.

make gpu
python -m benchmarks.gpu --sections=rounds,steps --out=FOLDER

Each section has a process of its own and a limit of time: one that fails or is cut off loses
nothing of the others. Its programs compile at the same time, in threads, and run one after the
other, each for the median of several calls. --small runs every section in a tiny form, also
without a GPU.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import importlib.util
import inspect
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import frame, peers, workloads
from benchmarks.frame import Row, flag
from benchmarks.workloads import Job, Workload
from experiments import start
from fedjax_inv import __version__, platforms
from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Tree

ROOT = Path(__file__).parents[1]
_REPEATS, _WARMUP = 7, 2
_TOLERANCE = 1e-4  # of agreement with a CPU
_OF_REST = 10.0  # seconds that a section gets at least

# Stands above the tables.
COLUMNS = f"""\
Times are medians of {_REPEATS} calls, by the clock. ms a round: of all clients and seeds together.
steps a round: the local steps of all of them. us a step: a round's time over these. slowest over
fastest: of the calls. temporaries GB: by XLA's account. compiled in s: while the section's other
programs compile, too."""


def _shrunk(job: Job) -> Job:
    """A job in small, of at most two clients, two seeds and two steps."""
    workload = job.workload._replace(
        network="mlp_8", shape=(4, 4, 1), num_clients=2, cohort=2, num_examples=8, batch_size=4
    )
    num_steps, num_seeds = min(job.num_steps, 2), min(job.num_seeds, 2)
    fewer = job._replace(workload=workload, num_steps=num_steps, num_seeds=num_seeds)
    return fewer._replace(num_rounds=1, quick=True)


def timed(jobs: Mapping[str, Job], small: bool) -> Iterator[Row]:
    """A row for each job, in small of one."""
    if small:
        jobs = {name: _shrunk(jobs[name]) for name in [*jobs][-1:]}
    made = _begun({name: partial(workloads.Engine, job) for name, job in jobs.items()})
    concurrent.futures.wait(made.values())
    for name, job in jobs.items():
        row: Row = {"program": name, "work": job.workload.title}
        if 0 < job.at_once < job.workload.cohort:
            row["work"] += f", {job.at_once} at once"
        try:
            engine = made.pop(name).result()  # its memory is free after its row
            calls = [engine.round() for _ in range(_WARMUP + _REPEATS)][_WARMUP:]
        except Exception as error:  # compilers raise many kinds, and memory may be full
            yield row | {"failed": frame.line(error)}
            continue
        times, steps = [call.seconds for call in calls], calls[0].client_steps
        seconds = frame.median(times)
        yield row | {
            "ms a round": 1e3 * seconds / job.num_rounds,
            "steps a round": steps // job.num_rounds,
            "us a step": 1e6 * seconds / steps,
            "slowest over fastest": max(times) / min(times),
            "temporaries GB": engine.temporary_bytes / 1e9,
            "compiled in s": engine.compile_seconds,
        }
        del engine


def _begun(calls: Mapping[Any, Callable[[], Any]]) -> dict[Any, concurrent.futures.Future[Any]]:
    """The results of calls, in threads of all cores."""
    pool = concurrent.futures.ThreadPoolExecutor(platforms.cores())
    return {name: pool.submit(call) for name, call in calls.items()}


def agreement(options: "Options") -> Iterator[Row]:
    """Server and clients after two rounds beside those of a CPU, at the precision "highest".

    The network is the first look's. The difference is relative to values above 1. Without a GPU,
    the CPU runs the program that is made for one.
    """
    jobs = {}
    for name in LISTED:
        clients = 1 if name == "erm" else 4
        workload = Workload("mlp_64", (8, 8, 1), clients, 40, clients, 16, 1, 0.1)
        jobs[name] = Job(workload, name, {}, 3, 0.9, "highest", num_rounds=2, at_once=0, quick=True)
    if options.small:
        jobs = {"fedavg": jobs["fedavg"]}
    places = {"cpu": jax.devices("cpu")[0], "gpu": jax.devices()[0]}

    def state(platform: str, job: Job) -> Tree:
        with platforms.traced_for(platform), jax.default_device(places[platform]):
            engine = workloads.Engine(job)
            engine.round()
        return jax.device_get((engine.state.server, engine.state.clients))

    calls = {
        (place, name): partial(state, place, job) for name, job in jobs.items() for place in places
    }
    made = _begun(calls)
    for name in jobs:
        try:
            ours, theirs = (jax.tree.leaves(made[place, name].result()) for place in places)
        except Exception as error:  # compilers raise many kinds
            yield {"algorithm": name, "failed": frame.line(error)}
            continue
        pairs = zip(ours, theirs, strict=True)
        most = float(np.max([_distance(*pair) for pair in pairs if pair[0].size]))
        is_near = "yes" if most <= _TOLERANCE else "no"
        yield {"algorithm": name, "largest difference": most, "within 1e-4": is_near}


def _distance(one: np.ndarray, other: np.ndarray) -> np.floating[Any]:
    """The largest difference; NaN if only one is a NaN."""
    both, there = np.float64(one), np.float64(other)
    away = np.abs(both - there) / np.maximum(np.abs(there), 1)
    return np.where((both == there) | (np.isnan(both) & np.isnan(there)), 0, away).max()


def peaks(options: "Options") -> Iterator[Row]:
    """Products of two 8192 x 8192 matrices, and 4 GiB that are read and written, both counted."""
    side = 256 if options.small else 8192
    square = jax.random.normal(jax.random.key(0), (side, side))
    for name, precision, dtype in (
        *((f"float32, {one}", one, jnp.float32) for one in platforms.PRECISIONS),
        ("bfloat16", "default", jnp.bfloat16),
    ):
        both = [square.astype(dtype)] * 2
        with platforms.products_at(precision):
            product = jax.jit(jnp.matmul).lower(*both).compile()
        flops = 2 * side**3 / _seconds(partial(product, *both))
        yield {"what": f"product, {name}", "TFLOP/s": flops / 1e12}
    long = jnp.ones(2**20 if options.small else 2**30, jnp.float32)
    seconds = _seconds(partial(jax.jit(lambda array: array + 1), long))
    yield {"what": "memory", "TB/s": 2 * long.nbytes / seconds / 1e12}


def _seconds(call: Callable[[], Any]) -> float:
    """The median time of a call."""
    times = []
    for _ in range(_WARMUP + _REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return frame.median(times[_WARMUP:])


def of_rounds(options: "Options") -> Iterator[Row]:
    """Rounds of FedAvg; unequal: as for clients whose numbers of steps may differ."""
    yield from timed(workloads.ROUNDS | workloads.UNEQUAL, options.small)


def steps(options: "Options") -> Iterator[Row]:
    """Ten local steps of each algorithm at its own precision, beside as many clients of FedAvg."""
    base: dict[int, float] = {}
    for row in timed(workloads.METHODS, options.small):
        number, time_ = workloads.METHODS[row["program"]].workload.cohort, row.get("ms a round")
        if time_ and row["program"].startswith("fedavg"):
            base[number] = time_
        yield row | ({"times fedavg": time_ / base[number]} if time_ and number in base else {})


def clients(options: "Options") -> Iterator[Row]:
    """FedAvg with more and more clients, at most 1,000 of the MLP or 500 of LeNet at once."""
    jobs = {}
    for network, most in (("mlp", 10_000), ("lenet", 1_000)):
        for number in (10**power for power in range(1, 5) if 10**power <= most):
            workload = Workload(network, (28, 28, 1), number, 100, number, 10, 1, 0.05)
            at_once = min(number, 1_000 if network == "mlp" else 500)
            jobs[f"{network}, {number} clients"] = Job(workload, num_rounds=2, at_once=at_once)
    yield from timed(jobs, options.small)


def seeds(options: "Options") -> Iterator[Row]:
    """FedAvg with more and more seeds, all at once."""
    workload = Workload("mlp", (28, 28, 1), 10, 100, 10, 10, 1, 0.05)
    jobs = {f"{n} seeds": Job(workload, num_seeds=n, num_rounds=4) for n in (1, 4, 16, 64)}
    yield from timed(jobs, options.small)


def precision(options: "Options") -> Iterator[Row]:
    """FedIPG with products at each precision."""
    job = workloads.METHODS["fedipg"]
    named = {f"fedipg, {one}": job._replace(precision=one) for one in platforms.PRECISIONS}
    yield from timed(named, options.small)


def first_look(options: "Options") -> Iterator[Row]:
    """`paper first_look` without a cache of programs, with one, and with autotuning; each anew."""
    words = ["paper", "first_look"]
    if options.small:
        words += ["--rows=colour-FedAvg", "--seeds=0", "--rounds=2"]
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as other:
        yield _command("without a cache", words, cache)
        if not options.small:
            yield _command("with a cache", words, cache)
            tuned = {"XLA_FLAGS": "--xla_gpu_autotune_level=4"}
            yield _command("autotuned, without a cache", words, other, tuned)


def table(options: "Options") -> Iterator[Row]:
    """Three rows of FL Games' Table 1 at its size with ten seeds; noise, if MNIST is not there."""
    words = ["paper", "fl_games", "--study=methods"]
    if options.small:
        words += ["--data=colored_digits", "--rows=F-parallel", "--seeds=0", "--rounds=2"]
        words += ["--eval_every=2", "--widths=8", "--stop_below="]
    else:
        words += ["--data=colored_mnist", "--rows=FedAvg,F-sequential,F-parallel"]
        words += ["--seeds=0,1,2,3,4,5,6,7,8,9"]
    at = Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser() / "mnist"
    with tempfile.TemporaryDirectory() as folder:
        if not options.small and not at.exists():
            generator, file = np.random.default_rng(0), Path(folder) / "noise.npz"
            x = generator.integers(0, 256, (70_000, 28, 28), np.uint8)
            np.savez(file, x=x, y=generator.integers(0, 10, len(x)))
            words += [f"--dataset={file}"]
        yield _command("FL Games", words, folder)


def _command(
    what: str, words: Sequence[str], cache: str, environment: Mapping[str, str] | None = None
) -> Row:
    """The time of a command of ours by the clock and of all cores, and what it prints."""
    settings = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache, **(environment or {})}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as runs:
        call = [sys.executable, "-m", "experiments", *words, f"--run_dir={runs}"]
        done = subprocess.run(call, cwd=ROOT, env=settings, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {"command": what, "s": time.perf_counter() - began, "processor s": used}
    if done.returncode:
        row["failed"] = (done.stderr.strip().splitlines() or [str(done.returncode)])[-1]
    return row | {"printed": done.stdout}


def torch(options: "Options") -> Iterator[Row]:
    """PyTorch in turns with ours, examples in float32: a loop, all clients at once, and compiled.

    ratio: the medians, PyTorch's over ours; spread: that of single turns.
    """
    if not options.venvs and importlib.util.find_spec("torch") is None:
        yield {"failed": "PyTorch is not installed; --venvs names the folder of its environment"}
        return
    asked = peers.Options(
        peers=("pytorch", "pytorch_vmapped", "pytorch_compiled"),
        workloads=("b",) if options.small else tuple(workloads.WORKLOADS),
        venvs=options.venvs,
        timeout=100.0,
    )
    yield from peers.rows(asked)


# Name -> (its rows, the seconds that it may take)
SECTIONS: dict[str, tuple[Callable[["Options"], Iterator[Row]], float]] = {
    "peaks": (peaks, 20),
    "rounds": (of_rounds, 45),
    "steps": (steps, 80),
    "agreement": (agreement, 80),
    "precision": (precision, 25),
    "clients": (clients, 45),
    "seeds": (seeds, 25),
    "first_look": (first_look, 150),
    "table": (table, 80),
    "torch": (torch, 150),  # the last one gets what is left
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    sections: tuple[str, ...] = flag(tuple(SECTIONS), "What to measure.", SECTIONS)
    out: str = flag("build/gpu", "The folder of gpu.json and gpu.md.")
    seconds: float = flag(480.0, "Seconds for all sections; each has a limit of its own, too.")
    venvs: str = flag("", "The folder of PyTorch's environment, as of peers.py; none: this one.")
    small: bool = flag(False, "Everything in a tiny form, also without a GPU.")
    child: bool = flag(False, "Prints the rows of sections as JSON, in this process.")


def run(options: Options, name: str, limit: float) -> dict[str, Any]:
    """A section in a process of its own: its rows, and how it ended."""
    words = [f"--sections={name}", f"--venvs={options.venvs}", "--child"]
    words += ["--small"] if options.small else []
    began, ended = time.perf_counter(), "done"
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        call = [sys.executable, "-m", "benchmarks.gpu", *words]
        process = subprocess.Popen(call, cwd=ROOT, stdout=out, stderr=err, start_new_session=True)
        try:
            if process.wait(limit):
                err.seek(0)
                ended = f"failed: {(err.read().strip().splitlines() or [''])[-1][:300]}"
        except subprocess.TimeoutExpired:
            ended = f"cut off after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()
        out.seek(0)
        rows = [json.loads(line) for line in out if line.startswith("{") and line.endswith("}\n")]
    for row in rows:
        del row["section"]
    return {"ended": ended, "seconds": time.perf_counter() - began, "rows": rows}


def written(folder: Path, about: Row, found: Mapping[str, dict[str, Any]]) -> None:
    """Writes gpu.json and gpu.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps({"run": about, "sections": found}, indent=1))
    parts = [", ".join(f"{name} {value}" for name, value in about.items()), COLUMNS]
    for name, section in found.items():
        rows = [{key: row[key] for key in row if key != "printed"} for row in section["rows"]]
        parts.append(f"## {name}: {section['ended']}, {section['seconds']:.0f} s")
        parts += [inspect.getdoc(SECTIONS[name][0]) or "", frame.table(rows)]
    (folder / "gpu.md").write_text("\n\n".join(parts) + "\n")


def about() -> Row:
    """What runs here. In a process that ends before others need the device."""
    code = "import jax; print(jax.devices()[0].device_kind)"
    kind = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    return {
        "date": datetime.date.today().isoformat(),
        "version": __version__,
        "jax": jax.__version__,
        "device": kind.strip(),
        "cores": platforms.cores(),
        "python": platform.python_version(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "none"),
    }


def main() -> None:
    options: Options = frame.options(Options, __doc__)
    if options.child:
        for name in options.sections:
            for row in SECTIONS[name][0](options):
                print(json.dumps({"section": name, **row}), flush=True)
        return
    found: dict[str, dict[str, Any]] = {}
    head, end = about(), time.perf_counter() + options.seconds
    if head["device"] == "cpu" and not options.small:
        raise UsageError("--small", False, "must be given, as JAX finds no GPU here")
    for name in options.sections:
        left = end - time.perf_counter()
        found[name] = run(options, name, max(_OF_REST, min(SECTIONS[name][1], left)))
        written(Path(options.out), head, found)
        print(f"{name}: {found[name]['ended']}, {found[name]['seconds']:.0f} s", flush=True)
    print(Path(options.out, "gpu.md").read_text())


if __name__ == "__main__":
    with start.in_one_line():
        main()
