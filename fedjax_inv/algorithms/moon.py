"""MOON: FedAvg that pulls features to the server's, and away from those of the last local network.

    minimise  CE(f(x), y) + penalty mean of -log(e^g / (e^g + e^p))
    g = cos(z, z_received) / temperature,   p = cos(z, z_previous) / temperature,   z = m(e(x))

e is the body and m a projection, two dense layers with a ReLU between, which is trained and
averaged with the network. The constants z_received and z_previous are the z of the received network
and of the client's own last network; before its first turn that is the initial network.

Li et al. 2021, "Model-Contrastive Federated Learning" (CVPR; arXiv 2103.16257), Algorithm 1. The
paper leaves open, and we chose: the two other networks are in evaluation mode, and see examples
without augmentation. We changed: the classifier reads e(x) and not z, so that all methods serve
with the same network. The release has no contrast in the first round, where ours is ln 2 for all,
and a random last network for a client that first attends in a later one.
"""

from functools import partial
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, objectives, platforms, servers, tree, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.types import Array, Tree

_EPSILON = 1e-12  # added to squared norms under a root
_NAME = "projection"  # key of its parameters, beside those of the head


def contrastive(
    z: Array, z_global: Array, z_previous: Array, *, temperature: float | Array
) -> Array:
    """Return -log(e^g / (e^g + e^p)) of each row, where g and p are cosines / temperature, [B].

    The cosine of a row whose norm is at most 1e-6 is 0, with a gradient of 0.

    Args:
      z: features of the trained network [B, P].
      z_global: features of the received network [B, P].
      z_previous: features of the client's last network [B, P].
      temperature: the paper's tau, above 0.
    """
    chex.assert_equal_shape([z, z_global, z_previous])

    def unit(rows: Array) -> Array:
        rows = tree.wide(rows)
        squared = (rows**2).sum(-1, keepdims=True)
        # A row of zeros, as of units that are all off, would have a gradient of 1e6.
        return jnp.where(squared > _EPSILON, rows, 0) / jnp.sqrt(squared + _EPSILON)

    def cosine(other: Array) -> Array:
        return (unit(z) * unit(other)).sum(-1)

    return jax.nn.softplus((cosine(z_previous) - cosine(z_global)) / temperature)


class _Projection(nn.Module):
    width: int

    @nn.compact
    def __call__(self, features: Array) -> Array:
        hidden = nn.relu(nn.Dense(features.shape[-1])(features))
        return nn.Dense(self.width)(hidden)


class _Extractor(NamedTuple):
    """The part of a network that computes z."""

    body: Tree
    stats: Tree  # of the body
    projection: Tree  # () without a projection


def _extractor(variables: types.Variables, width: int) -> _Extractor:
    params, stats = variables
    return _Extractor(params.body, stats.body, params.head[_NAME] if width else ())


def _projected(projection: Tree, features: Array, width: int) -> Array:
    """Features [B, ..., D] as z [B, P]."""
    features = averaging.embedding(features)
    if not width:
        return features
    return jnp.asarray(_Projection(width).apply({"params": projection}, features))


def _gradient(
    model: types.Model,
    loss: types.Loss,
    penalty: float | Array,
    temperature: float | Array,
    width: int,
    visit: types.Visit,
) -> types.GradFn:
    """The gradient of a client's local steps."""

    def constant(fixed: _Extractor, batch: types.Batch) -> Array:
        """The z of a network that is not trained."""
        features, _ = model.encode(fixed.body, fixed.stats, batch.x, batch.mask, False)
        return _projected(fixed.projection, features, width)

    def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
        stats, mask = variables.stats, batch.mask
        body_key, head_key = jax.random.split(key)  # as `models.apply` does
        received = _extractor(visit.message.variables, width)
        z_received = constant(received, batch)
        apart = batch
        if platforms.on_gpu():  # or XLA would copy both networks into one matmul in each step
            apart = batch._replace(x=jax.lax.optimization_barrier(batch.x))
        z_previous = constant(visit.own, apart)

        def objective(params: types.Halves) -> tuple[Array, tuple[Array, Array, types.Halves]]:
            features, body = model.encode(params.body, stats.body, batch.x, mask, True, body_key)
            outputs, head = model.decode(params.head, stats.head, features, mask, True, head_key)
            value = loss(outputs, batch.y, mask)
            projection = _extractor(types.Variables(params, stats), width).projection
            z = _projected(projection, features, width)
            losses = contrastive(z, z_received, z_previous, temperature=temperature)
            contrast = objectives.masked_mean(losses, mask)
            return value + penalty * contrast, (value, contrast, types.Halves(body, head))

        grads, (value, contrast, after) = jax.grad(objective, has_aux=True)(variables.params)
        return types.Step(grads, after, {"loss": value, "contrast": contrast})

    return grad_fn


def moon(
    model: types.Model,
    work: types.Work,
    *,
    penalty: float | Array = 1.0,
    temperature: float | Array = 0.5,
    projection: int = 256,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> types.Algorithm:
    """Return MOON (Li et al. 2021, Algorithm 1). A client's own state is its last extractor of z.

    It reports both terms, the second one without its weight as "contrast".

    Args:
      penalty: weight of the contrast, the paper's mu, 1 or 5 there; 0 is FedAvg.
      temperature: the paper's tau.
      projection: outputs of the projection; 0 for no projection: z are then the body's features,
        averaged over positions.
    """
    checks.real("penalty", penalty)
    checks.positive("temperature", temperature)
    checks.integer("projection", projection, 0)
    training = averaging.averaging(
        model,
        work,
        partial(_gradient, model, loss, penalty, temperature, projection),
        server_optimizer=server_optimizer,
        weighting=weighting,
        init_client=lambda server, who: _extractor(server.variables, projection),
        remember=lambda visit, trained: _extractor(trained.local.variables, projection),
    )

    def init_server(setup: types.Setup) -> servers.Server:
        if not projection:
            return training.init_server(setup)
        params, stats = setup.variables
        shape, _ = averaging.output_shapes(model, setup)
        features = averaging.embedding(jnp.zeros(shape.shape, shape.dtype))
        drawn = _Projection(projection).init(setup.key, features)["params"]
        variables = types.Variables(types.Halves(params.body, {**params.head, _NAME: drawn}), stats)
        return training.init_server(setup._replace(variables=variables))

    return training._replace(init_server=init_server)
