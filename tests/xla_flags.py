"""Which of XLA's flags this jaxlib knows; XLA aborts a process that has another one."""

import os
import subprocess
import sys
from collections.abc import Sequence

# Compile in a third of the time, to programs that run longer.
QUICKEST = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",  # one piece of code for LLVM
)
# Lets jaxlib parse XLA_FLAGS without importing JAX, which would take four times as long.
_PARSE = "from jaxlib import _jax; _jax.CompileOptions()"


def known(*flags: str) -> str:
    """The flags that this jaxlib knows, as XLA_FLAGS has them."""
    if not _parsed(flags):
        flags = tuple(flag for flag in flags if _parsed([flag]))
    return " ".join(flags)


def _parsed(flags: Sequence[str]) -> bool:
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    parsed = subprocess.run([sys.executable, "-c", _PARSE], env=environment, capture_output=True)
    return parsed.returncode == 0
