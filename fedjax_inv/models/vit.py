"""Vision transformers: ViT (Dosovitskiy et al. 2021, arXiv 2010.11929), DINOv2 (Oquab et al. 2024,
arXiv 2304.07193) with registers (Darcet et al. 2024, arXiv 2309.16588), and CLIP's vision tower
(Radford et al. 2021, arXiv 2103.00020).
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_inv import types
from fedjax_inv.checks import UsageError
from fedjax_inv.models.blocks import from_blocks
from fedjax_inv.models.layers import Logits, check_images
from fedjax_inv.types import Array

# Modules and parameters have timm's names. The position of the class token is added to the token
# itself, as with registers in timm: `weights` does so where a file has it apart.

_EXPANSION = 4  # hidden units of a block for each of its inputs


def _quick_gelu(x: Array) -> Array:
    """Return OpenAI's approximation of the GELU."""
    return x * jax.nn.sigmoid(1.702 * x)


class _Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with layer scale each term has a factor."""

    heads: int
    epsilon: float
    quick_gelu: bool
    layer_scale: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        *batch, width = x.shape
        norm = partial(nn.LayerNorm, epsilon=self.epsilon, use_fast_variance=False)
        gelu = _quick_gelu if self.quick_gelu else partial(jax.nn.gelu, approximate=False)
        products = nn.Dense(3 * width, name="attn.qkv")(norm(name="norm1")(x))
        products = products.reshape(*batch, 3, self.heads, width // self.heads)
        attended = jax.nn.dot_product_attention(*jnp.unstack(products, axis=2))
        x = x + self._scaled("ls1", nn.Dense(width, name="attn.proj")(attended.reshape(x.shape)))
        hidden = nn.Dense(_EXPANSION * width, name="mlp.fc1")(norm(name="norm2")(x))
        return x + self._scaled("ls2", nn.Dense(width, name="mlp.fc2")(gelu(hidden)))

    def _scaled(self, name: str, x: Array) -> Array:
        if not self.layer_scale:
            return x
        return x * self.param(f"{name}.gamma", nn.initializers.constant(1e-5), x.shape[-1:])


class _Transformer(nn.Module):
    """Patches, class token, registers and blocks; its outputs are those of the class token."""

    width: int
    depth: int
    heads: int
    patch: int
    registers: int
    layer_scale: bool
    projection: int
    quick_gelu: bool

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        check_images(x, self.patch)
        if x.shape[1] % self.patch or x.shape[2] % self.patch:
            text = f"must be images whose sides are multiples of {self.patch} pixels"
            raise UsageError("inputs", x, text)
        is_clip = self.projection > 0
        epsilon = 1e-5 if is_clip else 1e-6
        norm = partial(nn.LayerNorm, epsilon=epsilon, use_fast_variance=False)
        small = nn.initializers.truncated_normal(0.02)
        sides = (self.patch, self.patch)
        x = nn.Conv(
            self.width, sides, sides, "VALID", use_bias=not is_clip, name="patch_embed.proj"
        )(x)
        x = x.reshape(x.shape[0], -1, self.width)
        x += self.param("pos_embed", small, (1, *x.shape[1:]))
        tokens = [self.param("cls_token", small, (1, 1, self.width))]
        if self.registers:
            tokens += [self.param("reg_token", small, (1, self.registers, self.width))]
        before = [jnp.broadcast_to(token, (len(x), *token.shape[1:])) for token in tokens]
        x = jnp.concatenate([*(token.astype(x.dtype) for token in before), x], 1)
        if is_clip:
            x = norm(name="norm_pre")(x)
        for i in range(self.depth):
            options = self.heads, epsilon, self.quick_gelu, self.layer_scale
            x = _Block(*options, name=f"blocks.{i}")(x)
        x = norm(name="norm")(x[:, 0])
        return nn.Dense(self.projection, use_bias=False, name="proj")(x) if is_clip else x


def vit(
    num_classes: int,
    *,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    patch: int = 16,
    registers: int = 0,
    layer_scale: bool = False,
    projection: int = 0,
    quick_gelu: bool = False,
    cut: int | None = None,
) -> types.Model:
    """Build a vision transformer, whose weights `models.weights` loads; `models.BODIES` has names.

    Its features are those of the class token after the last norm, [B, width].

    Args:
      width: features of a token.
      depth: number of blocks.
      heads: heads of each attention, which divide the width.
      patch: the side of a patch in pixels.
      registers: further tokens without a position, as in DINOv2.
      layer_scale: whether each block's terms have a factor for each feature, as in DINOv2.
      projection: above 0 for CLIP's vision tower: a norm before the blocks, patches without a bias,
        1e-5 added to variances instead of 1e-6, and a last projection, so that features are
        [B, projection].
      quick_gelu: OpenAI's x sigmoid(1.702 x) instead of the exact GELU.
      cut: how many of two layers are the body, the transformer and the linear classifier; by
        default 1.

    Returns:
      A model with logits [B, K] of images [B, height, width, channels], whose sides are multiples
      of the patch. The images of one network have one size.
    """
    if width % heads:
        raise UsageError("heads", heads, f"must divide width={width}")
    transformer = _Transformer(
        width, depth, heads, patch, registers, layer_scale, projection, quick_gelu
    )
    return from_blocks([transformer, Logits(num_classes, "head")], 1 if cut is None else cut)
