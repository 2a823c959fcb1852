"""Flags: groups and their flat form, the command line, and what it tells of itself."""

import inspect
import json

import pytest
from absl import flags

from experiments import command_line, config, environments, groups, registry
from experiments.flag import name_of
from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError


def test_flags_as_a_list_are_those_of_a_command_line() -> None:
    assert command_line.of_arguments([]) == config.of()
    chosen = command_line.of_arguments(
        ["--preset=colored_mnist_v,games_sequential,games_smooth", "--rounds=77"]
    )
    assert (chosen.data.dataset, chosen.model.cut, chosen.run.rounds) == ("mnist", 1, 77)
    assert set(chosen.method.settings) == {
        *("learned=true", "body_learning_rate=0.000025", "memory=5", "play=sequential"),
    }
    assert command_line.of_arguments([], nonfinite="mark").run.nonfinite == "mark"
    for arguments, words in (
        ("--rounds=x", "rounds"),
        ("--preset=colored_mnis_f", "colored_mnist_f"),
    ):
        with pytest.raises(UsageError, match=words):
            command_line.of_arguments([arguments])


def test_the_groups_hold_every_flag_once_and_flat_is_the_inverse_of_of() -> None:
    every = [field.name for group in groups.GROUPS for field in groups.fields(group)]
    assert len(every) == len(set(every)) == len(groups.FLAGS)
    chosen = config.of(
        algorithm=("fedipg",), environment="colored", flips=(0.3,), widths=(4, 5), rounds=9
    )
    assert config.of(**config.flat(chosen)) == chosen
    assert config.from_record(json.loads(json.dumps(config.to_record(chosen)))) == chosen
    assert config.changed(chosen, rounds=7).run.rounds == 7
    # What an environment does not take is as if it had never been given.
    assert config.flat(config.changed(chosen, environment="none"))["flips"] == (0.2, 0.1)
    with pytest.raises(TypeError, match="round is no flag"):
        config.of(round=3)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        *(("digits", "rotated"), ("mnist", "rotated"), ("dsprites", "rotated")),
        *(("mine.npz", "none"), ("here/mine.npz", "none"), (".", "none")),
    ],
)
def test_data_of_ones_own_keep_their_domains(dataset: str, name: str) -> None:
    chosen = config.of(dataset=dataset)
    assert chosen.environment.name == name
    assert config.to_record(chosen)["environment"] == name
    assert config.of(dataset=dataset, environment="colored").environment.name == "colored"


def test_a_flag_of_no_environment_has_no_record() -> None:
    for name, kind in environments.LISTED.items():
        chosen = config.of(environment=name)
        assert tuple(type(record) for record in chosen.environment.records) == kind.records


def helped(*arguments: str) -> str:
    values = flags.FlagValues()
    command_line.define(values, nonfinite="mark")
    told = command_line.answer(["", *arguments], "What it is.\n", values)
    assert told is not None
    return told


@pytest.mark.parametrize("ask", ["--help", "-h", "--helpfull"])
def test_help_tells_all_in_groups(ask: str) -> None:
    told = helped("--rounds=3", ask)
    assert told.startswith("What it is.\n\n")
    places = [told.index(f"{group.upper()}: ") for group in groups.GROUPS]
    assert places == sorted(places)
    for start, end, group in zip(places, [*places[1:], None], groups.GROUPS, strict=True):
        for field in groups.fields(group):
            assert f"  --{name_of(field)}=" in told[start:end]
    assert "--nonfinite=mark" in told
    for name, text in command_line.presets().items():
        assert f"  {name} " in told
        assert text.split()[0] in told
    for name in (*LISTED, *environments.LISTED):
        assert f"  {name} " in told
    assert max(map(len, told.splitlines())) <= 100


def test_without_a_question_there_is_no_answer() -> None:
    assert command_line.answer(["", "--rounds=3", "help"], "") is None


@pytest.mark.parametrize("algorithm", LISTED)
def test_describe_tells_every_setting_and_its_meaning(algorithm: str) -> None:
    told = helped(f"--describe={algorithm}")
    factory = registry.factory(algorithm)
    meanings = command_line.meanings(factory)
    for name, kinds in registry.hyperparameters(algorithm).items():
        settable = set(kinds) - {type(None)}
        assert (f"--set={name} " in told) == bool(settable)
        if settable:
            assert len(meanings[name]) > 5, name
            default = inspect.signature(factory).parameters[name].default
            assert str(default).lower() in told.lower() or f"{default:g}" in told


def test_describe_of_an_unknown_algorithm() -> None:
    with pytest.raises(UsageError, match="--describe=fedpig: unknown; did you mean fedipg"):
        helped("--describe=fedpig")
