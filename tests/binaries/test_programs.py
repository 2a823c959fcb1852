"""Programs are shared by cells whose keys are equal: then the programs must be equal, too."""

import weakref
from dataclasses import fields
from typing import Any

import jax
import pytest

from fedjax_inv.plan import Plan
from fedjax_inv_experiments import config, run
from fedjax_inv_experiments.assembly import experiment

SMALL: dict[str, Any] = {"widths": (4,), "local_steps": 1, "rounds": 4, "eval_every": 2}
SMALL |= {"seeds": (0,), "devices": "1"}
COLORED: dict[str, Any] = {"environment": "colored"}
STAINED: dict[str, Any] = {"environment": "stained"}
SIMPSON: dict[str, Any] = {"environment": "simpson"}
MIXED: dict[str, Any] = {"partition": "mixed", "clients": 6}
DIRICHLET: dict[str, Any] = {"partition": "dirichlet", "clients": 6, "held_out": "none"}
SHARDS: dict[str, Any] = {"partition": "shards", "clients": 6, "held_out": "none"}
# A value of each flag that may leave a program as it is, and the flags with which it acts.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dataset": ("moved_digits", {}),
    "stride": (2, {}),
    "max_examples": (900, {}),
    "held_out": ("30", {}),
    "validate": ("next", {}),
    "test_fraction": (0.3, {"held_out": "none"}),
    "environment": ("none", {}),
    "data_seed": ("5", {}),
    "angles": ((0.0, 20.0, 40.0, 50.0, 60.0, 75.0), {}),
    "odd_angles": ((10.0,), {}),
    "num_classes": (5, COLORED),
    "flips": ((0.3, 0.2), COLORED),
    "label_noise": (0.1, COLORED),
    "binarise": (False, COLORED),
    "stain": ("background", STAINED),
    "training_domains": (4, STAINED),
    "domain_size": (100, STAINED),
    "shading": ("random", SIMPSON),
    "agreements": ((0.5, 0.6), STAINED),
    "joint_colors": (True, STAINED | {"stain": "both"}),
    "hues": (True, SIMPSON),
    "paradox": (0.5, SIMPSON),
    "partition": ("iid", {"clients": 6}),
    "alpha": (2.0, DIRICHLET),
    "min_size": (20, DIRICHLET),
    "classes_per_client": (3, SHARDS),
    "mixing": (0.5, MIXED),
    "clients": (7, MIXED),
    "validation": (0.3, {}),
    "held_out_clients": (0.25, MIXED),
    "partition_seed": ("3", MIXED),
    "imbalance": (4.0, {}),
    "rare_domain": ("0:0.1", {}),
    "wrong_labels": (0.5, {}),
    "wrong_clients": (0.9, {"wrong_labels": 0.5}),
    "pooled": (True, {}),
    "cohort": (3, {}),
    "sampling_rate": (0.5, {}),
    "sampling": ("poisson", {"sampling_rate": 0.5}),
    "aggregate": ("median", {}),
    "attack": ("scaled_noise", {"attack": "sign_flip", "attackers": (0,)}),
    "attackers": ((1,), {"attack": "sign_flip", "attackers": (0,)}),
    "private_clip": (0.1, {"noise_multiplier": 1.0, "private_clip": 0.5}),
    "noise_multiplier": (2.0, {"noise_multiplier": 1.0, "private_clip": 0.5}),
    "epsilon": (4.0, {"epsilon": 8.0, "private_clip": 0.5}),
    "delta": (1e-3, {"epsilon": 8.0, "private_clip": 0.5}),
    "first_all": (True, {"cohort": 3}),
    "buffer": (2, {"cohort": 3}),
    "slow": (("0:2",), {}),
    "lossy": (("0:0.5",), {}),
    "dropout": (0.3, {}),
    "frequency": (0.5, {}),
    "late": ("stale", {"dropout": 0.3}),
    "missing": ("reuse", {"dropout": 0.3}),
}
OF_FILES = {"target_column", "domain_column", "client_column", "test_column", "group_column"}
OF_FILES |= {"split_column", "image_column", "ignored_columns", "task", "image_size"}
OF_FILES |= {"vocabulary", "text_length"}


def text(plan: Plan) -> str:
    """The lowered programs of a plan."""
    plan = plan.placed()
    jitted: Any = plan.program.jitted
    arguments = plan.data, plan.inputs
    states = jax.eval_shape(jitted.init, *arguments)
    programs = [
        jitted.init.lower(*arguments),
        jitted.evaluate.lower(*arguments, states),
        jitted.rounds.lower(*arguments, states, plan.part(1)),
    ]
    return "\n".join(program.as_text() for program in programs)


@pytest.mark.slow
def test_of_one_key_programs_are_the_same() -> None:
    groups = (
        config.Data,
        config.Environment,
        config.Partition,
        config.Participation,
        config.Aggregation,
    )
    assert {field.name for group in groups for field in fields(group)} == OF_FILES | {*CHANGES}
    flags = {"": {}} | {str(others): others for _, others in CHANGES.values()}
    flags |= {name: {**others, name: value} for name, (value, others) in CHANGES.items()}
    first: dict[Any, Plan] = {}
    texts: dict[Any, str] = {}
    shared = []
    for name, more in flags.items():
        assembled = experiment.make(config.of(**SMALL, **more))
        plan = assembled.plan(assembled.cells[0])
        key = run.depends_on(assembled, assembled.cells[0], plan)
        if key not in first:
            first[key] = plan
            continue
        if key not in texts:
            texts[key] = text(first[key])
        assert text(plan) == texts[key], f"{name} changes the program, and not its key"
        shared.append(name)
    assert len(shared) > 20, shared


def test_the_sampling_rate_is_a_number_of_a_private_program() -> None:
    private = {"private_clip": 0.5, "noise_multiplier": 1.0, "sampling": "poisson"}
    found = []
    for rate in (0.5, 0.50001):  # with the same cohorts
        assembled = experiment.make(config.of(**SMALL, **private, sampling_rate=rate))
        plan = assembled.plan(assembled.cells[0])
        found.append((plan.cohorts.who.shape, run.depends_on(assembled, assembled.cells[0], plan)))
    (first, key), (second, other) = found
    assert first == second
    assert key != other


def test_the_number_of_domains_is_one_of_a_program_of_domains() -> None:
    mixed = {"algorithm": ("group_dro",), "partition": "mixed", "clients": 2, "held_out": "none"}
    found = []
    for angles in ((0.0, 30.0), (0.0, 30.0, 60.0)):
        assembled = experiment.make(config.of(**SMALL | mixed | {"angles": angles}))
        plan = assembled.plan(assembled.cells[0])
        key = run.depends_on(assembled, assembled.cells[0], plan)
        found.append((assembled.objective.num_domains, key))
    (two, key), (three, other) = found
    assert (two, three) == (2, 3)
    assert key != other


def test_programs_that_are_not_kept_leave_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have 65,530 memory maps, of which a program takes hundreds."""
    monkeypatch.setattr(run, "_MOST_PROGRAMS", 1)
    programs = run.Programs()
    made = []
    for width in (3, 4, 5):
        assembled = experiment.make(config.of(**SMALL | {"widths": (width,)}))
        plan = programs.plan(assembled, assembled.cells[0]).compile()
        made.append(weakref.ref(plan.program))
        del plan, assembled
    assert [each() is None for each in made] == [True, True, False]


def test_what_follows_a_stop_does_nothing_without_a_stop() -> None:
    """As in a row of FedAvg beside games, whose flags are for all rows."""
    assembled = experiment.make(config.of(**SMALL, after_stop="end"))
    assert not assembled.plan(assembled.cells[0]).evaluations.end_at_stop
