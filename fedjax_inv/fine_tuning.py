"""Personal networks after training: each client trains the global network on its own examples."""

import jax
import jax.numpy as jnp

from fedjax_inv import averaging, checks, freezing, models, objectives, tree, wrapping
from fedjax_inv.checks import UsageError
from fedjax_inv.rounds import State
from fedjax_inv.types import Algorithm, Array, Federation, Loss, Model, Shard, Tree, Variables, Work


def fine_tuned(
    algorithm: Algorithm,
    state: State,
    federation: Federation,
    *,
    model: Model,
    work: Work,
    key: Array,
    loss: Loss = objectives.cross_entropy,
    client_chunk: int = 1,
) -> tuple[Algorithm, State]:
    """Return an algorithm and a state that serve each client with a fine-tuned network.

    It is FedAvg's network with local fine-tuning, as in Wang et al. 2019, "Federated Evaluation of
    On-device Personalization" (arXiv 1910.10252), for any algorithm with a global network.

        personal = fine_tuning.fine_tuned(algorithm, state, train, model=model, work=work, key=key)
        scores = evaluation.evaluate(*personal, test)

    The function is pure, so `jax.vmap` applies it to several runs. All clients' networks are in
    memory at once.

    Args:
      algorithm: the algorithm of the run, with a `network`, which it serves by `models.predict`.
      state: the state after training.
      federation: the training examples of the clients; not a compact one.
      model: the network.
      work: the fine-tuning, such as `local.epochs(optimizer, batch_size=32, num_epochs=5)`.
      key: the random key of the fine-tuning; each client gets a key of its own.
      loss: the objective of the fine-tuning.
      client_chunk: clients that train at the same time.

    Returns:
      (algorithm, state): an algorithm that is personal, and serves a client that was never seen
      with the global network; and a state whose clients are the fine-tuned networks, [C, ...]. A
      client without examples has the global network.

    Raises:
      UsageError: if the algorithm has no global network, is personal already, trains a part of
        its network or computes outputs in a way of its own, and for arguments of other types.
    """
    checks.record("algorithm", algorithm, Algorithm)
    checks.record("state", state, State)
    checks.federation(federation, whole=True)
    checks.record("model", model, Model)
    checks.record("work", work, Work)
    checks.key("key", key)
    checks.integer("client_chunk", client_chunk)
    if algorithm.network is None:
        raise UsageError("algorithm", ..., "has no global network to fine-tune, must have one")
    if algorithm.personal:
        raise UsageError("algorithm", ..., "is personal already, must serve all clients alike")
    if any(isinstance(layer, freezing.Server) for layer in wrapping.layers(state.server)):
        raise UsageError("state", ..., "is of `freezing.train_only`, must train all parameters")
    if algorithm.own_outputs:
        raise UsageError("algorithm", ..., "computes outputs in a way of its own, must not")
    network_of, grad_fn = algorithm.network, averaging.gradient(model, loss)
    state, federation = tree.on_device((state, federation))
    start = network_of(state.server)
    data, order, first, size, _ = federation

    def client(who: Array) -> Variables:
        shard = Shard(data, order, first[who], size[who], who)
        own_key = jax.random.fold_in(key, who)
        return work.run(grad_fn, work.init(start), shard, own_key).local.variables

    everyone = jnp.arange(federation.num_clients, dtype=jnp.int32)
    clients = jax.lax.map(client, everyone, batch_size=min(client_chunk, len(everyone)))

    def predict(server: Tree, own: Variables, x: Tree) -> Array:
        del server
        return models.predict(model, own, x)

    personal = algorithm._replace(
        init_client=lambda server, who: network_of(server), predict=predict, personal=True
    )
    return personal, state._replace(clients=clients)
