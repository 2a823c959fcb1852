"""Weights of a network from a local file, by the names under which they are published.

Those of a ResNet have torchvision's and timm's names, of EfficientNet-Lite0 timm's, of a ViT timm's
or DINOv2's, and of CLIP's vision tower those of Hugging Face or of open_clip.
"""

import functools
import logging
import math
import re
from collections.abc import Mapping, Sequence
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

# Our names of a convolutional network's modules -> torchvision's or timm's, where they differ.
_OF_CONVOLUTIONS = {
    "norm1": "bn1",
    "norm2": "bn2",
    "norm3": "bn3",
    "downsample_conv": "downsample.0",
    "downsample_norm": "downsample.1",
} | {
    f"layer{stage}_{block}": f"layer{stage}.{block}" for stage in range(1, 5) for block in range(6)
}
# Our names of arrays -> PyTorch's, where they differ.
_OF_LEAVES = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
# The last layer in a file.
_CLASSIFIERS = [(f"{name}.weight", f"{name}.bias") for name in ("fc", "classifier", "head")]
_COUNTER = "num_batches_tracked"  # PyTorch's BatchNorm saves it; ours does not need it
_UNUSED = (_COUNTER, "mask_token", "position_ids")  # ends of names that no network here needs
_VISION = ("vision_model.", "visual_projection.", "visual.")  # beside a text tower in CLIP's files
# Patterns of names of CLIP's vision tower and of DINOv2 -> timm's; each applies after those above.
_TO_TIMM = {
    # Hugging Face
    r"^vision_model\.embeddings\.class_embedding": "cls_token",
    r"^vision_model\.embeddings\.patch_embedding": "patch_embed.proj",
    r"^vision_model\.embeddings\.position_embedding\.weight": "pos_embed",
    r"^vision_model\.pre_layrnorm": "norm_pre",
    r"^vision_model\.post_layernorm": "norm",
    r"^vision_model\.encoder\.layers": "blocks",
    r"^visual_projection": "proj",
    r"\.layer_norm": ".norm",
    r"\.self_attn\.out_proj": ".attn.proj",
    r"\.self_attn": ".attn",
    # open_clip
    r"^visual\.class_embedding": "cls_token",
    r"^visual\.positional_embedding": "pos_embed",
    r"^visual\.conv1": "patch_embed.proj",
    r"^visual\.ln_pre": "norm_pre",
    r"^visual\.ln_post": "norm",
    r"^visual\.transformer\.resblocks": "blocks",
    r"\.ln_(\d)": r".norm\1",
    r"\.attn\.in_proj_": ".attn.qkv.",
    r"\.attn\.out_proj": ".attn.proj",
    r"\.mlp\.c_fc": ".mlp.fc1",
    r"\.mlp\.c_proj": ".mlp.fc2",
    # DINOv2
    r"^register_tokens": "reg_token",
}
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
    """Return the variables of a network, cut anywhere, with the weights of a file.

    The variables are those of a `models.resnet18`, `resnet50`, `efficientnet_lite0` or `vit`, or of
    its body alone, with an empty head; their dtypes stay. The .safetensors file has PyTorch's
    layouts and the names under which such weights are published ("conv1.weight",
    "blocks.0.attn.qkv.bias"). If it has no classifier, or one for another number of classes, the
    network's classifier stays. Positions of a ViT are interpolated (bicubic, antialiased, as in
    timm) to the network's grid, a square. A line is logged that names the classifier that stays and
    what is not used, such as CLIP's text tower. All else must fit, or a UsageError says what does
    not.
    """
    return _placed(path, *_read(path), variables)


def pretrained(model: types.Model, path: str | Path) -> types.Model:
    """Return the model, one of those of `load`, that starts from the weights of a file.

    The file is read in this call. If its classifier does not fit, the key of the initialisation
    draws the classifier, and nothing else.
    """
    content = _read(path)

    def init(key: Array, x: Tree) -> types.Variables:
        return _placed(path, *content, model.init(key, x))

    return model._replace(init=init)


def _read(path: str | Path) -> tuple[dict[str, Array], list[str]]:
    """Return the arrays of a file by timm's names, in our layouts, and the names of the others."""
    if Path(path).suffix in _CONVERT:
        code = _CONVERT[Path(path).suffix].format(path=path, stem=Path(path).with_suffix(""))
        text = f'must be a .safetensors file; convert it by: python -c "{code}"'
        raise UsageError("path", path, text)
    arrays = saved.read(path)
    is_tower = any(name.startswith(_VISION) for name in arrays)
    used = {
        name: array
        for name, array in arrays.items()
        if not name.endswith(_UNUSED) and (not is_tower or name.startswith(_VISION))
    }
    others = [name for name in arrays if name not in used and not name.endswith(_COUNTER)]
    arrays = {_timm(name): array for name, array in used.items()}
    if "visual.proj" in arrays:  # open_clip's [in, out]
        arrays["proj.weight"] = arrays.pop("visual.proj").T
    for name in [name for name in arrays if ".attn.q_proj." in name]:
        parts = [name.replace("q_proj", f"{part}_proj") for part in "qkv"]
        if {*parts} <= {*arrays}:
            together = jnp.concatenate([arrays.pop(part) for part in parts])
            arrays[name.replace("q_proj", "qkv")] = together
    token = arrays.get("cls_token")
    positions = arrays.get("pos_embed")
    if token is not None and positions is not None and positions.size % token.size == 0:
        arrays |= _tokens(token, positions)
    # Theirs [out, in, ...], ours [..., in, out].
    ours = {
        name: jnp.moveaxis(array, (1, 0), (-2, -1)) if array.ndim in (2, 4) else array
        for name, array in arrays.items()
    }
    return ours, others


def _timm(name: str) -> str:
    for pattern, text in _TO_TIMM.items():
        name = re.sub(pattern, text, name)
    return name


def _tokens(token: Array, positions: Array) -> dict[str, Array]:
    """Return the class token [1, 1, D] with its own position, and those of patches [1, N, D]."""
    token = token.reshape(1, 1, -1)
    positions = positions.reshape(1, -1, token.shape[-1])
    if not _is_square(positions.shape[1]):  # it starts with the position of the class token
        token = token + positions[:, :1]
        positions = positions[:, 1:]
    return {"cls_token": token, "pos_embed": positions}


def _is_square(number: int) -> bool:
    return math.isqrt(number) ** 2 == number


def _interpolated(positions: Array, like: Array) -> Array:
    """Return positions [1, N, D] of a square grid for the square grid of `like`."""
    before, after = (array.shape[1] for array in (positions, like))
    if before == after or not (_is_square(before) and _is_square(after)):
        return positions
    width = positions.shape[-1]
    grid = positions.astype(jnp.float32).reshape(math.isqrt(before), math.isqrt(before), width)
    side = math.isqrt(after)
    return jax.image.resize(grid, (side, side, width), "cubic").reshape(1, after, width)


def _placed(
    path: str | Path, arrays: Mapping[str, Array], unused: Sequence[str], variables: types.Variables
) -> types.Variables:
    """Do what `load` does with the file's arrays; as only shapes matter, leaves may be tracers."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    names = [_place(place) for place, _ in leaves]
    if "pos_embed" not in names:
        names = [
            ".".join(_OF_CONVOLUTIONS.get(part, part) for part in name.split(".")) for name in names
        ]
    places = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}
    notes = [f"{_listed(unused)}: not used"] * bool(unused)
    head = next((pair for pair in _CLASSIFIERS if {*pair} <= {*places}), None)
    if head is None:  # of a body alone
        of_file = {name for pair in _CLASSIFIERS for name in pair}
        arrays = {name: array for name, array in arrays.items() if name not in of_file}
    else:
        classes = places[head[1]].size
        found = [arrays[key].shape[-1] for key in head if key in arrays]
        if not found or (len(found) == 2 and found[1] != classes):
            notes += [f"has no classifier of {classes} classes, {head[0]}; it stays as drawn"]
            arrays = {**arrays, **{key: places[key] for key in head}}
    if notes:
        _warn(f"{path}: {'; '.join(notes)}")
    lacking = [*places.keys() - arrays.keys()]
    others = [*arrays.keys() - places.keys()]
    if lacking or others:
        texts = [f"has no {_listed(lacking)}"] * bool(lacking)
        texts += [f"has {_listed(others)}, which this one has not"] * bool(others)
        raise UsageError("path", path, f"holds another network: {' and '.join(texts)}")
    if "pos_embed" in places:
        fitting = _interpolated(arrays["pos_embed"], places["pos_embed"])
        arrays = {**arrays, "pos_embed": fitting}
    return saved.placed(path, arrays, variables, places)


@functools.lru_cache(64)
def _warn(text: str) -> None:
    """Log a line once, though each start of a network comes here."""
    _LOG.warning(text)


def _place(place: tuple) -> str:
    """Return timm's name of the variable at a place in our tree, without params, half and block."""
    *modules, leaf = [jax.tree_util.keystr((key,), simple=True) for key in place[3:]]
    return ".".join([*modules, _OF_LEAVES.get(leaf, leaf)])


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many there are."""
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
