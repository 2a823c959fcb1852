"""The platform that a program is traced for, on which its operations may depend, and its cores."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from fedjax_inv.checks import UsageError

PRECISIONS = ("default", "high", "highest")  # of float32 products, as JAX names them

_LEVEL = "xla_backend_optimization_level"
_EMITTERS = "xla_cpu_use_fusion_emitters"
_AUTOTUNE = "xla_gpu_autotune_level"

# A context of JAX's: what was traced for one platform is traced again for another.
_traced_for: Any = jax.make_user_context(default_value="")


def on_cpu() -> bool:
    """Return whether programs are traced for a CPU.

    On a CPU, a core executes one operation after the other, and the turns of a loop cost nothing.
    """
    return _current() == "cpu"


def on_gpu() -> bool:
    """Return whether programs are traced for a GPU."""
    return _current() == "gpu"


def on_tpu() -> bool:
    """Return whether programs are traced for a TPU.

    The TPU's compiler turns a grouped convolution into a convolution with one more axis.
    """
    return _current() == "tpu"


def one_thread() -> dict[str, Any]:
    """Return `compiler_options` of `jax.jit` for programs with one thread for each CPU device.

    A core that is a device has work of its own, so threads of another's would only wait for it.
    """
    return {"xla_cpu_multi_thread_eigen": False} if on_cpu() else {}


def quick_to_compile() -> dict[str, Any]:
    """Return `compiler_options` of `jax.jit` for programs that compile longer than they run.

    They leave out slow passes of LLVM on CPUs and use XLA's older code for fusions: 0.6 of the time
    to compile, and code that runs 1.05 times as long. On GPUs they leave out the search for the
    fastest tiles, for which each product would be compiled some 25 times. XLA_FLAGS that name a
    level come first.
    """
    return _unless_chosen({_LEVEL: 1, _EMITTERS: False})


def quickest_to_compile() -> dict[str, Any]:
    """Return `compiler_options` of `jax.jit` for programs that run only a few times.

    On CPUs nothing is optimised either, unless XLA_FLAGS name a level: a quarter of the time to
    compile, and code that runs 2 to 3 times as long. On GPUs as `quick_to_compile`.
    """
    return _unless_chosen({_LEVEL: 0, _EMITTERS: False})


def _unless_chosen(options: dict[str, Any]) -> dict[str, Any]:
    chosen = os.environ.get("XLA_FLAGS", "")
    if on_gpu():
        return {} if _AUTOTUNE in chosen else {_AUTOTUNE: 0}
    if not on_cpu() or _LEVEL in chosen:
        return {}
    return {name: value for name, value in options.items() if _is_known(name, value)}


@functools.cache
def _is_known(option: str, value: Any) -> bool:
    """Return whether this jaxlib has a compiler option; with another one it compiles nothing."""
    try:
        jax.jit(lambda: 0, compiler_options={option: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@contextlib.contextmanager
def products_at(precision: str) -> Iterator[None]:
    """Trace float32 products and convolutions at a precision while the context is open.

    It holds for operations that name no precision, and for their derivatives. A CPU computes
    float32 at every precision, so nothing changes there.

    Args:
      precision: one of PRECISIONS. "default": TF32 on a GPU, one product of bfloat16 on a TPU.
        "high": three products of TF32 on a GPU, with the error of float32, and of bfloat16 on a
        TPU. "highest": float32 on a GPU, six products of bfloat16 on a TPU.
    """
    if on_gpu() and precision == "high":  # which is TF32 to XLA
        precision = "TF32_TF32_F32_X3"
    with contextlib.nullcontext() if on_cpu() else jax.default_matmul_precision(precision):
        yield


def _current() -> str:
    return _traced_for.value or jax.default_backend()


def traced_for(platform: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which this thread traces programs for "cpu", "gpu" or "tpu".

    The programs can then be compiled for a machine that is not here.
    """
    return _traced_for(platform)


def same_context() -> contextlib.AbstractContextManager[None]:
    """Return the context of `traced_for` in which this thread is, for another thread."""
    return _traced_for(_traced_for.value)


def machine_bytes() -> int:
    """Return the size of this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(
    name: str, value: Any, needed: int, there: int | None = None, what: str = ""
) -> None:
    """Raise UsageError unless arrays of so many bytes, which an argument decides, fit into memory.

    `there` are the bytes of the memory, by default this machine's. `what` stands after the needed
    size in the message.
    """
    there = machine_bytes() if there is None else there
    if needed > there:
        text = f"needs {needed / 1e9:,.1f} GB{what}, must fit into {there / 1e9:,.1f} GB of memory"
        raise UsageError(name, value, text)


def make_devices(number: int) -> None:
    """Make so many CPU cores JAX's devices, at most all, unless JAX has started or has a number.

    It is for a program's first lines, as it changes the process: `fit` leaves that alone.
    """
    wanted = min(number, cores())
    if wanted > 1 and getattr(jax.config, "jax_num_cpu_devices", 0) < 1:
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_num_cpu_devices", wanted)


def devices(number: int | None = None) -> list[jax.Device]:
    """Return the devices to use, of several processes those of all.

    Args:
      number: how many; None: all, but no more CPU devices than cores.
    """
    there = jax.devices()
    is_cpu = jax.default_backend() == "cpu"
    if jax.process_count() > 1:
        return there
    if number is None:
        return there[: cores()] if is_cpu else there
    if number > len(there):
        text = f"must be at most {len(there)}, the devices that JAX has"
        if is_cpu:
            text += '; before JAX starts, jax.config.update("jax_num_cpu_devices", '
            text += f"{number}) makes a CPU so many"
        raise UsageError("devices", number, text)
    return there[:number]


def cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use, by its affinity, its SLURM task and a quota.

    The quota is that of a container, read in the folder `root`.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    number = len(affinity(0)) if affinity else os.cpu_count() or 1
    of_task = os.environ.get("SLURM_CPUS_PER_TASK", "")  # not all clusters confine a task to them
    if of_task.isdecimal() and int(of_task) > 0:
        number = min(number, int(of_task))
    with contextlib.suppress(OSError, ValueError):  # there is no quota, or it is "max"
        quota, period = map(int, (root / "sys/fs/cgroup/cpu.max").read_text().split())
        number = min(number, quota // period)
    return max(1, number)
