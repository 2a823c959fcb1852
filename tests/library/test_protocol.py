"""The laws that every algorithm must obey, in every configuration of `federations.TABLE`."""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import federations
import slow
from federations import TABLE, assert_close, assert_equal, plain
from fedjax_inv import algorithms, averaging, devices, local, rounds, testing, tree
from fedjax_inv.testing.comparing import largest_difference
from fedjax_inv.types import Array, Cohort, Model, Shard, Tree

NUM_CLIENTS = federations.NUM_CLIENTS
# Without optimisation XLA may round the same operations in two ways.
QUICK = {"xla_backend_optimization_level": 1}
# The algorithm whose first configuration must also have the same bits on every number of devices;
# others must, too, in a slow test.
EXACT = "fedavg"
CASES = [
    pytest.param(
        (name, i),
        id=f"{name}-{i}-{config.model.__name__}",
        marks=[pytest.mark.slow] if i else [],
    )
    for name in algorithms.LISTED
    for i, config in enumerate(TABLE.get(name, ()))
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> testing.Case:
    name, index = request.param
    is_exact = name == EXACT and index == 0
    options = QUICK if is_exact else {}
    return federations.case(name, TABLE[name][index], is_exact=is_exact, options=options)


@pytest.mark.parametrize("law", testing.LAWS)
def test_every_algorithm_obeys(case: testing.Case, law: str) -> None:
    try:
        testing.LAWS[law](case)
    except testing.NotApplicable:
        assert law in ("a_blank_upload_fits", "the_network_gives_the_outputs_for_a_new_client") or (
            # A client without examples is no player.
            (law, case.name.split(".")[-1])
            == ("a_round_without_examples_changes_nothing", "fl_games")
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cafe", "erm", "exit_strategy", "fl_games"])
def test_the_bits_of_a_run_do_not_depend_on_the_devices(name: str) -> None:
    case = federations.case(name, TABLE[name][0], is_exact=True, options=QUICK)
    testing.LAWS["devices_and_empty_slots_do_not_matter"](case)


def test_all_algorithms_are_in_the_table() -> None:
    """A file is listed if it has a factory of its own name, and all in the list are configured."""
    names = {module.name for module in pkgutil.iter_modules(algorithms.__path__)}
    modules = {name: importlib.import_module(f"{algorithms.__name__}.{name}") for name in names}
    assert set(algorithms.LISTED) == {name for name in names if hasattr(modules[name], name)}
    assert len(set(algorithms.LISTED)) == len(algorithms.LISTED)
    assert set(algorithms.LISTED) == {name for name, configs in TABLE.items() if configs}


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
    (
        "fedipg",
        federations.mlp,
        {"penalty": 9.0, "warmup_rounds": 6, "estimator": "halves", "scale_loss": True},
    ),
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
    ("moon", federations.mlp, {"penalty": 0.0, "projection": 0}),
    ("fedbn", federations.normed_body, {"is_local": lambda path: False}),
    ("fedproto", federations.mlp, {"penalty": 0.0}),
    ("fediir", federations.mlp, {"penalty": 0.0, "weighting": "size"}),
    *(
        ("fedipg", federations.mlp, {"penalty": 0.0, "penalty_on": on, "derivative": derivative})
        for on in ("all", "classifier")
        for derivative in ("reverse_over_forward", "forward_over_reverse")
    ),
]


@pytest.mark.parametrize(("name", "model", "arguments"), slow.after(5, REDUCTIONS))
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
