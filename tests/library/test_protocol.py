"""The laws that every algorithm must pass, in every configuration of `federations.TABLE`.

Compiling takes nearly all of the time, so each configuration has five programs, each traced once:
the start of two seeds; a round, one client after the other, on one, two and four devices; a run of
three rounds on several lanes, three clients at a time. Each test compares their results.

Equal means bit for bit if the same program runs on the same numbers. Otherwise sums are in another
order, and `assert_close` allows the rounding errors of float32: its docstring says how large they
are, and how to distinguish them from a broken law.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import federations
from federations import TABLE, Config, assert_close, assert_equal, assert_same_bits, plain
from fedjax_inv import algorithms, averaging, devices, local, rounds, tree
from fedjax_inv.types import Algorithm, Array, Cohort, Federation, Model, Shard, Tree, Variables

Result = tuple[rounds.State, tuple[rounds.Report, ...]]
CASES = [
    pytest.param(
        (name, config),
        id=f"{name}-{i}-{config.model.__name__}",
        marks=[pytest.mark.slow] if i else [],
    )
    for name in algorithms.LISTED
    for i, config in enumerate(TABLE.get(name, ()))
]
NUM_CLIENTS = federations.NUM_CLIENTS
LANES = 8
# The tests compile without optimisation, which may round the same operations in two ways.
QUICK = {"xla_backend_optimization_level": 1}
USERS = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}  # XLA's defaults
# One algorithm of each kind of exchange, for the run of the tests that are not slow.
KINDS = {"cafe", "erm", "exit_strategy", "fedavg", "fl_games"}
# On several devices XLA turns a quotient of the counterfactual terms' gradient, weights / examples,
# into a product with the reciprocal. No other configuration was seen to differ.
INEXACT = ("fedcfa", TABLE["fedcfa"][0])
# By client, so that neither the devices nor the order of slots changes a bit.
ALONE = devices.chunked(1, lanes=LANES)._replace(replicated=False)
NO_EXAMPLE, ONE_EXAMPLE, POISONED = 1, 2, 3  # clients
SEGMENT = 3  # rounds; the schedule has two of them


class Lane(NamedTuple):
    """One of the runs that are vmapped."""

    state: rounds.State
    numbers: dict[str, float]  # of the factory and the local optimizer
    schedule: Cohort


def once(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `fn` jitted, as a program that may be traced once."""
    chex.clear_trace_counter()  # which counts by the name of the function
    return jax.jit(chex.assert_max_traces(fn, n=1), **options)


class Case:
    """One configuration, its programs, and the results that its tests share, on the host."""

    def __init__(self, name: str, config: Config) -> None:
        self.name, self.config = name, config
        self.algorithm = federations.build(name, config)
        self.federation = federations.in_floats(federations.federation())
        self.schedule: Cohort = plain(federations.schedule())
        self.numbers = {
            "learning_rate": config.learning_rate,
            **federations.hyperparameters(config),
        }

        def step(state: rounds.State, cohort: Cohort, federation: Federation) -> Result:
            return self.round(state, cohort, federation, ALONE)

        def segment(federation: Federation, lanes: Lane) -> Result:
            def one(lane: Lane) -> Result:
                algorithm = federations.build(name, config, **lane.numbers)
                return rounds.run(
                    algorithm, lane.state, lane.schedule, federation, axis=devices.chunked(3)
                )

            return jax.vmap(one)(lanes)

        def attending(server: Tree, round: Array) -> list[Array]:
            def of(who: Array) -> list[Array]:
                exchanges = self.algorithm.exchanges
                return [jnp.bool_(each.attends(server, who, round)) for each in exchanges]

            return jax.vmap(of)(jnp.arange(NUM_CLIENTS, dtype=jnp.int32))

        self.is_exact = name in KINDS and config is TABLE[name][0]
        self.options = {**devices.compiler_options(), **(QUICK if self.is_exact else {})}
        self.step = once(step, donate_argnums=0, compiler_options=self.options)
        self.segment = once(segment)
        # Server and round -> of each exchange, which clients attend it [C].
        self.attending = jax.jit(attending)

    def round(
        self, state: rounds.State, cohort: Cohort, federation: Federation, axis: devices.Axis
    ) -> Result:
        return rounds.step(
            self.algorithm, state, cohort, federation, axis=axis, drop_nonfinite=True
        )

    def steps_on(
        self,
        num_devices: int,
        schedule: Cohort,
        federation: Federation,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[rounds.State, tuple[rounds.Report, ...]]:
        """Return what the rounds give on devices, of which several own the clients.

        That is the last state and the reports of all rounds. options: more compiler options.
        """
        mesh = jax.make_mesh((num_devices,), ("clients",), axis_types=(AxisType.Auto,))
        axis = devices.owned("clients", ALONE)
        whole: Any = PartitionSpec()
        lies = rounds.State(whole, PartitionSpec("clients"), whole, whole, whole)
        on_device = devices.over(
            mesh, partial(self.round, axis=axis), (lies, whole, whole), (lies, whole)
        )
        if num_devices == 1:  # a program without a mesh
            on_device = partial(self.round, axis=ALONE)
        step = jax.jit(on_device, donate_argnums=0, compiler_options={**self.options, **options})
        state, results = self.restored(self.stops[0]), []
        room = num_devices * devices.clients_per_device(NUM_CLIENTS, num_devices, LANES)

        def padded(leaf: Array) -> Array:
            return jnp.concatenate([leaf, leaf[: room - NUM_CLIENTS]])

        state = state._replace(clients=jax.tree.map(padded, state.clients))
        for t in range(len(schedule.who)):
            state, reports = step(state, tree.take(schedule, t), federation)
            results.append(plain(reports))
        state = plain(state)
        states = jax.tree.map(lambda leaf: leaf[:NUM_CLIENTS], state.clients)
        together = jax.tree.map(lambda *leaves: np.stack(leaves), *results)
        return state._replace(clients=states), together

    def init(self, algorithm: Algorithm, variables: Variables, seed: Array | int) -> rounds.State:
        return rounds.init(
            algorithm,
            variables,
            self.federation,
            jax.random.key(seed),
            history=federations.HISTORY,
        )

    @cached_property
    def drawn(self) -> tuple[Variables, rounds.State]:
        """The networks and the states of two seeds before the first round, on the device."""

        def start(seed: Array) -> tuple[Variables, rounds.State]:
            variables = federations.initial(self.config.model(), jax.random.key(seed))
            return variables, self.init(self.algorithm, variables, seed)

        return jax.jit(jax.vmap(start))(np.arange(2))

    @cached_property
    def starts(self) -> rounds.State:
        """The states of `drawn`."""
        return plain(self.drawn[1])

    def restored(self, saved: rounds.State) -> rounds.State:
        """Return a state, or several stacked ones, in new buffers, from `plain` ones."""

        def leaf(saved: np.ndarray, like: Array) -> Array:
            is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
            return jax.random.wrap_key_data(saved) if is_key else jnp.array(saved)

        return jax.tree.map(leaf, saved, self.drawn[1])

    @cached_property
    def stops(self) -> list[rounds.State]:
        """The states before each round and after the last."""
        return [tree.take(self.starts, 0), *(state for state, _ in self.steps)]

    @cached_property
    def steps(self) -> list[Result]:
        """The results of the rounds played one by one: all others are compared with these."""
        return self.steps_from(tree.take(self.starts, 0), 0)

    def steps_from(self, start: rounds.State, first: int) -> list[Result]:
        state, results = self.restored(start), []
        for t in range(first, len(self.schedule.who)):
            state, reports = self.step(state, tree.take(self.schedule, t), self.federation)
            results.append(plain((state, reports)))
        return results

    @cached_property
    def result(self) -> Result:
        """The state after the last round, and the reports of all [T, S]."""
        reports = jax.tree.map(lambda *leaves: np.stack(leaves), *(each[1] for each in self.steps))
        return self.steps[-1][0], reports

    @cached_property
    def lanes(self) -> dict[str, Lane]:
        """The run of `steps`, and runs that must equal it, or must not."""
        start, other = (tree.take(self.starts, seed) for seed in range(2))
        undelayed = self.schedule._replace(delay=np.zeros_like(self.schedule.delay))
        halves = {
            name: Lane(start, {**self.numbers, name: value / 2}, self.schedule)
            for name, value in self.numbers.items()
        }
        return {
            "as it is": Lane(start, self.numbers, self.schedule),
            "other order": Lane(start, self.numbers, rearranged(self.schedule, 2)),
            "undelayed": Lane(start, self.numbers, undelayed),
            "other seed": Lane(other, self.numbers, self.schedule),
            **halves,
        }

    @cached_property
    def results(self) -> dict[str, Result]:
        return self.run(list(self.lanes))

    def run(
        self,
        names: Sequence[str],
        *,
        federation: Federation | None = None,
        carry: Callable[[rounds.State], rounds.State] = lambda state: state,
    ) -> dict[str, Result]:
        """All lanes in the order of `names`, in two segments; carry: of the state between them."""
        lanes: Lane = jax.tree.map(lambda *leaves: np.stack(leaves), *map(self.lanes.get, names))
        state, parts = self.restored(lanes.state), []
        for half in (slice(0, SEGMENT), slice(SEGMENT, None)):
            schedule = jax.tree.map(lambda leaf, half=half: leaf[:, half], lanes.schedule)
            now = lanes._replace(state=carry(state), schedule=schedule)
            state, reports = self.segment(federation or self.federation, now)
            parts.append(plain(reports))
        together = jax.tree.map(lambda *leaves: np.concatenate(leaves, 1), *parts)
        return {name: tree.take((plain(state), together), i) for i, name in enumerate(names)}

    def turn(self, exchange: int, who: int) -> rounds.State:
        """Return the latest state of the run, with a round in which a client attends an exchange.

        That is a following round, or one of the first rounds if only those have the exchange.
        """
        for state in reversed(self.stops):
            now = int(state.round)
            for round in (*range(now, now + 2 * NUM_CLIENTS), *range(now)):
                if self.attending(state.server, np.int32(round))[exchange][who]:
                    return state._replace(round=np.int32(round))
        raise AssertionError(f"client {who} never attends exchange {exchange}")

    def one_step(
        self, state: rounds.State, cohort: Cohort, federation: Federation | None = None
    ) -> Result:
        return plain(self.step(self.restored(state), plain(cohort), federation or self.federation))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def per_client(schedule: Cohort, reports: tuple[rounds.Report, ...]) -> list[Tree]:
    """Return reports [T, S] as [T, C], whatever the slots of clients; zeros if absent."""
    rounds_, slots = np.nonzero(schedule.present)
    who = np.asarray(schedule.who)[rounds_, slots]
    shape = (len(schedule.who), NUM_CLIENTS)

    def scattered(values: np.ndarray) -> np.ndarray:
        by_client = np.zeros(shape, values.dtype)
        by_client[rounds_, who] = values[rounds_, slots]
        return by_client

    for report in reports:
        # In a slot that the schedule leaves empty nobody is present, and nothing is nonfinite.
        assert not (report.present & ~schedule.present).any()
        assert (report.finite | schedule.present).all()
    return [
        jax.tree.map(
            scattered,
            report._replace(
                metrics={k: np.where(report.present, v, 0) for k, v in report.metrics.items()}
            ),
        )
        for report in reports
    ]


def assert_same_run(
    case: Case, result: Result, schedule: Cohort | None = None, *, expected: Result | None = None
) -> None:
    """Assert that `result`, whose schedule may have other slots, is the run of the case."""
    state, reports = expected or case.result
    schedule = case.schedule if schedule is None else schedule
    assert_close(result[0], state)
    assert_close(per_client(schedule, result[1]), per_client(case.schedule, reports))


def largest_difference(first: Tree, second: Tree) -> float:
    leaves = zip(jax.tree.leaves(plain(first)), jax.tree.leaves(plain(second)), strict=True)
    return max(np.abs(a.astype(float) - b.astype(float)).max(initial=0) for a, b in leaves)


def rearranged(schedule: Cohort, seed: int) -> Cohort:
    """Return the schedule with the slots of each round in another order."""
    shape = schedule.who.shape
    order = np.random.default_rng(seed).permuted(
        np.tile(np.arange(shape[1]), (shape[0], 1)), axis=1
    )
    assert (order != np.arange(shape[1])).any(1).all()
    return jax.tree.map(lambda a: np.take_along_axis(a, order, 1), schedule)


def with_empty_slots(schedule: Cohort) -> Cohort:
    """Insert two empty slots among the others; they name clients that may attend."""
    num_rounds = len(schedule.who)
    empty = Cohort(
        np.tile(np.array([3, 0], np.int32), (num_rounds, 1)),
        np.zeros((num_rounds, 2), bool),
        np.ones((num_rounds, 2), np.int32),
    )
    together = jax.tree.map(lambda a, b: np.concatenate([a, b], 1), schedule, empty)
    return rearranged(together, 3)


def test_all_algorithms_are_in_the_table() -> None:
    """A file is listed if it has a factory of its own name, and all in the list are configured."""
    names = {module.name for module in pkgutil.iter_modules(algorithms.__path__)}
    modules = {name: importlib.import_module(f"{algorithms.__name__}.{name}") for name in names}
    assert set(algorithms.LISTED) == {name for name in names if hasattr(modules[name], name)}
    assert len(set(algorithms.LISTED)) == len(algorithms.LISTED)
    assert set(algorithms.LISTED) == {name for name, configs in TABLE.items() if configs}


def test_the_run_moves_everything_and_delays_matter(case: Case) -> None:
    """Otherwise the tests below could not fail."""
    state, reports = case.result
    start = case.stops[0]
    assert largest_difference(start.server, state.server) > 1e-2
    if jax.tree.leaves(start.clients):
        assert largest_difference(start.clients, state.clients) > 1e-3
    assert largest_difference(case.results["undelayed"][0].server, state.server) > 1e-3
    chex.assert_tree_all_finite((state, [report.metrics for report in reports]))


def test_clients_take_part_if_scheduled_with_examples_and_attending(case: Case) -> None:
    _, reports = case.result
    attending = [
        # By the server before the round: no first exchange decides who attends the second.
        plain(case.attending(stop.server, np.int32(t)))
        for t, stop in enumerate(case.stops[:-1])
    ]
    who, present, _ = case.schedule
    for index, report in enumerate(reports):
        attends = np.stack([turn[index] for turn in attending])
        expected = present & (who != NO_EXAMPLE) & np.take_along_axis(attends, who, 1)
        assert expected.any()
        assert_equal(report.present, expected)
        assert_equal(report.size, np.array(federations.SIZES, np.int32)[who])


def test_a_run_in_chunks_is_a_loop_of_steps(case: Case) -> None:
    assert_same_run(case, case.results["as it is"])


def test_a_run_on_devices_with_empty_slots_on_bytes_is_a_loop_of_steps(case: Case) -> None:
    """Each device has the states of its own clients alone, which it does not share evenly.

    On four devices there are empty slots, and the images are those of 8 bits.
    """
    schedule = with_empty_slots(case.schedule)
    four = case.steps_on(4, schedule, federations.federation())
    assert_same_run(case, four, schedule)
    if case.is_exact:
        expected = case.result[0], per_client(case.schedule, case.result[1])
        assert_same_bits((four[0], per_client(schedule, four[1])), expected)


@pytest.mark.slow
def test_devices_change_no_bit(case: Case) -> None:
    one, two, four = (
        case.steps_on(number, case.schedule, case.federation, USERS) for number in (1, 2, 4)
    )
    same = assert_close if (case.name, case.config) == INEXACT else assert_same_bits
    same(two, one)
    same(four, one)


def test_the_order_of_slots_does_not_matter(case: Case) -> None:
    schedule = case.lanes["other order"].schedule
    assert_same_run(case, case.results["other order"], schedule)


def test_others_rows_and_their_order_do_not_matter(case: Case) -> None:
    relaid = federations.relaid(federations.federation())
    assert not np.isfinite(relaid.data.x).all()
    assert (relaid.start != case.federation.start).any()
    assert_equal(case.run(list(case.lanes), federation=relaid), case.results)


def test_lanes_do_not_affect_each_other(case: Case) -> None:
    """So seeds and numbers, which may be traced, can be vmapped over."""
    names = list(case.lanes)
    # Each run on the lane of another run, so that its changes are on another lane.
    turned = case.run(names[1:] + names[:1])
    for name, lane in case.lanes.items():
        result, expected = turned[name], case.results[name]
        assert_close(result[0], expected[0])
        reports = (per_client(lane.schedule, each[1]) for each in (result, expected))
        assert_close(*reports)
    for name in ("other seed", *case.numbers):
        got = case.results[name][0].server
        assert largest_difference(got, case.results["as it is"][0].server) > 1e-4


def test_stop_and_resume_is_bit_identical(case: Case) -> None:
    """Through the host, as with a checkpoint, between segments of a run and between steps."""
    resumed = case.run(list(case.lanes), carry=lambda state: case.restored(plain(state)))
    assert_equal(resumed, case.results)
    assert_equal(case.steps_from(case.stops[SEGMENT], SEGMENT), case.steps[SEGMENT:])


def test_a_state_can_be_donated(case: Case) -> None:
    start = case.restored(case.stops[0])
    case.step(start, tree.take(case.schedule, 0), case.federation)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(start.server))


@pytest.mark.parametrize("present", [[], [NO_EXAMPLE]], ids=["nobody", "nobody with examples"])
def test_an_unattended_round_is_the_identity(case: Case, present: list[int]) -> None:
    who = [4, 3, 1, 2, 0]
    cohort = federations.cohort(who, [client in present for client in who])
    for index in range(len(case.algorithm.exchanges)):
        # A round that NO_EXAMPLE attends, so that its lack of examples is the reason.
        before = case.turn(index, NO_EXAMPLE)
        after, reports = case.one_step(before, cohort)
        assert_equal((after.server, after.clients), (before.server, before.clients))
        assert_equal(after.round, before.round + 1)
        for report in reports:
            assert not report.present.any()


def test_a_client_of_one_example_gives_no_nan(case: Case) -> None:
    who = [0, NO_EXAMPLE, ONE_EXAMPLE, 3, 4]
    cohort = federations.cohort(who, [client in (NO_EXAMPLE, ONE_EXAMPLE) for client in who])
    for index in range(len(case.algorithm.exchanges)):
        before = case.turn(index, ONE_EXAMPLE)
        state, reports = case.one_step(before, cohort)
        assert_equal(reports[index].present, np.array(who) == ONE_EXAMPLE)
        assert largest_difference(state.server, before.server) > 0
        chex.assert_tree_all_finite(state)


def test_a_client_that_uploads_nan_is_reported_and_treated_as_absent(case: Case) -> None:
    who = np.array([4, POISONED, 0, 2, 1], np.int32)
    is_poisoned = who == POISONED
    x = np.array(case.federation.data.x)
    x[federations.rows_of(case.federation, POISONED)] = np.nan
    poisoned = case.federation._replace(data=case.federation.data._replace(x=jnp.asarray(x)))
    for index in range(len(case.algorithm.exchanges)):
        before = case.turn(index, POISONED)
        got, reports = case.one_step(before, federations.cohort(who), poisoned)
        absent = federations.cohort(who, ~is_poisoned)
        expected, expected_reports = case.one_step(before, absent)
        assert_equal(got, expected)
        chex.assert_tree_all_finite(got)
        assert_equal(reports[index].finite, ~is_poisoned)
        for report, other in zip(reports, expected_reports, strict=True):
            assert_equal(report.present, other.present)


def test_nothing_is_mutated_and_numbers_may_be_traced(case: Case) -> None:
    """Traced in a closure, so that a dict changed in place would be the caller's."""
    start = case.restored(case.stops[0])
    variables = jax.tree.map(jnp.array, tree.take(plain(case.drawn[0]), 0))
    cohort = tree.take(case.schedule, 0)
    inputs = (variables, start, cohort, case.federation)
    before = plain(inputs)

    def trace(numbers: dict[str, Array]) -> Any:
        algorithm = federations.build(case.name, case.config, **numbers)
        case.init(algorithm, variables, 0)
        return rounds.step(algorithm, start, cohort, case.federation, axis=devices.chunked(1))

    jax.eval_shape(trace, case.numbers)
    assert_equal(inputs, before)


class Unfused:
    """The rounds of an algorithm, compiled without fusion.

    Fusion may change the order of sums if there are other operations to fuse them with.
    """

    def __init__(self, name: str, model: Model, arguments: dict[str, Any]) -> None:
        work = federations.full_batch(0.1)
        factory = getattr(importlib.import_module(f"{algorithms.__name__}.{name}"), name)
        algorithm = factory(model, work, server_optimizer=optax.adam(0.05), **arguments)
        federation = federations.federation()

        @jax.jit
        def start(key: Array) -> rounds.State:
            variables = federations.initial(model, key)
            return rounds.init(algorithm, variables, federation, key, history=federations.HISTORY)

        def step(state: rounds.State, cohort: Cohort) -> tuple[rounds.State, Tree]:
            axis = devices.vmapped()
            # Deltas travel in the last exchange.
            state, (*_, report) = rounds.step(algorithm, state, cohort, federation, axis=axis)
            own = algorithm.init_client(state.server, jnp.int32(0))
            logits = algorithm.predict(state.server, own, federation.data.x)
            server = (state.server.variables, state.server.opt_state)
            return state, (server, report.metrics["loss"], logits)

        options = {"xla_disable_hlo_passes": "fusion,cpu-instruction-fusion"}
        program, state = jax.jit(step, compiler_options=options), start(jax.random.key(0))
        schedule = plain(federations.schedule())
        self.rounds: list[Tree] = []  # server, losses and predictions after each round
        for t in range(len(schedule.who)):
            state, results = program(state, tree.take(schedule, t))
            self.rounds.append(plain(results))


@cache
def fedavg_unfused(model: Callable[[], Model]) -> Unfused:
    return Unfused("fedavg", model(), {})


REDUCTIONS = [
    ("fedprox", federations.mlp, {"proximal": 0.0}),
    ("moon", federations.mlp, {"penalty": 0.0, "projection": 0}),
    ("fedproto", federations.mlp, {"penalty": 0.0}),
    ("fedbn", federations.normed_body, {"is_local": lambda path: False}),
    ("fediir", federations.mlp, {"penalty": 0.0, "weighting": "size"}),
    (
        "fedcfa",
        federations.mlp,
        {
            "top_k": 3,
            "positive_weight": 0.0,
            "negative_weight": 0.0,
            "decorrelation_weight": 0.0,
        },
    ),
    *(
        ("fedipg", federations.mlp, {"penalty": 0.0, "penalty_on": on, "derivative": derivative})
        for on in ("all", "classifier")
        for derivative in ("forward_over_reverse", "reverse_over_forward")
    ),
    (
        "fedipg",
        federations.mlp,
        {"penalty": 9.0, "warmup_rounds": 6, "estimator": "halves", "scale_loss": True},
    ),
]


@pytest.mark.parametrize(("name", "model", "arguments"), REDUCTIONS)
def test_reduces_to_fedavg_bit_for_bit(
    name: str, model: Callable[[], Model], arguments: dict[str, Any]
) -> None:
    expected, got = fedavg_unfused(model), Unfused(name, model(), arguments)
    assert_equal(got.rounds, expected.rounds)


def test_scaffold_is_fedavg_until_its_variates_are_set() -> None:
    expected = fedavg_unfused(federations.mlp)
    got = Unfused("scaffold", federations.mlp(), {"weighting": "size"})
    assert_equal(got.rounds[0], expected.rounds[0])
    assert largest_difference(got.rounds[1], expected.rounds[1]) > 1e-3


def test_fedcfa_is_fedavg_until_it_has_averages() -> None:
    expected = fedavg_unfused(federations.mlp)
    arguments = {"top_k": 3, "rows": 2, "chunk": 3, "decorrelation_weight": 0.0}
    got = Unfused("fedcfa", federations.mlp(), arguments)
    assert_equal(got.rounds[0], expected.rounds[0])
    assert largest_difference(got.rounds[1], expected.rounds[1]) > 1e-3


def test_a_larger_capacity_of_a_full_batch_changes_nothing() -> None:
    model, federation = federations.small_normed(), federations.federation()
    variables = federations.initial(model, jax.random.key(0))
    grad_fn = averaging.gradient(model)

    def trained(capacity: int) -> Tree:
        work = local.full_batch(optax.sgd(0.1), capacity=capacity, num_steps=2)

        def train(who: Array) -> Tree:
            start, size = federation.start[who], federation.size[who]
            shard = Shard(federation.data, federation.order, start, size, who)
            return work.run(grad_fn, work.init(variables), shard, jax.random.key(0))

        return jax.jit(jax.vmap(train))(jnp.arange(NUM_CLIENTS))

    exact = trained(max(federations.SIZES))
    assert_close(trained(max(federations.SIZES) + 4), exact)
    kernels = exact.local.variables.params.head["blocks_0"]["Dense_0"]["kernel"]
    assert jnp.abs(kernels[3] - kernels[4]).max() > 1e-3
