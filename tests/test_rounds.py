"""The engine, on toy algorithms that record what they were given."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import federations
from federations import assert_equal
from fedjax_inv import aggregators, clients, rounds, tree
from fedjax_inv.types import Algorithm, Array, Cohort, Exchange, Metrics, Shard, Tree

FEDERATION = federations.in_floats(federations.federation())
C = federations.NUM_CLIENTS
NAN, INFINITE = 3, 2  # clients


def toy(*exchanges: Exchange) -> Algorithm:
    """The server is a number and what it received last; a client counts its rounds."""
    return Algorithm(
        lambda variables, key: (jnp.float32(0), variables),
        lambda server, who: {"who": who, "rounds": jnp.int32(0)},
        exchanges,
        lambda server, own, x: x,
    )


def exchange(**replaced: object) -> Exchange:
    """Broadcasts the number, uploads what was heard, counts the rounds."""

    def client(
        message: Array, own: dict[str, Array], shard: Shard, key: Array
    ) -> tuple[Tree, Tree, Metrics]:
        own = {**own, "rounds": own["rounds"] + 1}
        return own, {"heard": message, "key": jax.random.bits(key), "who": own["who"]}, {}

    def update(server: Tree, aggregated: Tree, cohort: Cohort) -> Tree:
        return server[0] + 1, {"stack": aggregated, "present": cohort.present}

    default = Exchange(lambda server: server[0], client, aggregators.stacked(), update)
    return default._replace(**replaced)


def empty(num_slots: int) -> Tree:
    """What the server holds before it received anything."""
    zero = {"heard": jnp.float32(0), "key": jnp.uint32(0), "who": jnp.int32(0)}
    return {
        "stack": aggregators.stacked().init(zero, num_slots),
        "present": jnp.zeros(num_slots, bool),
    }


def start(algorithm: Algorithm, num_slots: int = C, *, history: int = 1) -> rounds.State:
    key = jax.random.key(0)
    return rounds.init(algorithm, empty(num_slots), key, C, history=history)


def steps(
    algorithm: Algorithm, state: rounds.State, schedule: Cohort, *, drop_nonfinite: bool = False
) -> list[tuple[rounds.State, tuple[rounds.Report, ...]]]:
    """The state and the reports after each round, with one trace."""
    axis = clients.chunked(2)

    def step(state: rounds.State, cohort: Cohort) -> tuple[rounds.State, tuple[rounds.Report, ...]]:
        return rounds.step(
            algorithm, state, cohort, FEDERATION, axis=axis, drop_nonfinite=drop_nonfinite
        )

    chex.clear_trace_counter()  # which counts by the name of the function
    step = jax.jit(chex.assert_max_traces(step, n=1))
    results = []
    for t in range(len(schedule.who)):
        state, reports = step(state, tree.take(schedule, t))
        results.append((state, reports))
    return results


def received(state: rounds.State) -> dict[int, dict[str, float]]:
    """What each client that was present uploaded."""
    stack: aggregators.Stack = state.server[1]["stack"]
    return {
        int(who): jax.tree.map(lambda leaf, i=i: float(leaf[i]), stack.values)
        for i, who in enumerate(stack.who)
        if stack.present[i]
    }


@pytest.mark.parametrize("history", [1, 2, 4])
def test_a_delayed_client_hears_the_broadcast_of_then(history: int) -> None:
    algorithm = toy(exchange())
    schedule = federations.schedule()
    schedule = schedule._replace(present=schedule.present.at[2, 1].set(True))  # attend all rounds
    schedule = schedule._replace(delay=schedule.delay + (schedule.who == 4) * 3)
    results = steps(algorithm, start(algorithm, history=history), schedule)
    for t, (state, _) in enumerate(results):
        delay = dict(zip(schedule.who[t].tolist(), schedule.delay[t].tolist(), strict=True))
        for who, upload in received(state).items():
            assert upload["who"] == who
            # The number that is broadcast is the round's.
            assert upload["heard"] == max(0, t - min(delay[who], history - 1))


def test_a_broadcast_that_nobody_heard_counts_as_a_round() -> None:
    algorithm = toy(exchange())
    schedule = tree.take(federations.schedule(), slice(5))  # nobody attends round 2
    schedule = schedule._replace(delay=jnp.ones_like(schedule.delay))
    state, _ = steps(algorithm, start(algorithm, history=3), schedule)[-1]
    # In rounds 2 and 3 the number was 2; round 4 hears what round 3 did.
    assert {upload["heard"] for upload in received(state).values()} == {2}
    assert state.round == 5


def count_only(server: Tree, aggregated: Tree, cohort: Cohort) -> Tree:
    """An update that leaves what the server recorded as it is."""
    return server[0] + 1, server[1]


@pytest.mark.parametrize("recorded", [0, 1])
@pytest.mark.parametrize("history", [1, 2])
def test_exchanges_follow_each_other_and_have_histories_of_their_own(
    recorded: int, history: int
) -> None:
    exchanges = [exchange(update=count_only)] * 2
    exchanges[recorded] = exchange()
    algorithm = toy(*exchanges)
    schedule = federations.schedule()
    schedule = schedule._replace(
        present=jnp.ones_like(schedule.present), delay=jnp.ones_like(schedule.delay)
    )
    results = steps(algorithm, start(algorithm, history=history), schedule)
    for t, (state, reports) in enumerate(results):
        assert len(reports) == 2
        assert state.server[0] == 2 * (t + 1)  # two updates a round
        # The second exchange hears what the first has made; in the first round nobody is late.
        expected = 2 * max(0, t - (history - 1)) + recorded
        assert {upload["heard"] for upload in received(state).values()} == {expected}


def test_keys_differ_by_round_exchange_and_client_but_not_by_slot() -> None:
    seen = []
    for recorded in range(2):
        exchanges = [exchange(update=count_only)] * 2
        exchanges[recorded] = exchange()
        algorithm = toy(*exchanges)
        schedule = federations.schedule()
        schedule = schedule._replace(present=jnp.ones_like(schedule.present))
        backwards = jax.tree.map(lambda leaf: leaf[:, ::-1], schedule)
        for (state, _), (other, _) in zip(
            steps(algorithm, start(algorithm), schedule),
            steps(algorithm, start(algorithm), backwards),
            strict=True,
        ):
            assert received(state) == received(other)
            seen += [upload["key"] for upload in received(state).values()]
    assert len(set(seen)) == len(seen) == 2 * 6 * (C - 1)


def test_the_keys_follow_the_run() -> None:
    algorithm = toy(exchange())
    schedule = tree.take(federations.schedule(), slice(1))
    keys = []
    for seed in range(2):
        state = rounds.init(algorithm, empty(C), jax.random.key(seed), C)
        ((state, _),) = steps(algorithm, state, schedule)
        keys += [upload["key"] for upload in received(state).values()]
    assert len(set(keys)) == len(keys)


def test_only_who_is_present_and_has_examples_counts() -> None:
    algorithm = toy(exchange())
    schedule = federations.schedule()
    expected = np.zeros(C)
    for t, (state, (report,)) in enumerate(steps(algorithm, start(algorithm), schedule)):
        attending = [
            who
            for who, present in zip(schedule.who[t].tolist(), schedule.present[t], strict=True)
            if present and federations.SIZES[who]
        ]
        expected[attending] += 1
        assert_equal(state.clients["rounds"], expected.astype(np.int32))
        assert_equal(state.clients["who"], np.arange(C, dtype=np.int32))
        assert set(np.asarray(schedule.who[t])[report.present]) == set(attending)
        assert report.finite.all()
        if attending:
            assert set(received(state)) == set(attending)
            assert_equal(state.server[1]["present"], report.present)


def test_slots_may_be_fewer_than_clients() -> None:
    algorithm = toy(exchange())
    state = start(algorithm, 2)
    cohort = federations.cohort([4, 2])
    state, _ = rounds.step(algorithm, state, cohort, FEDERATION, axis=clients.vmapped())
    assert_equal(state.clients["rounds"], np.array([0, 0, 1, 0, 1], np.int32))
    assert set(received(state)) == {2, 4}


@pytest.mark.parametrize("present", [[True, True, False], [False, True, True]])
def test_an_empty_slot_may_name_a_client_that_attends(present: list[bool]) -> None:
    algorithm = toy(exchange())
    schedule = jax.tree.map(lambda a: a[None], federations.cohort([0, 3, 0], present))
    ((state, _),) = steps(algorithm, start(algorithm, 3), schedule)
    assert_equal(state.clients["rounds"], np.array([1, 0, 0, 1, 0], np.int32))


def poisonous() -> Exchange:
    """Client NAN uploads a NaN, client INFINITE reports an infinity."""
    client = exchange().client

    def poisoned(message: Array, own: Tree, shard: Shard, key: Array) -> tuple[Tree, Tree, Metrics]:
        own, upload, _ = client(message, own, shard, key)
        upload["heard"] = jnp.where(own["who"] == NAN, jnp.nan, upload["heard"])
        return own, upload, {"loss": jnp.where(own["who"] == INFINITE, jnp.inf, 0.0)}

    return exchange(client=poisoned)


@pytest.mark.parametrize("drop", [False, True])
def test_a_nonfinite_upload_is_reported_and_dropped_on_demand(drop: bool) -> None:
    algorithm = toy(poisonous())
    schedule = jax.tree.map(lambda a: a[None], federations.cohort([0, NAN, 4, 1, INFINITE]))
    ((state, (report,)),) = steps(algorithm, start(algorithm), schedule, drop_nonfinite=drop)
    assert_equal(report.finite, np.array([True, False, True, True, False]))
    assert_equal(report.present, np.array([True, not drop, True, False, not drop]))
    assert_equal(state.server[1]["present"], report.present)
    assert state.clients["rounds"][NAN] == (not drop)
    assert set(received(state)) == ({0, 4} if drop else {0, 4, INFINITE, NAN})
    if not drop:
        assert np.isnan(received(state)[NAN]["heard"])


def test_a_round_of_nothing_but_nan_is_unattended() -> None:
    algorithm = toy(poisonous())
    schedule = jax.tree.map(lambda a: a[None], federations.cohort([NAN, 1]))
    before = start(algorithm, 2)
    ((after, _),) = steps(algorithm, before, schedule, drop_nonfinite=True)
    assert_equal((after.server, after.clients), (before.server, before.clients))


def test_aggregators_may_be_a_tree() -> None:
    parts = {"heard": aggregators.total(), "key": aggregators.stacked(), "who": aggregators.mean()}

    def update(server: Tree, aggregated: Tree, cohort: Cohort) -> Tree:
        return aggregated["who"], {**server[1], "present": aggregated["key"].present}

    algorithm = toy(exchange(aggregate=parts, update=update))
    schedule = jax.tree.map(lambda a: a[None], federations.cohort([0, 3, 4, 1, 2]))
    ((state, _),) = steps(algorithm, start(algorithm), schedule)
    assert state.server[0] == np.mean([0, 3, 4, 2])
    assert_equal(state.server[1]["present"], np.array([1, 1, 1, 0, 1], bool))


def test_run_stacks_the_reports_of_its_steps() -> None:
    algorithm = toy(exchange())
    schedule = federations.schedule()
    state, reports = rounds.run(
        algorithm, start(algorithm), schedule, FEDERATION, axis=clients.chunked(2)
    )
    looped = steps(algorithm, start(algorithm), schedule)
    assert_equal(state, looped[-1][0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(reports for _, reports in looped))
    assert_equal(reports, stacked)


def test_a_state_can_be_donated_although_its_leaves_began_as_one_array() -> None:
    algorithm = toy(exchange())._replace(
        init_server=lambda variables, key: (jnp.float32(0), {**variables, "again": variables})
    )
    variables = empty(C)
    state = rounds.init(algorithm, variables, jax.random.key(0), C, history=2)
    leaves = jax.tree.leaves((state, variables))
    pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.dtype == jnp.float32}
    assert len(pointers) == sum(leaf.dtype == jnp.float32 for leaf in leaves)
    bumped = jax.jit(lambda state: state._replace(round=state.round + 1), donate_argnums=0)(state)
    assert bumped.round == 1
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(variables))


def test_init_refuses_no_history() -> None:
    with pytest.raises(ValueError, match="history=0: must be at least 1"):
        start(toy(exchange()), history=0)
