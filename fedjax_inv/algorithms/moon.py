"""MOON: FedAvg that pulls features to the server's, and away from those of the last local network.

    minimise  CE(f(x), y) + penalty mean of -log(e^g / (e^g + e^p))
    g = cos(z, z_received) / temperature,   p = cos(z, z_previous) / temperature,   z = m(e(x))

e is the body and m a projection, two dense layers with a ReLU between, which is trained and
averaged with the network. The constants z_received and z_previous are the z of the received network
and of the client's own last network; before its first turn that is the initial network.

Li et al. 2021, "Model-Contrastive Federated Learning" (CVPR; arXiv 2103.16257), Algorithm 1. The
paper leaves open, and we chose: the two other networks are in evaluation mode, and see examples
without augmentation. We changed: the classifier reads e(x) and not z, so that all methods serve
with the same network.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, objectives, servers, tree
from fedjax_inv.aggregators import Weight
from fedjax_inv.checks import UsageError
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    GradFn,
    Halves,
    Loss,
    Model,
    Setup,
    Step,
    Tree,
    Variables,
    Visit,
    Work,
)

_EPSILON = 1e-12  # added to squared norms under a root
_NAME = "projection"  # key of its parameters, beside those of the head


def _check_temperature(temperature: float | Array) -> None:
    checks.real("temperature", temperature)
    if checks.is_known_zero(temperature):
        raise UsageError("temperature", temperature, "must be above 0")


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

    Raises:
      UsageError: for different shapes, and for a temperature that is not above 0.
    """
    checks.same_shapes(z=z, z_global=z_global, z_previous=z_previous)
    _check_temperature(temperature)

    def unit(rows: Array) -> Array:
        rows = tree.wide(rows)
        squared = (rows**2).sum(-1, keepdims=True)
        # A row of zeros, as of units that are all off, would have a gradient of 1e6.
        return jnp.where(squared > _EPSILON, rows, 0) / jnp.sqrt(squared + _EPSILON)

    def cosine(other: Array) -> Array:
        return (unit(z) * unit(other)).sum(-1)

    return jax.nn.softplus((cosine(z_previous) - cosine(z_global)) / temperature)


class _Extractor(NamedTuple):
    """The part of a network that computes z."""

    body: Tree
    stats: Tree  # of the body
    projection: Tree  # () without a projection


class _Projection(nn.Module):
    width: int

    @nn.compact
    def __call__(self, features: Array) -> Array:
        hidden = nn.relu(nn.Dense(features.shape[-1])(features))
        return nn.Dense(self.width)(hidden)


def moon(
    model: Model,
    work: Work,
    *,
    penalty: float | Array = 1.0,
    temperature: float | Array = 0.5,
    projection: int = 256,
    loss: Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "size",
) -> Algorithm:
    """Return MOON (Li et al. 2021, Algorithm 1). A client's own state is its last extractor of z.

    It reports both terms, the second one without its weight as "contrast".

    Args:
      model: the network.
      work: local training.
      penalty: weight of the contrast, the paper's mu, 1 or 5 there; 0 is FedAvg.
      temperature: the paper's tau.
      projection: outputs of the projection; 0 for no projection: z are then the body's features,
        averaged over positions.
      loss: the objective of local training.
      server_optimizer: the server's optimizer, on the mean delta.
      weighting: weights of clients, "size" or "uniform"; in Python also a function of `Slots`.

    Raises:
      UsageError: for values out of range; before the first round for a head whose parameters are no
        dict, as the projection's are added to it.
    """
    checks.record("model", model, Model)
    checks.function("loss", loss)
    checks.real("penalty", penalty)
    _check_temperature(temperature)
    checks.integer("projection", projection, 0)
    module = _Projection(projection)

    def extractor(variables: Variables) -> _Extractor:
        params, stats = variables
        return _Extractor(params.body, stats.body, params.head[_NAME] if projection else ())

    def projected(params: Tree, features: Array) -> Array:
        features = averaging.embedding(features)
        return jnp.asarray(module.apply({"params": params}, features)) if projection else features

    def constant(fixed: _Extractor, batch: Batch) -> Array:
        """The z of a network that is not trained."""
        features, _ = model.encode(fixed.body, fixed.stats, batch.x, batch.mask, False)
        return projected(fixed.projection, features)

    def gradient_from(visit: Visit) -> GradFn:
        received, previous = extractor(visit.message.variables), visit.own

        def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
            stats = variables.stats
            z_received, z_previous = constant(received, batch), constant(previous, batch)

            def objective(params: Halves) -> tuple[Array, tuple[Array, Array, Halves]]:
                body_key, head_key = jax.random.split(key)  # as `models.apply` does
                features, body = model.encode(
                    params.body, stats.body, batch.x, batch.mask, True, body_key
                )
                outputs, head = model.decode(
                    params.head, stats.head, features, batch.mask, True, head_key
                )
                value = loss(outputs, batch.y, batch.mask)
                z = projected(params.head[_NAME] if projection else (), features)
                losses = contrastive(z, z_received, z_previous, temperature=temperature)
                contrast = objectives.masked_mean(losses, batch.mask)
                return value + penalty * contrast, (value, contrast, Halves(body, head))

            grads, (value, contrast, after) = jax.grad(objective, has_aux=True)(variables.params)
            return Step(grads, after, {"loss": value, "contrast": contrast})

        return grad_fn

    training = averaging.averaging(
        model,
        work,
        gradient_from,
        server_optimizer=server_optimizer,
        weighting=weighting,
        init_client=lambda server, who: extractor(server.variables),
        remember=lambda visit, trained: extractor(trained.local.variables),
    )

    def init_server(setup: Setup) -> servers.Server:
        if not projection:
            return training.init_server(setup)
        params, stats = setup.variables
        if not hasattr(params.head, "keys") or _NAME in params.head:
            raise UsageError(
                "model",
                ...,
                f"its head must be a dict without {_NAME!r}, or {{projection}} must be 0",
                projection=("projection", projection),
            )
        real = jnp.ones(jax.tree.leaves(setup.sample)[0].shape[0], bool)
        features, _ = model.encode(params.body, stats.body, setup.sample, real, False)
        drawn = module.init(setup.key, averaging.embedding(features))["params"]
        variables = Variables(Halves(params.body, {**params.head, _NAME: drawn}), stats)
        return training.init_server(setup._replace(variables=variables))

    return training._replace(init_server=init_server)
