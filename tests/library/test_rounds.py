"""The engine, on toy algorithms that record their arguments."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations
from federations import assert_equal
from fedjax_inv import aggregators, devices, rounds, tree
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Algorithm, Array, Cohort, Exchange, Reply, Setup, Tree, Visit

FEDERATION = federations.in_floats(federations.federation())
C = federations.NUM_CLIENTS
# The numbers that a client uploads beside the message, in one array: this makes programs smaller.
NUMBERS = ("key", "mine", "rounds", "round", "delay", "who", "start", "size")
Result = tuple[rounds.State, tuple[rounds.Report, ...]]


def toy(*exchanges: Exchange) -> Algorithm:
    """The server has a number and the last uploads; a client counts its rounds."""
    return Algorithm(
        lambda setup: (jnp.float32(0), setup.variables),
        lambda server, who: {"who": who, "rounds": jnp.int32(0)},
        exchanges,
        lambda server, own, x: x,
    )


def client(visit: Visit) -> Reply:
    """Upload the whole visit, report the number of examples, count turns."""
    own = {**visit.own, "rounds": visit.own["rounds"] + 1}
    numbers = {
        "key": jax.random.bits(visit.key).astype(jnp.int32),
        "mine": visit.own["who"],
        "rounds": visit.own["rounds"],
        "round": visit.round,
        "delay": visit.delay,
        "who": visit.shard.who,
        "start": visit.shard.start,
        "size": visit.shard.size,
    }
    upload = {"heard": visit.message, "numbers": jnp.stack([numbers[name] for name in NUMBERS])}
    return Reply(own, upload, {"size": visit.shard.size})


def exchange(**replaced: Any) -> Exchange:
    """Broadcast the number, upload the visit, count the rounds."""

    def update(server: Tree, aggregated: Tree, cohort: Cohort) -> Tree:
        return server[0] + 1, {"stack": aggregated, "cohort": cohort}

    default = Exchange(lambda server: server[0], client, aggregators.stacked(), update)
    return default._replace(**replaced)


def empty(num_slots: int) -> Tree:
    """Return the uploads of a server that has received none."""
    zero = jnp.zeros(num_slots, jnp.int32)
    upload = {"heard": jnp.float32(0), "numbers": jnp.zeros(len(NUMBERS), jnp.int32)}
    return {
        "stack": aggregators.stacked().init(upload, num_slots),
        "cohort": Cohort(zero, jnp.zeros(num_slots, bool), zero),
    }


def count_only(server: Tree, aggregated: Tree, cohort: Cohort) -> Tree:
    """Count a round, and leave the recorded uploads as they are."""
    return server[0] + 1, server[1]


@functools.cache
def start(make: Callable[[], Algorithm], history: int) -> rounds.State:
    return rounds.init(make(), empty(C), FEDERATION, jax.random.key(0), history=history)


@functools.cache
def program(make: Callable[[], Algorithm], history: int) -> Callable[..., Any]:
    """Return a jitted round of the algorithm that `make` returns; all rounds share one trace."""
    algorithm, axis = make(), devices.chunked(2)

    def step(state: rounds.State, cohort: Cohort) -> Result:
        return rounds.step(algorithm, state, cohort, FEDERATION, axis=axis)

    step.__name__ = f"{make} {history}"  # by which the traces are counted
    return jax.jit(chex.assert_max_traces(step, n=1))


def steps(make: Callable[[], Algorithm], schedule: Cohort, *, history: int = 1) -> list[Result]:
    """Return the state and the reports after each round, on the host."""
    step, state = program(make, history), start(make, history)
    schedule, results = federations.plain(schedule), []
    for t in range(len(schedule.who)):
        state, reports = step(state, tree.take(schedule, t))
        results.append((federations.plain(state), federations.plain(reports)))
    return results


def received(state: rounds.State) -> dict[int, dict[str, Any]]:
    """Return the upload of each client that was present."""
    stack: aggregators.Stack = state.server[1]["stack"]
    numbers, heard = stack.values["numbers"].tolist(), stack.values["heard"].tolist()
    return {
        int(who): {**dict(zip(NUMBERS, numbers[i], strict=True)), "heard": heard[i]}
        for i, who in enumerate(stack.who)
        if stack.present[i]
    }


def one() -> Algorithm:
    return toy(exchange())


def two(recorded: int) -> Algorithm:
    """Return an algorithm of two exchanges that records one of them."""
    exchanges = [exchange(update=count_only)] * 2
    exchanges[recorded] = exchange()
    return toy(*exchanges)


TWO = [functools.partial(two, recorded) for recorded in range(2)]


def full() -> Cohort:
    """Return the schedule with all clients present."""
    schedule = federations.schedule()
    return schedule._replace(present=jnp.ones_like(schedule.present))


def test_the_server_gets_the_setup() -> None:
    setups: list[Setup] = []

    def init_server(setup: Setup) -> Tree:
        setups.append(setup)
        return jnp.float32(0), setup.variables

    def init_client(server: Tree, who: Array) -> Tree:
        return {"who": who + 10, "rounds": server[0]}

    algorithm = one()._replace(init_server=init_server, init_client=init_client)
    for seed in range(2):
        key = jax.random.key(seed)
        state = rounds.init(algorithm, empty(C), FEDERATION, key)
        # The server's draws are not those of the rounds, nor the caller's own.
        assert len({int(jax.random.bits(each)) for each in (key, state.key, setups[-1].key)}) == 3
    assert setups[0].num_clients == C
    assert_equal(setups[0].sample, np.zeros_like(FEDERATION.data.x[:1]))
    assert_equal(setups[0].variables, empty(C))
    assert len({int(jax.random.bits(setup.key)) for setup in setups}) == 2
    assert_equal(state.clients["who"], np.arange(10, 10 + C, dtype=np.int32))
    assert state.round == 0


def undelayed() -> Algorithm:
    """Clients upload the difference of both messages; the server counts rounds."""

    def answer(visit: Visit) -> Reply:
        reply = client(visit)
        return reply._replace(
            upload={**reply.upload, "heard": visit.undelayed_message - visit.message}
        )

    return toy(exchange(client=answer, broadcast_undelayed=lambda server: 10 * server[0]))


def test_an_undelayed_message_is_never_delayed() -> None:
    schedule = late(full(), 2)
    for t, (state, _) in enumerate(steps(undelayed, schedule, history=3)):
        for upload in received(state).values():
            assert upload["heard"] == 10 * t - max(t - 2, 0)
            assert upload["delay"] == min(t, 2)  # that of its message


def test_a_visit_has_its_client_and_its_round() -> None:
    schedule = full()
    for t, (state, _) in enumerate(steps(one, schedule)):
        uploads = received(state)
        assert set(uploads) == {0, 2, 3, 4}
        for who, upload in uploads.items():
            assert upload["who"] == upload["mine"] == who
            assert upload["round"] == upload["rounds"] == t
            assert upload["start"] == FEDERATION.start[who]
            assert upload["size"] == federations.SIZES[who]


@pytest.mark.parametrize("recorded", [0, 1])
def test_exchanges_follow_each_other_and_have_histories_of_their_own(recorded: int) -> None:
    schedule = full()._replace(delay=jnp.ones_like(full().delay))
    results = steps(TWO[recorded], schedule, history=2)
    for t, (state, reports) in enumerate(results):
        assert len(reports) == 2
        assert state.server[0] == 2 * (t + 1)  # two updates a round
        # The second exchange receives the result of the first; in the first round nobody is late.
        expected = 2 * max(0, t - 1) + recorded
        uploads = received(state).values()
        assert {upload["heard"] for upload in uploads} == {expected}
        # It sees the state that the client had after the first.
        assert {upload["rounds"] for upload in uploads} == {2 * t + recorded}


def test_keys_differ_by_round_exchange_and_client_but_not_by_slot() -> None:
    seen = []
    for make in TWO:
        backwards = jax.tree.map(lambda leaf: leaf[:, ::-1], full())
        for (state, _), (other, _) in zip(
            steps(make, full(), history=2), steps(make, backwards, history=2), strict=True
        ):
            assert received(state) == received(other)
            seen += [upload["key"] for upload in received(state).values()]
    assert len(set(seen)) == len(seen) == 2 * 6 * (C - 1)


def taking_turns() -> Algorithm:
    """Return two exchanges: even clients attend in even rounds, odd ones in odd; nobody."""

    def attends(server: Tree, who: Array, round: Array) -> Array:
        return (who + round) % 2 == 0

    nobody = exchange(update=count_only, attends=lambda server, who, round: False)
    return toy(exchange(attends=attends), nobody)


def test_attends_decides_for_each_client_and_round() -> None:
    results = steps(taking_turns, full())
    for t, (state, (report, nobody)) in enumerate(results):
        due = {who for who in range(C) if (who + t) % 2 == 0 and federations.SIZES[who]}
        assert set(received(state)) == due
        assert set(np.asarray(full().who[t])[report.present]) == due
        assert_equal(state.server[1]["cohort"].present, report.present)
        assert (nobody.present.any(), nobody.finite.all()) == (False, True)
        # The exchange that nobody attends changes neither the server nor a client.
        assert state.server[0] == t + 1
        counts = [len(range(who % 2, t + 1, 2)) * (who != 1) for who in range(C)]
        assert_equal(state.clients["rounds"], np.array(counts, np.int32))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_parameters_in_half_precision_are_refused(dtype: Any) -> None:
    """The sum of numbers of examples, by which the server divides, may be infinite in float16."""
    variables = {"scale": jnp.zeros(2), "w": jnp.zeros(3, dtype)}
    with pytest.raises(UsageError, match="variables"):
        rounds.init(one(), variables, FEDERATION, jax.random.key(0))


def test_run_stacks_the_reports_of_its_steps() -> None:
    schedule = federations.schedule()
    run = functools.partial(rounds.run, one(), axis=devices.chunked(2))
    state, reports = run(start(one, 3), schedule, FEDERATION)
    looped = steps(one, schedule, history=3)
    assert_equal(state, looped[-1][0])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(reports for _, reports in looped))
    assert_equal(reports, stacked)


def late(schedule: Cohort, delay: int) -> Cohort:
    return schedule._replace(delay=jnp.full_like(schedule.delay, delay))
