"""The engine, on toy algorithms that record their arguments."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations
from federations import assert_equal
from fedjax_inv import aggregators, devices, rounds, tree
from fedjax_inv.checks import UsageError
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Exchange,
    Reply,
    Setup,
    Tree,
    Visit,
)

FEDERATION = federations.in_floats(federations.federation())
C = federations.NUM_CLIENTS
NAN, INFINITE = 3, 2  # clients
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
def start(make: Callable[[], Algorithm], num_slots: int = C, history: int = 1) -> rounds.State:
    return rounds.init(make(), empty(num_slots), FEDERATION, jax.random.key(0), history=history)


@functools.cache
def program(make: Callable[[], Algorithm], drop_nonfinite: bool) -> Callable[..., Any]:
    """Return a jitted round of the algorithm that `make` returns."""
    algorithm = make()
    axis = devices.chunked(2)

    def step(state: rounds.State, cohort: Cohort) -> Result:
        return rounds.step(
            algorithm, state, cohort, FEDERATION, axis=axis, drop_nonfinite=drop_nonfinite
        )

    return jax.jit(step)


def steps(
    make: Callable[[], Algorithm],
    schedule: Cohort,
    state: rounds.State | None = None,
    *,
    drop_nonfinite: bool = False,
    history: int = 1,
) -> list[Result]:
    """Return the state and the reports after each round, on the host."""
    step = program(make, drop_nonfinite)
    if state is None:
        state = start(make, schedule.who.shape[1], history)
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


def once(who: list[int], present: list[bool] | None = None) -> Cohort:
    """Return a schedule of one round."""
    return jax.tree.map(lambda a: a[None], federations.cohort(who, present))


@pytest.mark.parametrize("history", [1, 2])
def test_a_step_is_traced_once_because_it_returns_the_shapes_that_it_takes(history: int) -> None:
    algorithm, traces = one(), []

    def step(state: rounds.State, cohort: Cohort) -> rounds.State:
        traces.append(1)
        return rounds.step(algorithm, state, cohort, FEDERATION, axis=devices.vmapped())[0]

    state, step = start(one, C, history), jax.jit(step)
    for _ in range(3):
        state = jax.eval_shape(step, state, federations.cohort([0, 1, 2, 3, 4]))
    assert len(traces) == 1


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


@pytest.mark.parametrize("history", [1, 3])
def test_a_delayed_client_receives_the_broadcast_of_its_delay(history: int) -> None:
    schedule = federations.schedule()
    schedule = schedule._replace(present=schedule.present.at[2, 1].set(True))  # attend all rounds
    schedule = schedule._replace(delay=schedule.delay + (schedule.who == 4) * 3)
    results = steps(one, schedule, history=history)
    for t, (state, _) in enumerate(results):
        late = np.minimum(schedule.delay[t], min(history - 1, t))
        delay = dict(zip(schedule.who[t].tolist(), late.tolist(), strict=True))
        for who, upload in received(state).items():
            # The broadcast is the number of the round.
            assert upload["heard"] == t - delay[who]
            # A visit has the delay of its message, which may be shorter than the schedule's.
            assert upload["delay"] == delay[who]
        assert_equal(state.server[1]["cohort"].delay, late.astype(np.int32))


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
        heard = {upload["heard"] for upload in received(state).values()}
        assert heard == {10 * t - max(t - 2, 0)}


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


def test_only_clients_that_are_present_and_have_examples_count() -> None:
    schedule = federations.schedule()
    expected = np.zeros(C, np.int32)
    for t, (state, (report,)) in enumerate(steps(one, schedule)):
        attending = [
            who
            for who, present in zip(schedule.who[t].tolist(), schedule.present[t], strict=True)
            if present and federations.SIZES[who]
        ]
        expected[attending] += 1
        assert_equal(state.clients["rounds"], expected)
        assert_equal(state.clients["who"], np.arange(C, dtype=np.int32))
        assert set(np.asarray(schedule.who[t])[report.present]) == set(attending)
        assert report.finite.all()
        if attending:
            assert set(received(state)) == set(attending)
            assert_equal(state.server[1]["cohort"].present, report.present)


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


def poisonous() -> Algorithm:
    """Return an algorithm in which client NAN uploads a NaN and INFINITE reports an infinity."""

    def poisoned(visit: Visit) -> Reply:
        reply = client(visit)
        who = visit.own["who"]
        reply.upload["heard"] = jnp.where(who == NAN, jnp.nan, reply.upload["heard"])
        reply.metrics["loss"] = jnp.where(who == INFINITE, jnp.inf, 0.0)
        return reply

    return toy(exchange(client=poisoned))


@pytest.mark.parametrize("drop", [False, True])
def test_a_nonfinite_upload_is_reported_and_dropped_on_demand(drop: bool) -> None:
    schedule = once([0, NAN, 4, 1, INFINITE])
    ((state, (report,)),) = steps(poisonous, schedule, drop_nonfinite=drop)
    assert_equal(report.finite, np.array([True, False, True, True, False]))
    assert_equal(report.present, np.array([True, not drop, True, False, not drop]))
    assert_equal(state.server[1]["cohort"].present, report.present)
    assert state.clients["rounds"][NAN] == (not drop)
    assert set(received(state)) == ({0, 4} if drop else {0, 4, INFINITE, NAN})
    if not drop:
        assert np.isnan(received(state)[NAN]["heard"])


def test_a_round_of_nothing_but_nan_is_unattended() -> None:
    who = [NAN, 1, 0, 2, 4]
    schedule = once(who, [client in (NAN, 1) for client in who])
    before = start(poisonous)
    ((after, (report,)),) = steps(poisonous, schedule, before, drop_nonfinite=True)
    # An absent client counts as finite, whatever it returned.
    assert_equal(report.finite, np.array([client != NAN for client in who]))
    assert_equal((after.server, after.clients), (before.server, before.clients))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_parameters_in_half_precision_are_refused(dtype: Any) -> None:
    """The sum of numbers of examples, by which the server divides, may be infinite in float16."""
    variables = {"scale": jnp.zeros(2), "w": jnp.zeros(3, dtype)}
    with pytest.raises(UsageError, match="variables"):
        rounds.init(one(), variables, FEDERATION, jax.random.key(0))


def test_run_stacks_the_reports_of_its_steps() -> None:
    schedule = federations.schedule()
    run = functools.partial(rounds.run, one(), axis=devices.chunked(2))
    state, reports = run(start(one, C, 3), schedule, FEDERATION)
    looped = steps(one, schedule, history=3)
    assert_equal(state, looped[-1][0])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(reports for _, reports in looped))
    assert_equal(reports, stacked)


def late(schedule: Cohort, delay: int) -> Cohort:
    return schedule._replace(delay=jnp.full_like(schedule.delay, delay))
