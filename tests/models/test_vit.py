"""Vision transformers: the formula in NumPy, names of files, and PyTorch where it is installed."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy.special import erf

from federations import assert_close, assert_equal
from fedjax_inv import models
from fedjax_inv.checks import UsageError
from fedjax_inv.models import weights
from fedjax_inv.types import Model, Variables

KEY = jax.random.key(0)
WIDTH, DEPTH, HEADS, PATCH, CLASSES, PROJECTED = 12, 2, 3, 2, 3, 5
Arrays = dict[str, np.ndarray]
DINO = {"registers": 2, "layer_scale": True}
CLIP = {"projection": PROJECTED, "quick_gelu": True}


def tiny(**options: Any) -> Model:
    return models.vit(CLASSES, width=WIDTH, depth=DEPTH, heads=HEADS, patch=PATCH, **options)


def shapes_of(model: Model, side: int) -> Variables:
    return jax.eval_shape(model.init, KEY, np.zeros((1, side, side, 3), np.float32))


def timm(patches: int, registers: int = 0, layer_scale: bool = False, **clip: Any) -> Arrays:
    """All that timm would save, were it this small; CLIP's tower under the same names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, patches + (not registers), WIDTH),
        "head.weight": (CLASSES, PROJECTED if clip else WIDTH),
        "head.bias": (CLASSES,),
    }
    layers = {"attn.qkv": (3 * WIDTH, WIDTH), "attn.proj": (WIDTH, WIDTH)}
    layers |= {"mlp.fc1": (4 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 4 * WIDTH)}
    norms = ["norm"] + ["norm_pre"] * bool(clip)
    for i in range(DEPTH):
        for name, shape in layers.items():
            shapes |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
        norms += [f"blocks.{i}.norm1", f"blocks.{i}.norm2"]
        if layer_scale:
            shapes |= {f"blocks.{i}.ls{j}.gamma": (WIDTH,) for j in (1, 2)}
    shapes |= {f"{name}.{part}": (WIDTH,) for name in norms for part in ("weight", "bias")}
    shapes |= {"reg_token": (1, registers, WIDTH)} if registers else {}
    extra = {"proj.weight": (PROJECTED, WIDTH)} if clip else {"patch_embed.proj.bias": (WIDTH,)}
    around = ("gamma", "norm.weight", "norm1.weight", "norm2.weight", "pre.weight")
    return {
        name: (0.5 * rng.normal(size=shape) + name.endswith(around)).astype(np.float32)
        for name, shape in (shapes | extra).items()
    }


def forward(arrays: Arrays, x: np.ndarray) -> np.ndarray:
    """Features [B, D] of images [B, height, width, 3], one token after the other."""
    of = {name: np.float64(array) for name, array in arrays.items()}
    is_clip = "proj.weight" in of

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        epsilon = 1e-5 if is_clip else 1e-6
        shifted = x - x.mean(-1, keepdims=True)
        scaled = shifted / np.sqrt(x.var(-1, keepdims=True) + epsilon)
        return scaled * of[f"{name}.weight"] + of[f"{name}.bias"]

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ of[f"{name}.weight"].T + of[f"{name}.bias"]

    def gelu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-1.702 * x)) if is_clip else x * (1 + erf(x / 2**0.5)) / 2

    def attention(tokens: np.ndarray, name: str) -> np.ndarray:
        outputs = []
        for number in range(HEADS):
            size = WIDTH // HEADS
            q, k, v = (
                dense(tokens, f"{name}.qkv")[:, part * WIDTH + number * size :][:, :size]
                for part in range(3)
            )
            odds = np.exp(q @ k.T / size**0.5)
            outputs.append(odds / odds.sum(1, keepdims=True) @ v)
        return dense(np.concatenate(outputs, 1), f"{name}.proj")

    features = []
    for image in np.float64(x):
        rows, columns = (side // PATCH for side in image.shape[:2])
        kernel, bias = of["patch_embed.proj.weight"], of.get("patch_embed.proj.bias", 0)
        tokens = [
            np.einsum("hwc,dchw->d", image[r * PATCH :, c * PATCH :][:PATCH, :PATCH], kernel) + bias
            for r in range(rows)
            for c in range(columns)
        ]
        positions = of["pos_embed"][0]
        first = of["cls_token"][0]
        if len(positions) > len(tokens):
            first, positions = first + positions[:1], positions[1:]
        registers = of.get("reg_token", np.zeros((1, 0, WIDTH)))[0]
        z = np.concatenate([first, registers, np.stack(tokens) + positions])
        z = norm(z, "norm_pre") if is_clip else z
        for i in range(DEPTH):
            block = f"blocks.{i}"
            attended = attention(norm(z, f"{block}.norm1"), f"{block}.attn")
            z = z + attended * of.get(f"{block}.ls1.gamma", 1)
            hidden = gelu(dense(norm(z, f"{block}.norm2"), f"{block}.mlp.fc1"))
            z = z + dense(hidden, f"{block}.mlp.fc2") * of.get(f"{block}.ls2.gamma", 1)
        out = norm(z[0], "norm")
        features.append(of["proj.weight"] @ out if is_clip else out)
    return np.stack(features)


def encoded(model: Model, variables: Variables, x: np.ndarray) -> np.ndarray:
    params, stats = variables
    return jax.jit(model.encode, static_argnums=4)(
        params.body, stats.body, x, np.ones(len(x), bool), False
    )[0]


@pytest.mark.parametrize("options", [{}, DINO, CLIP], ids=["vit", "dino", "clip"])
def test_a_loaded_transformer_is_its_formula(tmp_path: Path, options: dict[str, Any]) -> None:
    arrays, model = timm(9, **options), tiny(**options)
    save_file(arrays, tmp_path / "vit.safetensors")
    x = np.random.default_rng(1).normal(size=(2, 6, 6, 3)).astype(np.float32)
    variables = weights.load(tmp_path / "vit.safetensors", shapes_of(model, 6))
    features = forward(arrays, x)
    assert np.abs(features[0] - features[1]).max() > 0.1
    assert_close(encoded(model, variables, x), features, rtol=1e-4, atol=1e-4)
    logits = features @ arrays["head.weight"].T + arrays["head.bias"]
    assert_close(models.predict(model, variables, x), logits, rtol=1e-4, atol=1e-3)


def renamed(arrays: Arrays, names: dict[str, str]) -> Arrays:
    found = {}
    for name, array in arrays.items():
        for old, new in names.items():
            name = re.sub(old, new, name)
        found[name] = array
    return found


def hugging_face(arrays: Arrays) -> Arrays:
    names = {
        "blocks.": "vision_model.encoder.layers.",
        r"\.norm(\d)": r".layer_norm\1",
        "attn.proj": "self_attn.out_proj",
        "^norm_pre": "vision_model.pre_layrnorm",
        r"^norm\.": "vision_model.post_layernorm.",
        "patch_embed.proj": "vision_model.embeddings.patch_embedding",
        "cls_token": "vision_model.embeddings.class_embedding",
        "pos_embed": "vision_model.embeddings.position_embedding.weight",
    }
    arrays = dict(arrays)
    arrays["visual_projection.weight"] = arrays.pop("proj.weight")
    found = renamed(arrays, names)
    for name in [name for name in found if "attn.qkv" in name]:
        parts = np.split(found.pop(name), 3)
        for part, array in zip("qkv", parts, strict=True):
            found[name.replace("attn.qkv", f"self_attn.{part}_proj")] = array.copy()
    token, positions = (f"vision_model.embeddings.{n}" for n in ("class_", "position_"))
    found[f"{token}embedding"] = found[f"{token}embedding"][0, 0]
    found[f"{positions}embedding.weight"] = found[f"{positions}embedding.weight"][0]
    others = {"text_model.final_layer_norm.bias": np.zeros(2, np.float32)}
    return found | others | {"logit_scale": np.zeros((), np.float32)}


def open_clip(arrays: Arrays) -> Arrays:
    names = {
        "blocks.": "visual.transformer.resblocks.",
        r"\.norm(\d)": r".ln_\1",
        r"attn\.qkv\.": "attn.in_proj_",
        "attn.proj": "attn.out_proj",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
        "^norm_pre": "visual.ln_pre",
        r"^norm\.": "visual.ln_post.",
        "patch_embed.proj": "visual.conv1",
        "cls_token": "visual.class_embedding",
        "pos_embed": "visual.positional_embedding",
    }
    arrays = dict(arrays)
    projection = arrays.pop("proj.weight").T.copy()
    found = renamed(arrays, names)
    found["visual.class_embedding"] = found["visual.class_embedding"][0, 0]
    found["visual.positional_embedding"] = found["visual.positional_embedding"][0]
    others = {"positional_embedding": np.zeros((2, 2), np.float32)}
    others |= {"transformer.resblocks.0.ln_1.bias": np.zeros(2, np.float32)}
    return found | {"visual.proj": projection} | others


@pytest.mark.parametrize("rename", [hugging_face, open_clip])
def test_a_tower_has_three_kinds_of_names(tmp_path: Path, rename: Any) -> None:
    model = tiny(**CLIP)
    arrays = timm(4, **CLIP)
    shapes = shapes_of(model, 4)
    save_file(arrays, tmp_path / "timm.safetensors")
    expected = weights.load(tmp_path / "timm.safetensors", shapes)
    without = {name: array for name, array in arrays.items() if not name.startswith("head")}
    save_file(rename(without), tmp_path / "other.safetensors")
    got = weights.load(tmp_path / "other.safetensors", model.init(KEY, np.zeros((1, 4, 4, 3))))
    assert_equal(got.params.body, expected.params.body)


def test_dino_s_own_names_and_the_position_of_its_class_token(tmp_path: Path) -> None:
    model, arrays = tiny(**DINO), timm(4, **DINO)
    position = np.random.default_rng(2).normal(size=(1, 1, WIDTH)).astype(np.float32)
    own = arrays | {"register_tokens": arrays["reg_token"], "mask_token": position}
    del own["reg_token"]
    own["pos_embed"] = np.concatenate([position, arrays["pos_embed"]], 1)
    own["cls_token"] = arrays["cls_token"] - position
    loaded = []
    for name, content in {"timm": arrays, "own": own}.items():
        save_file(content, tmp_path / f"{name}.safetensors")
        loaded.append(weights.load(tmp_path / f"{name}.safetensors", shapes_of(model, 4)))
    assert_close(*loaded, rtol=1e-6, atol=1e-6)


def test_a_file_of_another_transformer_is_refused(tmp_path: Path) -> None:
    """Without layer scale the network would run, and be another one."""
    path = tmp_path / "vit.safetensors"
    save_file(timm(4, **DINO), path)
    with pytest.raises(UsageError, match=r"ls1\.gamma"):
        weights.load(path, shapes_of(tiny(registers=2), 4))
    with pytest.raises(UsageError, match=r"norm_pre\.bias"):
        weights.load(path, shapes_of(tiny(**CLIP), 4))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="whole"):
        weights.load(path, shapes_of(tiny(**DINO), 4))
    with pytest.raises(UsageError, match="multiples"):
        shapes_of(tiny(), 5)


def test_positions_of_a_plane_stay_one_between_the_borders(tmp_path: Path) -> None:
    """Cubic interpolation reproduces a linear function of the place, whose pixels have centres."""
    arrays, side, after = timm(49, **DINO), 7, 14
    places = (np.arange(side) + 0.5) / side
    plane = np.stack([*np.meshgrid(places, places, indexing="ij")], -1).reshape(1, -1, 2)
    arrays["pos_embed"] = np.pad(plane, [(0, 0), (0, 0), (0, WIDTH - 2)]).astype(np.float32)
    save_file(arrays, tmp_path / "vit.safetensors")
    shapes = shapes_of(tiny(**DINO), after * PATCH)
    loaded = weights.load(tmp_path / "vit.safetensors", shapes)
    grid = loaded.params.body["blocks_0"]["pos_embed"].reshape(after, after, WIDTH)[4:-4, 4:-4]
    finer = ((np.arange(after) + 0.5) / after)[4:-4]
    expected = np.stack(np.meshgrid(finer, finer, indexing="ij"), -1)
    assert_close(grid[..., :2], expected, rtol=1e-5, atol=1e-5)


def saved_by_torch(module: Any, path: Path) -> None:
    """Save random weights, without the symmetries and zeros of a fresh network."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in module.named_parameters():
            is_scale = name.endswith(("gamma", "norm.weight", "norm1.weight", "norm2.weight"))
            value.normal_(1.0 if is_scale else 0.0, 0.3 if is_scale else 0.1)
    save_torch({k: v.contiguous() for k, v in module.state_dict().items()}, path)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_equals_timm(tmp_path: Path, name: str) -> None:
    """At another size than that of the file."""
    pytest.importorskip("torch")
    timm = pytest.importorskip("timm")
    import torch

    patch, registers = (14, 4) if "reg4" in name else (16, 0)
    sides = (7 * patch, 4 * patch)
    options: dict[str, Any] = {"depth": 3, "embed_dim": 24, "num_heads": 3, "num_classes": CLASSES}
    theirs = timm.create_model(name, img_size=sides[0], **options)
    saved_by_torch(theirs, tmp_path / "vit.safetensors")
    model = models.vit(
        CLASSES,
        width=24,
        depth=3,
        heads=3,
        patch=patch,
        registers=registers,
        layer_scale=registers > 0,
    )
    for side in sides:
        other = timm.create_model(name, img_size=side, dynamic_img_size=True, **options)
        state = timm.models.vision_transformer.checkpoint_filter_fn(theirs.state_dict(), other)
        other.load_state_dict(state)
        x = np.random.default_rng(1).normal(size=(2, side, side, 3)).astype(np.float32)
        with torch.inference_mode():
            expected = other.eval()(torch.from_numpy(x.transpose(0, 3, 1, 2))).numpy()
        variables = weights.load(tmp_path / "vit.safetensors", shapes_of(model, side))
        got = np.asarray(models.predict(model, variables, x))
        print(name, side, np.abs(got - expected).max(), np.abs(expected).max())
        assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_equals_the_tower_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=96,
        projection_dim=PROJECTED,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=32,
        patch_size=8,
    )
    theirs = transformers.CLIPVisionModelWithProjection(config).eval()
    saved_by_torch(theirs, tmp_path / "clip.safetensors")
    model = models.vit(CLASSES, width=24, depth=3, heads=3, patch=8, **CLIP)
    x = np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype(np.float32)
    with torch.inference_mode():
        expected = theirs(torch.from_numpy(x.transpose(0, 3, 1, 2))).image_embeds.numpy()
    variables = weights.load(
        tmp_path / "clip.safetensors", model.init(KEY, np.zeros((1, 32, 32, 3)))
    )
    got = np.asarray(encoded(model, variables, x))
    print(np.abs(got - expected).max(), np.abs(expected).max())
    assert_close(got, expected, rtol=1e-4, atol=1e-4)
