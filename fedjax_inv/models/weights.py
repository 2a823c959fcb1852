"""Weights of a ResNet-18 or ResNet-50 from a local file with torchvision's names and layouts.

The files of timm's resnet18 and resnet50 have the same names and layouts.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from fedjax_inv import types
from fedjax_inv.checks import UsageError
from fedjax_inv.models import saved
from fedjax_inv.types import Array, Tree

_LOG = logging.getLogger("fedjax_inv")

# Statistics of each channel of images in [0, 1], by which torchvision's weights expect inputs to
# be normalised.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Our names of modules and variables -> torchvision's, where they differ.
_NAMES = {
    "norm1": "bn1",
    "norm2": "bn2",
    "norm3": "bn3",
    "downsample_conv": "downsample.0",
    "downsample_norm": "downsample.1",
    "kernel": "weight",
    "scale": "weight",
    "mean": "running_mean",
    "var": "running_var",
} | {
    f"layer{stage}_{block}": f"layer{stage}.{block}" for stage in range(1, 5) for block in range(6)
}
_HEAD = ("fc.weight", "fc.bias")
_COUNTER = "num_batches_tracked"  # PyTorch's BatchNorm saves it; ours does not need it
# Code that converts files of other kinds, by their suffix.
_OF_TORCH = (
    "import torch; from safetensors.torch import save_file; "
    "save_file(torch.load('{path}'), '{stem}.safetensors')"
)
_CONVERT = dict.fromkeys((".pth", ".pt", ".bin"), _OF_TORCH) | {
    ".npz": "import numpy; from safetensors.numpy import save_file; "
    "save_file(dict(numpy.load('{path}')), '{stem}.safetensors')"
}


def load(path: str | Path, variables: types.Variables) -> types.Variables:
    """Return the variables of a ResNet, cut anywhere, with the weights of a file.

    The variables are those of a `models.resnet18` or `resnet50`; their dtypes stay. The
    .safetensors file has torchvision's names ("conv1.weight", "layer2.0.downsample.1.running_mean",
    "fc.bias") and layouts. If it has no classifier, or one for another number of classes, the
    network's classifier stays, and a warning is logged. All else must fit, or a UsageError says
    what does not.
    """
    return _placed(path, _read(path), variables)


def pretrained(model: types.Model, path: str | Path) -> types.Model:
    """Return the `models.resnet18` or `resnet50` that starts from the weights of a file.

    The file, as in `load`, is read in this call. If its classifier does not fit, the key of the
    initialisation draws the classifier, and nothing else.
    """
    arrays = _read(path)

    def init(key: Array, x: Tree) -> types.Variables:
        return _placed(path, arrays, model.init(key, x))

    return model._replace(init=init)


def _read(path: str | Path) -> dict[str, Array]:
    """Return the arrays of a file by torchvision's names, in our layouts."""
    if Path(path).suffix in _CONVERT:
        code = _CONVERT[Path(path).suffix].format(path=path, stem=Path(path).with_suffix(""))
        text = f'must be a .safetensors file; convert it by: python -c "{code}"'
        raise UsageError("path", path, text)
    arrays = {key: a for key, a in saved.read(path).items() if not key.endswith(_COUNTER)}
    # Theirs [out, in, ...], ours [..., in, out].
    return {
        key: jnp.moveaxis(array, (1, 0), (-2, -1)) if array.ndim > 1 else array
        for key, array in arrays.items()
    }


def _placed(
    path: str | Path, arrays: Mapping[str, Array], variables: types.Variables
) -> types.Variables:
    """Do what `load` does with the file's arrays; as only shapes matter, leaves may be tracers."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    places = {_torchvision(place): leaf for place, leaf in leaves}
    if not {*_HEAD} <= {*places}:
        raise UsageError("variables", ..., "must be those of models.resnet18 or resnet50")
    classes = places["fc.bias"].size
    found = [arrays[key].shape[-1] for key in _HEAD if key in arrays]
    if not found or (len(found) == 2 and found[1] != classes):
        _LOG.warning("%s: has no classifier of %d classes; it stays as drawn", path, classes)
        arrays = {**arrays, **{key: places[key] for key in _HEAD}}
    return saved.placed(path, arrays, variables, places)


def _torchvision(place: tuple) -> str:
    """Return torchvision's name of the variable at a place in our tree."""
    ours = [jax.tree_util.keystr((key,), simple=True) for key in place]
    # Without params or stats, the half and the block.
    return ".".join(_NAMES.get(name, name) for name in ours[3:])
