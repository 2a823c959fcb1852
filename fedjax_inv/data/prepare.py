"""Converts the clients of other files to a folder that `sources.load` reads.

    python -m fedjax_inv.data.prepare leaf/femnist/data --to=femnist

It writes the examples of each client in a row (`on_disk`), in one pass and with bounded memory. It
takes LEAF's FEMNIST, a folder of images (--folders), a data set of TFDS with a feature that names
the user (--user), or a function package.module:function that yields (x, y) of each client from a
number on. Started again after an interruption, it goes on.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from fedjax_inv.checks import UsageError
from fedjax_inv.data import convert, leaf, on_disk, sources
from fedjax_inv.data.convert import Plan

# The flags of conversions, and the sources that each is for.
_OF_SOURCE = {
    "user": "data sets of TFDS",
    "folders": "folders of images",
    "image_size": "folders of images",
    "channels": "folders of images",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Write a source where `sources.load` reads it.

    Exits with status 2 and one line if a flag or the source is wrong.

    Args:
      argv: the command line without the program, by default the process's own.
    """
    try:
        _prepare(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)


def _prepare(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fedjax_inv.data.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("name", help="the source")
    parser.add_argument("--data_dir", help="by default $TFDS_DATA_DIR, else ~/tensorflow_datasets")
    parser.add_argument("--to", required=True, help="the folder that the source is converted to")
    parser.add_argument("--user", help="of TFDS: the feature that names the user")
    parser.add_argument(
        "--folders",
        choices=convert.FOLDERS,
        help="of images: what the folders above those of the classes are; by default client",
    )
    parser.add_argument("--image_size", type=int, help="side in pixels that images are scaled to")
    parser.add_argument(
        "--channels", type=int, choices=(1, 3), help="of images; by default as the first has"
    )
    try:
        args, others = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(error.argument_name or "argv", ..., error.message) from None
    if others:
        raise UsageError(others[0], ..., "unknown; must be one source")
    _convert(args)


def _convert(args: argparse.Namespace) -> None:
    name, folder = args.name, Path(args.to).expanduser()
    try:
        for split, plan in _plans(name, args).items():
            place = folder / "test" if split == "test" else folder
            about = [name, split, *(str(getattr(args, flag)) for flag in _OF_SOURCE)]
            with _progress(plan, place) as report:
                meta = on_disk.write(
                    place, plan.source, name=" ".join(about), classes=plan.classes, report=report
                )
            print(f"{place}: {meta['clients']} clients, {meta['examples']} examples")
    except UsageError as error:
        flags = {"folder": ("--to", args.to), "root": ("name", name), "name": ("name", name)}
        argument, value = flags.get(str(error.argument), (error.argument, error.value))
        if error.argument == "found":
            argument, value = str(error.value), ...
        if argument in _OF_SOURCE:
            argument = f"--{argument}"
        raise UsageError(argument, value, error.allowed, **error.others) from None
    except OSError as error:
        reason = f"cannot be written ({error.strerror}); then the same command goes on"
        raise UsageError("--to", args.to, reason) from None


def _plans(name: str, args: argparse.Namespace) -> dict[str, Plan]:
    """Return the sources by split."""
    path = Path(name).expanduser()
    of_leaf = leaf.files(path)
    is_tfds = not of_leaf and bool(sources.tfds_splits(name, args.data_dir))
    is_images = not (of_leaf or is_tfds or convert.is_function(name))
    for flag, kind in _OF_SOURCE.items():
        fits = is_tfds if flag == "user" else is_images
        if getattr(args, flag) is not None and not fits:
            raise UsageError(f"--{flag}", getattr(args, flag), f"is for {kind}, {name} is none")
    if args.data_dir is not None and not is_tfds:
        allowed = f"is for a prepared data set of TFDS, {name} is none"
        raise UsageError("--data_dir", args.data_dir, allowed)
    if of_leaf:
        splits = {"train": [f for f, test in of_leaf if not test]}
        splits["test"] = [file for file, test in of_leaf if test]
        if not splits["train"]:
            raise UsageError(str(path), ..., "must hold .json files in train, too")
        return {split: convert.leaf_json(files) for split, files in splits.items() if files}
    if is_tfds:
        if args.user is None:
            raise UsageError("--user", ..., f"must name the feature of {name} that is the user")
        there = sources.tfds_splits(name, args.data_dir)
        return {
            split: convert.tfds(name, args.user, data_dir=args.data_dir, split=split)
            for split in ("train", "test")
            if split in there
        }
    if convert.is_function(name):
        return {"train": convert.function(name)}
    if not path.is_dir():
        needed = "must be LEAF's json, a folder, a prepared data set of TFDS, or a function"
        raise UsageError("name", name, needed)
    folders, channels = args.folders or "client", args.channels or 0
    plan = convert.images(path, folders=folders, image_size=args.image_size, channels=channels)
    return {"train": plan}


@contextlib.contextmanager
def _progress(plan: Plan, place: Path) -> "Iterator[on_disk.Report]":
    """Show a bar of the clients on stderr, if tqdm is installed and stderr is a terminal."""
    if not sys.stderr.isatty() or find_spec("tqdm") is None:
        yield lambda clients: None
        return
    from tqdm import tqdm

    with tqdm(total=plan.clients, desc=str(place), unit="client") as bar:

        def report(clients: int) -> None:
            bar.update(clients - bar.n)

        yield report


if __name__ == "__main__":
    main()
