"""Weights of a ResNet-18 or ResNet-50 from a local file with torchvision's names and layouts.

The files of timm's resnet18 and resnet50 have the same names and layouts.
"""

import logging
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import checks
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Model, Tree, Variables

_LOG = logging.getLogger("fedjax_inv")

# Statistics of each channel of images in [0, 1], by which torchvision's weights expect inputs to
# be normalised.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Shape = tuple[int, ...]


class Report(NamedTuple):
    """Which arrays were loaded: shapes in the file's layout, by torchvision's names.

    Kernels are [out, in, height, width].
    """

    taken: dict[str, Shape]  # loaded
    left: dict[str, Shape]  # in the file only
    missing: dict[str, Shape]  # in the network only, unchanged
    # in both, but of another shape: (the file's, the network's)
    misshaped: Mapping[str, tuple[Shape, Shape]] = {}


# Our names of modules and variables -> torchvision's.
_MODULES = {
    "conv1": "conv1",
    "conv2": "conv2",
    "conv3": "conv3",
    "norm1": "bn1",
    "norm2": "bn2",
    "norm3": "bn3",
    "downsample_conv": "downsample.0",
    "downsample_norm": "downsample.1",
    "fc": "fc",
} | {
    f"layer{stage}_{block}": f"layer{stage}.{block}" for stage in range(1, 5) for block in range(6)
}
_VARIABLES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
_HEAD = ("fc.weight", "fc.bias")
# Errors that reading a damaged file raises.
_DAMAGES = (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
_COUNTER = "num_batches_tracked"  # PyTorch's BatchNorm saves it; ours does not need it


def load(path: str | Path, variables: Variables) -> tuple[Variables, Report]:
    """Load the weights of a file into the variables of a `models.resnet18` or `resnet50`.

    If the file has no classifier, or one for another number of classes, the network's classifier
    stays, and a warning is logged.

    Args:
      path: a .safetensors or .npz file with torchvision's names ("conv1.weight",
        "layer2.0.downsample.1.running_mean", "fc.bias") and layouts.
      variables: the network's variables, cut anywhere.

    Returns:
      (variables, report): the variables with the file's weights, in the dtypes of the old ones, and
      which arrays were loaded.

    Raises:
      UsageError: if the file is missing or damaged, if it lacks an array or has one that the
        network has no place for, or if an array has another shape.
      ImportError: without `safetensors`.
    """
    checks.record("variables", variables, Variables)
    path = _path(path)
    return _placed(path, _read(path), variables)


def pretrained(model: Model, path: str | Path) -> Model:
    """Return the `models.resnet18` or `resnet50` that starts from the weights of a file.

    The file is read in this call. If its classifier does not fit, the key of the initialisation
    draws the classifier, and nothing else.

    Args:
      model: the network.
      path: the file, as in `load`.

    Returns:
      The model.

    Raises:
      UsageError: as `load` does; for names and shapes, at initialisation.
      ImportError: without `safetensors`.
    """
    checks.record("model", model, Model)
    path = _path(path)
    arrays = _read(path)

    def init(key: Array, x: Tree) -> Variables:
        return _placed(path, arrays, model.init(key, x))[0]

    return model._replace(init=init)


def _path(path: str | Path) -> Path:
    if not isinstance(path, str | Path):
        raise UsageError("path", path, "must be the path of a file")
    return Path(path)


def _read(path: Path) -> dict[str, np.ndarray]:
    file = path.expanduser()
    if file.suffix not in (".safetensors", ".npz"):
        raise UsageError("path", path, "must be a .safetensors or an .npz file")
    if not file.is_file():
        raise UsageError("path", path, "must be a file, there is none")
    try:
        arrays = _npz(file) if file.suffix == ".npz" else _safetensors(file)
    except _DAMAGES as error:
        reason = " ".join(str(error).split())
        raise UsageError("path", path, f"must be a whole file of plain arrays: {reason}") from None
    except MemoryError as error:
        raise UsageError("path", path, f"must fit into memory: {error}") from None
    for key, array in arrays.items():
        if key.endswith(_COUNTER):
            continue
        if not _are_finite_floats(array):
            raise UsageError("path", path, f"{key} must be finite floating-point numbers")
    return arrays


def _are_finite_floats(array: np.ndarray) -> bool:
    is_array = isinstance(array, np.ndarray)  # a damaged member of an .npz file is bytes
    if not is_array or not jnp.issubdtype(array.dtype, jnp.floating):  # includes bfloat16
        return False
    with np.errstate(over="ignore"):  # too large numbers become infinite
        return bool(np.isfinite(array.astype(np.float32)).all())


def _npz(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as archive:
        return dict(archive)


def _safetensors(file: Path) -> dict[str, np.ndarray]:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'fedjax_inv[experiments]'") from error
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(str(error)) from None


def report(path: str | Path, variables: Variables) -> Report:
    """Return which arrays of a file fit the variables of a `models.resnet18` or `resnet50`.

    Where `load` refuses a file, this says all that is wrong.

    Args:
      path: the file, as in `load`.
      variables: the network's variables, or their shapes.

    Raises:
      UsageError: if the file is missing or damaged, and for another network's variables.
      ImportError: without `safetensors`.
    """
    checks.record("variables", variables, Variables)
    path = _path(path)
    return _compared({key: array.shape for key, array in _read(path).items()}, variables)


def _compared(found: Mapping[str, Shape], variables: Variables) -> Report:
    ours = jax.tree_util.tree_leaves_with_path(variables)
    needed = {_name_of(place): _their_shape(leaf.shape) for place, leaf in ours}
    as_drawn = _HEAD if _is_other_head(found, needed) else ()
    missing = {key: shape for key, shape in needed.items() if key in as_drawn or key not in found}
    left = {key: shape for key, shape in found.items() if key in as_drawn or key not in needed}
    fits = {key: shape for key, shape in found.items() if key not in left}
    misshaped = {key: (shape, needed[key]) for key, shape in fits.items() if shape != needed[key]}
    taken = {key: shape for key, shape in fits.items() if key not in misshaped}
    return Report(taken, left, missing, misshaped)


def _placed(
    path: Path, arrays: Mapping[str, np.ndarray], variables: Variables
) -> tuple[Variables, Report]:
    """Do what `load` does with the file's arrays; as only shapes matter, leaves may be tracers."""
    report = _compared({key: array.shape for key, array in arrays.items()}, variables)
    as_drawn = [key for key in _HEAD if key in report.missing and not _is_lacking(key, report)]
    _check_fits(path, report, as_drawn)
    if as_drawn:
        theirs = list(arrays[_HEAD[0]].shape) if _HEAD[0] in arrays else "not there"
        _LOG.warning(
            "%s: its %s is %s, so the classifier %s stays as it was drawn",
            path,
            _HEAD[0],
            theirs,
            list(report.missing[_HEAD[0]]),
        )

    def placed(place: tuple, leaf: Array) -> Array:
        key = _name_of(place)
        taken = key in report.taken
        return jnp.asarray(_our_layout(arrays[key]), leaf.dtype) if taken else leaf

    return jax.tree_util.tree_map_with_path(placed, variables), report


def _is_lacking(key: str, report: Report) -> bool:
    """Return whether the file has one half of a classifier alone, which it must have whole."""
    return any(
        other in report.taken or other in report.misshaped for other in _HEAD if other != key
    )


def _check_fits(path: Path, report: Report, as_drawn: Sequence[str]) -> None:
    """Check that all arrays fit, else raise UsageError with the first of each kind that does not.

    as_drawn: the arrays of a classifier that stays as drawn.
    """
    lacking = {key: shape for key, shape in report.missing.items() if key not in as_drawn}
    unknown = {
        key: shape
        for key, shape in report.left.items()
        if key not in as_drawn and not key.endswith(_COUNTER)
    }
    texts = []
    if lacking:
        texts.append(f"must hold {_first(lacking)}, as the network does")
    if unknown:
        texts.append(f"holds {_first(unknown)}, which the network does not")
    if report.misshaped:
        key, (theirs, ours) = next(iter(report.misshaped.items()))
        more = f", and {len(report.misshaped) - 1} more" if len(report.misshaped) > 1 else ""
        texts.append(f"{key} is {list(theirs)}, must be {list(ours)}{more}")
    if texts:
        raise UsageError("path", path, "; ".join(texts))


def _name_of(place: tuple) -> str:
    """Return torchvision's name of the variable at a place in our tree."""
    ours = [jax.tree_util.keystr((key,), simple=True) for key in place]
    *modules, variable = ours[3:]  # without params or stats, the half and the block
    if not modules or variable not in _VARIABLES or not set(modules) <= set(_MODULES):
        raise UsageError(
            "variables",
            ...,
            f"must be those of models.resnet18 or resnet50, they have {'/'.join(ours)}",
        )
    return ".".join([*(_MODULES[module] for module in modules), _VARIABLES[variable]])


def _their_shape(shape: Shape) -> Shape:
    if len(shape) < 2:
        return shape
    *window, inputs, outputs = shape
    return (outputs, inputs, *window)


def _our_layout(array: np.ndarray) -> np.ndarray:
    """Return an array [out, in, ...] as [..., in, out]; a vector stays unchanged."""
    return np.moveaxis(array, (1, 0), (-2, -1)) if array.ndim > 1 else array


def _is_other_head(found: Mapping[str, Shape], needed: Mapping[str, Shape]) -> bool:
    """Return whether the file has no classifier, or a whole one for another number of classes."""
    if not any(key in found for key in _HEAD):
        return True
    if not all(key in found for key in _HEAD):
        return False
    weight, bias = (found[key] for key in _HEAD)
    expected = needed[_HEAD[0]]
    is_whole = weight[1:] == expected[1:] and bias == weight[:1]
    return is_whole and weight[:1] != expected[:1]


def _first(shapes: Mapping[str, Shape]) -> str:
    """Return the first name and shape as text, and how many more there are."""
    key, shape = next(iter(shapes.items()))
    more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
    return f"{key} {list(shape)}{more}"
