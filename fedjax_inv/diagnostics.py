"""Diagnostics of a network: how far the clients' gradients at it agree."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import checks, devices, local, models, objectives, tree
from fedjax_inv.types import Array, Batch, Federation, Halves, Loss, Model, Shard, Tree, Variables


class Agreement(NamedTuple):
    """Statistics of the gradients of the risks R_i; all are 0 for a client without examples."""

    loss: Array  # [C] R_i(w)
    norm: Array  # [C] ||grad R_i(w)||
    invariance: Halves  # [C] <grad R_i(w), w> by the body and by the head; s_i(w) is their sum
    cosine: Array  # [] mean over pairs of clients; 0 unless two have a nonzero gradient


def agreement(
    model: Model,
    variables: Variables,
    federation: Federation,
    *,
    loss: Loss = objectives.cross_entropy,
    axis: devices.Axis | None = None,
    batch_size: int = 512,
) -> Agreement:
    """Compare each client's gradient with the parameters w and with the other clients' gradients.

    The gradient is over all examples of the client.

    R_i is the mean loss in evaluation mode, so that batches do not matter: normalisation uses the
    stored statistics, and dropout is off.

    Args:
      model: the model of the network.
      variables: the network; w are its parameters.
      federation: the clients and their examples; not a compact one.
      loss: the mean loss of a batch of outputs.
      axis: how clients are laid over memory and devices, as in `rounds.step`; by default one client
        after the other. Memory is needed for one gradient of each client that is computed at the
        same time, and for their sum.
      batch_size: B, the number of examples whose gradient is computed at a time.

    Returns:
      The statistics of each client [C] and the mean cosine [].

    Raises:
      UsageError: if batch_size is below 1, or if a client's rows are not rows of the examples.
    """
    checks.record("model", model, Model)
    checks.record("variables", variables, Variables)
    checks.function("loss", loss)
    axis = devices.chunked(1) if axis is None else axis
    checks.record("axis", axis, devices.Axis)
    checks.integer("batch_size", batch_size)
    checks.federation(federation, whole=True)
    data, order, start, size, _ = tree.on_device(federation)

    def total_loss(params: Halves, batch: Batch) -> Array:
        network = Variables(params, variables.stats)
        outputs, _ = models.apply(model, network, batch.x, batch.mask, False)
        return loss(outputs, batch.y, batch.mask) * batch.mask.sum()

    def client(slot: tuple[Array, Array]) -> tuple[Tree, tuple[Array, Array, Halves]]:
        """Return (the direction of a client's gradient, (loss, norm, invariance))."""
        who, size = slot  # 0 and 0 if the axis has appended the slot
        shard = Shard(data, order, start[who], size, who)

        def sums(batch: Batch) -> tuple[Array, Halves]:
            return jax.value_and_grad(total_loss)(variables.params, batch)

        count = jnp.maximum(size, 1)
        value, grads = jax.tree.map(
            lambda leaf: leaf / count.astype(leaf.dtype),
            local.fold(shard, sums, batch_size=batch_size),
        )
        norm = optax.tree.norm(grads)
        direction = optax.tree.scale(1 / jnp.where(norm > 0, norm, 1), grads)
        invariance = Halves(*map(_inner, grads, variables.params))
        return direction, (value, norm, invariance)

    def add(total: Tree, directions: Tree, slots: Tree) -> Tree:
        del slots
        return jax.tree.map(lambda sum_, each: sum_ + each.sum(0), total, directions)

    everyone = jnp.arange(federation.num_clients, dtype=jnp.int32), size
    zeros = optax.tree.zeros_like(variables.params)
    total, (value, norm, invariance) = axis(client, add, zeros, everyone)

    def mean_cosine(total: Tree, norm: Array) -> Array:
        # The square of a sum of m unit vectors is m plus twice the cosines of all pairs.
        count = (norm > 0).sum()
        cosines = optax.tree.norm(total, squared=True) - count
        return jnp.where(count > 1, cosines / jnp.maximum(count, 1) / jnp.maximum(count - 1, 1), 0)

    return Agreement(value, norm, invariance, axis.isolated(mean_cosine, total, norm))


def _inner(first: Tree, second: Tree) -> Array:
    """Return the inner product [] of two trees; 0 if they are empty."""
    return jnp.asarray(optax.tree.vdot(first, second))
