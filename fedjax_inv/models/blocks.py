"""From a sequence of flax.linen blocks to a `Model` that is cut between two of them."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_inv.types import Array, Halves, Model, Tree, Variables


class _Sequence(nn.Module):
    blocks: Sequence[nn.Module]  # each called as block(x [B, ...], mask [B], train)

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        for block in self.blocks:
            x = block(x, mask, train)
        return x


def unit_range(x: Array) -> Array:
    """8-bit images scaled to [0, 1] float32; anything else as it is."""
    return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x


def from_blocks(blocks: Sequence[nn.Module], cut: int) -> Model:
    """The model whose body is `blocks[:cut]` and whose head is the rest.

    Each block is called as block(x [B, ...], mask [B] bool, train: bool); what it changes without
    a gradient lives in its collection "batch_stats". Raises ValueError for a cut off the network.
    """
    if not 0 <= cut < len(blocks):
        raise ValueError(f"cut={cut}: must be between 0 and {len(blocks) - 1}")
    body, head = _Sequence(blocks[:cut]), _Sequence(blocks[cut:])

    def init_half(half: nn.Module, key: Array, x: Array, mask: Array) -> tuple[Tree, Tree]:
        variables = half.init(key, x, mask, False)
        return variables.get("params", {}), variables.get("batch_stats", {})

    def init(key: Array, x: Tree) -> Variables:
        body_key, head_key = jax.random.split(key)
        mask = jnp.ones(jax.tree.leaves(x)[0].shape[0], bool)
        body_params, body_stats = init_half(body, body_key, unit_range(x), mask)
        features, _ = encode(body_params, body_stats, x, mask, False)
        head_params, head_stats = init_half(head, head_key, features, mask)
        return Variables(Halves(body_params, head_params), Halves(body_stats, head_stats))

    def apply_half(
        half: nn.Module, params: Tree, stats: Tree, x: Array, mask: Array, train: bool
    ) -> tuple[Array, Tree]:
        variables = {"params": params, "batch_stats": stats}
        outputs: Tree
        if not train:
            outputs = half.apply(variables, x, mask, False)
            return outputs, stats
        outputs, changed = half.apply(variables, x, mask, True, mutable=["batch_stats"])
        return outputs, changed.get("batch_stats", {})

    def encode(params: Tree, stats: Tree, x: Tree, mask: Array, train: bool) -> tuple[Array, Tree]:
        return apply_half(body, params, stats, unit_range(x), mask, train)

    def decode(
        params: Tree, stats: Tree, features: Array, mask: Array, train: bool
    ) -> tuple[Array, Tree]:
        return apply_half(head, params, stats, features, mask, train)

    return Model(init, encode, decode)


def rendered(model: Model, render: Callable[[Tree], Array]) -> Model:
    """The model on stored inputs that `render` turns into the ones that it takes."""

    def encode(params: Tree, stats: Tree, x: Tree, mask: Array, train: bool) -> tuple[Array, Tree]:
        return model.encode(params, stats, render(x), mask, train)

    return Model(lambda key, x: model.init(key, render(x)), encode, model.decode)


def apply(
    model: Model, variables: Variables, x: Tree, mask: Array, train: bool
) -> tuple[Array, Halves]:
    """The whole network: (logits [B, K], stats) of x [B, ...] under mask [B]."""
    params, stats = variables
    features, body = model.encode(params.body, stats.body, x, mask, train)
    logits, head = model.decode(params.head, stats.head, features, mask, train)
    return logits, Halves(body, head)


def predict(model: Model, variables: Variables, x: Tree) -> Array:
    """Logits [B, K] of x [B, ...] in evaluation mode."""
    mask = jnp.ones(jax.tree.leaves(x)[0].shape[0], bool)
    return apply(model, variables, x, mask, False)[0]
