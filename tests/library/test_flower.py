"""An algorithm on Flower's nodes is the algorithm of a simulation with the same absences."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
import slow
from fedjax_inv import (
    algorithms,
    devices,
    fit,
    laws,
    models,
    private,
    robust,
    rounds,
    schedules,
    types,
)
from fedjax_inv.algorithms import scaffold
from fedjax_inv.checks import UsageError
from fedjax_inv.fit import LOCAL, LocalTraining
from fedjax_inv.models import saved

pytest.importorskip("flwr", minversion="1.42")
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedjax_inv import flower

SIZES = (4, 7, 5)
ROUNDS, CLIENTS = 4, len(SIZES)
DATA = federations.federation(SIZES)
# (round, exchange, client) -> what becomes of the first message from that exchange on in the round:
# "unheard", "lost" (its reply), "error", "stop" (of the server). Exchange -1 is the last.
Events = dict[tuple[int, int, int], str]
SCENARIOS: dict[str, Events] = {
    "all are present": {},
    "one is absent in a round": {(1, 0, 2): "unheard"},
    "a reply is lost": {(1, 0, 1): "lost", (2, -1, 0): "lost"},
    "an error in the last exchange": {(2, -1, 1): "error"},
    "nobody answers an exchange": {(1, -1, client): "lost" for client in range(CLIENTS)},
}
# Methods that divide by small numbers, of norms or of gaps: rounding is up to 2e-5 of the move.
MAGNIFIES = ("feddg_ga", "moon")
FIRST = ("fedavg", "scaffold", "fedipg", "fl_games", "fedcfa")


class Nodes(Grid):
    """Nodes in this process, each of which has its own rows alone."""

    def __init__(self, case: "Case", events: Events | None = None, **config: Any) -> None:
        number = len(case.algorithm.exchanges)
        self.app, self.contexts = case.app, {}
        named = (events or {}).items()
        self.events = {(t, e % number, client): kind for (t, e, client), kind in named}
        self.asked, self.restart = -1, -9  # in which round a SuperNode is another one
        for client in range(CLIENTS):
            own = {name: str(value).format(client) for name, value in config.items()}
            self.contexts[70 - client] = context(client=client, **own)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = []
        for message in messages:
            assert message.metadata.ttl == timeout
            there = self.contexts[message.metadata.dst_node_id]
            event = self.event(message, there.node_config["client"])
            if event == "stop":
                raise KeyboardInterrupt
            if event == "error":
                replies.append(Message(Error(0, "out of memory"), reply_to=message))
            elif event != "unheard":
                reply = answer(self.app, message, there)
                replies += [reply] if event != "lost" else []
        return replies

    def event(self, message: Message, client: int) -> str:
        kind, _, exchange = message.metadata.message_type.partition(".exchange_")
        if kind != "train":
            return ""
        round = message.content["about"]["round"]
        found = ((round, index, client) for index in range(int(exchange) + 1))
        return next((self.events[key] for key in found if key in self.events), "")

    def get_node_ids(self) -> list[int]:
        self.asked += 1  # once before the first round, and before each
        if self.asked == 1 + self.restart:
            self.contexts[5] = context(**self.contexts.pop(69).node_config)
        return [*self.contexts]

    run = set_run = create_message = push_messages = pull_messages = None  # type: ignore[assignment]


def answer(app: ClientApp, message: Message, there: Context) -> Message:
    """A node's reply; its error, as Flower sends it."""
    try:
        return app(message, there)
    except Exception as error:
        return Message(Error(0, repr(error)), reply_to=message)


def context(**config: Any) -> Context:
    return Context(1, 0, config, RecordDict(), {})


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Flower's processes set, and messages read."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Case:
    """An algorithm and its network; its programs serve all runs."""

    def __init__(self, name: str, held: types.Federation = DATA) -> None:
        config, self.held, self.data = federations.TABLE[name][0], held, held.data
        self.model = config.model()
        self.algorithm = federations.build(name, config)

    @property
    def app(self) -> ClientApp:
        return flower.client_app(self.algorithm, self.model, self.rows)

    def rows(self, node: Any) -> types.Examples:
        """A client's own rows, and no others."""
        mine = federations.rows_of(self.held, node["client"])
        return jax.tree.map(lambda leaf: leaf[mine], self.data)

    def deployed(self, folder: Path, grid: Grid, **settings: Any) -> Any:
        """The server's state after the rounds."""
        settings = {"num_clients": CLIENTS, "rounds": ROUNDS, "timeout": 9.0, **settings}
        app = flower.server_app(self.algorithm, self.model, self.held.data, folder, **settings)
        app(grid, context())
        return saved.load(folder / "server.safetensors", {"server": self.start.server})["server"]

    @property
    def clients(self) -> list[types.Examples]:
        return [self.rows({"client": client}) for client in range(CLIENTS)]

    @functools.cached_property
    def start(self) -> rounds.State:
        key = jax.random.key(0)
        start = self.model.init(jax.random.fold_in(key, 0), self.held.data.x[:1])
        return rounds.init(self.algorithm, start, self.held, jax.random.fold_in(key, 1))

    def simulated(self, events: Events) -> Any:
        """The same with the same absences: each lasts until the round ends."""
        number = len(self.algorithm.exchanges)
        there = np.ones((ROUNDS, number, CLIENTS), bool)
        for round, exchange, client in events:
            there[round, exchange % number :, client] = False

        def run(there: Any) -> rounds.State:
            def masked(index: int, exchange: types.Exchange) -> types.Exchange:
                return exchange._replace(
                    attends=lambda server, who, round: (
                        exchange.attends(server, who, round) & there[round, index, who]
                    )
                )

            exchanges = tuple(masked(*pair) for pair in enumerate(self.algorithm.exchanges))
            everyone = federations.cohort(range(CLIENTS))
            always = jax.tree.map(lambda leaf: jnp.stack([leaf] * ROUNDS), everyone)
            algorithm = self.algorithm._replace(exchanges=exchanges)
            return rounds.run(algorithm, self.start, always, self.held, axis=devices.chunked(1))[0]

        return jax.jit(run)(there)

    def network(self, server: Any) -> Any:
        """What serves clients, without counters and seeds."""
        return self.algorithm.network(server) if self.algorithm.network else server


@functools.lru_cache(maxsize=1)
def case_of(name: str) -> Case:
    return Case(name)


NAMES = [*FIRST, *(name for name in algorithms.LISTED if name not in FIRST)]


@pytest.mark.parametrize("name", slow.after(len(FIRST), NAMES))
def test_nodes_give_the_weights_of_a_simulation(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    for index, (words, events) in enumerate(SCENARIOS.items()):
        deployed = case.deployed(tmp_path / str(index), Nodes(case, events))
        simulated = case.simulated(events).server
        ends = [case.network(server) for server in (case.start.server, simulated)]
        moved, apart = laws.largest_difference(*ends), laws.largest_difference(deployed, simulated)
        print(f"{name:14} {words:30} moved {moved:.3g}, apart {apart:.2e}")
        assert moved > 1e-2, words
        assert apart < (1e-4 if name in MAGNIFIES else 1e-5) * moved, words


@pytest.mark.parametrize(("name", "exchange"), slow.after(1, [("vrex", 1), ("scaffold", 0)]))
def test_a_stopped_server_goes_on(name: str, exchange: int, tmp_path: Path) -> None:
    """It stops when some nodes are ahead of what it saved; they need files for their own states."""
    case, kept = case_of(name), {"state": tmp_path / "own{}.safetensors"}
    with pytest.raises(KeyboardInterrupt):
        case.deployed(tmp_path, Nodes(case, {(2, exchange, 1): "stop"}, **kept))
    with pytest.raises(UsageError, match="client="):
        case.deployed(tmp_path, Nodes(case))
    laws.assert_close(case.deployed(tmp_path, Nodes(case, **kept)), case.simulated({}).server)


@pytest.mark.parametrize("has_file", slow.after(1, [True, False]))
def test_a_client_on_another_node_goes_on_if_its_own_state_is_in_a_file(
    has_file: bool, tmp_path: Path
) -> None:
    case = case_of("scaffold")
    nodes = Nodes(case, **({"state": tmp_path / "{}.safetensors"} if has_file else {}))
    nodes.restart = 2
    absent: Events = {} if has_file else {(t, 0, 1): "unheard" for t in (2, 3)}
    laws.assert_close(case.deployed(tmp_path, nodes), case.simulated(absent).server)


def test_nodes_of_another_network_or_with_one_number_are_an_error(tmp_path: Path) -> None:
    case, other = case_of("scaffold"), Case("fedavg")
    with pytest.raises(UsageError, match="Dense_0"):
        case.deployed(tmp_path, Nodes(other))
    with pytest.raises(UsageError, match="example/x float32"):
        case.deployed(tmp_path, Nodes(Case("scaffold", federations.in_floats(DATA))))
    twins = Nodes(case)
    twins.contexts[1] = context(client=0)
    with pytest.raises(UsageError, match="client=0"):
        case.deployed(tmp_path, twins)
    delayed = lambda *sizes: schedules.slow(schedules.attending()(*sizes), 2)  # noqa: E731
    with pytest.raises(UsageError, match="delay"):
        case.deployed(tmp_path, Nodes(case), schedule=delayed)


def test_a_reply_that_is_not_finite_does_not_count(tmp_path: Path) -> None:
    held = federations.in_floats(DATA)
    case, poisoned = Case("scaffold", held), Case("scaffold", held)
    poisoned.data = jax.tree.map(
        lambda leaf: leaf.at[federations.rows_of(held, 2)].set(np.nan) if leaf.ndim > 1 else leaf,
        held.data,
    )
    deployed = case.deployed(tmp_path, Nodes(poisoned))
    absent: Events = {(t, 0, 2): "unheard" for t in range(ROUNDS)}
    laws.assert_close(deployed, case.simulated(absent).server)


def test_nodes_give_the_network_of_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, lines = Case("scaffold"), []
    monkeypatch.setattr(flower, "_log", lines.append)
    settings: Any = {"schedule": schedules.attending(cohort=2), "rounds": 5, "seed": 3}
    clients = [(rows.x, rows.y) for rows in case.clients]
    local = {"batch_size": 3, "learning_rate": 0.05}
    fitted = fit(scaffold.scaffold, case.model, clients, callbacks=(), **settings, **local)
    work = LocalTraining(optax.sgd, 3, 1, None).work({**LOCAL, "learning_rate": 0.05})
    case.algorithm = scaffold.scaffold(case.model, work)
    case.deployed(tmp_path, Nodes(case), score_every=5, **settings)
    network = saved.load(tmp_path / "model.safetensors", fitted.network())
    laws.assert_close(network, fitted.network(), rtol=1e-5, atol=1e-6)
    held = case.clients
    outputs = [models.predict(case.model, network, rows.x) for rows in held]
    right = np.concatenate([o.argmax(-1) == rows.y for o, rows in zip(outputs, held, strict=True)])
    found = re.search(r"score ([\d.]+)", lines[-1])
    assert found is not None
    assert float(found[1]) == pytest.approx(right.mean(), abs=1e-3)


@pytest.mark.parametrize("rule", [robust.median(), robust.krum(0)])
def test_a_robust_rule_is_that_of_a_simulation(rule: types.Aggregator, tmp_path: Path) -> None:
    case, events = Case("fedavg"), SCENARIOS["a reply is lost"]
    case.algorithm = robust.aggregated(case.algorithm, rule)
    deployed = case.deployed(tmp_path, Nodes(case, events))
    laws.assert_close(deployed, case.simulated(events).server)


def private_case(**settings: Any) -> Case:
    case = Case("fedavg")
    case.algorithm = private.private(case.algorithm, clip=0.1, **settings)
    return case


def test_a_private_sum_without_noise_is_that_of_a_simulation(tmp_path: Path) -> None:
    case, events = private_case(noise_multiplier=0.0), SCENARIOS["a reply is lost"]
    deployed = case.deployed(tmp_path, Nodes(case, events))
    laws.assert_close(deployed.wrapped, case.simulated(events).server.wrapped)


def test_no_node_knows_the_noise_or_who_attends(tmp_path: Path) -> None:
    """They know the seed. A round without answers has noise; a stopped run keeps its own."""
    case = private_case(noise_multiplier=1.0, sampling_rate=0.5)
    silent: Events = {(t, 0, client): "unheard" for t in range(99) for client in range(CLIENTS)}
    settings: Any = {"schedule": schedules.poisson(0.5), "rounds": 1}
    ends = [case.deployed(tmp_path / each, Nodes(case, silent), **settings) for each in "ab"]
    keys = [end.noise_key.tolist() for end in [*ends, case.start.server]]
    assert len({*map(str, keys)}) == 3
    networks = [case.network(end) for end in [*ends, case.start.server]]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert laws.largest_difference(networks[first], networks[second]) > 1e-3
    nobody: Any = {"schedule": schedules.poisson(1e-9), "rounds": 1}
    alone = case.network(case.deployed(tmp_path / "nobody", Nodes(case), **nobody))
    assert laws.largest_difference(alone, networks[2]) > 1e-3
    longer = case.deployed(tmp_path / "a", Nodes(case, silent), **settings | {"rounds": 2})
    assert longer.noise_key.tolist() == keys[0]
    received: list[str] = []

    class Heard(Nodes):
        def event(self, message: Message, client: int) -> str:
            received.extend(message.content.array_records.get("arrays", {}))
            return super().event(message, client)

    case.deployed(tmp_path / "c", Heard(case))
    assert received
    assert not any("noise" in name for name in received)
    drawn = set()
    for number in range(8):
        heard = Attended(case)
        case.deployed(tmp_path / f"{number}", heard, **settings | {"rounds": 2})
        drawn.add(tuple(heard.attended))
    assert len(drawn) > 1


class Attended(Nodes):
    """Nodes that write down who is asked in which round."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.attended: list[tuple[int, int]] = []

    def event(self, message: Message, client: int) -> str:
        if "train" in message.metadata.message_type:
            self.attended.append((message.content["about"]["round"], client))
        return super().event(message, client)
