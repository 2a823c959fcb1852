"""Downloads data sets of TFDS for `sources.load`: `python -m fedjax_inv.data.prepare mnist`."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources


def main(argv: Sequence[str] | None = None) -> None:
    """Download each named data set and write it where `sources.load` reads it.

    Exits with status 2 and one line if a flag is wrong, or if a package or a data set is missing.

    Args:
      argv: the command line without the program, by default the process's own.
    """
    try:
        _prepare(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _prepare(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fedjax_inv.data.prepare",
        description=__doc__,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", help="as mnist or emnist/letters")
    parser.add_argument("--data_dir", help="by default $TFDS_DATA_DIR, else ~/tensorflow_datasets")
    try:
        args, others = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(error.argument_name or "argv", ..., error.message) from None
    if others:
        raise UsageError(others[0], ..., "unknown; must be names of data sets, or --data_dir")
    if not args.names:
        raise UsageError("names", ..., "must be one data set of TFDS or several, such as mnist")
    for name in args.names:
        if not sources.may_be_prepared(name):
            raise UsageError(
                repr(name), ..., "must be a data set of TFDS, such as mnist or emnist/letters"
            )
    if args.data_dir and Path(args.data_dir).expanduser().is_file():
        raise UsageError("--data_dir", Path(args.data_dir), "must be a folder")
    for package in ("tensorflow_datasets", "tensorflow"):
        if find_spec(package) is None:
            raise UsageError(
                f"{package} is needed to download: pip install 'fedjax_inv[experiments,prepare]'"
            )
    import tensorflow_datasets as tfds

    for name in args.names:
        try:
            builder = tfds.builder(name, data_dir=args.data_dir)
        except tfds.core.DatasetNotFoundError:
            raise UsageError(repr(name), ..., "must be a data set of TFDS") from None
        except (ValueError, AssertionError) as error:  # TFDS has no such configuration or version
            reason = " ".join(str(error).split())
            text = f"has no such configuration or version: {reason}"
            raise UsageError(repr(name), ..., text) from None
        builder.download_and_prepare(file_format="array_record")  # for random access
        print(f"{name}: {builder.data_dir}")


if __name__ == "__main__":
    main()
