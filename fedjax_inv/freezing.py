"""Training of a chosen part of the network: all other parameters stay as they were."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fedjax_inv import tree, types
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree


class Server(NamedTuple):
    """The server of an algorithm that trains a part of the network."""

    wrapped: Tree  # the server of the algorithm, whose networks have the trained part alone
    frozen: types.Variables  # the other part, with None in place of the trained leaves


def _chosen(params: types.Halves, patterns: Sequence[str]) -> types.Halves:
    """Return for each parameter whether a pattern fits its name or the beginning of it."""
    return jax.tree_util.tree_map_with_path(lambda at, leaf: _fits(_name(at), patterns), params)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, each) for p in patterns for each in (p, f"{p}/*"))


def _name(place: tuple) -> str:
    return jax.tree_util.keystr(place, simple=True, separator="/")


def check(params: types.Halves, patterns: Sequence[str]) -> None:
    """Raise UsageError if a pattern fits no parameter, or if together they fit all."""
    _check_fit(params, patterns)
    if all(jax.tree.leaves(_chosen(params, patterns))):
        raise UsageError("patterns", ",".join(patterns), "must leave out some parameter")


def _check_fit(params: types.Halves, patterns: Sequence[str]) -> None:
    """Raise UsageError if a pattern fits no parameter."""
    names = [_name(place) for place, _ in jax.tree_util.tree_leaves_with_path(params)]
    for pattern in patterns:
        if not any(jax.tree.leaves(_chosen(params, [pattern]))):
            allowed = f"{pattern} must fit a parameter, such as {names[0]} or {names[-1]}"
            raise UsageError("patterns", ",".join(patterns), allowed)


def is_frozen(params: types.Halves, patterns: Sequence[str]) -> types.Halves:
    """Return which halves have parameters and train none of them, as two bools."""
    halves = map(jax.tree.leaves, _chosen(params, patterns))
    return types.Halves(*(len(half) > 0 and not any(half) for half in halves))


def _parted(
    variables: types.Variables, patterns: Sequence[str]
) -> tuple[types.Variables, types.Variables]:
    """Return (trained, frozen): the variables twice, with None for the leaves of the other part.

    The statistics of a half are frozen if all of its parameters are.
    """
    frozen = is_frozen(variables.params, patterns)

    def is_trained(path: tuple[str, ...]) -> bool:
        kind, half, *_ = path
        if kind == "stats":
            return not getattr(frozen, half)
        return _fits("/".join(path[1:]), patterns)

    return tree.partition(variables, is_trained)


def _filled(trained: Tree, frozen: Tree) -> Tree:
    """Return the tree of two parts; a method may have added entries to the trained one."""
    if trained is None or frozen is None:
        return frozen if trained is None else trained
    if isinstance(trained, Mapping) and isinstance(frozen, Mapping):
        return {name: _filled(trained[name], frozen.get(name)) for name in trained}
    if isinstance(trained, tuple) and not trained:  # of a method that shares no network
        return ()
    return tree.combine(trained, frozen)


def _completed(model: types.Model, frozen: types.Variables, patterns: Sequence[str]) -> types.Model:
    """Return the model whose variables are the trained part alone, also those that it draws."""

    def half(run: types.Apply, fixed: Tree, fixed_stats: Tree) -> types.Apply:
        leaves = jax.tree.leaves(fixed, is_leaf=lambda leaf: leaf is None)
        is_constant = len(leaves) > 0 and all(leaf is not None for leaf in leaves)

        def apply(params: Tree, stats: Tree, *inputs: Any) -> tuple[Tree, Tree]:
            whole = _filled(params, fixed)
            if not is_constant:
                return run(whole, stats, *inputs)
            x, mask, *_ = inputs  # in evaluation mode
            return run(whole, _filled(stats, fixed_stats), x, mask, False)[0], stats

        return apply

    params, stats = frozen

    def init(key: Array, x: Tree) -> types.Variables:
        return _parted(model.init(key, x), patterns)[0]

    return model._replace(
        init=init,
        encode=half(model.encode, params.body, stats.body),
        decode=half(model.decode, params.head, stats.head),
    )


def train_only(
    make: Callable[[types.Model], types.Algorithm], model: types.Model, patterns: Sequence[str]
) -> types.Algorithm:
    """Return an algorithm that trains a part of the network's parameters.

    The other parameters are constants for the algorithm: they have no gradient, decay and momentum,
    no client uploads or keeps them, and their bits never change. Optax's `set_to_zero` would not
    do: penalties of gradients and norms would still count them, and clients would upload them. The
    server sends them with every message, as a client may be new. A half of the network without a
    trained parameter runs in evaluation mode, so that its statistics are constants, too; in a half
    that is trained in part, all statistics move. For inputs that are augmented, `make` augments the
    model that it gets (`models.augmented`), or the augmentation of a frozen body would be off.

        algorithm = freezing.train_only(lambda m: fedavg.fedavg(m, work), model, ("head",))

    Args:
      make: model -> the algorithm.
      model: the network.
      patterns: the names of the parameters to train, such as "head/blocks_0/Dense_0/kernel",
        "head", "body/blocks_1" or "*/bias". A pattern fits a name or its beginning up to a "/";
        * stands for anything, also for several levels.

    Returns:
      The algorithm, around that of `make`. Its `network` is whole.
    """
    plain = make(model)
    network = plain.network

    def after_round(server: Server, round: Array) -> Server:
        after = inner(server.frozen).after_round
        assert after
        return server._replace(wrapped=after(server.wrapped, round))

    def inner(frozen: types.Variables) -> types.Algorithm:
        return make(_completed(model, frozen, patterns))

    def init_server(setup: types.Setup) -> Server:
        _check_fit(setup.variables.params, patterns)
        trained, frozen = _parted(setup.variables, patterns)
        return Server(inner(frozen).init_server(setup._replace(variables=trained)), frozen)

    def init_client(server: Server, who: Array) -> Tree:
        return inner(server.frozen).init_client(server.wrapped, who)

    def predict(server: Server, own: Tree, x: Tree) -> Array:
        return inner(server.frozen).predict(server.wrapped, own, x)

    def network_of(server: Server) -> types.Variables:
        assert network
        trained = network(server.wrapped)
        halves = (map(_filled, *pair) for pair in zip(trained, server.frozen, strict=True))
        return types.Variables(*(types.Halves(*pair) for pair in halves))

    def exchange(number: int) -> types.Exchange:
        return _exchange(lambda frozen: inner(frozen).exchanges[number], plain.exchanges[number])

    return types.Algorithm(
        init_server,
        init_client,
        tuple(exchange(number) for number in range(len(plain.exchanges))),
        predict,
        plain.personal,
        network_of if network else None,
        plain.own_outputs,
        after_round if plain.after_round else None,
    )


def _exchange(
    at: Callable[[types.Variables], types.Exchange], plain: types.Exchange
) -> types.Exchange:
    """Return the exchange at(frozen) with the frozen variables from the server; plain: at any."""

    def client(visit: types.Visit) -> types.Reply:
        undelayed, frozen = visit.undelayed_message
        return at(frozen).client(visit._replace(undelayed_message=undelayed))

    def update(server: Server, aggregated: Tree, cohort: types.Cohort) -> Server:
        after = at(server.frozen).update(server.wrapped, aggregated, cohort)
        return server._replace(wrapped=after)

    def undelayed(server: Server) -> tuple[Tree, types.Variables]:
        return at(server.frozen).broadcast_undelayed(server.wrapped), server.frozen

    blank = plain.blank
    return types.Exchange(
        lambda server: at(server.frozen).broadcast(server.wrapped),
        client,
        plain.aggregate,
        update,
        lambda server, who, round: at(server.frozen).attends(server.wrapped, who, round),
        undelayed,
        blank and (lambda server: blank(server.wrapped)),
        plain.unattended,
    )
