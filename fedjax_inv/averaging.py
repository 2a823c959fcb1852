"""What FedAvg and its many relatives share: local training, deltas up, an optimizer on their mean.

A method says what differs: the gradient of a local step, what a client remembers, and what travels
beside the network. The method's own file holds that and nothing else.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

from fedjax_inv import aggregators, models, objectives, servers
from fedjax_inv.types import (
    Algorithm,
    Array,
    Batch,
    Cohort,
    Exchange,
    GradFn,
    Halves,
    InitClient,
    Local,
    Loss,
    Model,
    Reply,
    Setup,
    Step,
    Trained,
    Tree,
    Variables,
    Visit,
    Work,
)


class Message(NamedTuple):
    """What the server sends."""

    variables: Variables  # of the network, those that are shared
    side: Tree


class Upload(NamedTuple):
    """What a client sends."""

    delta: Tree  # how far local training moved those of the `Variables` that are shared
    side: Tree


class SideState(NamedTuple):
    """What a method keeps on the server and exchanges beside the network."""

    init: Callable[[Setup], Tree]  # what the server keeps
    send: Callable[[Tree], Tree]  # what is kept -> what clients receive of it
    upload: Callable[[Visit, Trained], Tree]
    aggregate: Tree  # an aggregator of the upload, or a tree of them
    update: Callable[[Tree, Tree], Tree]  # (what is kept, aggregated upload) -> what is kept


NOTHING = SideState(
    init=lambda setup: (),
    send=lambda kept: (),
    upload=lambda visit, trained: (),
    aggregate=(),
    update=lambda kept, aggregated: (),
)


def risk(
    model: Model, loss: Loss, params: Halves, stats: Halves, batch: Batch, key: Array
) -> tuple[Array, Halves]:
    """(mean loss over the batch's real examples, changed stats), in training mode."""
    variables = Variables(params, stats)
    outputs, stats = models.apply(model, variables, batch.x, batch.mask, True, key)
    return loss(outputs, batch.y, batch.mask), stats


def embedding(features: Array) -> Array:
    """Features [B, ..., D], averaged over the axes between, an image's positions; [B, D]."""
    return features.mean(tuple(range(1, features.ndim - 1)))


def gradient(model: Model, loss: Loss = objectives.cross_entropy) -> GradFn:
    """The gradient of `risk`; reports it as "loss"."""

    def grad_fn(variables: Variables, batch: Batch, key: Array) -> Step:
        def of(params: Halves) -> tuple[Array, Halves]:
            return risk(model, loss, params, variables.stats, batch, key)

        (value, stats), grads = jax.value_and_grad(of, has_aux=True)(variables.params)
        return Step(grads, stats, {"loss": value})

    return grad_fn


def averaging(
    model: Model,
    work: Work,
    gradient_from: Callable[[Visit], GradFn],
    *,
    server_optimizer: optax.GradientTransformation,
    weighting: str | aggregators.Weight,
    init_client: InitClient = lambda server, who: (),
    start: Callable[[Visit], Local] | None = None,
    remember: Callable[[Visit, Trained], Tree] = lambda visit, trained: visit.own,
    shared: Callable[[Variables], Variables] = lambda variables: variables,
    serve: Callable[[servers.Server, Tree], Variables] | None = None,
    side: SideState = NOTHING,
) -> Algorithm:
    """FedAvg whose clients step along `gradient_from(visit)`.

    weighting: of the deltas, as in `aggregators.weight_of`. start: where training starts; by
    default from the network received, with a new optimizer state. remember: what a client keeps.
    shared: which of the variables travel. serve: (server, own) -> the variables that a client is
    served with, for a personal algorithm; by default the server's. side: what else travels.
    """
    begin = start or (lambda visit: work.init(visit.message.variables))
    return averaging_of(
        model,
        lambda visit: work.run(gradient_from(visit), begin(visit), visit.shard, visit.key),
        server_optimizer=server_optimizer,
        weighting=weighting,
        init_client=init_client,
        remember=remember,
        shared=shared,
        serve=serve,
        side=side,
    )


def averaging_of(
    model: Model,
    train: Callable[[Visit], Trained],
    *,
    server_optimizer: optax.GradientTransformation,
    weighting: str | aggregators.Weight,
    init_client: InitClient = lambda server, who: (),
    remember: Callable[[Visit, Trained], Tree] = lambda visit, trained: visit.own,
    shared: Callable[[Variables], Variables] = lambda variables: variables,
    serve: Callable[[servers.Server, Tree], Variables] | None = None,
    side: SideState = NOTHING,
) -> Algorithm:
    """FedAvg with a local training of one's own; the other arguments are those of `averaging`."""
    weight = aggregators.weight_of(weighting)

    def init_server(setup: Setup) -> servers.Server:
        return servers.init(server_optimizer, shared(setup.variables), side.init(setup))

    def broadcast(server: servers.Server) -> Message:
        return Message(server.variables, side.send(server.side))

    def client(visit: Visit) -> Reply:
        trained = train(visit)
        delta = optax.tree.sub(shared(trained.local.variables), visit.message.variables)
        upload = Upload(delta, side.upload(visit, trained))
        return Reply(remember(visit, trained), upload, trained.metrics)

    def update(server: servers.Server, mean: Upload, cohort: Cohort) -> servers.Server:
        del cohort
        server = servers.update(server_optimizer, server, mean.delta)
        return server._replace(side=side.update(server.side, mean.side))

    def predict(server: servers.Server, own: Tree, x: Tree) -> Array:
        variables = serve(server, own) if serve else server.variables
        return models.predict(model, variables, x)

    def blank(server: servers.Server) -> Upload:
        return Upload(optax.tree.zeros_like(server.variables), ())

    exchange = Exchange(
        broadcast,
        client,
        Upload(aggregators.mean(weight), side.aggregate),
        update,
        # What travels beside the network may be a change, which counts once.
        blank=blank if side is NOTHING else None,
    )
    return Algorithm(
        init_server,
        init_client,
        (exchange,),
        predict,
        personal=serve is not None,
        network=lambda server: server.variables,
    )
