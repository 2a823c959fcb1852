"""Long short-term memory (Hochreiter & Schmidhuber 1997) over the words of a text."""

from collections.abc import Sequence
from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_inv import types
from fedjax_inv.checks import UsageError
from fedjax_inv.models.blocks import from_blocks
from fedjax_inv.models.layers import Logits
from fedjax_inv.types import Array

PADDING = 0  # the word that fills a text up


def _are_words(x: Array) -> bool:
    return x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer)


def word_weights(x: Array, vocabulary: int) -> Array:
    """Return words [B, T], integers in 0..V - 1, as one-hot weights [B, T, V] float32.

    A mean of word numbers means nothing, but a mean of weights does: the embedding is linear, so
    the embedding of the mean is the mean of the words' vectors, with zeros for padding.
    """
    chex.assert_rank(x, 2)
    return jax.nn.one_hot(x, vocabulary)


class _Layer(nn.Module):
    """The units of one layer at each time: x [T, B, D], real [T, B] bool -> [T, B, width]."""

    width: int

    @nn.compact
    def __call__(self, x: Array, real: Array) -> Array:
        size = self.width

        def orthogonal(key: Array, shape: tuple[int, int]) -> Array:
            """Draw each gate by itself, as flax's cells do."""
            draw = nn.initializers.orthogonal()
            gates = [draw(k, (size, size)) for k in jax.random.split(key, shape[1] // size)]
            return jnp.concatenate(gates, axis=1)

        # One product for all times, with the gates (in, forget, candidate, out) side by side.
        inputs = nn.Dense(4 * size, name="input")(x)
        recurrent = self.param("recurrent", orthogonal, (size, 4 * size))

        def step(carry: tuple[Array, Array], now: tuple[Array, Array]) -> tuple[tuple, Array]:
            (hidden, cell), (inputs, is_real) = carry, now
            enter, keep, candidate, leave = jnp.split(inputs + hidden @ recurrent, 4, axis=-1)
            new = nn.sigmoid(keep) * cell + nn.sigmoid(enter) * jnp.tanh(candidate)
            out = nn.sigmoid(leave) * jnp.tanh(new)
            is_real = is_real[:, None]
            hidden = jnp.where(is_real, out, hidden)
            cell = jnp.where(is_real, new, cell)
            return (hidden, cell), hidden

        zeros = jnp.zeros((x.shape[1], size), inputs.dtype)
        _, hidden = jax.lax.scan(step, (zeros, zeros), (inputs, real))
        return hidden


class _Encoder(nn.Module):
    """The last layer's units after the last word: words -> [B, widths[-1]]."""

    vocabulary: int
    embedding: int
    widths: Sequence[int]

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        # Variance 1, which the layers' initialisation expects.
        shape = (self.vocabulary, self.embedding)
        vectors = self.param("embedding", nn.initializers.normal(1.0), shape)
        if _are_words(x):
            x = x.T
            real, out = x != PADDING, vectors[x]
        elif x.shape[2:] == (self.vocabulary,) and jnp.issubdtype(x.dtype, jnp.floating):
            x = x.swapaxes(0, 1)
            is_word = jnp.arange(self.vocabulary) != PADDING
            real = ((x != 0) & is_word).any(-1)
            out = x @ (vectors * is_word[:, None])  # padding has no vector
        else:
            allowed = (
                f"words, integers [B, T], or weights of words, floats [B, T, {self.vocabulary}]"
            )
            raise UsageError("inputs", x, f"must be {allowed}")
        for i, width in enumerate(self.widths):
            out = _Layer(width, name=f"layer{i + 1}")(out, real)
        return out[-1]  # unchanged by padding after the last word


def lstm(
    num_classes: int,
    *,
    vocabulary: int,
    embedding: int = 300,
    widths: Sequence[int] = (256, 256),
    cut: int | None = None,
) -> types.Model:
    """Build an LSTM: vectors of words, LSTM layers, and a linear classifier.

    The classifier gets the last layer's units after the last word. Word 0 is padding at any
    place: the units do not change at that time, so outputs and gradients are those of the text
    without it. The network also takes weights of words, floats [B, T, V], and embeds them as the
    mixture of the words' vectors; a time at which only padding has weight is padding. The model's
    `mixable` converts words to weights, for averages and mixtures.

    Args:
      vocabulary: V, the number of words.
      embedding: the length of their vectors.
      widths: units of the layers.
      cut: 1 makes the layers the body, so that a factor is a unit of the last layer; 0 makes the
        whole network the head; by default 1.

    Returns:
      A model with logits [B, K] of words [B, T], integers in 0..V - 1, for any T.
    """
    blocks = [_Encoder(vocabulary, embedding, tuple(widths)), Logits(num_classes)]
    model = from_blocks(blocks, 1 if cut is None else cut)
    return model._replace(mixable=partial(word_weights, vocabulary=vocabulary))
