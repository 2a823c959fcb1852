"""FedMix: mixup with examples of other clients, of which only means are known.

    (1 - l) R(u, y) + l R(u, y_bar) + l (1 - l) <grad_u R(u, y), x_bar>,        u = (1 - l) x

in place of the risk R(x, y) of a minibatch: the Taylor series, up to l, of the risk of mixup,
(1 - l) R(u + l x_bar, y) + l R(u + l x_bar, y_bar). One mean example (x_bar, y_bar) is drawn for
each minibatch, and its x_bar stands beside every example: R is a mean over the minibatch, and so is
the inner product. Yoon et al. 2021, "FedMix: Approximation of Mixup under Mean Augmented Federated
Learning" (arXiv 2107.00233), Algorithm 2. Public code divides the last term by the size of the
minibatch once more.

The paper exchanges means before training. Here each client sends its own in the first round that it
attends, in an exchange before that round's training, and no more; the server keeps them. Whoever
finds none trains as in FedAvg. Inputs are mixed as the network sees them: 8-bit images in
[0, 1], and what is rendered once it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averages, averaging, checks, models, objectives, servers, tree
from fedjax_inv.averages import Averages
from fedjax_inv.checks import UsageError
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Cohort,
    Exchange,
    GradFn,
    Halves,
    Model,
    Reply,
    Setup,
    Step,
    Tree,
    Variables,
    Visit,
    Work,
)

_BATCH_SIZE = 64  # of the pass that takes a client's means; it changes nothing but time


def mixed_loss(
    loss_fn: Callable[[Array, Array], Any],
    x: Array,
    y: Array,
    mean_x: Array,
    mean_y: Array,
    *,
    ratio: float | Array,
    has_aux: bool = False,
) -> Any:
    """The loss of mixup with a mean example, to first order in `ratio`, as in the file's docstring.

    loss_fn: (x [B, ...], y [B, K]) -> the mean loss over a batch, a scalar; with has_aux (scalar,
    aux), where aux must not depend on y, and the result is (scalar, aux) too. It is called once.
    y: [B, K] one-hot labels. mean_x, mean_y: of one mean example, [...] and [K]. ratio: l in 0..1.
    Raises ValueError for another ratio and other shapes.
    """
    checks.real("ratio", ratio, 0, 1)
    if mean_x.shape != x.shape[1:] or mean_y.shape != y.shape[1:]:
        raise UsageError(
            f"mean_x {mean_x.shape} and mean_y {mean_y.shape}: must be one of x {x.shape} and one "
            f"of y {y.shape}"
        )
    targets = jnp.stack([y, jnp.broadcast_to(mean_y, y.shape)])

    def losses(mixed: Array) -> tuple[Any, Tree]:
        """Against both targets [2]; what does not depend on the target is computed once."""
        if has_aux:
            return jax.vmap(lambda y: loss_fn(mixed, y), out_axes=(0, None))(targets)
        return jax.vmap(lambda y: loss_fn(mixed, y))(targets), ()

    (own, other), (slope, _), aux = jax.jvp(
        losses, ((1 - ratio) * x,), (jnp.broadcast_to(mean_x, x.shape),), has_aux=True
    )
    value = (1 - ratio) * own + ratio * other + ratio * (1 - ratio) * slope
    return (value, aux) if has_aux else value


def fedmix(
    model: Model,
    work: Work,
    *,
    ratio: float | Array = 0.05,
    rows: int = 1,
    inputs: Callable[[Tree], Tree] = averages.as_numbers,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    weighting: str | aggregators.Weight = "size",
) -> Algorithm:
    """FedMix (Yoon et al. 2021, Algorithm 2), with cross-entropy.

    ratio: how much of a mean is mixed in, the paper's lambda; 0 is FedAvg. rows: means that a
    client sends at most, each of ceil(n / rows) of its n examples, the last one of what is left;
    1 is the mean of all. inputs: what of seen inputs is averaged and mixed, if they are neither
    8-bit images nor in floating point, one array; the model must take that too. weighting: of
    clients, as in FedAvg ("size" or "uniform"). Reports the mixed loss as "loss". Raises ValueError
    for values out of range, and before the first round for inputs that have no mean, as words.
    """
    checks.real("ratio", ratio, 0, 1)
    checks.integer("rows", rows)

    def seen(x: Tree) -> Array:
        return inputs(model.see(x))

    def init(setup: Setup) -> Averages:
        """Of no client yet; each leaf is [C, rows, ...]."""
        x = jax.eval_shape(seen, setup.sample)
        outputs = jax.eval_shape(
            lambda variables: models.predict(model, variables, setup.sample), setup.variables
        )
        leading = (setup.num_clients, rows)
        return Averages(
            jnp.zeros((*leading, *x.shape[1:]), x.dtype),
            jnp.zeros((*leading, outputs.shape[-1])),
            jnp.zeros(leading, bool),
        )

    def collection() -> Exchange:
        """The first exchange: who has not sent means yet sends them."""

        def client(visit: Visit) -> Reply:
            means = averages.of_shard(
                visit.shard,
                visit.key,
                num_classes=visit.message.shape[0],
                rows=rows,
                length=-(-visit.shard.size // rows),
                batch_size=_BATCH_SIZE,
                inputs=seen,
            )
            return Reply(visit.own, means, {})

        def update(server: servers.Server, sent: aggregators.Stack, cohort: Cohort) -> Tree:
            del cohort
            who = jnp.where(sent.present, sent.who, server.side.real.shape[0])
            return server._replace(side=tree.put(server.side, who, sent.values))

        return Exchange(
            lambda server: jnp.zeros_like(server.side.y[0, 0]),  # tells how many classes there are
            client,
            aggregators.stacked(),
            update,
            attends=lambda server, who, round: ~server.side.real[who].any(),
        )

    def all_rows(kept: Averages) -> Averages:
        """Those of all clients [C * rows], the real ones first."""
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), kept)
        # By counting, as a sort is slow on accelerators.
        index, real = jnp.arange(flat.real.shape[0]), jnp.cumsum(flat.real)
        place = jnp.where(flat.real, real - 1, real[-1] + index - real)
        return tree.put(optax.tree.zeros_like(flat), place, flat)

    def gradient_from(visit: Visit) -> GradFn:
        means = visit.message.side
        num_classes = means.y.shape[1]
        now = jnp.where(means.real.any(), ratio, 0)

        def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
            mean_x, mean_y = tree.take(averages.draw(means, jax.random.fold_in(key, 1), 1), 0)
            is_class = (batch.y >= 0) & (batch.y < num_classes)
            # A label that is none has NaN for a loss, as elsewhere.
            y = jnp.where(is_class[:, None], jax.nn.one_hot(batch.y, num_classes), jnp.nan)

            def objective(params: Halves) -> tuple[Array, Halves]:
                def risk(x: Array, y: Array) -> tuple[Array, Halves]:
                    given = Variables(params, variables.stats)
                    outputs, stats = models.apply(model, given, x, batch.mask, True, key)
                    return objectives.soft_cross_entropy(outputs, y, batch.mask), stats

                x = seen(batch.x)
                return mixed_loss(risk, x, y, mean_x, mean_y, ratio=now, has_aux=True)

            (value, stats), grads = jax.value_and_grad(objective, has_aux=True)(variables.params)
            return Step(grads, stats, {"loss": value})

        return grad_fn

    training = averaging.averaging(
        model,
        work,
        gradient_from,
        server_optimizer=server_optimizer,
        weighting=weighting,
        side=averaging.NOTHING._replace(
            init=init, send=all_rows, update=lambda kept, nothing: kept
        ),
    )
    return training._replace(exchanges=(collection(), *training.exchanges))
