"""The common part of FedAvg and its relatives: clients upload deltas, the server steps on the mean.

The file of a method holds only the differences: the gradient of a local step, the state of a
client, further messages and uploads, and how a client's delta and the server's step are scaled.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import aggregators, checks, local, models, objectives, servers, tree, types
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree


class Message(NamedTuple):
    """The message of the server."""

    variables: types.Variables  # the shared variables of the network
    side: Tree


class Upload(NamedTuple):
    """The upload of a client."""

    delta: Tree  # of the shared variables: the parameters' change, and the statistics
    side: Tree
    weight: Tree = ()  # nothing; the server adds the clients' weights


class Own(NamedTuple):
    """The state of a client that has variables of its own."""

    variables: types.Variables
    has_trained: Array | np.bool_  # [] bool, whether the client has had a turn


def variables_of(own: Own, newcomer: types.Variables) -> types.Variables:
    """Return a client's own variables, or before its first turn those of a newcomer."""
    if checks.is_concrete(own.has_trained):  # then the program depends on one of the two alone
        return own.variables if own.has_trained else newcomer
    return optax.tree.where(own.has_trained, own.variables, newcomer)


class MeasuredRisk(NamedTuple):
    """The state of a client that measures its mean loss in one exchange, for another one."""

    risk: Array  # [] R_i
    round: Array  # [] int32, the round in which it was measured; -1 before the first


class SideState(NamedTuple):
    """What a method keeps on the server and sends beside the network, by default nothing.

    Five functions, in the order in which they are called. A round sends `send(state)` with the
    network (`visit.message.side`), each client returns `upload` with its delta, `aggregate` makes
    one of all uploads, and `update` makes the new state.
    """

    init: Callable[[types.Setup], Tree] = lambda setup: ()  # the state before the first round
    send: Callable[[Tree], Tree] = lambda state: ()  # state -> its part of the message
    upload: Callable[[types.Visit, types.Trained], Tree] = lambda visit, trained: ()
    aggregate: types.Aggregator = aggregators.total()
    # (state, aggregated upload, mean delta) -> state; of statistics the delta is their change
    update: Callable[[Tree, Tree, types.Variables], Tree] = lambda state, aggregated, delta: state


def risk(
    model: types.Model,
    loss: types.Loss,
    params: types.Halves,
    stats: types.Halves,
    batch: types.Batch,
    key: Array,
) -> tuple[Array, types.Halves]:
    """Return (mean loss over the batch's real examples [], new statistics) in training mode."""
    variables = types.Variables(params, stats)
    outputs, stats = models.apply(model, variables, batch.x, batch.mask, True, key)
    return loss(outputs, batch.y, batch.mask), stats


def mean_loss(
    model: types.Model,
    loss: types.Loss,
    variables: types.Variables,
    shard: types.Shard,
    *,
    batch_size: int,
) -> Array:
    """Return the mean loss [] over all examples of a client, in evaluation mode; 0 if it has none.

    `batch_size` examples at once change only time and memory.
    """

    def total(batch: types.Batch) -> Array:
        outputs = models.predict(model, variables, batch.x)
        value = loss(outputs, batch.y, batch.mask)
        return tree.wide(value) * batch.mask.sum()

    return local.fold(shard, total, batch_size=batch_size) / jnp.maximum(shard.size, 1)


def embedding(features: Array) -> Array:
    """Return features [B, ..., D] averaged over the axes between (an image's positions), [B, D]."""
    return features.mean(tuple(range(1, features.ndim - 1)))


def output_shapes(model: types.Model, setup: types.Setup) -> tuple[Tree, Array]:
    """Return the shapes and dtypes of the outputs of the body and of the network for one input."""

    def outputs(x: Tree) -> tuple[Tree, Array]:
        params, stats = setup.variables
        features, _ = model.encode(params.body, stats.body, x, jnp.ones(1, bool), False)
        return features, models.predict(model, setup.variables, x)

    return jax.eval_shape(outputs, setup.sample)


def gradient(model: types.Model, loss: types.Loss = objectives.cross_entropy) -> types.GradFn:
    """Return the gradient of `risk`; its steps report the risk as "loss"."""

    def grad_fn(variables: types.Variables, batch: types.Batch, key: Array) -> types.Step:
        def of(params: types.Halves) -> tuple[Array, types.Halves]:
            return risk(model, loss, params, variables.stats, batch, key)

        (value, stats), grads = jax.value_and_grad(of, has_aux=True)(variables.params)
        return types.Step(grads, stats, {"loss": value})

    return grad_fn


def uniform_over(has_examples: Array) -> Array:
    """Return the weights [C] of clients before the first round: uniform, 0 without examples."""
    return has_examples / jnp.maximum(has_examples.sum(), 1)


def serving_the_server(
    model: types.Model,
    server_optimizer: optax.GradientTransformation,
    exchanges: tuple[types.Exchange, ...],
    *,
    init_client: types.InitClient = lambda server, who: (),
    side: Callable[[types.Setup], Tree] = lambda setup: (),
) -> types.Algorithm:
    """Return an algorithm whose server is a `servers.Server`, whose network serves all clients.

    `side` gives the method's own state on the server before the first round.
    """
    return types.Algorithm(
        lambda setup: servers.init(server_optimizer, setup.variables, side(setup)),
        init_client,
        exchanges,
        lambda server, own, x: models.predict(model, server.variables, x),
        network=lambda server: server.variables,
    )


def averaging(
    model: types.Model,
    work: types.Work,
    gradient_from: Callable[[types.Visit], types.GradFn | types.LocalGradFn],
    *,
    server_optimizer: optax.GradientTransformation,
    weighting: str | aggregators.Weight,
    init_client: types.InitClient = lambda server, who: (),
    start: Callable[[types.Visit], types.Local] | None = None,
    remember: Callable[[types.Visit, types.Trained], Tree] = lambda visit, trained: visit.own,
    shared: Callable[[types.Variables], types.Variables] = lambda variables: variables,
    serve: Callable[[servers.Server, Tree], types.Variables] | None = None,
    side: SideState | None = None,
    scale_delta: Callable[[types.Visit, types.Trained], Array] | None = None,
    server_delta: Callable[[Tree, types.Variables, Tree], types.Variables] | None = None,
) -> types.Algorithm:
    """Return FedAvg whose clients step along `gradient_from(visit)`.

    Args:
      model: the network.
      work: local training; `local.seeing_local` of it for a `LocalGradFn`.
      gradient_from: visit -> the gradient of the client's local steps.
      server_optimizer: the optimizer of the server, on the mean delta.
      weighting: the weights of the deltas, as in `aggregators.weight_of`.
      init_client: a client's state before its first turn.
      start: visit -> the state in which training starts; default: that of the received network.
      remember: (visit, result of training) -> the client's new state.
      shared: variables -> the variables that server and clients exchange; default: all.
      serve: (server, own) -> the network that serves a client, if that is not the server's.
      side: the method's own state, messages and uploads; default: none.
      scale_delta: (visit, result of training) -> the factor [] of the client's change of the
        parameters; default: 1. Statistics have none, so that a variance stays positive. If a
        client's weight depends on the message or on its examples, write an exchange, as `afl` does.
      server_delta: (side state after its update, mean delta, aggregated side upload) -> the delta
        of the server's step; default: the mean delta.

    The algorithm's `network` is the server's, of the shared variables alone; a method with other
    ones replaces it.
    """
    beside = side or SideState()
    begin = start or (lambda visit: work.init(visit.message.variables))

    def client(visit: types.Visit) -> types.Reply:
        trained = work.run(gradient_from(visit), begin(visit), visit.shard, visit.key)
        delta = servers.upload_of(shared(trained.local.variables), visit.message.variables)
        if scale_delta:
            delta = _scaled(scale_delta(visit, trained), delta)
        upload = Upload(delta, beside.upload(visit, trained))
        return types.Reply(remember(visit, trained), upload, trained.metrics)

    def predict(server: servers.Server, own: Tree, x: Tree) -> Array:
        return models.predict(model, serve(server, own) if serve else server.variables, x)

    exchange = types.Exchange(
        lambda server: Message(server.variables, beside.send(server.side)),
        client,
        _aggregate(weighting, beside),
        _update(server_optimizer, beside, server_delta),
        # Uploads of a side state may be increments; a stale one that stands in for a missing one
        # would be applied twice.
        blank=_blank if side is None else None,
    )
    return types.Algorithm(
        lambda setup: servers.init(server_optimizer, shared(setup.variables), beside.init(setup)),
        init_client,
        (exchange,),
        predict,
        personal=serve is not None,
        network=lambda server: server.variables,
    )


def sole_exchange(algorithm: types.Algorithm) -> types.Exchange:
    """Return the only exchange of an algorithm whose clients upload what FedAvg's do.

    Raises UsageError for another upload, such as one with a side state.
    """
    exchange = algorithm.exchanges[0]
    if len(algorithm.exchanges) > 1 or exchange.blank is None:
        text = "must upload the change of its parameters alone, once a round, as fedavg does"
        raise UsageError("algorithm", ..., text)
    return exchange


def check_upload(exchange: types.Exchange, server: Tree, *, stats: bool) -> None:
    """Raise UsageError unless the upload of a `sole_exchange` is an `Upload` of a delta alone.

    stats: whether the delta may have statistics.
    """
    assert exchange.blank
    blank = exchange.blank(server)
    if not isinstance(blank, Upload) or jax.tree.leaves((blank.side, blank.weight)):
        raise UsageError("algorithm", ..., "must upload a delta alone, as fedavg does")
    if jax.tree.leaves(blank.delta.stats) and not stats:
        text = "must have no statistics, as BatchNorm has: they would not be private"
        raise UsageError("model", ..., text)


def _scaled(factor: Array, delta: types.Variables) -> types.Variables:
    chex.assert_shape(factor, ())
    return delta._replace(params=tree.scaled(factor, delta.params))


def _blank(server: servers.Server) -> Upload:
    """Return an upload of zeros."""
    return Upload(optax.tree.zeros_like(server.variables), ())


def _aggregate(weighting: str | aggregators.Weight, side: SideState) -> types.Aggregator:
    """Return the aggregator of `Upload`."""
    weight = aggregators.weight_of(weighting)
    mean = aggregators.mean(weight)
    total = aggregators.weight_sum(weight)
    return aggregators.combine(Upload(mean, side.aggregate, total))


def _update(
    optimizer: optax.GradientTransformation,
    side: SideState,
    server_delta: Callable[[Tree, types.Variables, Tree], types.Variables] | None,
) -> types.Update:
    """Return the server's step along the mean delta, after the update of the side state."""

    def update(server: servers.Server, mean: Upload, cohort: types.Cohort) -> servers.Server:
        del cohort
        delta = servers.delta_of(server, mean.delta, mean.weight)
        state = side.update(server.side, mean.side, delta)
        if server_delta:
            delta = server_delta(state, delta, mean.side)
        return servers.update(optimizer, server, delta)._replace(side=state)

    return update
