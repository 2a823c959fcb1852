"""What every algorithm must pass, for every configuration in the table of `federations`."""

from functools import cached_property, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import federations
from federations import TABLE, Config, assert_close, assert_equal, plain
from fedjax_inv import clients, rounds, tree
from fedjax_inv.types import Algorithm, Array, Cohort, Federation, Tree, Variables

Result = tuple[rounds.State, tuple[rounds.Report, ...]]
CASES = [
    pytest.param((name, config), id=f"{name}-{i}-{config.model.__name__}")
    for name in federations.listed()
    for i, config in enumerate(TABLE.get(name, ()))
]
NO_EXAMPLE, ONE_EXAMPLE, POISONED = 1, 2, 3  # clients


class Case:
    """One configuration, and what several of its tests share."""

    def __init__(
        self, name: str, config: Config, compiler_options: dict[str, str] | None = None
    ) -> None:
        self.name, self.config, self.compiler_options = name, config, compiler_options
        self.algorithm = federations.build(name, config)
        self.federation = federations.federation()
        self.schedule = federations.schedule()

        def step(state: rounds.State, cohort: Cohort, federation: Federation) -> Result:
            axis = clients.vmapped()
            return rounds.step(
                self.algorithm, state, cohort, federation, axis=axis, drop_nonfinite=True
            )

        chex.clear_trace_counter()  # which counts by the name of the function
        # One trace serves all of the tests; the images are floats.
        self.step = jax.jit(chex.assert_max_traces(step, n=1), donate_argnums=0)

    def variables(self, seed: Array | int = 0) -> Variables:
        return federations.initial(self.config.model(), jax.random.key(seed))

    def init(self, algorithm: Algorithm, variables: Variables, seed: Array | int = 0) -> Any:
        return rounds.init(
            algorithm,
            variables,
            jax.random.key(seed),
            federations.NUM_CLIENTS,
            history=federations.HISTORY,
        )

    def run(
        self,
        axis: clients.Axis | None = None,
        *,
        state: rounds.State | None = None,
        schedule: Cohort | None = None,
        federation: Federation | None = None,
        mesh: Mesh | None = None,
    ) -> Result:
        """The run under an axis, vmapped by default; each axis has a program of its own."""
        run = partial(rounds.run, self.algorithm, axis=axis) if axis else self.vmapped_run
        if mesh is not None:
            run = clients.over(mesh, run)
        return jax.jit(run, compiler_options=self.compiler_options)(
            self.start if state is None else state,
            self.schedule if schedule is None else schedule,
            self.federation if federation is None else federation,
        )

    @cached_property
    def vmapped_run(self) -> Any:
        return partial(rounds.run, self.algorithm, axis=clients.vmapped())

    @cached_property
    def start(self) -> rounds.State:
        return jax.jit(partial(self.init, self.algorithm))(self.variables())

    @cached_property
    def result(self) -> Result:
        """The run that the others are compared with."""
        return self.run()

    def taking_place(self) -> list[Array | bool]:
        """Of each exchange, whether it takes place in the round after the run."""
        after = self.result[0].round
        return [exchange.takes_place(after) for exchange in self.algorithm.exchanges]

    def warm(self) -> rounds.State:
        """A copy of the state after the run, which may be donated."""
        return jax.tree.map(jnp.copy, self.result[0])


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def per_client(schedule: Cohort, reports: tuple[rounds.Report, ...]) -> list[Tree]:
    """Reports [T, S] as [T, C]: wherever a client sat; zeros where it has nothing to say."""
    rounds_, slots = np.nonzero(schedule.present)
    who = np.asarray(schedule.who)[rounds_, slots]
    shape = (len(schedule.who), federations.NUM_CLIENTS)

    def scattered(values: Array) -> np.ndarray:
        by_client = np.zeros(shape, np.asarray(values).dtype)
        by_client[rounds_, who] = np.asarray(values)[rounds_, slots]
        return by_client

    for report in reports:
        # Nobody is present in a slot that the schedule leaves empty, or says that it failed.
        assert not np.asarray(report.present & ~schedule.present).any()
        assert np.asarray(report.finite | schedule.present).all()
    return [
        jax.tree.map(
            scattered,
            report._replace(
                metrics={k: jnp.where(report.present, v, 0) for k, v in report.metrics.items()}
            ),
        )
        for report in reports
    ]


def assert_same_run(
    case: Case, result: Result, schedule: Cohort | None = None, *, exact: bool = False
) -> None:
    """`result`, under a schedule that may be laid out otherwise, is the run of the case."""
    check = assert_equal if exact else assert_close
    state, reports = case.result
    check(result[0], state)
    check(
        per_client(case.schedule if schedule is None else schedule, result[1]),
        per_client(case.schedule, reports),
    )


def largest_difference(first: Tree, second: Tree) -> float:
    leaves = zip(jax.tree.leaves(plain(first)), jax.tree.leaves(plain(second)), strict=True)
    return max(np.abs(a.astype(float) - b.astype(float)).max() for a, b in leaves)


def rearranged(schedule: Cohort, seed: int) -> Cohort:
    """The slots of each round in another order."""
    shape = schedule.who.shape
    order = np.random.default_rng(seed).permuted(
        np.tile(np.arange(shape[1]), (shape[0], 1)), axis=1
    )
    assert (order != np.arange(shape[1])).any(1).all()
    return jax.tree.map(lambda a: jnp.take_along_axis(a, jnp.asarray(order), 1), schedule)


def with_empty_slots(schedule: Cohort) -> Cohort:
    """Two empty slots more, strewn among the others; they name clients that may attend."""
    num_rounds = len(schedule.who)
    empty = Cohort(
        jnp.tile(jnp.array([3, 0], jnp.int32), (num_rounds, 1)),
        jnp.zeros((num_rounds, 2), bool),
        jnp.ones((num_rounds, 2), jnp.int32),
    )
    together = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), schedule, empty)
    return rearranged(together, 3)


def test_no_algorithm_dodges_the_table() -> None:
    assert set(federations.listed()) == {name for name, configs in TABLE.items() if configs}


def test_the_run_moves_everything_and_delays_matter(case: Case) -> None:
    """Otherwise the tests below would compare nothing with nothing."""
    state, reports = case.result
    assert largest_difference(case.start.server, state.server) > 1e-2
    undelayed = case.schedule._replace(delay=jnp.zeros_like(case.schedule.delay))
    assert largest_difference(case.run(schedule=undelayed)[0].server, state.server) > 1e-3
    attended = case.schedule.present & (case.schedule.who != NO_EXAMPLE)
    rounds_of_run = jnp.arange(len(attended))
    for exchange, report in zip(case.algorithm.exchanges, reports, strict=True):
        now = jnp.broadcast_to(exchange.takes_place(rounds_of_run), rounds_of_run.shape)
        assert now.any()
        assert_equal(report.present, attended & now[:, None])
        assert_equal(report.size, jnp.array(federations.SIZES)[case.schedule.who])


@pytest.mark.parametrize("size", [1, 3])
def test_chunked_is_vmapped(case: Case, size: int) -> None:
    assert_same_run(case, case.run(clients.chunked(size)))


def test_sharded_is_vmapped(case: Case) -> None:
    mesh = jax.make_mesh((4,), ("clients",), axis_types=(AxisType.Auto,))
    assert_same_run(case, case.run(clients.sharded("clients"), mesh=mesh))


def test_the_order_of_slots_does_not_matter(case: Case) -> None:
    schedule = rearranged(case.schedule, 2)
    assert_same_run(case, case.run(schedule=schedule), schedule)


def test_empty_slots_do_not_matter(case: Case) -> None:
    schedule = with_empty_slots(case.schedule)
    harmless = federations.padded(case.federation, 3, garbage=False)
    assert_same_run(case, case.run(schedule=schedule, federation=harmless), schedule)


def test_padding_with_garbage_does_not_matter(case: Case) -> None:
    schedule = with_empty_slots(case.schedule)  # for the program of the test above
    garbage = federations.padded(case.federation, 3, garbage=True)
    assert not np.isfinite(garbage.data.x[garbage.rows[~garbage.mask]]).all()
    assert_same_run(case, case.run(schedule=schedule, federation=garbage), schedule)


def test_stop_and_resume_is_bit_identical(case: Case) -> None:
    first, last = (tree.take(case.schedule, part) for part in (slice(3), slice(3, 6)))
    state, reports = case.run(schedule=first)
    # Through the host, as a checkpoint goes.
    saved = plain(state)
    restored = jax.tree.map(jnp.array, saved)._replace(key=jax.random.wrap_key_data(saved.key))
    state, more = case.run(state=restored, schedule=last)
    reports = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), reports, more)
    assert_same_run(case, (state, reports), exact=True)


def test_run_is_a_loop_of_steps_on_a_donated_state(case: Case) -> None:
    variables = case.variables()
    kept = plain(variables)
    state, reports = case.init(case.algorithm, variables), []
    for t in range(len(case.schedule.who)):
        given = state
        state, report = case.step(
            given, tree.take(case.schedule, t), federations.in_floats(case.federation)
        )
        reports.append(report)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(given.server))  # donated indeed
    assert_equal(variables, kept)  # what the caller passed to `init` is still there
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)
    assert_same_run(case, (state, stacked))


@pytest.mark.parametrize("present", [[], [NO_EXAMPLE]], ids=["nobody", "nobody with examples"])
def test_an_unattended_round_is_the_identity(case: Case, present: list[int]) -> None:
    who = [4, 3, 1, 2, 0]
    cohort = federations.cohort(who, [client in present for client in who])
    before = case.result[0]
    after, reports = case.step(case.warm(), cohort, federations.in_floats(case.federation))
    assert_equal((after.server, after.clients), (before.server, before.clients))
    assert_equal(after.round, before.round + 1)
    for report in reports:
        assert not report.present.any()


def test_tiny_clients_give_no_nan(case: Case) -> None:
    who = [0, NO_EXAMPLE, ONE_EXAMPLE, 3, 4]
    cohort = federations.cohort(who, [client in (NO_EXAMPLE, ONE_EXAMPLE) for client in who])
    state, reports = case.step(case.warm(), cohort, federations.in_floats(case.federation))
    assert largest_difference(state.server, case.result[0].server) > 0
    chex.assert_tree_all_finite(plain((state, case.result[0])))
    chex.assert_tree_all_finite([report.metrics for report in case.result[1]])
    for now, report in zip(case.taking_place(), reports, strict=True):
        assert_equal(report.present, (jnp.array(who) == ONE_EXAMPLE) & now)


def test_a_client_that_uploads_nan_is_reported_and_treated_as_absent(case: Case) -> None:
    who = [4, POISONED, 0, 2, 1]
    federation = federations.in_floats(case.federation)
    rows = federation.rows[POISONED][federation.mask[POISONED]]
    poisoned = federation._replace(
        data=federation.data._replace(x=federation.data.x.at[rows].set(jnp.nan))
    )
    is_poisoned = jnp.array(who) == POISONED
    got, reports = case.step(case.warm(), federations.cohort(who), poisoned)
    absent = federations.cohort(who, list(~is_poisoned))
    expected, _ = case.step(case.warm(), absent, federation)
    assert_equal(got, expected)
    chex.assert_tree_all_finite(plain(got))
    for now, report in zip(case.taking_place(), reports, strict=True):
        assert_equal(report.finite, ~(is_poisoned & now))
        assert_equal(report.present, ~is_poisoned & (jnp.array(who) != NO_EXAMPLE) & now)


def test_nothing_is_mutated(case: Case) -> None:
    """Neither the inputs nor hidden state: traced in a closure, so that a dict that an algorithm
    changes in place is the caller's own.
    """
    variables = case.variables()
    state, cohort = case.start, tree.take(case.schedule, 0)
    inputs = (variables, state, cohort, case.federation)
    before = jax.tree.map(plain, inputs)

    def trace() -> Result:
        case.init(case.algorithm, variables)
        return rounds.step(case.algorithm, state, cohort, case.federation, axis=clients.vmapped())

    jax.eval_shape(trace)
    assert_equal(inputs, before)
    # The same program again, from the same state.
    assert_same_run(case, case.run(), exact=True)


def test_a_run_can_be_vmapped_over_seeds_and_numbers(case: Case) -> None:
    numbers = {
        "learning_rate": case.config.learning_rate,
        **federations.hyperparameters(case.config),
    }
    # The run of the case, then one number changed at a time, then another seed.
    lanes = [(0, numbers), *((0, {**numbers, k: numbers[k] / 2}) for k in numbers), (1, numbers)]
    lanes = [jax.tree.map(jnp.asarray, lane) for lane in lanes]

    def whole(seed: Array, numbers: dict[str, Array]) -> Result:
        algorithm = federations.build(case.name, case.config, **numbers)
        state = case.init(algorithm, case.variables(seed), seed)
        return rounds.run(algorithm, state, case.schedule, case.federation, axis=clients.vmapped())

    one_by_one = [jax.jit(whole)(*lane) for lane in lanes]
    together = jax.jit(jax.vmap(whole))(*jax.tree.map(lambda *leaves: jnp.stack(leaves), *lanes))
    assert_same_run(case, one_by_one[0])
    for i, one in enumerate(one_by_one):
        state, reports = tree.take(together, i)
        assert_close(state, one[0])
        assert_close(per_client(case.schedule, reports), per_client(case.schedule, one[1]))
        if i > 0:
            assert largest_difference(one[0].server, case.result[0].server) > 1e-4


REDUCTIONS = [
    ("fedprox", {"proximal": 0.0}),
    *(
        ("fedipg", {"penalty": 0.0, "penalty_on": on, "derivative": derivative})
        for on in ("all", "classifier")
        for derivative in ("forward_over_reverse", "reverse_over_forward")
    ),
]


@pytest.fixture(scope="module")
def fedavg_case() -> Case:
    config = Config(federations.mlp, federations.full_batch)
    # Fusion may take sums in another order when there is something else to fuse them with.
    return Case("fedavg", config, {"xla_disable_hlo_passes": "fusion,cpu-instruction-fusion"})


@pytest.mark.parametrize(("name", "arguments"), REDUCTIONS)
def test_reduces_to_fedavg_bit_for_bit(
    fedavg_case: Case, name: str, arguments: dict[str, Any]
) -> None:
    config = fedavg_case.config._replace(arguments=arguments)
    (expected, expected_reports), (got, reports) = (
        fedavg_case.result,
        Case(name, config, fedavg_case.compiler_options).result,
    )
    assert_equal(got, expected)
    for report, other in zip(reports, expected_reports, strict=True):
        assert_equal(report.metrics["loss"], other.metrics["loss"])
