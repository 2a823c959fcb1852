"""Packages of the extras: what to install if one of them is missing.

It imports the standard library alone, as any other package may be the missing one.
"""

_EXPERIMENTS = (
    *("absl", "array_record", "docstring_parser", "lime", "matplotlib", "msgspec", "orbax"),
    *("pandas", "PIL", "pyarrow", "safetensors", "scipy", "sklearn", "tabulate"),
    *("tensorflow_datasets", "tqdm"),
)
# The extra of pyproject.toml that installs a package, by the name under which it is imported.
EXTRAS = {
    **dict.fromkeys(_EXPERIMENTS, "experiments"),
    "tensorboardX": "tensorboard",
    "tensorflow": "prepare",
}


def missing(error: ImportError) -> str | None:
    """The line for a missing package of an extra, with the command that installs it.

    It is None for other failures of an import, which are defects.
    """
    # The library adds the command to the error, whose cause names the package.
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    package = (cause.name or "").partition(".")[0]
    if not isinstance(cause, ModuleNotFoundError) or package not in EXTRAS:
        return None
    return f"the package {package} is missing: pip install 'fedjax_inv[{EXTRAS[package]}]'"
