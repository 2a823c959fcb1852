"""Flower apps that run an algorithm on real nodes, with the weights of a simulation.

    app = flower.client_app(algorithm, model, examples)  # of a node
    app = flower.server_app(algorithm, model, example, "results", num_clients=3, rounds=50)

Both sides build the same algorithm. A node sees messages and its own rows, and knows the seed. If
it fails or is late, it is absent for the rest of the round. Its client is named by --node-config
"client=0", whichever SuperNode it runs on. The client's own state lies in the memory of the
SuperNode for one run, or in a file: --node-config 'client=0 state="own.safetensors"'.
"""

import functools
import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedjax_inv import checks, inputs, models, objectives, private, schedules, tree, types, wrapping
from fedjax_inv import rounds as engine
from fedjax_inv.checks import UsageError
from fedjax_inv.models import saved
from fedjax_inv.types import Tree

Read = Callable[[Mapping[str, Any]], types.Examples]
_EVERYONE = schedules.attending()
_log = logging.getLogger("flwr").info  # which `flwr run --stream` shows

# What both sides compute, and the form of messages: arrays by the names of their places in a tree.


class _App(NamedTuple):
    """What both sides must have in common."""

    algorithm: types.Algorithm
    model: types.Model
    num_clients: int  # C


@functools.partial(jax.jit, static_argnums=0)
def _start(app: _App, example: types.Examples, size: Any, seed: Any) -> engine.State:
    """Return the state with which `fit` begins; size [C] are the examples of the clients."""
    one = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), example)
    variables = app.model.init(jax.random.fold_in(jax.random.key(seed), 0), one.x)
    clients = types.Federation(one, jnp.zeros(1, jnp.int32), jnp.zeros_like(size), size)
    key = jax.random.fold_in(jax.random.key(seed), 1)
    return engine.init(app.algorithm, variables, clients, key)


def _messages(exchange: types.Exchange, server: Tree) -> dict[str, Tree]:
    """Return the two messages of an exchange."""
    undelayed = exchange.broadcast_undelayed(server)
    return {"message": exchange.broadcast(server), "undelayed": undelayed}


def _received(app: _App, index: int, example: types.Examples) -> dict[str, Tree]:
    """Return the shapes of what a client gets in an exchange."""

    def received(size: Any) -> dict[str, Tree]:
        state = _start(app, example, size, 0)
        messages = _messages(app.algorithm.exchanges[index], state.server)
        return {**messages, "own": tree.take(state.clients, 0)}

    return jax.eval_shape(received, np.ones(app.num_clients, np.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _turn(
    app: _App, index: int, arrays: Any, rows: types.Examples, client: Any, round: Any, key: Any
) -> tuple[types.Reply, Any]:
    """Return the reply of a client in an exchange, and whether it is finite."""
    got = _tree(arrays, _received(app, index, rows))
    number = _number(rows)
    zero = jnp.int32(0)
    order = jnp.arange(number, dtype=jnp.int32)
    shard = types.Shard(rows, order, zero, jnp.int32(number), client)
    for each in (round, index, client):
        key = jax.random.fold_in(key, each)
    visit = types.Visit(got["message"], got["own"], shard, round, zero, key, got["undelayed"])
    reply = app.algorithm.exchanges[index].client(visit)
    return reply, tree.all_finite(reply)


def _forms(app: _App, rows: types.Examples) -> list[dict[str, Tree]]:
    """Return the shapes of what a client has, gets and uploads in each exchange."""
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), rows)
    forms = [_received(app, index, one) for index in range(len(app.algorithm.exchanges))]
    for index, form in enumerate(forms):
        turn = functools.partial(_turn, app, index)
        zero = np.int32(0)
        reply, _ = jax.eval_shape(turn, saved.named(form), one, zero, zero, jax.random.key(0))
        form |= {"upload": reply.upload, "example": one}
    return forms


def _lines(forms: list[dict[str, Tree]]) -> list[str]:
    """Return a line for each array, by which two sides are compared."""
    return [f"{name} {leaf.dtype} {[*leaf.shape]}" for name, leaf in saved.named(forms).items()]


def _number(rows: types.Examples) -> int:
    """Return the number of examples."""
    return len(jax.tree.leaves(rows)[0])


def _record(values: Tree) -> ArrayRecord:
    """Return a tree as Flower sends it."""
    return ArrayRecord({k: Array(np.asarray(leaf)) for k, leaf in saved.named(values).items()})


def _arrays(record: Mapping[str, Array]) -> dict[str, Any]:
    return {name: array.numpy() for name, array in record.items()}


def _tree(arrays: Mapping[str, Any], like: Tree) -> Tree:
    """Return arrays as the tree in which they have their names."""
    leaves = [arrays[name] for name in saved.named(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _write(path: Path, values: Tree, about: Mapping[str, str] | None = None) -> None:
    """Write a file, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    saved.save(partial, values, about)
    os.replace(partial, path)


# A node.


def client_app(
    algorithm: types.Algorithm,
    model: types.Model,
    examples: Read,
    validation: Read | None = None,
    score: types.Loss = objectives.accuracy,
) -> ClientApp:
    """Return the app of a node.

    `examples` reads the client's rows from what --node-config says, and `validation` those on which
    the network is scored, by default the same. A reply with a NaN or an infinity is an error.
    """

    def about(message: Message, context: Context) -> Message:
        rows = examples(context.node_config)
        config = context.node_config
        checks.integer("client", config.get("client"), 0)
        forms = _forms(_App(algorithm, model, message.content["about"]["num_clients"]), rows)
        answer = {"client": config["client"], "size": _number(rows), "lines": _lines(forms)}
        answer["domains"] = [] if rows.domain is None else np.unique(rows.domain).tolist()
        answer |= {"kept": [*_kept(context)], "has_file": "state" in config}
        return Message(RecordDict({"about": ConfigRecord(answer)}), reply_to=message)

    def train(index: int, message: Message, context: Context) -> Message:
        order = message.content["about"]
        kept = _kept(context)
        rows = examples(context.node_config)
        key = jnp.array(order["key"], jnp.uint32)
        reply, is_finite = _turn(
            _App(algorithm, model, order["num_clients"]),
            index,
            _arrays(message.content["arrays"]) | kept.get(order["accepted"], {}),
            rows,
            np.int32(context.node_config["client"]),
            np.int32(order["round"]),
            jax.random.wrap_key_data(key),
        )
        if not is_finite:
            raise FloatingPointError("its reply holds a NaN or an infinity")
        # The reply may be lost, and the server may stop: the next message says which state counts.
        states = {tag: kept[tag] for tag in (order["saved"], order["accepted"]) if tag in kept}
        _keep(context, {**states, order["tag"]: saved.named({"own": reply.own})})
        return _reply(message, _number(rows), reply.metrics, {"upload": reply.upload})

    def evaluate(message: Message, context: Context) -> Message:
        rows = (validation or examples)(context.node_config)
        like = {"network": jax.eval_shape(model.init, jax.random.key(0), rows.x)}
        network = _tree(_arrays(message.content["arrays"]), like)["network"]
        outputs = models.predict(model, network, rows.x)
        value = score(outputs, rows.y, jnp.ones(_number(rows), bool))
        return _reply(message, _number(rows), {"score": value}, {})

    app = ClientApp()
    app.query()(about)
    app.evaluate()(evaluate)
    for index in range(len(algorithm.exchanges)):
        app.train(f"exchange_{index}")(functools.partial(train, index))
    return app


def _reply(message: Message, number: int, metrics: types.Metrics, arrays: Tree) -> Message:
    """Return a reply with metrics that are means over so many examples."""
    record = MetricRecord({"examples": number, **{k: float(v) for k, v in metrics.items()}})
    return Message(RecordDict({"metrics": record, "arrays": _record(arrays)}), reply_to=message)


def _kept(context: Context) -> dict[str, dict[str, Any]]:
    """Return the own states that the node keeps, by the tags of the replies that made them."""
    kept: dict[str, dict[str, Any]] = {}
    arrays = _arrays(context.state.get("kept", {}))
    if "state" in context.node_config:
        path = Path(str(context.node_config["state"]))
        arrays = saved.read(path) if path.exists() else {}
    for name, array in arrays.items():
        tag, _, place = name.partition(" ")
        kept.setdefault(tag, {})[place] = array
    return kept


def _keep(context: Context, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep these own states, and no others."""
    arrays = {f"{tag} {k}": leaf for tag, state in states.items() for k, leaf in state.items()}
    if "state" in context.node_config:
        _write(Path(str(context.node_config["state"])), arrays)
    else:
        context.state["kept"] = _record(arrays)


# The server.


class _Node(NamedTuple):
    """The node of a client."""

    number: int  # Flower's
    size: int  # examples of the client
    has_file: bool  # for the client's own state


class _Server:
    """A run: what is saved after each round, and the nodes that are there."""

    def __init__(
        self, app: _App, example: types.Examples, grid: Grid, timeout: float, path: Path
    ) -> None:
        self.app = app
        self.grid = grid
        self.timeout = timeout
        self.path = path
        self.forms = _forms(app, example)
        self.nodes: dict[int, _Node] = {}  # by client
        self.known: set[int] = set()  # nodes that have answered, if only by an error
        # Of clients, the tags of the last replies that count, and the examples at the start.
        self.book: dict[str, Any] = {"round": 0, "accepted": [""] * app.num_clients, "size": []}
        if path.exists():
            self.book = json.loads(saved.about(path)["book"])
        self.saved = list(self.book["accepted"])

    def begin(self, run: str, least: int, example: types.Examples, seed: int) -> Tree:
        """Return the server of a new or a stopped run, when so many nodes are there."""
        self.wait(least, is_start=True)
        sizes = {client: node.size for client, node in self.nodes.items()}
        # Who comes later counts as an average client.
        mean = max(1, sum(sizes.values()) // len(sizes))
        clients = range(self.app.num_clients)
        self.book.setdefault("run", run)
        self.book["size"] = self.book["size"] or [sizes.get(client, mean) for client in clients]
        self.start = _start(self.app, example, np.array(self.book["size"], np.int32), seed)
        if not self.path.exists():
            return _with_own_noise(self.start.server)
        return saved.load(self.path, {"server": self.start.server})["server"]

    def wait(self, least: int, *, is_start: bool = False) -> None:
        """Ask new nodes who they are, until so many nodes are there."""
        question = RecordDict({"about": ConfigRecord({"num_clients": self.app.num_clients})})
        number_told = -1
        while True:
            there = set(self.grid.get_node_ids())
            self.known &= there
            for client, node in list(self.nodes.items()):
                if node.number not in there:
                    fate = "lies in its file" if node.has_file else "is lost with its SuperNode"
                    _log(f"client {client} has left; its own state, if any, {fate}")
                    del self.nodes[client]
            new = dict.fromkeys(there - self.known, question)
            for number, content in self.send("query", new).items():
                try:
                    self._admit(number, content["about"], is_start=is_start)
                except UsageError as error:
                    if is_start:
                        raise
                    _log(f"a node takes no part: {error}")
            if len(self.nodes) >= least:
                return
            if len(self.nodes) != number_told:
                number_told = len(self.nodes)
                _log(f"{number_told} nodes are there, waiting for {least}")
            time.sleep(1)

    def _admit(self, number: int, about: Mapping[str, Any], *, is_start: bool) -> None:
        """Add a node, or raise UsageError if it does not fit the run."""
        client = about["client"]
        checks.integer("client", client, 0, self.app.num_clients - 1, ", the clients")
        if is_start and client in self.nodes:
            raise UsageError("client", client, "is the number of two nodes, must be of one")
        for ours, theirs in itertools.zip_longest(_lines(self.forms), about["lines"]):
            if ours != theirs:
                text = f"has {theirs}, must have {ours}: both sides need the same code and settings"
                raise UsageError("client", client, text)
        tag = self.book["accepted"][client]
        if tag and tag not in about["kept"] and jax.tree.leaves(self.forms[0]["own"]):
            text = "has lost its own state; --node-config 'state=\"path\"' keeps it in a file"
            raise UsageError("client", client, text)
        self.nodes[client] = _Node(number, about["size"], about["has_file"])
        _log(f"client {client}: {about['size']} examples, domains {about['domains']}")

    def send(self, kind: str, contents: Mapping[int, RecordDict]) -> dict[int, RecordDict]:
        """Return the contents of replies, both by Flower's numbers of nodes; log errors."""
        out = [Message(content, node, kind, ttl=self.timeout) for node, content in contents.items()]
        replies = list(self.grid.send_and_receive(out, timeout=self.timeout)) if out else []
        for reply in replies:
            self.known.add(reply.metadata.src_node_id)
            if reply.has_error():
                _log(f"node {reply.metadata.src_node_id}: {reply.error.reason}")
        return {r.metadata.src_node_id: r.content for r in replies if r.has_content()}

    def play(self, server: Tree, cohort: types.Cohort) -> Tree:
        """Return the server after a round."""
        clients = cohort.who.tolist()
        algorithm = self.app.algorithm
        attended = False
        size = np.array([self.nodes[c].size if c in self.nodes else 0 for c in clients], np.int32)
        here = cohort.present & (size > 0)
        now = np.int32(self.book["round"])
        for index, exchange in enumerate(algorithm.exchanges):
            sent, attends = _open(exchange, server, cohort.who, now)
            asked = here & np.asarray(attends)
            tag = f"{self.book['run']}.{now}.{index}"
            name = f"round {now + 1}, exchange {index}"
            numbers = {client: self.nodes[client].number for client in cohort.who[asked].tolist()}
            contents = {n: self._content(client, tag, sent) for client, n in numbers.items()}
            answers = self.send(f"train.exchange_{index}", contents)
            replies = {client: answers[n] for client, n in numbers.items() if n in answers}
            for client in numbers.keys() - replies.keys():
                _log(f"{name}: client {client} is absent, and keeps its own state of before")
            present = asked & np.isin(cohort.who, [*replies])
            here &= present | ~asked
            if not replies and not exchange.unattended:
                continue
            _log(f"{name}: {_means(replies.values()) if replies else 'replies 0'}")
            like = {"upload": self.forms[index]["upload"]}
            zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
            uploads = [
                _tree(_arrays(replies[client]["arrays"]), like) if counts else zeros
                for client, counts in zip(clients, present, strict=True)
            ]
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *uploads)["upload"]
            position = jnp.arange(len(clients), dtype=jnp.int32)
            slots = types.Slots(position, cohort.who, present, jnp.asarray(size), cohort.delay)
            server = _close(exchange, server, stacked, slots)
            attended = True
            for client in replies:
                self.book["accepted"][client] = tag
        if attended and algorithm.after_round:
            server = algorithm.after_round(server, jnp.asarray(now))
        self.book["round"] += 1
        _write(self.path, {"server": server}, {"book": json.dumps(self.book)})
        self.saved = list(self.book["accepted"])
        return server

    def _content(self, client: int, tag: str, sent: dict[str, Tree]) -> RecordDict:
        """Return what a client gets."""
        about = {"num_clients": self.app.num_clients, "round": self.book["round"], "tag": tag}
        about |= {"accepted": self.book["accepted"][client], "saved": self.saved[client]}
        about["key"] = jax.random.key_data(self.start.key).tolist()
        if not about["accepted"]:
            sent = {**sent, "own": tree.take(self.start.clients, client)}
        return RecordDict({"about": ConfigRecord(about), "arrays": _record(sent)})

    def score(self, network: types.Variables) -> None:
        """Log the score of a network on the validation rows of all nodes."""
        content = RecordDict({"arrays": _record({"network": network})})
        numbers = [node.number for node in self.nodes.values()]
        replies = self.send("evaluate", dict.fromkeys(numbers, content))
        if replies:
            _log(f"round {self.book['round']}, validation: {_means(replies.values())}")


def _with_own_noise(server: Tree) -> Tree:
    """Return a server whose noise has another key than that of the seed."""
    changed: Any = server
    if isinstance(server, private.Server):
        changed = server._replace(noise_key=_unknown(server.noise_key))
    if isinstance(server, wrapping.Wrapping):
        changed = changed._replace(wrapped=_with_own_noise(server.wrapped))
    return changed


def _unknown(key_data: Any) -> Any:
    """Return numbers of a random key, of the same shape, that nobody else can know."""
    drawn = np.frombuffer(secrets.token_bytes(key_data.nbytes), key_data.dtype)
    return drawn.reshape(key_data.shape)


def _means(replies: Iterable[RecordDict]) -> str:
    """Return the means of metrics over clients, weighted by their examples."""
    metrics = [dict(reply["metrics"]) for reply in replies]
    weights = [each.pop("examples") for each in metrics]
    means = {k: np.average([each[k] for each in metrics], weights=weights) for k in metrics[0]}
    return ", ".join([f"replies {len(metrics)}", *(f"{k} {mean:.4g}" for k, mean in means.items())])


@functools.partial(jax.jit, static_argnums=0)
def _open(exchange: types.Exchange, server: Tree, who: Any, round: Any) -> tuple[Any, Any]:
    """Return the messages of an exchange, and who attends it [S] bool."""
    attends = jax.vmap(lambda who: jnp.asarray(exchange.attends(server, who, round), bool))(who)
    return _messages(exchange, server), attends


@functools.partial(jax.jit, static_argnums=0)
def _close(exchange: types.Exchange, server: Tree, uploads: Tree, slots: types.Slots) -> Tree:
    """Return the server after the uploads [S, ...] of an exchange."""
    start = exchange.aggregate.init(tree.take(uploads, 0), len(slots.who))
    aggregated = exchange.aggregate.finish(exchange.aggregate.add(start, uploads, slots))
    return exchange.update(server, aggregated, types.Cohort(slots.who, slots.present, slots.delay))


def server_app(
    algorithm: types.Algorithm,
    model: types.Model,
    example: types.Examples,
    folder: str | Path,
    *,
    num_clients: int,
    rounds: int,
    seed: int = 0,
    schedule: Callable[[Any, int, int], types.Cohort] = _EVERYONE,
    min_nodes: int | None = None,
    timeout: float = 600.0,
    score_every: int = 0,
) -> ServerApp:
    """Return the app of the server.

    Args:
      algorithm: the algorithm that the nodes have, too.
      model: its network.
      example: examples [M, ...], of which only the shapes matter.
      folder: gets the state after each round, server.safetensors, from which a stopped run goes on,
        and the network, model.safetensors.
      num_clients: C; nodes have the numbers 0..C-1.
      rounds: T, and seed and schedule, as in `fit`; the schedule without delays. All nodes know the
        seed, so with `private.private` the noise and the schedule have keys of their own, of which
        the nodes know nothing.
      min_nodes: the nodes that the first round waits for; None: all. Later rounds wait for one.
      timeout: the seconds after which a message and its reply are lost.
      score_every: the rounds between scores on the nodes' validation rows; 0: none.
    """
    least = num_clients if min_nodes is None else min_nodes
    checks.integer("min_nodes", least, 1, num_clients, ", the clients")
    app, name = ServerApp(), "server.safetensors"

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        key = inputs.schedule_key(seed)
        is_private = any(exchange.unattended for exchange in algorithm.exchanges)
        if is_private:
            key = jax.random.wrap_key_data(_unknown(jax.random.key_data(key)))
        drawn = jax.jit(lambda key: schedule(key, num_clients, rounds))(key)
        cohorts = jax.device_get(drawn)
        if not is_private or cohorts.present.any():  # a private sum has noise also of nobody
            schedules.check(cohorts, num_clients, 1)
        Path(folder).mkdir(parents=True, exist_ok=True)
        run = _Server(
            _App(algorithm, model, num_clients), example, grid, timeout, Path(folder, name)
        )
        server = run.begin(str(context.run_id), least, example, seed)
        _log(f"{run.book['round']} of {rounds} rounds are over, by {run.path}")
        for round in range(run.book["round"], rounds):
            run.wait(1)
            server = run.play(server, tree.take(cohorts, round))
            if algorithm.network:
                network = algorithm.network(server)
                _write(Path(folder, "model.safetensors"), network)
                if score_every and (round + 1) % score_every == 0:
                    run.score(network)

    return app
