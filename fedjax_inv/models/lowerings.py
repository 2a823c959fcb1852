"""Lowerings: one convolution and one pooling, each in the forms that platforms run fast.

Axis letters of this file: B images of a batch, C channels, O output channels. Inputs are
[B, *space, C], kernels [*window, C, O], outputs [B, *space, O].
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_inv import checks, platforms
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array

_LOG = logging.getLogger("fedjax_inv")
Conv = Callable[..., Array]  # with the signature of jax.lax.conv_general_dilated


class _Geometry(NamedTuple):
    """How the window slides, with the names of `jax.lax.conv_general_dilated`'s arguments."""

    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    precision: Any


def lowering(conv: str) -> Conv:
    """Return a convolution by name, for `flax.linen.Conv(conv_general_dilated=...)`.

    Args:
      conv: one of LOWERINGS:
        - "lax": XLA's own. On a CPU its gradient is 10 to 50 times slower inside a loop than
          outside (jax issue 12868), and `vmap` over kernels gives a grouped convolution, which is
          slow;
        - "im2col": patches and one matrix product, which `vmap` batches;
        - "canonical": XLA's own, with derivatives of any order in the one layout that is fast
          inside a loop on a CPU; under `vmap`, kernels take turns;
        - "winograd": 3x3 and 5x5 windows at stride 1 by Winograd's minimal filtering, with 1/4 and
          2/5 of the multiplications and about twice the rounding error. All else is canonical;
        - "auto": on a CPU winograd from 32 channels on and canonical below; lax on a TPU, whose
          compiler makes no groups; im2col elsewhere. A layer cannot know whether it will be
          vmapped.

    Returns:
      A function with the signature of `jax.lax.conv_general_dilated`. All but "lax" refuse groups,
      dilation and other layouts than channels last.
    """
    checks.one_of("conv", conv, LOWERINGS)
    return _LOWERINGS[conv]


def _channels_last(rank: int) -> tuple[str, str, str]:
    space = "0123"[: rank - 2]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def _checked(conv: Callable[[Array, Array, _Geometry], Array]) -> Conv:
    """Give `conv` the signature of `jax.lax.conv_general_dilated`, and refuse what it cannot do."""

    def conv_general_dilated(
        inputs: Array,
        kernel: Array,
        strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        precision: Any = None,
    ) -> Array:
        ones = (1,) * len(strides)
        layout = _channels_last(inputs.ndim)
        numbers = partial(lax.conv_dimension_numbers, inputs.shape, kernel.shape)
        dilations = tuple(lhs_dilation or ones), tuple(rhs_dilation or ones)
        is_plain = feature_group_count == 1 and dilations == (ones, ones)
        if not is_plain or numbers(dimension_numbers) != numbers(layout):
            raise UsageError("conv", ..., "must be 'lax' for groups, dilation or channels not last")
        # A primitive is lowered later, when the precision around its tracing holds no more.
        precision = precision or jax.config.values["jax_default_matmul_precision"]
        if isinstance(padding, str):
            space = inputs.shape[1:-1]
            window = kernel.shape[:-2]
            padding = lax.padtype_to_pads(space, window, strides, padding)
        padding = tuple((low, high) for low, high in padding)
        return conv(inputs, kernel, _Geometry(tuple(strides), padding, ones, ones, precision))

    return conv_general_dilated


def _im2col(inputs: Array, kernel: Array, geometry: _Geometry) -> Array:
    widths = [(0, 0, 0), *((low, high, 0) for low, high in geometry.padding), (0, 0, 0)]
    patches = lax.pad(inputs, jnp.zeros((), inputs.dtype), widths)
    # One axis at a time, the last one first: this puts channels in the kernel's order.
    for axis in reversed(range(1, inputs.ndim - 1)):
        size = kernel.shape[axis - 1]
        stride = geometry.window_strides[axis - 1]
        stop = patches.shape[axis] - size + 1
        shifted = [lax.slice_in_dim(patches, k, k + stop, stride, axis) for k in range(size)]
        patches = jnp.concatenate(shifted, -1)
    return jnp.matmul(patches, kernel.reshape(-1, kernel.shape[-1]), precision=geometry.precision)


# The canonical convolution is a primitive, as only a primitive can define its transpose: itself,
# between explicit transposes of its arguments. So derivatives of any order consist of it. XLA:CPU's
# fast convolution has one layout, and XLA converts other layouts outside loops only. Under
# `jax.shard_map` it needs check_vma=False where only one argument is split.


def _canonical_impl(inputs: Array, kernel: Array, *, geometry: _Geometry) -> Array:
    layout = _channels_last(inputs.ndim)
    return lax.conv_general_dilated(inputs, kernel, dimension_numbers=layout, **geometry._asdict())


def _canonical_aval(inputs: Any, kernel: Any, *, geometry: _Geometry) -> Any:
    out = jax.eval_shape(partial(_canonical_impl, geometry=geometry), inputs, kernel)
    return inputs.update(shape=out.shape, dtype=out.dtype, weak_type=False)


def _spans(inputs: Any, kernel: Any, outputs: Any, geometry: _Geometry) -> list[tuple[int, ...]]:
    """Return per spatial axis the dilated sizes of inputs, window, outputs; the low padding."""
    sizes = inputs.shape[1:-1], kernel.shape[:-2], outputs.shape[1:-1]
    dilations = geometry.lhs_dilation, geometry.rhs_dilation, geometry.window_strides
    dilated = [
        [(n - 1) * d + 1 for n, d in zip(*pair, strict=True)]
        for pair in zip(sizes, dilations, strict=True)
    ]
    return list(zip(*dilated, [low for low, _ in geometry.padding], strict=True))


def _inputs_cotangent(
    cotangent: Array, inputs: Any, kernel: Array, *, geometry: _Geometry
) -> Array:
    """Slide the flipped kernel over the cotangent."""
    spans = _spans(inputs.aval, kernel, cotangent, geometry)
    back = geometry._replace(
        window_strides=geometry.lhs_dilation,
        padding=tuple((k - 1 - low, n + low - o) for n, k, o, low in spans),
        lhs_dilation=geometry.window_strides,
    )
    flipped = lax.rev(kernel, range(kernel.ndim - 2)).swapaxes(-1, -2)
    return _bind_canonical(cotangent, flipped, geometry=back)


def _kernel_cotangent(
    cotangent: Array, inputs: Array, kernel: Any, *, geometry: _Geometry
) -> Array:
    """Slide the cotangent over the inputs; the sum over channels becomes one over images."""
    spans = _spans(inputs, kernel.aval, cotangent, geometry)
    back = geometry._replace(
        window_strides=geometry.rhs_dilation,
        padding=tuple((low, o - n + k - 1 - low) for n, k, o, low in spans),
        rhs_dilation=geometry.window_strides,
    )
    channels_first = _bind_canonical(
        inputs.swapaxes(0, -1), jnp.moveaxis(cotangent, 0, -2), geometry=back
    )
    return jnp.moveaxis(channels_first, 0, -2)


def _canonical_batch(
    arguments: tuple[Array, Array], axes: tuple[int | None, int | None], *, geometry: _Geometry
) -> tuple[Array, int]:
    """Batch: inputs join the images, kernels the output channels; pairs of both take turns."""
    (inputs, kernel), (inputs_axis, kernel_axis) = arguments, axes
    bind = partial(_bind_canonical, geometry=geometry)
    if kernel_axis is None:
        assert inputs_axis is not None
        inputs = jnp.moveaxis(inputs, inputs_axis, 0)
        out = bind(inputs.reshape(-1, *inputs.shape[2:]), kernel)
        return out.reshape(*inputs.shape[:2], *out.shape[1:]), 0
    if inputs_axis is None:
        kernel = jnp.moveaxis(kernel, kernel_axis, -2)
        out = bind(inputs, kernel.reshape(*kernel.shape[:-2], -1))
        return out.reshape(*out.shape[:-1], *kernel.shape[-2:]), out.ndim - 1
    pairs = jnp.moveaxis(inputs, inputs_axis, 0), jnp.moveaxis(kernel, kernel_axis, 0)
    return lax.map(lambda pair: bind(*pair), pairs), 0


def _register() -> Callable[..., Array]:
    """Register the canonical convolution's rules with JAX, and return the function that applies it.

    A later JAX may keep its registries of rules elsewhere. Then the convolution loses speed, not
    correctness: XLA's own takes its place, and a warning says so.
    """
    try:
        from jax.extend.core import Primitive
        from jax.interpreters import ad, batching, mlir

        primitive = Primitive("canonical_conv")
        primitive.def_impl(jax.jit(_canonical_impl, static_argnames="geometry"))
        primitive.def_abstract_eval(_canonical_aval)
        mlir.register_lowering(primitive, mlir.lower_fun(_canonical_impl, multiple_results=False))
        ad.defbilinear(primitive, _inputs_cotangent, _kernel_cotangent)
        batching.primitive_batchers[primitive] = _canonical_batch
    except (ImportError, AttributeError, TypeError) as error:
        _LOG.warning("this JAX takes no rules (%s): canonical convolutions are XLA's own", error)
        return _canonical_impl
    return primitive.bind


_bind_canonical = _register()


def _canonical(inputs: Array, kernel: Array, geometry: _Geometry) -> Array:
    return _bind_canonical(inputs, kernel, geometry=geometry)


# Winograd's minimal filtering (Lavin & Gray 2016): along one axis a tile of inputs gives a patch of
# 4 outputs. Such a convolution is a transposed product of polynomials, computed from their values
# at as many points as a tile has entries: infinity, and others with small rounding errors.

_PATCH = 4


def _filtering(window: int, points: Sequence[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return matrices from a tile and from a kernel to values at points, and back to a patch.

    window is the length of the kernel, points are all but infinity. The matrices are [tile, tile],
    [tile, window] and [4, tile].
    """

    def values(count: int) -> np.ndarray:
        """Return [tile, count], from `count` coefficients of a polynomial to its values."""
        return np.vstack([np.vander(points, count, increasing=True), np.eye(count)[-1]])

    return np.linalg.inv(values(_PATCH + window - 1)).T, values(window), values(_PATCH).T


def _transform(matrix: np.ndarray, array: Array, precision: Any) -> Array:
    """Multiply a matrix [M, N] with an array whose first axes hold N entries: [M, the rest]."""
    flat = array.reshape(matrix.shape[1], -1)
    return jnp.matmul(matrix.astype(array.dtype), flat, precision=precision)


# F(4x4, 3x3): a Kronecker product transforms both axes at once.
_WINDOW = 3
_TILE = _PATCH + _WINDOW - 1
_FROM_TILES, _FROM_KERNEL, _TO_PATCHES = (
    np.kron(matrix, matrix)
    for matrix in _filtering(_WINDOW, (0, 2**-0.5, -(2**-0.5), 2**0.5, -(2**0.5)))
)  # [36, 6 * 6], [36, 3 * 3] and [4 * 4, 36]


def _winograd(inputs: Array, kernel: Array, geometry: _Geometry) -> Array:
    exact = inputs.dtype in (jnp.float32, jnp.float64)  # 16 bits would round the matrices too much
    if geometry.window_strides == (1, 1) and exact:
        if kernel.shape[:-2] == (_WINDOW, _WINDOW):
            return _winograd_3x3(inputs, kernel, geometry)
        if kernel.shape[:-2] == (_WINDOW_5, _WINDOW_5):
            return _winograd_5x5(inputs, kernel, geometry)
    return _canonical(inputs, kernel, geometry)


def _winograd_3x3(inputs: Array, kernel: Array, geometry: _Geometry) -> Array:
    """Convolve by one matrix product over channels for each of the 36 values of a tile."""
    images, *space, channels = inputs.shape
    features = kernel.shape[-1]
    sizes = [
        low + n + high - (_WINDOW - 1)
        for n, (low, high) in zip(space, geometry.padding, strict=True)
    ]
    counts = [-(-size // _PATCH) for size in sizes]
    # Blocks of 4x4, one more than patches along each axis: a tile is a block and half of the next.
    pads = [
        (low, _PATCH * (count + 1) - low - n, 0)
        for n, count, (low, _) in zip(space, counts, geometry.padding, strict=True)
    ]
    tiles = lax.pad(inputs, jnp.zeros((), inputs.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
    # To [6, images, rows, counts[1], channels], then to [6, 6, images, *counts, channels].
    for count in reversed(counts):
        blocks = tiles.reshape(*tiles.shape[:2], count + 1, _PATCH, *tiles.shape[3:])
        in_block = jnp.unstack(blocks, axis=3)  # by the place in the block
        tiles = jnp.stack(
            [
                lax.slice_in_dim(in_block[k % _PATCH], k // _PATCH, k // _PATCH + count, 1, 2)
                for k in range(_TILE)
            ]
        )
    transform = partial(_transform, precision=geometry.precision)
    products = jnp.matmul(
        transform(_FROM_TILES, tiles).reshape(_TILE**2, -1, channels),
        transform(_FROM_KERNEL, kernel).reshape(_TILE**2, channels, features),
        precision=geometry.precision,
    )
    out = transform(_TO_PATCHES, products).reshape(_PATCH, _PATCH, images, *counts, features)
    rows, columns = (_PATCH * count for count in counts)
    out = jnp.stack(jnp.unstack(out), 3).reshape(_PATCH, images, rows, counts[1], features)
    out = jnp.stack(jnp.unstack(out), 3).reshape(images, rows, columns, features)
    return out[:, : sizes[0], : sizes[1]]


# F(4, 5) along the rows only; along both axes it would be no faster, with twice the rounding error.
_WINDOW_5 = 5
_FROM_TILE_5, _FROM_KERNEL_5, _TO_PATCH_5 = _filtering(_WINDOW_5, (0, 0.5, -0.5, 1, -1, 2, -2))


def _winograd_5x5(inputs: Array, kernel: Array, geometry: _Geometry) -> Array:
    """Convolve along the columns for each of the 8 values of a tile along the rows."""
    images, rows, *rest = inputs.shape
    (low, high), columns_padding = geometry.padding
    size = low + rows + high - (_WINDOW_5 - 1)
    count = -(-size // _PATCH)
    # Blocks of 4 rows, one more than patches: a tile is a block and the next.
    pads = [(0, 0, 0), (low, _PATCH * (count + 1) - low - rows, 0), (0, 0, 0), (0, 0, 0)]
    blocks = lax.pad(inputs, jnp.zeros((), inputs.dtype), pads)
    in_block = jnp.moveaxis(blocks.reshape(images, count + 1, _PATCH, *rest), 2, 0)
    tiles = jnp.concatenate([in_block[:, :, :-1], in_block[:, :, 1:]])

    transform = partial(_transform, precision=geometry.precision)
    tiles = transform(_FROM_TILE_5, tiles).reshape(tiles.shape)
    kernels = transform(_FROM_KERNEL_5, kernel).reshape(-1, 1, *kernel.shape[1:])
    along_columns = geometry._replace(padding=((0, 0), columns_padding))
    # One by one: `vmap` would make a loop, whose derivatives copy what they need.
    values = [
        _canonical(*pair, along_columns)
        for pair in zip(jnp.unstack(tiles), jnp.unstack(kernels), strict=True)
    ]  # each [images, count, columns, features]
    # Elementwise: a matrix product is slower here.
    out = jnp.stack(
        [
            sum(factor * value for factor, value in zip(row, values, strict=True) if factor)
            for row in _TO_PATCH_5.tolist()
        ],
        2,
    )
    return out.reshape(images, -1, *out.shape[3:])[:, :size]


_WINOGRAD_CHANNELS = 32  # with fewer, the transforms cost more than they save


def _auto(inputs: Array, kernel: Array, geometry: _Geometry) -> Array:
    if platforms.on_tpu():
        return _canonical_impl(inputs, kernel, geometry=geometry)
    if not platforms.on_cpu():
        return _im2col(inputs, kernel, geometry)
    conv = _winograd if min(kernel.shape[-2:]) >= _WINOGRAD_CHANNELS else _canonical
    return conv(inputs, kernel, geometry)


_LOWERINGS: dict[str, Conv] = {
    "auto": _checked(_auto),
    "lax": lax.conv_general_dilated,
    "im2col": _checked(_im2col),
    "canonical": _checked(_canonical),
    "winograd": _checked(_winograd),
}
LOWERINGS = tuple(_LOWERINGS)


def depthwise(x: Array, kernel: Array, stride: int) -> Array:
    """Return each channel of x [B, *space, C] filtered by its own kernel [*window, 1, C].

    The padding is SAME. XLA's grouped convolutions are slow on a CPU: there it is a sum of shifted
    inputs, each times a number of the kernel for each channel.
    """
    strides = (stride,) * (x.ndim - 2)
    window = kernel.shape[:-2]
    if not platforms.on_cpu():
        layout = _channels_last(x.ndim)
        groups = x.shape[-1]
        return lax.conv_general_dilated(
            x, kernel, strides, "SAME", dimension_numbers=layout, feature_group_count=groups
        )
    pads = lax.padtype_to_pads(x.shape[1:-1], window, strides, "SAME")
    padded = jnp.pad(x, [(0, 0), *pads, (0, 0)])
    outputs = [-(-size // stride) for size in x.shape[1:-1]]
    total = jnp.zeros((), x.dtype)
    for place in np.ndindex(*window):
        view = tuple(
            slice(first, first + stride * (count - 1) + 1, stride)
            for first, count in zip(place, outputs, strict=True)
        )
        total += padded[:, *view] * kernel[place][0]
    return total


def max_pool(x: Array, size: int, stride: int | None = None, padding: int = 0) -> Array:
    """Return the largest number of each window of images [B, height, width, C], floating point.

    Windows are squares of side `size`, by default side by side (`stride`). On every side lie
    `padding` rows and columns of minus infinity, at most half of the size. Pixels that do not fill
    a window are left out, as in `flax.linen.max_pool`. The gradient takes a few elementwise
    operations instead of a scatter, which is slow on a CPU; equal numbers share it.
    """
    batch, height, width, channels = x.shape
    stride = size if stride is None else stride
    if stride == size and padding == 0:
        rows, columns = height // size, width // size
        whole = x[:, : rows * size, : columns * size]
        return whole.reshape(batch, rows, size, columns, size, channels).max((2, 4))
    for axis in (1, 2):
        span = (x.shape[axis] + 2 * padding - size) // stride * stride + 1
        pads = [(padding, padding, 0) if i == axis else (0, 0, 0) for i in range(4)]
        padded = lax.pad(x, jnp.array(-jnp.inf, x.dtype), pads)
        shifted = [lax.slice_in_dim(padded, k, k + span, stride, axis) for k in range(size)]
        x = reduce(jnp.maximum, shifted)
    return x
