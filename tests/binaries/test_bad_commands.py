"""Bad command lines: each gets one line that names the flag, and leaves nothing behind."""

import csv
import io
import json
import os
import re
import shlex
import signal
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import pytest
from absl import flags

from fedjax_inv import checks
from fedjax_inv.data import prepare
from fedjax_inv_experiments import (
    contributions,
    evaluate,
    explain,
    export,
    factors,
    show_data,
    sweep,
    train,
)
from fedjax_inv_experiments import map as map_binary
from fedjax_inv_experiments.experiment import assemble, config, grid
from fedjax_inv_experiments.flags import errors
from fedjax_inv_experiments.flags.command import Binary
from fedjax_inv_experiments.papers import cafe, fedcfa, fedipg, fl_games
from fedjax_inv_experiments.parts import machine
from fedjax_inv_experiments.running import files, loop, provenance, records
from fedjax_inv_experiments.running import folder as folders
from runs import line

_MEMORY = 4 * 10**9  # bytes of the machine and of the device, whatever they are
_SECONDS = 30  # after which a command hangs


BINARIES: dict[str, Binary] = {
    "train": train.BINARY,
    "sweep": sweep.BINARY,
    "show_data": show_data.BINARY,
    "evaluate": evaluate.BINARY,
    "export": export.BINARY,
    "explain": explain.BINARY,
    "contributions": contributions.BINARY,
    "factors": factors.BINARY,
    "cafe": cafe.BINARY,
    "fedcfa": fedcfa.BINARY,
    "fedipg": fedipg.BINARY,
    "fl_games": fl_games.BINARY,
    "map": map_binary.BINARY,
}


def run(command: str) -> None:
    """Runs a command line in this process, as `python -m` does."""
    name, *arguments = shlex.split(command)
    if name == "prepare":
        prepare.main(arguments)
        return
    binary, values = BINARIES[name], flags.FlagValues()
    binary.define(values)
    with errors.in_one_line():
        print(binary.run(binary.read(["", *arguments], values)))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data and runs, most of which are no good."""
    folder = tmp_path_factory.mktemp("data")
    _arrays(folder)
    _images(folder)
    _others(folder)
    _runs(folder)
    return folder


def _arrays(folder: Path) -> None:
    rng = np.random.default_rng(0)
    x, vectors = rng.integers(0, 255, (60, 8, 8), np.uint8), rng.normal(size=(60, 5))
    y, domain = np.arange(60) % 3, np.array(["a", "b", "c"])[np.arange(60) // 20]
    names = np.arange(60) // 20
    nan = vectors.copy()
    nan[3, 2] = np.nan
    files: dict[str, dict[str, Any]] = {
        "good": dict(x=x, y=y, domain=domain),
        "vectors": dict(x=vectors, y=y, domain=domain),
        "tiny": dict(x=x[:, :2, :2], y=y, domain=domain),
        "volumes": dict(x=np.zeros((60, 2, 2, 2, 2)), y=y, domain=domain),
        "colours": dict(x=np.stack([x] * 3, -1), y=y, domain=domain),
        "lacking": dict(x=x, y=np.where(names == 2, 0, y), domain=domain),
        "no_features": dict(x=np.zeros((60, 0)), y=y),
        "no_examples": dict(x=np.zeros((0, 5)), y=np.zeros(0, int)),
        "one_class": dict(x=x, y=y * 0, domain=domain),
        "one_example": dict(x=x[:1], y=y[:1]),
        "two_examples": dict(x=x[:2], y=y[:2]),
        "negative": dict(x=x, y=y - 1),
        "values": dict(x=x, y=y + 0.5, domain=domain),
        "labels": dict(x=x, y=np.stack([y == 0, y == 1], 1), domain=domain),
        "flags": dict(x=x, y=y > 0),
        "infinite": dict(x=x, y=np.where(y == 0, np.inf, y)),
        "texts": dict(x=x, y=domain),
        "nan": dict(x=nan, y=y),
        "complex": dict(x=vectors * 1j, y=y),
        "scalars": dict(x=np.float32(1), y=np.int32(1)),
        "no_y": dict(x=x),
        "short_y": dict(x=x, y=y[:30]),
        "short_domain": dict(x=x, y=y, domain=domain[:5]),
        "float_domain": dict(x=x, y=y, domain=y + 0.5),
        "int_test": dict(x=x, y=y, test=y),
        "domains": dict(x=x, y=y, domains=domain),
        "upper_case": dict(x=x, y=y, Domain=domain),
        "clients": dict(x=x, y=y, clients=domain),
        "long_name": dict(x=x, y=y, domain=np.array(["a" * 101, "b", "c"])[names]),
        "all_test": dict(x=x, y=y, test=np.ones(60, bool)),
        "objects": dict(x=np.array([{}, {}], object), y=np.arange(2)),
        "called_none": dict(x=x, y=y, domain=np.array(["none", "b", "c"])[names]),
        "called_all": dict(x=x, y=y, domain=np.array(["all", "b", "c"])[names]),
        "called_mean": dict(x=x, y=y, domain=np.array(["mean", "b", "c"])[names]),
        "blanks": dict(x=x, y=y, domain=np.array(["a", "b", "a "])[names]),
        "nameless": dict(x=x, y=y, domain=np.array(["", "b", "c"])[names]),
        "two_lines": dict(x=x, y=y, domain=np.array(["a\nb", "b", "c"])[names]),
    }
    for name, arrays in files.items():
        np.savez(folder / f"{name}.npz", **arrays)
    whole = (folder / "good.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.npz").write_bytes(b"")
    (folder / "bytes.npz").write_bytes(b"\x00junk" * 99)
    header = io.BytesIO()
    claimed = {"descr": "|u1", "fortran_order": False, "shape": (10**6, 10**9)}
    np.lib.format.write_array_header_1_0(header, claimed)
    for name, content in (("junk", b"junk" * 99), ("claims", header.getvalue())):
        with zipfile.ZipFile(folder / f"{name}.npz", "w") as archive:
            archive.writestr("x.npy", content)
            archive.writestr("y.npy", content)
    (folder / "folder.npz").mkdir()


def _png(width: int, height: int, pixels: bytes | None = None) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    if pixels is None:
        pixels = np.random.default_rng(0).bytes(height * (width + 1))
        lines = [pixels[i * (width + 1) : (i + 1) * (width + 1)] for i in range(height)]
        pixels = b"".join(b"\0" + line[1:] for line in lines)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    content = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


def _images(folder: Path) -> None:
    image, bomb = _png(8, 8), _png(50_000, 50_000, b"x")
    good = {f"{d}/{k}/{i}.png": image for d in "abc" for k in "xy" for i in range(3)}
    folders_of: dict[str, dict[str, bytes]] = {
        "images": good,
        "one_class": {name: image for name in good if "/x/" in name},
        "nested": {f"more/{name}": image for name in good},
        "bomb": {**good, "a/x/1.png": bomb},
        "bombs": dict.fromkeys(good, bomb),
        "cut_image": {**good, "a/x/1.png": image[:70]},
        "text_image": {**good, "a/x/1.png": b"hello"},
        "two_sizes": {**good, "a/x/1.png": _png(9, 8)},
        "two_lines": {**good, "a\nb/x/1.png": image},
        "other": {"notes.txt": b"hello"},
        "deep": {"a/b/notes.txt": b"hello"},
        "tiny_imagenet": {"train/n/images/0.png": image, "val/val_annotations.txt": b"\xff\xfe"},
        "tiny_imagenet_2": {"train/n/images/0.png": image, "val/val_annotations.txt": b"0.png\tn"},
    }
    for name, contents in folders_of.items():
        for file, content in contents.items():
            place = folder / "folders" / name / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
    (folder / "folders" / "empty").mkdir()
    for name, make in (
        ("pipe", os.mkfifo),
        ("folder", os.mkdir),
        ("link", lambda place: os.symlink("/nowhere", place)),
    ):
        place = folder / "folders" / f"with_{name}"
        (place / "a" / "x").mkdir(parents=True)
        make(place / "a" / "x" / "0.png")
    (folder / "folders" / "leaf_pipe" / "train").mkdir(parents=True)
    os.mkfifo(folder / "folders" / "leaf_pipe" / "train" / "0.json")


def _others(folder: Path) -> None:
    for name in ("pipe", "pipe.npz", "pipe.csv", "pipe.json", "pipe.safetensors"):
        os.mkfifo(folder / name)
    for name, content in (
        ("notes.txt", "hello"),
        ("bad.csv", "a,b\n"),
        ("empty.csv", ""),
        ("table.csv", "x,city,target\n1,Rome,0.5\n2,Oslo,1.5\n3,Rome,2.5\n"),
        ("ragged.csv", "x,target\n1\n"),
        ("bad.parquet", "x"),
        ("label.csv", '"2","1","d","q","u","t"\n'),
        ("empty.json", ""),
        ("bad.json", "{}"),
        ("list.json", "[]"),
        ("deep.json", "[" * 10**5),
        ("nobody.json", json.dumps({"users": [], "user_data": {}})),
        ("pixels.json", json.dumps({"users": ["u"], "user_data": {"u": {"x": [[1]], "y": [0]}}})),
        ("junk.safetensors", "junk"),
    ):
        (folder / name).write_text(content)
    for name, array in (("numbers", np.ones((2, 3), int)), ("objects", np.array([{}]))):
        np.save(folder / f"online_{name}.npy", array)
    whole = (folder / "online_numbers.npy").read_bytes()
    (folder / "online_cut.npy").write_bytes(whole[:-8])
    (folder / "online_junk.npy").write_bytes(b"junk" * 99)
    (folder / "online_folder.npy").mkdir()
    with (folder / "tweets.csv").open("w") as file:
        rows = [["04"[i % 2], i, "d", "q", f"u{i % 7}", f"word{i} hello"] for i in range(60)]
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    with (folder / "one_label.csv").open("w") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(["4", *row[1:]] for row in rows)
    (folder / "to_nothing").symlink_to("/nowhere/at/all")


def _runs(folder: Path) -> None:
    """Run folders: of a finished run that has no checkpoint, an unfinished one, and others."""
    chosen = config.of()
    (cell,) = grid.cells(chosen, ["75"])
    start = provenance.record(assemble.assemble(chosen).data)
    for name in ("finished", "unfinished", "sweep/cell"):
        folders.begin(folder / name, chosen, cell, start)
    last = line(5)
    run = records.RunResult(0, cell.runs[0].hyper, False, {"validation": last}, last)
    result = records.Result(records.Cell.of(cell), [run])
    files.write_json(folder / "finished/result.json", result)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "config.json").write_text("{}")


# What flags of numbers may not be.
RANGES = {
    "rounds batch_size local_steps watch_examples stride devices num_processes": (
        *("99999999999", "2147483648", "-1"),
    ),
    "clients cohort min_size checkpoint_every eval_every image_size num_images vocabulary"
    " max_examples": (*("99999999999", "-5"),),
    "text_length local_epochs longest_delay process_id cut": ("99999999999", "-5"),
    "seeds widths": ("99999999999", "-1", "0,-1", "1,2147483648"),
    "learning_rate server_learning_rate": ("nan", "inf", "1e308", "1e-320", "0", "-1", "0.1,nan"),
    "weight_decay clip server_clip server_weight_decay": ("nan", "inf", "1e308", "-1"),
    "focal_gamma stop_within": ("nan", "inf", "1e308", "-1"),
    "huber_delta": ("nan", "inf", "1e308", "1e-320", "0", "-1"),
    "label_smoothing": ("nan", "inf", "1e308", "-1", "1", "1.5"),
    "mixing wrong_labels wrong_clients": ("nan", "inf", "-1", "1.5", "much", "0.1,0.2"),
    "momentum server_momentum sampling_rate frequency": ("nan", "inf", "1e308", "-1", "1.5"),
    "alpha server_epsilon imbalance": ("nan", "inf", "-1"),
    "sparse test_fraction": ("nan", "1e308", "-1"),
    "stop_below stop_above": ("nan", "inf", "1e308"),
    "angles odd_angles": ("nan", "inf", "1e308", "-361", "0,400"),
    "day extra": ("99999999999", "-5", "1.5"),
    "online_least online_most time_zones": ("nan", "1e308", "-1", "1.5"),
    "deadline seconds_per_example seconds_per_megabyte speed_spread round_spread": (
        *("nan", "inf", "1e308", "-1"),
    ),
    "online": ("sometimes", "", "online.csv"),
    "data_seed client_chunk run_chunk": ("-1", "1.5", "99999999999", "٣", "many", "²", ""),
}
NO_NUMBERS = {
    "rounds clients batch_size image_size": ("", "1.5", "nan", "many", "' 3x'", "1e3", "9" * 5000),
    "alpha momentum clip test_fraction": ("", "much", "0.1,0.2", "1,"),
    "seeds widths": ("1.5", "many", ",", "1,,2"),
    "learning_rate angles stop_below": ("much", ",", "0.1,,0.2"),
    "resume augment first_all": ("maybe", "2"),
}


def _values(of: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [
        (f"train --{name}={value}", f"--{name}=.*must be ")
        for names, values in of.items()
        for name in names.split()
        for value in values
    ]


D = "--dataset={data}"
# A command line, and how its error begins; {data} is the folder above.
COMMANDS: list[tuple[str, str]] = [
    *_values(RANGES),
    *_values(NO_NUMBERS),
    # Environments: what they draw, of which data.
    *(
        (f"train --environment={kind} --{name}={value}", f"--{name}=")
        for kind, name, value in (
            *(("colored", "flips", value) for value in ("nan", "inf", "1.5", "-1", "", "0.2,0.2")),
            *(("colored", "flips", value) for value in ("0.9", "x", ",".join(["0.5"] * 2000))),
            *(("colored", name, "nan") for name in ("test_flip", "label_noise")),
            *(("colored", "num_classes", value) for value in ("3", "1", "11", "2000000000")),
            *(("stained", "colors", value) for value in ("1", "3", "11", "2000000000")),
            *(("stained", "training_domains", value) for value in ("0", "2000", "2000000000")),
            *(("stained", "agreements", value) for value in ("nan", "1.5", "", "0.1,0.2,0.3")),
            *(("stained", "domain_size", value) for value in ("-1", "2000000000")),
            *(("stained", name, "2") for name in ("test_agreement", "mislabelled")),
            *(("stained", name, "red") for name in ("stain", "test_rule")),
            *(("combinations", "colors", value) for value in ("1", "11")),
            *(("simpson", "ramp", value) for value in ("", "zzz", "ffffff", "000000,ffffff")),
            *(("simpson", "paradox", value) for value in ("nan", "1.5", "")),
            *(("simpson", "darker", value) for value in ("", "x")),
            *(("simpson", "clients", value) for value in ("2000000000", "-1")),
            *(("rotated", "angles", value) for value in ("", "0,0")),
            *(("rotated", "odd_angles", value) for value in ("15", "5,5")),
            *(("rotated", "clients", value) for value in ("2", "2000000000")),
        )
    ),
    ("train --environment=simpson --darker=7", "--lighter=7: must be another class than --darker"),
    ("train --environment=colored --test_flip=0.2", "--flips=0.2,0.1: .* from --test_flip=0.2"),
    ("train --odd_angles=5 --odd_share=0.0001", "--odd_share=0.0001: is not an image"),
    ("train --odd_angles=1,2 --odd_share=0.9", "--odd_share=0.9: leaves no image to --angles"),
    ("train --odd_share=0.3", "--odd_share=0.3: has no effect without --odd_angles"),
    *(
        (f"train {D}/{name}.npz --environment={kind}", f"--environment={kind}: .*images")
        for kind in ("rotated", "combinations", "stained", "simpson")
        for name in ("vectors", "volumes")
    ),
    (f"train {D}/colours.npz --environment=stained", "--environment=stained: .*grey"),
    (f"train {D}/good.npz --environment=stained", "--colors=10: must be an integer in 2..3"),
    (f"train {D}/good.npz --environment=colored", "--num_classes=2: must divide 3"),
    (f"train {D}/good.npz --environment=simpson", "--lighter=7: must be one of 0, 1, 2"),
    ("train --environment=patched", "--environment=patched: must be for images .* have 8x8"),
    (
        f"train {D}/two_examples.npz --environment=rotated",
        "--held_out=75: must be a domain with examples",
    ),
    (f"train {D}/tweets.csv --model=lstm --environment=rotated", "--environment=rotated: .*images"),
    # Networks.
    *(
        (f"train {D}/{name}.npz --model={model}", f"--model={model}: .*must be images")
        for model in ("cnn", "leaf_cnn", "alexnet", "lenet", "resnet18", "resnet50")
        for name in ("vectors", "volumes")
    ),
    (f"train {D}/tiny.npz --model=lenet", "--model=lenet: .*at least 4 pixels a side"),
    (f"train {D}/tiny.npz --model=alexnet", "--model=alexnet: .*at least 8 pixels a side"),
    (f"train {D}/tiny.npz --model=leaf_cnn", "--model=leaf_cnn: .*leave out a convolution"),
    (f"train {D}/good.npz --model=lstm", "--model=lstm: is for texts"),
    (f"train {D}/tweets.csv", "--model=mlp: is not for texts"),
    (f"train {D}/tweets.csv --model=cnn", "--model=cnn: is not for texts"),
    ("train --model=", "--model=: unknown; must be one of mlp"),
    ("train --model=fedavg", "--model=fedavg: unknown"),
    ("train --norm=group", "--norm=group: must be one of none, batch, with --model=mlp"),
    ("train --activation=tanh", "--activation=tanh: unknown; must be one of relu"),
    ("train --model=cnn --widths=12", "--widths=12: must be multiples of 8, with --model=cnn"),
    ("train --model=cnn --widths=8", "--widths=8: must end in at least 16"),
    ("train --model=lenet --widths=8,8", "--widths=8,8: must be 2 channels, then units"),
    ("train --model=alexnet --widths=8", "--widths=8: must be 5 channels and 2 units"),
    ("train --model=resnet18 --widths=8", "--widths=8: must be 4, one of each stage"),
    ("train --cut=9", "--cut=9: must be an integer in 0..2, with --model=mlp"),
    ("train --train_only=tail", "--train_only=tail: tail must fit a parameter, such as body/"),
    (
        f"train {D}/colours.npz --augment --train_only=head",
        "--augment=true: must be false, as --train_only=head trains no body",
    ),
    (
        "train --train_only=body --algorithm=fl_games",
        "--train_only: must have a head with a trained parameter, with --algorithm=fl_games",
    ),
    ("train --train_only=body,head", "--train_only=body,head: must leave out some parameter"),
    ("train --weights=/nowhere.npz", "--weights=/nowhere.npz: --model=mlp has no weights"),
    *(
        (f"train --model=resnet18 --weights={{data}}/{name}", f"--weights=.*/{name}: {error}")
        for name, error in (
            ("nowhere.npz", "must be a file, there is none"),
            ("notes.txt", "must be a .safetensors or an .npz file"),
            ("pipe.npz", "must be a file"),
            ("pipe.safetensors", "must be a file"),
            ("junk.safetensors", "must be a whole file"),
            ("empty.npz", "must be a whole file"),
            ("bytes.npz", "must be a whole file"),
            ("cut.npz", "must be a whole file"),
            ("junk.npz", "x must be finite floating-point numbers"),
            ("claims.npz", "must fit into memory"),
            ("vectors.npz", "y must be finite floating-point numbers"),
        )
    ),
    *(
        (f"train --init_from={{data}}/{name}", f"--init_from=.*/{name}: {error}")
        for name, error in (
            ("nowhere", "must be the folder of a run"),
            ("pipe", "must be the folder of a run"),
            ("sweep", "must be the folder of a run of this sweep, one of cell"),
            ("damaged", ".*is damaged"),
            ("finished", "has no checkpoint yet"),
        )
    ),
    # Data.
    *(
        (f"train {D}/{name}.npz", f"--dataset=.*/{name}.npz: {error}")
        for name, error in (
            ("no_features", ".*without an empty axis"),
            ("no_examples", "must hold at least one example"),
            ("one_class", "has the class '0' alone, must have two"),
            ("negative", "y must be at least 0"),
            ("flags", "y must be integers"),
            ("infinite", "y must be finite"),
            ("texts", "y must be integers"),
            ("nan", "x must be finite"),
            ("complex", "x must be numbers"),
            ("scalars", "y must be integers"),
            ("no_y", ".*it has no y"),
            ("short_y", "x and y must be of one length, they have 60 and 30"),
            ("short_domain", "domain must be"),
            ("float_domain", "domain must be"),
            ("int_test", "test must be bool"),
            ("objects", "must be an .npz file of plain arrays"),
            ("cut", "must be an .npz file"),
            ("empty", "must be an .npz file"),
            ("bytes", "must be an .npz file"),
            ("junk", "must be an .npz file"),
            ("claims", "must fit into memory"),
            ("folder", "must hold images in folders"),
            ("pipe", "must be a file"),
            ("nowhere", "must be a file"),
            ("called_none", "has the domain 'none', .*another name"),
            ("called_all", "has the domain 'all', .*another name"),
            ("called_mean", "has the domain 'mean', .* in the tables; must have another name"),
            ("blanks", "has domains whose names differ in blanks alone, must have other names"),
            ("nameless", "has the domain '', .*another name"),
            ("two_lines", r"has the domain 'a\\nb', must have names that can be printed"),
            ("domains", "has an array 'domains', must be 'domain' to be read"),
            ("upper_case", "has an array 'Domain', must be 'domain' to be read"),
            ("clients", "has an array 'clients', must be 'client' to be read"),
            ("long_name", "has the domain 'a+'..., must have names of at most 100 bytes"),
        )
    ),
    (
        f"train {D}/all_test.npz",
        "--held_out=none: leaves no examples to train on, as all are in the test split",
    ),
    *(
        (f"train {D}/folders/{name}", f"--dataset=.*/{name}: .*{error}")
        for name, error in (
            ("empty", "must hold images in folders domain/class"),
            ("other", "must hold images in folders domain/class"),
            ("deep", "must be an image"),
            ("nested", "must be an image that can be decoded, is no file"),
            ("one_class", "has the class 'x' alone"),
            ("bomb", "must be an image that can be decoded: Image size"),
            ("bombs", "must be an image that can be decoded: Image size"),
            ("cut_image", "must be an image that can be decoded"),
            ("text_image", "must be an image that can be decoded"),
            ("two_sizes", "must hold images of one size"),
            ("two_lines", "names that can be printed"),
            ("with_pipe", "must be an image that can be decoded, is no file"),
            ("with_folder", "must be an image that can be decoded, is no file"),
            ("with_link", "must be an image that can be decoded, is no file"),
            ("tiny_imagenet", "line 1 must be of an image and a class"),
            ("tiny_imagenet_2", "must be an image that can be decoded, is no file"),
            ("leaf_pipe", "/.*/train/0.json: must be a file"),
        )
    ),
    *(
        (f"train {D}/{name}", f"--dataset=.*/{name}: .*{error}")
        for name, error in (
            ("pipe", "must be a data set"),
            ("notes.txt", "must be a data set"),
            ("pipe.csv", "must be a file"),
            ("bad.csv", "must hold the columns"),
            ("empty.csv", "must hold at least one example"),
            ("label.csv", "labels 0 or 4"),
            ("ragged.csv", "must be a .csv file with as many fields in each line"),
            ("bad.parquet", "must be a .parquet file"),
            ("nowhere.parquet", "must be a file, there is none"),
            ("pipe.json", "must be a file"),
            ("empty.json", "must be LEAF's json"),
            ("bad.json", "must be LEAF's json"),
            ("list.json", "must be LEAF's json"),
            ("deep.json", "must be LEAF's json"),
            ("nobody.json", "must hold at least one example"),
            ("pixels.json", "user 'u' must have x"),
        )
    ),
    ("train --dataset=no.csv --target_column=y", "--dataset=no.csv: must be a file, there is none"),
    ("train --dataset=", "--dataset=: must be the name or the path"),
    ("train --dataset=/dev/null", "--dataset=/dev/null: must be a data set"),
    ("train --dataset=/dev/zero", "--dataset=/dev/zero: must be a data set"),
    ("train --dataset=cifar", "--dataset=cifar: must be a data set, did you mean cifar10"),
    ("train --dataset=$HOME", r"--dataset=\$HOME: must be a data set"),
    (f"train --dataset={'x' * 5000}", "--dataset=xxx.*xxx: must be a data set"),
    ("train --stride=8", "--stride=8: must be below a side of the images, 8x8"),
    (f"train {D}/vectors.npz --stride=2", "--stride=2: must be 1, as the data are no images"),
    ("train --image_size=8", "--image_size=8: must be left out .*, with --dataset=digits"),
    ("train --vocabulary=9", "--vocabulary=9: must be left out .*, with --dataset=digits"),
    (f"train {D}/tweets.csv --model=lstm --vocabulary=1", "--vocabulary=1: must be an integer of"),
    ("train --data_dir=/data", "--data_dir=/data: has no effect with --dataset=digits"),
    ("show_data --data_dir=/data", "--data_dir=/data: has no effect with --dataset=digits"),
    (f"train {D}/one_label.csv --model=lstm", "--dataset=.*: has the class 'positive' alone"),
    (f"train {D}/bad.csv --model=lstm", "--dataset=.*: must hold the columns .* of Sentiment140"),
    # Tables.
    *(
        (f"train {D}/table.csv --{flag}={value}", f"--{flag}={value}: {error}")
        for flag, value, error in (
            *((f"{role}_column", "no", "is no column of the .*") for role in ("domain", "client")),
            ("test_column", "tes", "is no column of the table; it has x, city, target"),
            ("test_column", "cit", "is no column of the table; did you mean city"),
            ("target_column", "y", "is no column of the table; it has x, city, target"),
            ("target_column", "x,x", "must be different columns"),
            ("target_column", "", "must be the name of a column"),
            ("domain_column", "target", "must differ from --target_column"),
            ("ignored_columns", "target", "must differ from --target_column"),
            ("ignored_columns", "z", "is no column of the table"),
            ("task", "both", "unknown; .*must be one of auto, classes"),
        )
    ),
    (
        f"train {D}/table.csv --task=labels",
        "--target_column=target: must hold true/false or 0/1 for --task=labels, with --dataset=",
    ),
    (
        f"train {D}/table.csv --target_column=x --client_column=target",
        "--client_column=target: must hold texts, true/false or whole numbers, with --dataset=",
    ),
    (
        f"train {D}/table.csv --client_column=city --partition=user --clients=3",
        "--clients=3: must be an integer in 1..2, the number of users",
    ),
    (f"train {D}/table.csv --model=cnn", "--model=cnn: .*must be images"),
    (f"train {D}/table.csv --ignored_columns=x,city", "--dataset=.*: must hold a column of feat"),
    (
        f"train {D}/tweets.csv --model=lstm --task=values",
        "--task=values: must be left out for data that are not a table, with --dataset=",
    ),
    (
        f"train {D}/table.csv --model=resnet18 --weights={D}/w.npz",
        "--weights=.*: must be left out, as the data have categories",
    ),
    (
        f"train {D}/tweets.csv --model=lstm --standardise",
        "--standardise=true: must be false, as the data are words",
    ),
    ("train --target_column=y", "--target_column=y: has no effect with --dataset=digits, which is"),
    ("train --dataset=xyz", "--dataset=xyz: .* of Sentiment140's .csv or of LEAF's .json"),
    # Numbers have the digits 0 to 9, and float32 tells them from 0.
    *(
        (f"train --{flag}={before}{value}", f"--{flag}=.*: must be ")
        for value in ("1_0", "٣", "0x1")
        for flag, before in (
            *(("rounds", ""), ("seeds", ""), ("alpha", ""), ("learning_rate", "")),
            *(("paper", "fedavg="), ("lossy", "0:"), ("delay", "geometric:")),
        )
    ),
    *(
        (f"train --algorithm=fedipg --set={name}={value}", f"--set={name}={value}: must be ")
        for name in ("penalty", "warmup_rounds")
        for value in ("1_0", "٣", "0x1")
    ),
    *(
        (f"train --{name}=1e-46", f"--{name}=1e-46: must be 0 or at least 1e-38 in size")
        for name in ("clip", "server_clip", "weight_decay", "server_weight_decay", "momentum")
    ),
    ("train --algorithm=fedipg --set=penalty=1e-46", "--set=penalty=1e-46: must be 0 or at least"),
    ("train --algorithm=exit_strategy --set=threshold=nan", "--set=threshold=nan: .* or -inf"),
    ("train --set==3", "--set==3: must be name=value, or name=value,value"),
    # Flags and settings without an effect beside others.
    ("train --slow=0:2,00:3", "--slow=0:2,00:3: must have one value for each client"),
    ("train --lossy=0:0.2,00:0.3", "--lossy=0:0.2,00:0.3: must have one value for each client"),
    ("train --upload_every=1:2,01:3", "--upload_every=1:2,01:3: must have one value for each"),
    ("train --frequency=0.5 --sparse=0.05", "--sparse=0.05: selects none of the 5 clients"),
    ("train --first_all", "--first_all=true: has no effect, .* without --cohort"),
    ("train --first_all --clients=5 --cohort=5", "--first_all=true: has no effect"),
    ("train --missing=reuse", "--missing=reuse: has no effect, .* without --cohort"),
    *(
        (f"train --algorithm={name} --set={first} {second}", f"--set={first}: has no .*{error}")
        for name, first, second, error in (
            ("fedipg", "warmup_penalty=0.1", "", "--set=warmup_rounds=0"),
            ("fedipg", "estimator=halves", "--batch_size=1", "--batch_size=1"),
            ("fl_games", "fast=true", "", "--set=learned=false"),
            ("fl_games", "body_learning_rate=0.1", "", "--set=learned=false"),
            ("fl_games", "memory_mix=literal", "", "--set=memory=0"),
            ("exit_strategy", "share=0", "--set=threshold=0.1", "--set=threshold=0.1"),
            ("cafe", "feature_decay=0.5", "--momentum=0.9", "--set=drift_mode=svd"),
            ("fedproto", "weighting=uniform", "--set=share_weights=false", "--set=share_weights"),
            ("moon", "temperature=0.1", "--set=penalty=0", "--set=penalty=0"),
        )
    ),
    (
        "train --algorithm=fedipg --set=penalty=100 --set=warmup_rounds=60 --rounds=60",
        "--set=warmup_rounds=60: must be below --rounds=60, or --set=penalty has no effect",
    ),
    # Lines that name the flag that was typed.
    ("train --augment", "--augment=true: must be false, as the examples are .* no RGB images"),
    (
        f"train {D}/colours.npz --augment --algorithm=fl_games",
        "--augment=true: has no effect with --algorithm=fl_games, whose players see examples",
    ),
    ("train --algorithm=cafe", "--optimizer: must be sgd with momentum above 0, or --set=beta=0"),
    ("train --online_most=0.05", "--online_most=0.05: has no effect"),
    ("cafe --data=digits --cut=0", "CAFE: --cut: its head holds"),
    ("train --rounds=3 --eval_every=5", "--eval_every=5: must be at most --rounds=3"),
    ("cafe --data=digits --rows=FedAvg,FedAvg", "--rows=FedAvg,FedAvg: must be one or several"),
    *(
        (f"{command}=,x", "--runs=: must be one or several folders")
        for command in ("explain --runs", "factors --runs", "contributions --runs")
    ),
    (
        "factors --runs={data}/finished,{data}/finished/",
        "--runs=.*: must be one or several different",
    ),
    (
        "explain --runs={data}/finished --samples=2000000000",
        "--samples=2000000000: needs .* GB for .* 64 squares",
    ),
    ("factors --runs={data}/finished --seed=1_0", "--seed=1_0: must be a whole number"),
    ("show_data --out={data}/to_nothing/x.png", "--out=.*: .*/to_nothing is a link to nothing"),
    ("train --run_dir={data}/to_nothing", "--run_dir=.*/to_nothing: is a link to nothing"),
    # What does not fit into memory.
    ("train --widths=1000000000", "--widths=1000000000: needs 600.0 GB .*into 4.0 GB of memory"),
    ("train --widths=1000000000,1000000000", "--widths=1000000000,1000000000: needs 8,000,000,608"),
    ("train --model=cnn --widths=800000,800000", "--widths=800000,800000: needs .* GB"),
    ("train --batch_size=2000000000", "--batch_size=2000000000: needs .* GB"),
    ("train --rounds=2000000000", "--rounds=2000000000: needs 90.0 GB"),
    ("train --local_epochs=2000000000", "--local_epochs=2000000000: makes 18000000000 steps"),
    ("train --delay=1000000", "--delay=1000000: needs .* GB for 1000001 broadcasts"),
    (
        "train --delay=geometric:0.5 --longest_delay=1000000",
        "--longest_delay=1000000: needs .* GB for 1000001 broadcasts",
    ),
    ("train --slow=0:1000000", "--slow=0:1000000: needs .* GB for 1000000 broadcasts"),
    (
        "train --late=stale --frequency=0.5 --longest_delay=2000000000",
        "--longest_delay=2000000000: needs .* GB",
    ),
    (
        "train --algorithm=scaffold --widths=20000 --clients=1000 --devices=1 --hold=all",
        "--clients=1000: needs .* GB",
    ),
    (
        f"train --seeds={','.join(map(str, range(20_000)))}",
        "--seeds=0,1,.*: needs 4.6 GB for 20000 draws of the data",
    ),
    (
        f"train --environment=none --widths=1000000 --seeds={','.join(map(str, range(20)))}",
        "--seeds=0,1,.*19: needs 6.0 GB for 20 runs, each with server and 1 clients of fedavg",
    ),
    (f"train {D}/folders/images --image_size=100000", "--image_size=100000: needs 180.0 GB"),
    (f"train {D}/folders/images --image_size=2000000000", "--image_size=2000000000: needs "),
    (
        f"train {D}/tweets.csv --model=lstm --text_length=2000000000",
        "--text_length=2000000000: needs 480.0 GB",
    ),
    ("train --dataset=dsprites --num_images=2000000000", "--num_images=2000000000: must be an int"),
    ("cafe --data=digits --widths=1000000000", "FedAvg: --widths=1000000000: needs .* GB"),
    # Clients and who takes part.
    ("train --clients=2000000000 --partition=iid", "--clients=2000000000: .*with --partition=iid"),
    ("train --cohort=9", "--cohort=9: must be at most the 5 clients"),
    ("train --cohort=9 --clients=8", "--cohort=9: must be at most --clients=8"),
    ("train --sampling_rate=0.01", "--sampling_rate=0.01: selects none of --clients=5"),
    *(
        (f"train --{name}={value}", f"--{name}={value}: must be ")
        for name, value in (
            *(("slow", value) for value in ("99:2", "0:0", "0", "x", "-1:2", "²:2", "0:x")),
            *(("slow", value) for value in ("0:99999999999", "99999999999999999999:2")),
            *(("upload_every", value) for value in ("99:2", "0:0", "0", "x", "-1:2", "²:2", "٣")),
            *(("delay", value) for value in ("-1", "1.5", "x", "٣", "99999999999")),
            *(("delay", f"geometric:{value}") for value in ("", "0", "1.5", "nan", "x", "0.5:1")),
            *(("lossy", value) for value in ("99:0.5", "0:nan", "0:1.5", "0:", ":0.5", "0:0.5:1")),
        )
    ),
    *(
        (f"train --{name}={'9' * 5000}", f"--{name}=9.*9: must be ")
        for name in ("delay", "upload_every")
    ),
    ("train --slow=0:2,0:3", "--slow=0:2,0:3: must have one value for each client"),
    ("train --lossy=0:0.2,0:0.3", "--lossy=0:0.2,0:0.3: must have one value for each client"),
    # Who is online, and whose report comes in time.
    *(
        (f"train --online={{data}}/{name}.npy", f"--online=.*/{name}.npy: {error}")
        for name, error in (
            ("nowhere", "must be a file, there is none"),
            ("online_folder", "must be a file, there is none"),
            ("online_junk", "must be an .npy file, whole"),
            ("online_cut", "must be an .npy file, whole"),
            ("online_objects", "must be an .npy file, whole"),
            ("online_numbers", r"recorded: is int64 \(2, 3\), must be bool"),
        )
    ),
    ("train --day=9", "--day=9: has no effect without --online=diurnal"),
    ("train --time_zones=0.5", "--time_zones=0.5: has no effect without --online=diurnal"),
    ("train --online=diurnal --online_least=0.5", "--online_least=0.5: must be at most --online_m"),
    ("train --online=diurnal --first_all", "--first_all=true: must be left out with --online"),
    ("train --cohort=3 --extra=1", "--extra=1: needs --seconds_per_example or"),
    ("train --deadline=9", "--deadline=9: needs --seconds_per_example or"),
    ("train --seconds_per_example=1 --extra=1", "--extra=1: must be at most 0, the clients of 5"),
    (
        "train --seconds_per_example=1 --cohort=3 --extra=3",
        "--extra=3: must be at most 2, the clients of 5 that a round does not draw",
    ),
    (
        "train --seconds_per_megabyte=1 --deadline=3 --late=stale --dropout=0.1",
        "--deadline=3: must be left out with --late=stale",
    ),
    (
        "train --seconds_per_megabyte=1 --deadline=3 --first_all",
        "--deadline=3: must be left out with --first_all",
    ),
    ("train --speed_spread=2", "--speed_spread=2: has no effect without --seconds_per_example"),
    ("train --algorithm=erm --online=diurnal", "--online=diurnal: has no effect with --algorithm"),
    ("train --first_all --cohort=1 --rounds=3 --eval_every=1", "--first_all=true: needs 5 rounds"),
    (
        "train --environment=simpson --shading=random --paradox=0.5",
        "--paradox=0.5: has no effect with --shading=random",
    ),
    ("train --mixing=0.5", "--mixing=0.5: has no effect with --partition=domain"),
    ("train --wrong_clients=0.3", "--wrong_clients=0.3: has no effect with --wrong_labels=0"),
    ("train --wrong_labels=0.1 --wrong_clients=0", "--wrong_clients=0: must be above 0"),
    (
        "train --wrong_labels=0.1 --wrong_clients=0.05",
        "--wrong_clients=0.05: is none of 5 clients, must be at least one",
    ),
    ("train --partition=user", "--partition=user: needs data with users, .* in client"),
    (
        "train --partition=dirichlet --min_size=1000",
        "--min_size=1000: must be an integer in 0..299",
    ),
    ("train --held_out=nowhere", "--held_out=nowhere: unknown; did you mean none[?] All: 0, 15"),
    ("train --held_out=,", "--held_out=,: must be one or several different values"),
    ("train --held_out=0,", "--held_out=: unknown"),
    ("sweep --held_out=none,75", "--held_out=none: unknown"),
    (f"train {D}/lacking.npz --watch_classes", "--watch_classes=true: the test has no .* class 1"),
    # Targets that are no classes, losses and scores.
    *(
        (f"train {D}/values.npz {command}", error)
        for command, error in (
            ("--partition=dirichlet", "--partition=dirichlet: needs data with classes, .* values"),
            ("--partition=shards", "--partition=shards: needs data with classes"),
            (
                "--wrong_labels=0.1",
                "--wrong_labels=0.1: needs data with classes, these have values",
            ),
            ("--imbalance=9", "--partition=domain --imbalance=9: .* holds values, must hold"),
            ("--watch_classes", "--watch_classes=true: needs data with classes"),
            (
                "--stop_below=0.5 --watch_examples=9 --stop_centred",
                "--stop_centred=true: needs data with classes",
            ),
            ("--environment=colored", "--environment=colored: .* holds values, must hold classes"),
            *(
                (f"--select={rule}", f"--select={rule}: compares accuracies of classes")
                for rule in ("agreement", "last_if_agreed")
            ),
            ("--loss=focal", "--loss=focal: is for classes and labels, .* squared_error, huber"),
            ("--label_smoothing=0.1", "--label_smoothing=0.1: is for classes, the data have"),
            ("--score=accuracy", "--score=accuracy: is for classes, the data have values"),
            ("--metrics=r2,auroc", "--metrics=auroc: is for .* must be of mae, rmse, r2"),
            *(
                (f"--algorithm={name}", f"--algorithm={name}: needs data with classes")
                for name in ("fedproto", "fedcfa", "fedsr", "cafe")
            ),
        )
    ),
    (f"train {D}/labels.npz --loss=cross_entropy", "--loss=cross_entropy: .* binary_cross_entropy"),
    (f"train {D}/labels.npz --metrics=balanced_accuracy", "--metrics=balanced_accuracy: is for"),
    ("train --loss=squared", "--loss=squared: unknown; did you mean squared_error"),
    ("train --loss=no.module:loss", "--loss=no.module:loss: cannot be imported"),
    ("train --loss=math:pi", "--loss=math:pi: must be a function"),
    ("train --loss=math:sqrt", "--loss=math:sqrt: "),
    ("train --loss=jax.nn:log_softmax", "--loss=jax.nn:log_softmax: "),
    ("train --loss=jax.numpy:stack", "--loss=jax.numpy:stack: "),
    ("train --loss=squared_error", "--loss=squared_error: is for values, the data have classes"),
    ("train --loss=focal --algorithm=fedcfa", "--algorithm=fedcfa: has a loss of its own"),
    ("train --label_smoothing=0.1 --algorithm=fedcfa", "--algorithm=fedcfa: has a loss of its"),
    ("train --loss=focal --algorithm=fedmix", "--algorithm=fedmix: needs a loss that takes means"),
    ("train --loss=focal --label_smoothing=0.1", "--label_smoothing=0.1: has no effect with --lo"),
    ("train --focal_gamma=1", "--focal_gamma=1: has no effect with --loss=auto"),
    ("train --huber_delta=2", "--huber_delta=2: has no effect with --loss=auto"),
    ("train --score=precision", "--score=precision: unknown"),
    ("train --score=math:pi", "--score=math:pi: must be a function or a Score"),
    ("train --score=math:sqrt", "--score=math:sqrt: "),
    ("train --metrics=f2", "--metrics=f2: unknown; did you mean r2 or f1"),
    *(
        (f"train --watch_examples=9 --{name}={value}", f"--{name}=.*: must be above 0 and below 1")
        for name in ("stop_below", "stop_above")
        for value in ("0", "1", "0.5,2", "-1")
    ),
    ("cafe --data=digits --score=exact_match", "FedAvg: --score=exact_match: must be accuracy"),
    ("cafe --data=digits --distributed", "FedAvg: --distributed: must be left out, as studies"),
    ("evaluate --run={data}/finished --metrics=mae", "--metrics=mae: is for values, the data have"),
    ("evaluate --run={data}/finished --metrics=x", "--metrics=x: unknown"),
    *(
        (f"evaluate --run={{data}}/finished --predictions={out}", f"--predictions={out}: {error}")
        for out, error in (
            ("table.txt", "must end in .csv or .parquet"),
            ("/dev/null/table.csv", "cannot be written"),
        )
    ),
    # Flags that do not fit.
    ("train --flips=0.3", "--flips=0.3: has no effect with --environment=rotated"),
    ("train --environment=colored --angles=5", "--angles=5: has no effect with --environment=col"),
    ("train --environment=nowhere", "--environment=nowhere: unknown"),
    ("train --preset=nowhere", "--preset=nowhere: unknown"),
    (
        "train --clients=7 --preset=cafe_paper,digits_cafe",
        "--clients=7: must follow --preset=cafe_paper, which sets it, too",
    ),
    ("train --held_out=75,60", "--held_out=75,60: train runs one .*: fedjax-inv sweep"),
    ("train --algorithm=fedprox --set=proximal=1,2", "--set=proximal=1,2: train runs one"),
    ("cafe --data=digits --algorithm=fedprox", "--algorithm: must be left out, .* --rows"),
    ("train --preset=rotated_digits,,", "--preset=: unknown"),
    ("train --flagfile=/nowhere", "--flagfile: cannot be read: .*/nowhere"),
    ("train --set=penalty", "--set=penalty: must be name=value"),
    *(
        (f"sweep --algorithm={names} --set=penalty=1", f"--set=penalty=1: {words}; must be one of ")
        for names, words in (
            ("fedprox", "fedprox has no penalty"),
            ("fedavg,fedprox", "neither fedavg nor fedprox has penalty"),
            ("fedavg,fedprox,fednova", "none of fedavg, fedprox, fednova has penalty"),
        )
    ),
    ("train --algorithm=fedipg --set=penalty=1e308", r"--set=penalty=1e308: must be a finite"),
    (
        "train --algorithm=moon --set=temperature=0",
        "--set=temperature=0(.0)?: .*moon",
    ),
    ("train --algorithm=fedcfa --set=top_k=999999", "--set=top_k=999999: must be an integer in"),
    (
        "train --algorithm=fl_games --set=memory=2147483647",
        "--clients=5: .*fl_games memory=2147483",
    ),
    ("train --algorithm=fedmix --set=rows=2147483647", "--algorithm=fedmix rows=2147483647: needs"),
    (
        "train --algorithm=qfedavg --set=loss_batch_size=99999999999",
        "--set=loss_batch_size=999.*31",
    ),
    ("train --algorithm=", "--algorithm=: must be one or several"),
    ("train --algorithm=fedavg,fedavg", "--algorithm=fedavg,fedavg: must be one or several diff"),
    *(
        (f"train --paper={value}", f"--paper={value}: must be algorithm=number")
        for value in ("x", "fedavg", "fedavg=", "fedavg=many", "fedavg=nan")
    ),
    ("train --paper=nowhere=1", "--paper=nowhere: unknown"),
    ("train --paper=fedavg=1,fedavg=2", "--paper=fedavg=1,fedavg=2: must not name one twice"),
    *(
        (
            f"train --num_processes=2 --coordinator_address={value}",
            "--coordinator_address=.*: must be host:port of process 0, with --num_processes=2",
        )
        for value in ("", "host", "host:", ":1", "host:port", "'a b:1'", "host:9999999")
    ),
    *(
        (f"train --hold=stream {more}", f"{more}: must be")
        for more in (
            *("--client_chunk=measure", "--run_chunk=measure", "--watch_examples=9"),
            *("--stream_memory=0", "--stream_memory=nan", "--algorithm=erm"),
            "--watch_gradients=true",
        )
    ),
    ("train --hold=all --stream_memory=2", "--stream_memory=2: has no effect with --hold=all"),
    ("train --run_dir={data}/notes.txt", "--run_dir=.*/notes.txt: is a file, must be a folder"),
    ("train --run_dir={data}/notes.txt/x", "--run_dir=.*/notes.txt/x: cannot be written"),
    ("sweep --run_dir={data}/notes.txt/x", "--run_dir=.*/notes.txt/x: cannot be written"),
    ("train --run_dir=/dev/null", "--run_dir=/dev/null: is a file, must be a folder"),
    ("train --run_dir=a[1]", r"--run_dir=.*/a\[1\]: must be a folder whose path has no \["),
    ("sweep --run_dir=a]/b", r"--run_dir=.*/a\]/b: must be a folder whose path has no \]"),
    (r"train --run_dir=a\\\\b", r"--run_dir=.*a.*b: must be a folder whose path has no"),
    ("train --run_dir=gs://bucket/runs", "--run_dir=gs:/bucket/runs: must be a folder of this"),
    ("cafe --data=digits --run_dir=gs://runs", "FedAvg: --run_dir=.*: must be a folder of this"),
    ("train --run_dir={data}/folders", "--run_dir=.*/folders: is neither empty nor a run"),
    ("train --run_dir={data}/damaged", ".*/damaged/config.json: is damaged"),
    ("train --held_out=all", "--held_out=all: train runs one .*: fedjax-inv sweep"),
    ("train --fluffy=1", "--fluffy: unknown; --help lists"),
    ("train --round=1", "--round: unknown; did you mean --rounds"),
    ("train --rounds", "--rounds: must have a value"),
    ("train --noresume=1", "--noresume=1 does not take"),
    ("train rounds=3", "rounds=3: not a flag"),
    ("sweep --learning_rate=0.1,0.1", "--learning_rate=0.1,0.1: must be one or several different"),
    ("sweep --algorithm=fedavg,nowhere", "--algorithm=nowhere: unknown"),
    # The other binaries.
    ("show_data --images=0", "--images=0: must be in 1..500"),
    ("show_data --images=99999999999", "--images=99999999999: must be in 1..500"),
    ("show_data --images=x", "--images=x: must be a whole number"),
    ("show_data --held_out=0,15", "--held_out=0,15: must be one domain"),
    *(
        (f"{command} --out={out}", f"--out={out}: {error}")
        for command in (
            *("show_data", "evaluate --run={data}/finished", "explain --runs={data}/finished"),
            *("factors --runs={data}/finished", "contributions --runs={data}/finished"),
        )
        for out, error in (
            ("picture.jpg", "must end in .png"),
            ("result.png", "must not be named as a run's file: chunks, config"),
            ("/dev/null/picture.png", "cannot be written"),
        )
    ),
    ("show_data --out=", "--out=: must end in .png"),
    *(
        (f"{command}={{data}}/{name}", f"--runs?=.*/{name}: {error}")
        for command in ("evaluate --run", "export --run", "explain --runs", "factors --runs")
        for name, error in (
            ("nowhere", "must be the folder of a finished run"),
            ("pipe", "must be the folder of a finished run"),
            ("notes.txt", "must be the folder of a finished run"),
            ("unfinished", "must be the folder of a finished run; this one is unfinished"),
            ("sweep", "must be the folder of a finished run; of a sweep, that of one"),
            ("damaged", ".*is damaged"),
            ("finished", "has no checkpoint any more"),
        )
    ),
    *(
        (f"{command}=", "--runs?=: must be ")
        for command in (
            *("evaluate --run", "export --run", "explain --runs", "factors --runs"),
            "contributions --runs",
        )
    ),
    (f"evaluate --run={'x' * 5000}", "--run=xxx.*: must be the folder of a finished run"),
    (
        "train --keep_checkpoints=all --rounds=9000000 --eval_every=1 --widths=1000,1000",
        "--keep_checkpoints=all: needs up to .* GB of disk, but .* GB left; must be fewer",
    ),
    ("evaluate --run={data}/finished --state=0", "--state=0: must be .* the round of a checkpoint"),
    *(
        (f"train --keep_checkpoints={count}", "--keep_checkpoints=.*: must be all or a number of")
        for count in ("0", "-1", "last", "2.5", "")
    ),
    ("evaluate --run={data}/finished --state=middle", "--state=middle: must be one of best, last"),
    ("evaluate --run={data}/finished --data_dir=/data", "--data_dir=/data: has no effect"),
    ("evaluate --run={data}/finished --fine_tune=-1", "--fine_tune=-1: must be at least 0"),
    ("evaluate --run={data}/finished --rounds=5", "--rounds: unknown"),
    ("export --run={data}/finished --state=", "--state=: must be one of best, last"),
    ("explain --runs={data}/finished,{data}/nowhere", "--runs=.*/nowhere: must be the folder"),
    *(
        (f"explain --runs={{data}}/finished --{name}={value}", f"--{name}={value}: must be ")
        for name, value in (
            *(("images", value) for value in ("x", "", "-1", "99999999999", "0,1.5")),
            *(("seed", "5"), ("seed", "x"), ("run", "5"), ("run", "-1"), ("state", "x")),
            *(("samples", "1"), ("samples", "x"), ("segment", "-1"), ("segment", "100")),
        )
    ),
    *(
        (f"factors --runs={{data}}/finished --{name}={value}", f"--{name}={value}: must be ")
        for name, value in (
            *(("clients", "0"), ("clients", "x"), ("examples", "2"), ("hook", "-2")),
            *(("seed", "9"), ("run", "9")),
        )
    ),
    ("contributions --runs={data}/nowhere", "--runs=.*/nowhere: must be the folder of a run"),
    ("contributions --runs={data}/damaged", "--runs=.*is damaged"),
    *(
        (f"{paper} --{name}=nowhere", f"--{name}=nowhere: unknown")
        for paper in ("cafe", "fedcfa", "fedipg", "fl_games", "map")
        for name in ("study", "data", "rows")
    ),
    ("map --columns=nowhere", "--columns=nowhere: unknown; "),
    ("map --columns=unseen", "--columns=unseen: does not fit --data=digits"),
    ("map --columns=noise,noise", "--columns=noise,noise: must be one or several different"),
    ("map --columns=labels --beside=nowhere.csv", "--beside=nowhere.csv: must be the csv file"),
    ("map --select=last", "--select=last: must be validation, the same for all$"),
    ("map --study=severity", "--study=severity: must come after --study=map, or with --rows"),
    ("train --noeval_start=3", "--noeval_start=3 does not take an argument"),
    ("cafe --data=digits,digits", "--data=digits,digits: must be one or several different"),
    ("cafe --data=digits --rounds=0", "FedAvg: --rounds=0: must be at least 1"),
    ("cafe --data=digits --rounds=x", "--rounds=x: must be a whole number"),
    ("cafe --data=digits --data_dir=/data", "--data_dir: has no effect .*, in all rows"),
    ("cafe --data=digits --nowatch_classes", "FedAvg: --watch_classes=false: must be true"),
    ("cafe --data=digits --held_out=all", "FedAvg: the flags ask for several cells, by --held_out"),
    *(
        (f"fedipg --study={study} --set=weighting=uniform,size", ".*several cells, by --algorithm")
        for study in ("penalties --data=rotated_digits", "domains --data=rotated_digits")
    ),
    (
        "fedipg --study=penalties --data=rotated_digits --algorithm=fedipg,fediir",
        "--algorithm: must be left out, as each row has its own",
    ),
    ("fedcfa --data=digits --study=partitions", "--data=digits: has too few examples"),
    ("fedcfa --data=digits --learning_rate=nan", "FedAvg: --learning_rate=nan: must be"),
    (
        "fedipg --data=colored_digits --held_out=nowhere",
        "FedAvg-epochs: --held_out=nowhere: unknown",
    ),
    ("fedipg --data=colored_digits --seeds=x", "FedAvg-epochs: --seeds=x: must be whole numbers"),
    ("fl_games --data=colored_digits --watch_examples=0", "FedSGD: --watch_examples=0: must be"),
    (
        "fl_games --data=colored_dsprites --study=classes",
        "--data=colored_dsprites: has two classes",
    ),
    ("prepare", "names: must be one data set"),
    ("prepare --fluffy", "--fluffy: unknown"),
    ("prepare mnist --fluffy=1", "--fluffy=1: unknown"),
    ("prepare --data_dir", "--data_dir: expected one argument"),
    ("prepare mnist --data_dir={data}/notes.txt", "--data_dir=.*/notes.txt: must be a folder"),
    ("prepare mnist --user=id", "--user='id': has no effect without --to"),
    ("prepare mnist --folders=user", "--folders: invalid choice"),
    ("prepare mnist --channels=2", "--channels: invalid choice"),
    ("prepare a b --to=c", r"names=\['a', 'b'\]: must be one source, with --to"),
    ("prepare {data}/nowhere --to=c", "names='.*/nowhere': must be LEAF's json, a folder, a prep"),
    ("prepare {data}/folders/empty --to=c", "names='.*/empty': must hold images in folders client"),
    ("prepare {data}/folders/images --to={data}/folders", "--to=.*: must be empty, or new"),
    ("prepare {data}/folders/images --to=c --user=x", "--user='x': is for data sets of TFDS, "),
    ("prepare {data}/folders/images --to=c --image_size=0", "--image_size=0: must be an integer"),
    ("prepare os:nothing --to=c", "names='os:nothing': cannot be imported"),
    ("prepare os:nothing --to=c --folders=client", "--folders='client': is for folders of images"),
    *((f"prepare {name}", ".*must be a data set of TFDS") for name in ("digits", "../x", "a/b/c")),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a command, on a small machine; nothing is trained or compiled, and
    nothing waits."""

    def refuse(*arguments: Any, **others: Any) -> NoReturn:
        raise AssertionError("computed before the input was checked")

    def hang(*arguments: Any) -> NoReturn:
        raise AssertionError(f"hangs for {_SECONDS} s")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "run_cell", refuse)
    monkeypatch.setattr(jax, "jit", refuse)
    monkeypatch.setattr(machine, "memory", lambda: _MEMORY)
    monkeypatch.setattr(checks, "machine_bytes", lambda: _MEMORY)
    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(_SECONDS)
    yield tmp_path
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _cases() -> Iterator[Any]:
    """Every tenth of the commands and the first of each binary are fast enough for `make test`."""
    seen: set[str] = set()
    for number, case in enumerate(COMMANDS):
        binary = case[0].split()[0]
        is_slow = number % 10 and binary in seen
        seen.add(binary)
        yield pytest.param(*case, id=str(number), marks=[pytest.mark.slow] if is_slow else [])


def test_the_table_is_long_and_has_no_line_twice() -> None:
    commands = [command for command, _ in COMMANDS]
    assert len(set(commands)) == len(commands) >= 200


@pytest.mark.parametrize(("command", "message"), [*_cases()])
def test_a_bad_command_is_told_in_one_line_and_leaves_nothing(
    place: Path, data: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    before = sorted(data.rglob("*"))
    with pytest.raises(SystemExit) as ended, warnings.catch_warnings(action="error"):
        run(command.replace("{data}", str(data)))
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    (line,) = err.splitlines()
    assert re.match(f"error: {message}", line), line
    assert len(line) < 2500
    assert not out
    assert not list(place.iterdir())
    assert sorted(data.rglob("*")) == before
