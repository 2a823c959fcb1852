"""The features of a data set's images, in parts that a later start goes on with."""

import hashlib
import json
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from fedjax_inv import models, types
from fedjax_inv.checks import UsageError
from fedjax_inv.data import images, tables
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.models import weights

from .assembly import data, factories, machine
from .config import Config
from .errors import check_known, check_place, flag_error, in_flags
from .folder import files

_PART = 256  # images whose features are written at once
# What features of one network have in common, as the record names it.
_ALIKE = (
    "model",
    "weights",
    "layer",
    "unit_length",
    "image_size",
    "interpolation",
    "crop",
    "mean",
    "deviation",
)


class FeatureOptions(NamedTuple):
    """The flags of this command."""

    out: str
    interpolation: str = ""  # "": the network's own
    crop: bool = False
    mean: tuple[float, ...] = ()  # (): the network's own
    deviation: tuple[float, ...] = ()
    unit_length: bool = False
    images_at_once: int = 64


def run(config: Config, options: FeatureOptions) -> str:
    """Writes the features; returns the text to print."""
    body = _body(config, options)
    out = _place(options.out)
    side = config.data.image_size or body.image_size
    resizing = images.Resizing((side, side), body.interpolation, options.crop)
    model, variables = _network(config, body, side)
    dataset = data.load(config.data, decode=lambda paths: images.Files(paths, resizing))
    is_image = isinstance(dataset.x, images.Files | np.ndarray) and dataset.x.ndim == 4
    if not is_image or dataset.x.dtype != np.uint8:
        raise flag_error("dataset", config.data.dataset, "must have images of 8 bits")
    record = {
        "model": config.network.model,
        "weights": _digest(Path(config.network.weights)),
        "layer": body.layer,
        "unit_length": options.unit_length,
        "dataset": config.data.dataset,
        "examples": len(dataset.y),
        "image_size": side,
        "interpolation": body.interpolation,
        "crop": options.crop,
        "mean": list(body.mean),
        "deviation": list(body.std),
        "precision": _precision(config),
    }
    parts = _FeatureParts(out.with_name(f"{out.name}.parts"), len(dataset.y))
    if out.exists():
        if _record_of(out).items() >= record.items():
            return f"{out} has these features already."
        raise flag_error("out", out, "has other content; must be a new name")
    parts.begin(out, record)
    encode = models.encoder(
        model,
        variables,
        devices=machine.devices_of(config.machine),
        batch_size=options.images_at_once,
        precision="highest" if _precision(config) == "bfloat16" else _precision(config),
    )
    seconds = 0.1 if sys.stderr.isatty() else 60.0  # between lines of progress
    for first in tqdm(parts.lacking(), unit=f" x {_PART} images", mininterval=seconds):
        batch = np.asarray(dataset.x[first : first + _PART])
        if isinstance(dataset.x, np.ndarray):
            batch = images.resized(batch, resizing)
        features = encode(batch)
        if options.unit_length:
            lengths = np.linalg.norm(features, axis=1, keepdims=True)
            features = features / np.maximum(lengths, 1e-12)
        parts.write(first, features, hashlib.sha256(batch.tobytes()).hexdigest())
    shape = _join(parts, dataset, record, out)
    return f"Features {list(shape)} of {config.network.model}: {out}."


def _body(config: Config, options: FeatureOptions) -> models.Body:
    """The network, with the preprocessing that flags ask for; raises UsageError for bad ones."""
    name = config.network.model
    check_known("model", name, models.BODIES)
    if not config.network.weights:
        raise flag_error("weights", "", f"must be a .safetensors file, of {name}")
    body = models.BODIES[name]
    for flag, values in (("mean", options.mean), ("deviation", options.deviation)):
        if len(values) not in (0, 3) or (flag == "deviation" and min(values, default=1) <= 0):
            raise flag_error(flag, values, "must be three numbers, deviations above 0")
    return body._replace(
        mean=options.mean or body.mean,
        std=options.deviation or body.std,
        interpolation=options.interpolation or body.interpolation,
    )


def _precision(config: Config) -> str:
    """That of products: float32, as features are computed once, unless flags say otherwise."""
    given = config.network.precision
    return "highest" if given == "auto" else given


def _place(text: str) -> Path:
    """The .npz file, or the folder, of the features."""
    out = Path(text).expanduser()
    if not text or out.suffix not in ("", ".npz"):
        text = text or "(empty)"
        raise flag_error("out", text, "must be a new .npz file, or a new folder without a suffix")
    check_place("out", out, is_folder=not out.suffix)
    return out


def _network(config: Config, body: models.Body, side: int) -> tuple[types.Model, types.Variables]:
    """The network on images of [0, 255], and the variables of its body."""
    widths = config.network.widths
    has_widths = widths and factories.takes(body.make, "widths")
    model = body.make(1, **({"widths": widths} if has_widths else {}))
    key = jax.eval_shape(lambda: jax.random.key(0))
    like = jax.ShapeDtypeStruct((1, side, side, 3), np.float32)
    try:
        params, stats = jax.eval_shape(model.init, key, like)
        alone = types.Variables(params._replace(head={}), stats._replace(head={}))
        variables = weights.load(config.network.weights, alone)
    except UsageError as error:
        where = f"--model={config.network.model}"
        raise in_flags(error, where, {"path": "weights"}) from None
    if config.network.precision == "bfloat16":
        model = models.computed_in(model, "bfloat16")
    return models.normalised(model, body.mean, body.std), variables


def _digest(path: Path) -> str:
    with open(path.expanduser(), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _FeatureParts(NamedTuple):
    """A folder with the features of some images in each file, by the first image's number."""

    folder: Path
    examples: int  # of all parts

    def begin(self, out: Path, record: Mapping[str, Any]) -> None:
        """Makes the folder; raises UsageError if it has parts of other features."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._about.is_file():
            files.write_json(self._about, record)
        elif json.loads(self._about.read_text()) != record:
            text = f"has parts of other features in {self.folder}; delete that, or name another"
            raise flag_error("out", out, text)

    @property
    def _about(self) -> Path:
        return self.folder / "record.json"

    def lacking(self) -> list[int]:
        """The first images of the parts that are not there yet."""
        return [first for first, path in self.paths().items() if not path.is_file()]

    def paths(self) -> dict[int, Path]:
        """The files by their first image."""
        return {n: self.folder / f"{n:09}.npz" for n in range(0, self.examples, _PART)}

    def write(self, first: int, features: np.ndarray, digest: str) -> None:
        """Writes a part. digest: of its images."""
        with files.replacing(self.paths()[first]) as file:
            np.savez(file, x=features, digest=digest)


def _join(
    parts: _FeatureParts, dataset: Dataset, record: Mapping[str, Any], out: Path
) -> tuple[int, ...]:
    """Writes the data set of all parts, and removes them; returns the shape of its features."""
    sha = hashlib.sha256()
    first = np.load(parts.paths()[0])["x"]
    shape = parts.examples, *first.shape[1:]
    # In a file, as there may be more than fits into memory.
    joined = parts.folder / "joined"
    joined.mkdir(exist_ok=True)
    x = np.lib.format.open_memmap(joined / "x.npy", "w+", first.dtype, shape)
    for row, path in parts.paths().items():
        with np.load(path) as part:
            x[row : row + _PART] = part["x"]
            sha.update(str(part["digest"]).encode())
    x.flush()
    text = json.dumps({**record, "images": sha.hexdigest()})
    arrays = _others(dataset) | {"record": np.array(text)}
    if out.suffix:
        with files.replacing(out) as file:
            np.savez(file, x=x, **arrays)
    else:
        for name, array in arrays.items():
            np.save(joined / f"{name}.npy", array)
        joined.replace(out)
    shutil.rmtree(parts.folder)
    return shape


def _others(dataset: Dataset) -> dict[str, Any]:
    """The arrays beside the features, with names in place of numbers of classes and domains."""
    y = dataset.y
    arrays: dict[str, Any] = {"y": np.array(dataset.classes)[y] if dataset.task == "classes" else y}
    if len(dataset.domains) > 1:
        arrays["domain"] = np.array(dataset.domains)[dataset.domain]
    more = {"client": dataset.user, "group": dataset.original}
    if dataset.known is not None:
        more["split"] = tables.split_names(dataset)
    else:
        more["test"] = dataset.test if dataset.test.any() else None
        more["valid"] = dataset.valid
    arrays |= {name: array for name, array in more.items() if array is not None}
    if isinstance(dataset.x, images.Files):
        arrays["path"] = np.array([str(path) for path in dataset.x.paths])
    return arrays


def check_alike(old: str, new: str) -> None:
    """Raises UsageError if both data sets are features, and of different networks or images.

    old: of the training. new: of --dataset.
    """
    before, after = (_record_of(Path(name).expanduser()) for name in (old, new))
    for name in _ALIKE:
        theirs = before.get(name)
        ours = after.get(name)
        if None not in (theirs, ours) and theirs != ours:
            text = f"has features with {name} {ours}, must have {theirs}, as {old} of the training"
            raise flag_error("dataset", new, text)


def _record_of(out: Path) -> dict[str, Any]:
    """The record of features that are there; {} if there is none."""
    try:
        if out.is_dir():
            return dict(json.loads(str(np.load(out / "record.npy"))))
        with np.load(out) as archive:
            return dict(json.loads(str(archive["record"])))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}
