"""Algorithms whose clients' classifiers drift by hand, to test CAFE's Feature Calibration.

Each client adds drift a d^T to the change of its classifier [K, D] before the upload: a is 1 for
the first half of the classes and 0 for the others, d the unit vector of equal entries. Features
that are outputs of a ReLU are not negative, so the drift raises the logits of these classes for
every example.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import checks
from fedjax_inv.algorithms import cafe as plain_cafe
from fedjax_inv.algorithms import fedavg as plain_fedavg
from fedjax_inv.averaging import Upload
from fedjax_inv.types import Algorithm, Array, Facts, Metrics, Model, Reply, Tree, Visit, Work

FACTS = Facts(needs_classes=True)


def pushed(num_classes: int) -> Array:
    """a: which classes the drift raises, as 0 and 1, [K]."""
    return (jnp.arange(num_classes) < num_classes // 2).astype(jnp.float32)


def direction(num_features: int) -> Array:
    """d: the direction of the drift, [D]."""
    return jnp.full(num_features, num_features**-0.5)


def measured(classifier: Array) -> Metrics:
    """What shows of the drift in a classifier [K, D].

    found: the squared cosine of d and the classifier's leading direction, whose share alpha Feature
    Calibration removes. planted: the share of a d^T in the classifier, by squared entries.
    """
    classes, along = pushed(len(classifier)), direction(classifier.shape[1])
    found = (plain_cafe.leading_direction(classifier) @ along) ** 2
    squares = (classifier**2).sum()
    part = (classes @ classifier @ along) ** 2 / classes.sum()
    return {"found": found, "planted": part / jnp.where(squares > 0, squares, 1)}


def _kernel(head: Tree) -> Array:
    """The classifier [K, D] in a head."""
    return next(leaf for leaf in jax.tree.leaves(head) if leaf.ndim == 2).T


def drifting(algorithm: Algorithm, drift: float | Array) -> Algorithm:
    """The algorithm, a relative of FedAvg, whose clients' classifiers drift.

    Raises UsageError for a drift below 0.
    """
    checks.real("drift", drift)
    (exchange,) = algorithm.exchanges

    def client(visit: Visit) -> Reply:
        reply = exchange.client(visit)
        upload: Upload = reply.upload

        def moved(leaf: Array) -> Array:
            if leaf.ndim != 2:
                return leaf
            num_features, num_classes = leaf.shape
            return leaf + drift * jnp.outer(direction(num_features), pushed(num_classes))

        params = upload.delta.params
        params = params._replace(head=jax.tree.map(moved, params.head))
        return reply._replace(
            upload=upload._replace(delta=upload.delta._replace(params=params)),
            metrics=reply.metrics | measured(_kernel(visit.message.variables.params.head)),
        )

    return algorithm._replace(exchanges=(exchange._replace(client=client),))


def fedavg(
    model: Model,
    work: Work,
    *,
    drift: float | Array = 0.0,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> Algorithm:
    """FedAvg with drift."""
    plain = plain_fedavg.fedavg(model, work, server_optimizer=server_optimizer)
    return drifting(plain, drift)


def cafe(
    model: Model,
    work: Work,
    *,
    drift: float | Array = 0.0,
    alpha: float | Array = 0.2,
    beta: float | Array = 0.2,
    feature_calibration: bool = True,
    parameter_calibration: bool = True,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> Algorithm:
    """CAFE with drift."""
    plain = plain_cafe.cafe(
        model,
        work,
        alpha=alpha,
        beta=beta,
        feature_calibration=feature_calibration,
        parameter_calibration=parameter_calibration,
        server_optimizer=server_optimizer,
    )
    return drifting(plain, drift)
