"""FedSR: FedAvg with a random representation that stays small, and near a Gaussian of its class.

    minimise  CE(d(z), y) + l2r mean of E||z||^2 + cmi mean of KL(N(e(x), s(x)^2) || N(m_y, s_y^2))
    z = e(x) + s(x) n,   n ~ N(0, I),   s(x) = softplus(g(e(x)))

e is the body, d the head, and g a dense layer over the last axis of the features. The Gaussians are
diagonal; m_k and s_k, of class k, have the features' shape. They and g are trained and averaged
with the network. Evaluation takes the mean representation e(x).

Nguyen, Torr and Lim 2022, "FedSR: A Simple and Effective Domain Generalization Method for Federated
Learning" (NeurIPS). As in the authors' release, a step draws one z per example, s_k is a softplus,
and it starts at softplus(1), m_k at 0. We chose: the mean is the body's output itself, so that
FedSR fits any network with a cut, and serves with the network of all other methods. E||z||^2 and KL
are closed forms, summed over the features. The release has one dense layer for mean and deviation,
takes ||z|| of the drawn z, multiplies z in KL by a learned number, averages predictions over 20
draws, keeps the optimizer's momentum over rounds, and leaves m_k and s_k with each client;
averaged, they draw all clients to the same Gaussians.
"""

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_inv import averaging, checks, objectives, servers, types
from fedjax_inv.aggregators import Weight
from fedjax_inv.types import Array, Tree

FACTS = types.Facts(needs_classes=True)
_LEAST = 1e-6  # added to deviations, or their logarithm might be infinite
_NAME = "gaussians"  # key of the parameters of g, m and s, beside those of the head


def squared_norm(mean: Array, deviation: Array) -> Array:
    """Return E||z||^2 of each row for z ~ N(mean, deviation^2), [B], both [B, ...]."""
    chex.assert_equal_shape([mean, deviation])
    return _summed(mean**2 + deviation**2)


def divergence(mean: Array, deviation: Array, to_mean: Array, to_deviation: Array) -> Array:
    """Return KL(N(mean, deviation^2) || N(to_mean, to_deviation^2)) of each row, [B], in nats.

    All arguments are [B, ...]; deviations are above 0.
    """
    chex.assert_equal_shape([mean, deviation, to_mean, to_deviation])
    ratio = deviation / to_deviation
    apart = (mean - to_mean) / to_deviation
    return _summed((ratio**2 + apart**2 - 1) / 2 - jnp.log(ratio))


def _summed(terms: Array) -> Array:
    return terms.reshape(terms.shape[0], -1).sum(1)


def _positive(raw: Array) -> Array:
    return jax.nn.softplus(raw) + _LEAST


def _gaussians(model: types.Model, setup: types.Setup) -> Tree:
    """The initial parameters of g, m and s."""
    features, outputs = averaging.output_shapes(model, setup)
    chex.assert_type(features, float)
    # Parameters in bfloat16 would lose small steps.
    width = features.shape[-1]
    dtype = jnp.promote_types(features.dtype, jnp.float32)
    of_classes = (outputs.shape[-1], *features.shape[1:])
    return {
        "kernel": jax.nn.initializers.lecun_normal()(setup.key, (width, width), dtype),
        "bias": jnp.zeros(width, dtype),
        "mean": jnp.zeros(of_classes, dtype),
        "raw_deviation": jnp.ones(of_classes, dtype),
    }


def _gradient(
    model: types.Model, loss: types.Loss, l2r: float | Array, cmi: float | Array
) -> types.GradFn:
    """The gradient of a client's local steps."""

    def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
        stats, mask = variables.stats, batch.mask
        # The first two keys are those of `models.apply`.
        body_key, head_key, noise_key = jax.random.split(key, 3)

        def objective(params: types.Halves) -> tuple[Array, tuple[types.Halves, types.Metrics]]:
            mean, body = model.encode(params.body, stats.body, batch.x, mask, True, body_key)
            gaussians = params.head[_NAME]
            mean = mean.astype(gaussians["mean"].dtype)
            deviation = _positive(mean @ gaussians["kernel"] + gaussians["bias"])
            noise = jax.random.normal(noise_key, mean.shape, mean.dtype)
            outputs, head = model.decode(
                params.head, stats.head, mean + deviation * noise, mask, True, head_key
            )
            # By products, as the gradient of an index is a scatter.
            is_of = jax.nn.one_hot(batch.y, len(gaussians["mean"]), dtype=mean.dtype)
            class_mean, class_raw = (
                jnp.tensordot(is_of, gaussians[name], 1, precision="highest")
                for name in ("mean", "raw_deviation")
            )
            norms = squared_norm(mean, deviation)
            divergences = divergence(mean, deviation, class_mean, _positive(class_raw))
            metrics = {
                "loss": loss(outputs, batch.y, mask),
                "squared_norm": objectives.masked_mean(norms, mask),
                "divergence": objectives.masked_mean(divergences, mask),
            }
            total = metrics["loss"] + l2r * metrics["squared_norm"] + cmi * metrics["divergence"]
            return total, (types.Halves(body, head), metrics)

        grads, (after, metrics) = jax.grad(objective, has_aux=True)(variables.params)
        return types.Step(grads, after, metrics)

    return grad_fn


def fedsr(
    model: types.Model,
    work: types.Work,
    *,
    l2r: float | Array = 0.01,
    cmi: float | Array = 0.001,
    loss: types.Loss = objectives.cross_entropy,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | Weight = "uniform",
) -> types.Algorithm:
    """Return FedSR (Nguyen et al. 2022); the representation is the body's output.

    It reports all terms, the last two without their weights as "squared_norm" and "divergence". The
    default weights are those of the authors' release for PACS.

    Args:
      l2r: weight of the squared norm of the representation.
      cmi: weight of its divergence from the Gaussian of the class, a bound of the conditional
        mutual information of the representation and the input.
    """
    checks.real("l2r", l2r)
    checks.real("cmi", cmi)
    grad_fn = _gradient(model, loss, l2r, cmi)
    training = averaging.averaging(
        model, work, lambda visit: grad_fn, server_optimizer=server_optimizer, weighting=weighting
    )

    def init_server(setup: types.Setup) -> servers.Server:
        params, stats = setup.variables
        head = {**params.head, _NAME: _gaussians(model, setup)}
        variables = types.Variables(types.Halves(params.body, head), stats)
        return training.init_server(setup._replace(variables=variables))

    return training._replace(init_server=init_server)
