"""Downloads data sets of TFDS for `sources.load`: `python -m fedjax_inv.data.prepare mnist`."""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec


def main(argv: Sequence[str] | None = None) -> None:
    """Downloads each named data set and writes it where `sources.load` reads it.

    argv: the command line without the program, by default that of the process. Exits with one line
    if a package or a data set is missing.
    """
    parser = argparse.ArgumentParser(prog="python -m fedjax_inv.data.prepare", description=__doc__)
    parser.add_argument("names", nargs="+", help="as mnist or emnist/letters")
    parser.add_argument("--data_dir", help="by default $TFDS_DATA_DIR, else ~/tensorflow_datasets")
    args = parser.parse_args(argv)
    for package in ("tensorflow_datasets", "tensorflow"):
        if find_spec(package) is None:
            sys.exit(
                f"{package} is needed to download: pip install 'fedjax_inv[experiments,prepare]'"
            )
    import tensorflow_datasets as tfds

    for name in args.names:
        try:
            builder = tfds.builder(name, data_dir=args.data_dir)
        except tfds.core.DatasetNotFoundError:
            sys.exit(f"{name!r} is not a data set of TFDS")
        builder.download_and_prepare(file_format="array_record")  # what random access needs
        print(f"{name}: {builder.data_dir}")


if __name__ == "__main__":
    main()
