"""Check an algorithm from the command line; exit with 1 if it breaks a law.

python -m fedjax_inv.testing package.module:factory [name=value ...]
"""

import ast
import importlib
import sys
from typing import Any

import jax

from fedjax_inv.checks import UsageError
from fedjax_inv.testing.report import check


def main(arguments: list[str]) -> int:
    """Check the factory that the first argument names; the others are its hyperparameters."""
    if "--help" in arguments:
        print(__doc__)
        return 0
    place, *pairs = arguments or [""]
    module, _, name = place.partition(":")
    if not module or not name or not all("=" in pair for pair in pairs):
        print("usage: python -m fedjax_inv.testing package.module:factory [name=value ...]")
        return 2
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: for a relative module
        print(f"{place}: cannot be imported ({error})")
        return 2
    try:
        report = check(factory, hyperparameters=dict(map(_hyperparameter, pairs)))
    except UsageError as error:
        print(f"{place}: {error}")
        return 2
    return 1 if report.broken else 0


def _hyperparameter(pair: str) -> tuple[str, Any]:
    name, _, text = pair.partition("=")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # on any machine, for the law of devices
    sys.exit(main(sys.argv[1:]))
