"""Rules for missing uploads, against a naive loop of FedAvg in NumPy, in float64."""

from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations as tiny
import linear_networks as linear
import slow
from federations import assert_close, assert_equal, plain
from fedjax_inv import devices, late_uploads, rounds, schedules, tree
from fedjax_inv.algorithms import fedavg
from fedjax_inv.types import Algorithm, Array, Cohort, Slots, Visit

NUM_CLIENTS, HISTORY = len(linear.SIZES), 3


def weight(slots: Slots) -> Array:
    """Older ones count less, so that it matters which delay a remembered upload has."""
    return slots.size / (1.0 + slots.delay)


def algorithm(rule: str = "reuse", **arguments: Any) -> Algorithm:
    arguments = {"weighting": weight, **arguments}
    return late_uploads.with_rule(fedavg.fedavg(linear.MODEL, linear.work(), **arguments), rule)


@cache
def program(made: Algorithm) -> Any:
    return jax.jit(
        lambda state, schedule: rounds.run(
            made, state, schedule, linear.held(), axis=devices.chunked(2)
        )
    )


def start(made: Algorithm) -> rounds.State:
    @jax.jit
    def begin() -> rounds.State:
        variables = linear.MODEL.init(jax.random.key(0), linear.held().data.x)
        return rounds.init(made, variables, linear.held(), jax.random.key(1), history=HISTORY)

    return begin()


def naive(w: linear.Weights, schedule: Cohort) -> tuple[linear.Weights, dict[int, Any]]:
    """The weights after all rounds, and of each who arrived (upload, weight)."""
    examples = linear.examples_of(linear.held())
    begun: list[linear.Weights] = []
    last: dict[int, Any] = {}
    for t in range(len(schedule.who)):
        begun.append(w)
        arrived = False
        for i, present, delay in zip(*(np.asarray(leaf)[t] for leaf in schedule), strict=True):
            if present and linear.SIZES[i]:
                late = min(int(delay), t)
                delta = linear.trained(begun[t - late], examples[i])
                last[int(i)] = delta, linear.SIZES[i] / (1 + late)
                arrived = True
        if arrived:
            w = [
                a + b
                for a, b in zip(w, linear.mean(*zip(*last.values(), strict=True)), strict=True)
            ]
    return w, last


def test_reuse_is_the_naive_loop() -> None:
    with jax.enable_x64(True):
        made, schedule = algorithm(), tiny.schedule()
        before = start(made)
        for num_rounds in (4, 6):
            some = tree.take(schedule, slice(num_rounds))
            after, _ = program(made)(before, some)
            first = [np.asarray(half) for half in before.server.wrapped.variables.params]
            expected, last = naive(first, some)
            assert_close(
                list(after.server.wrapped.variables.params), expected, rtol=1e-8, atol=1e-10
            )
            memory = after.server.memories[0]
            assert set(np.flatnonzero(memory.arrived)) == set(last)
            for client, (upload, _) in last.items():
                remembered = [half[client] for half in memory.upload.delta.params]
                assert_close(remembered, upload, rtol=1e-8, atol=1e-10)


def test_parameters_are_the_mean_of_what_clients_last_delivered() -> None:
    """The paper's w^{t+1} = sum_i p_i w_i^{t - tau_i}, under ragged delays."""
    with jax.enable_x64(True):
        made, schedule = algorithm("parameters", weighting="size"), tiny.schedule()
        before = start(made)
        after, _ = program(made)(before, schedule)
        examples = linear.examples_of(linear.held())
        w = [np.asarray(half) for half in before.server.wrapped.variables.params]
        broadcasts, last = [], {}
        for t, (who, present, delay) in enumerate(zip(*map(np.asarray, schedule), strict=True)):
            broadcasts.append(w)
            arrived = [slot for slot in np.flatnonzero(present) if linear.SIZES[who[slot]]]
            for slot in arrived:
                received = broadcasts[t - min(int(delay[slot]), t)]
                delta = linear.trained(received, examples[who[slot]])
                last[who[slot]] = [a + b for a, b in zip(received, delta, strict=True)]
            if arrived:
                w = linear.mean([*last.values()], [linear.SIZES[i] for i in last])
        got = [*after.server.wrapped.variables.params]
        assert_close(got, w, rtol=1e-8, atol=1e-10)


def test_between_deliveries_a_slow_client_grows_old() -> None:
    """One that needs m rounds is m - 1 rounds old when it delivers, and 2 m - 2 before the next."""
    m, slow_client, num_rounds = 3, 3, 10
    with jax.enable_x64(True):
        made = algorithm("parameters")
        everyone = schedules.everyone(NUM_CLIENTS, num_rounds)
        cohorts = schedules.slow(everyone, jnp.ones(NUM_CLIENTS, int).at[slow_client].set(m))
        examples = linear.examples_of(linear.held())[slow_client]
        state, networks, ages = start(made), [], set()
        for t in range(num_rounds):
            networks.append([np.asarray(w) for w in state.server.wrapped.variables.params])
            state, _ = program(made)(state, tree.take(cohorts, slice(t, t + 1)))
            if t < m:
                continue
            origin = t - t % m - (m - 1)  # the round whose broadcast the last delivery began from
            delta = linear.trained(networks[origin], examples)
            stored = state.server.memories[0].upload.delta.params
            for half, old, move in zip(stored, networks[origin], delta, strict=True):
                np.testing.assert_allclose(half[slow_client], old + move, rtol=1e-8, atol=1e-10)
            ages.add(t - origin)
    assert ages == {*range(m - 1, 2 * m - 1)}


@pytest.mark.parametrize("rule", ["reuse", "parameters"])
@pytest.mark.parametrize("name", slow.after(1, ["fedavg", "exit_strategy"]))
def test_where_all_arrive_a_rule_is_skip(name: str, rule: str) -> None:
    """Also where clients leave: nobody stands in who would not attend."""
    config, federation, schedule = tiny.TABLE[name][0], tiny.federation(), tiny.schedule()
    schedule = schedule._replace(present=jnp.ones_like(schedule.present))
    if rule == "parameters":
        schedule = schedule._replace(delay=jnp.zeros_like(schedule.delay))

    @partial(jax.jit, static_argnums=0)
    def played(rule: str) -> Any:
        made = late_uploads.with_rule(tiny.build(name, config), rule)
        key = jax.random.key(0)
        state = rounds.init(made, tiny.initial(config.model(), key), federation, key, history=3)
        return rounds.run(made, state, schedule, federation, axis=devices.chunked(2))

    (got, reports), (expected, expected_reports) = map(played, (rule, "skip"))
    assert_close(got.server.wrapped, expected.server)
    # A stored upload travels with its round.
    reports, expected_reports = (
        [report._replace(traffic=None) for report in of] for of in (reports, expected_reports)
    )
    assert_close(reports, expected_reports)
    first, sizes = reports[0], np.array(tiny.SIZES)
    assert np.all(first.present[sizes[schedule.who] > 0]) == (name == "fedavg")


def test_reused_statistics_are_the_mean_of_the_clients_latest() -> None:
    model, federation = tiny.small_normed(), tiny.federation()
    clients = np.array([[0], [3]], np.int32)
    everybody = Cohort(clients, np.ones_like(clients, bool), np.zeros_like(clients))

    def after(rule: str, num_rounds: int) -> Any:
        made = late_uploads.with_rule(fedavg.fedavg(model, tiny.full_batch(0.1)), rule)

        @jax.jit
        def server() -> Any:
            key = jax.random.key(0)
            state = rounds.init(made, tiny.initial(model, key), federation, key)
            some = jax.tree.map(lambda leaf: leaf[:num_rounds], everybody)
            return rounds.run(made, state, some, federation, axis=devices.chunked(1))[0].server

        return server()

    # In a round with one client the server takes that client's statistics.
    first, second = (after("skip", number).variables.stats for number in (1, 2))
    got = after("reuse", 2).wrapped.variables.stats
    a, b = tiny.SIZES[0], tiny.SIZES[3]
    assert_close(got, jax.tree.map(lambda x, y: (a * x + b * y) / (a + b), first, second))


def test_a_round_in_which_nothing_arrives_is_the_identity() -> None:
    made, schedule = algorithm(server_optimizer=optax.adam(0.1)), plain(tiny.schedule())
    warm, _ = program(made)(start(made), schedule)
    nothing = tree.take(schedule, slice(1))._replace(present=np.zeros((1, NUM_CLIENTS), bool))
    after, (report,) = program(made)(warm, nothing)
    assert_equal(after.server, warm.server)
    assert not report.present.any()


@pytest.mark.parametrize("name", ["fedavg", "exit_strategy"])
def test_a_blank_has_the_shapes_of_an_upload(name: str) -> None:
    config, federation = tiny.TABLE[name][0], tiny.federation()
    made = tiny.build(name, config)

    def both() -> Any:
        exchange = made.exchanges[0]
        variables = tiny.initial(config.model(), jax.random.key(0))
        state = rounds.init(made, variables, federation, jax.random.key(0))
        visit = Visit(
            exchange.broadcast(state.server),
            tree.take(state.clients, 0),
            tiny.shard_of(federation, 0),
            state.round,
            state.round,
            state.key,
        )
        return exchange.blank(state.server), exchange.client(visit).upload

    chex.assert_trees_all_equal_shapes_and_dtypes(*jax.eval_shape(both))
