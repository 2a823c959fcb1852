"""Flags: groups and their flat form, the command line, and what it tells of itself."""

import dataclasses
import inspect
import json
import re

import pytest
from absl import flags

from fedjax_inv.algorithms import LISTED
from fedjax_inv.checks import UsageError
from fedjax_inv_experiments import sweep, train
from fedjax_inv_experiments.experiment import command_line, config
from fedjax_inv_experiments.flags import names as registry
from fedjax_inv_experiments.flags.flag import at_least, flag, name_of
from fedjax_inv_experiments.parts import environments


def test_flags_as_a_list_are_those_of_a_command_line() -> None:
    assert command_line.of_arguments([]) == config.of()
    chosen = command_line.of_arguments(
        ["--preset=colored_mnist_v,games_sequential,games_smooth", "--rounds=77"]
    )
    assert (chosen.dataset, chosen.cut, chosen.rounds) == ("mnist", 1, 77)
    assert set(chosen.settings) == {
        *("learned=true", "body_learning_rate=0.000025", "memory=5", "play=sequential"),
    }
    assert command_line.of_arguments(["--preset", "games_smooth"]) == command_line.of_arguments(
        ["--preset=games_smooth"]
    )
    assert command_line.of_arguments([], nonfinite="mark").nonfinite == "mark"
    for arguments, words in (
        ("--rounds=x", "rounds"),
        ("--preset=colored_mnis_f", "colored_mnist_f"),
    ):
        with pytest.raises(UsageError, match=words):
            command_line.of_arguments([arguments])


def test_the_groups_hold_every_flag_once_and_flat_is_the_inverse_of_of() -> None:
    every = [field.name for group in config.GROUPS for field in config.fields(group)]
    assert len(every) == len(set(every)) == len(config.FLAGS)
    chosen = config.of(
        algorithm=("fedipg",), environment="colored", flips=(0.3,), widths=(4, 5), rounds=9
    )
    assert config.of(**config.flat(chosen)) == chosen
    assert config.from_record(json.loads(json.dumps(config.to_record(chosen)))) == chosen
    assert config.changed(chosen, rounds=7).rounds == 7
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
    assert chosen.environment_name == name
    assert config.to_record(chosen)["environment"] == name
    assert config.of(dataset=dataset, environment="colored").environment_name == "colored"


def helped(*arguments: str) -> str:
    values = flags.FlagValues()
    command_line.define(values, nonfinite="mark")
    text = command_line.answer(["", *arguments], "What it is.\n", values)
    assert text is not None
    return text


def test_help_tells_all_in_groups() -> None:
    page = helped("--rounds=3", "--help")
    assert page.startswith("What it is.\n\n")
    places = [page.index(f"{group.upper()}: ") for group in config.GROUPS]
    assert places == sorted(places)
    for start, end, group in zip(places, [*places[1:], None], config.GROUPS, strict=True):
        for field in config.fields(group):
            assert f"  --{name_of(field)}=" in page[start:end]
    assert "--nonfinite=mark" in page
    for name, summary in command_line.presets().items():
        assert f"  {name} " in page
        assert summary.split()[0] in page
    for name in (*LISTED, *environments.LISTED):
        assert f"  {name} " in page
    assert max(map(len, page.splitlines())) <= 100


@dataclasses.dataclass(frozen=True)
class Own:
    """Flags of a binary beside those of an experiment."""

    images: int = flag(10, "Images of each domain.", at_least(1))
    out: str = flag("data.png", "The picture.")


def test_a_binary_has_its_own_flags_beside_those_of_an_experiment() -> None:
    binary = command_line.binary(
        lambda chosen, own: f"{chosen.rounds} {own.images} {own.out}",
        "It draws.",
        Own,
        rounds=7,
    )
    values = flags.FlagValues()
    binary.define(values)
    assert binary.run(binary.read(["", "--images=3"], values)) == "7 3 data.png"
    values = flags.FlagValues()
    binary.define(values)
    text = binary.answer(["", "--help"], values)
    assert text is not None
    assert text.startswith("It draws.\n\nTHIS BINARY\n  --images=10 ")
    assert "  --rounds=7 " in text
    assert binary.answer(["", "--images=3"], values) is None
    with pytest.raises(UsageError, match=r"^--images=0: must be at least 1"):
        binary.read(["", "--images=0"], values)


@pytest.mark.parametrize("algorithm", LISTED)
def test_describe_tells_every_setting_and_its_meaning(algorithm: str) -> None:
    text = helped(f"--describe={algorithm}")
    factory = registry.factory(algorithm)
    meanings = command_line.meanings(factory)
    for name, kinds in registry.hyperparameters(algorithm).items():
        settable = set(kinds) - {type(None)}
        assert (f"--set={name} " in text) == bool(settable)
        if settable:
            assert len(meanings[name]) > 5, name
            default = inspect.signature(factory).parameters[name].default
            assert str(default).lower() in text.lower() or f"{default:g}" in text


def described(plain: int, *, penalty: float = 0.1, first: int = 1, second: int = 2) -> None:
    """Do something.

    More of it: penalty: not this.

    Args:
      plain: A first argument.
      penalty: Weight of the penalty, at least 0; see
        Algorithm 1 (with a colon: here).
      first, second: Numbers.

    Returns:
      None: nothing.

    Raises:
      UsageError: for a bad penalty.
    """


def test_meanings_are_the_arguments_of_a_docstring() -> None:
    assert command_line.meanings(described) == {
        "plain": "A first argument",
        "penalty": "Weight of the penalty, at least 0; see Algorithm 1 (with a colon: here)",
        "first": "Numbers",
        "second": "Numbers",
    }


PRESET = "--preset=rotated_digits"  # says --set=penalty=0.001,0.01


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ([PRESET], ("penalty=0.001,0.01",)),
        ([PRESET, "--set=penalty=3"], ("penalty=3",)),
        ([PRESET, "--set", "penalty=3"], ("penalty=3",)),
        ([PRESET, "--set=weighting=uniform"], ("penalty=0.001,0.01", "weighting=uniform")),
        ([PRESET, "--set=penalty="], ()),
        ([PRESET, "--set="], ()),
        ([PRESET, "--set=", "--set=penalty=3"], ("penalty=3",)),
        ([PRESET, "--set=penalty=", "--set=penalty=3"], ("penalty=3",)),
        # Of presets the later one wins, as of all flags.
        (["--preset=fedipg_acts,rotated_digits", "--set=penalty_on="], None),
        (["--set=penalty=3", PRESET], ("penalty=0.001,0.01",)),
        (["--set=penalty=a="], ("penalty=a=",)),
    ],
)
def test_settings_of_presets_are_replaced_and_taken_back(
    arguments: list[str], settings: tuple[str, ...] | None
) -> None:
    values = command_line.of_arguments(arguments).settings
    if settings is None:
        settings = ("scale_loss=true", "warmup_rounds=20", "penalty=0.001,0.01")
        assert set(values) == set(settings)
    else:
        assert values == settings


def test_a_setting_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--set=penalty=2: .*--set=penalty=1"):
        command_line.of_arguments(["--algorithm=fedipg", "--set=penalty=1", "--set=penalty=2"])


def folder(*arguments: str) -> str:
    """Where `train` goes by default."""
    return train.folder(command_line.of_arguments(arguments)).as_posix()


def test_a_default_folder_tells_what_differs() -> None:
    assert folder() == "runs/fedavg-digits-default"
    assert (
        folder("--held_out=75", "--learning_rate=0.2") == "runs/fedavg-digits-75-learning_rate=0.2"
    )
    assert folder("--seeds=0,1") == "runs/fedavg-digits-default-seeds=0-1"
    assert folder("--algorithm=fedipg", "--set=penalty=0.1").endswith("-default-set=penalty=0.1")
    # What is long, and what a file system may not take, is named by a checksum.
    for arguments in (["--preset=rotated_digits_small"], ["--dataset=a/b.npz"]):
        assert re.fullmatch(r"runs/fedavg-\w+-[\d-]*\w*-[\da-f]{8}", folder(*arguments)), arguments
    several = sweep.folder(command_line.of_arguments([PRESET])).as_posix()
    assert re.fullmatch(r"runs/sweep-digits-fedavg-fedipg-[\da-f]{8}", several)


def test_a_default_folder_is_that_of_the_run() -> None:
    """The same for the same run, and another for another."""
    some = ["--learning_rate=0.2", "--clients=7"]
    assert folder(*some) == folder(*reversed(some))
    # With these a run goes on.
    for more in (
        *("--rounds=60", "--resume", "--checkpoint_every=10", "--client_chunk=1", "--devices=1"),
        *("--nonfinite=drop", "--select=last"),
    ):
        assert folder(*some, more) == folder(*some)
    many = [folder(*some, f"--set=weighting={w}") for w in ("size", "uniform")]
    rates = [folder("--learning_rate=0.1000001"), folder("--learning_rate=0.1000002")]
    data = [folder(f"--dataset={place}/mine.npz") for place in ("a", "b")]
    presets = [folder(f"--preset={name}") for name in ("stained_mnist", "rotated_digits_small")]
    more = [folder("--preset=stained_mnist", f"--clients={count}") for count in (10, 11)]
    every = [*many, *rates, *data, *presets, *more, folder(*some)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), 5),
        (("--rounds=3",), 3),
        (("--checkpoint_every=12",), 4),
        (("--checkpoint_every=10",), 5),
        (("--rounds=4", "--checkpoint_every=6"), 3),
        (("--preset=cafe_paper,digits_cafe",), 4),
        (("--preset=rotated_digits_domains", "--rounds=2"), 2),
        (("--rounds=3", "--eval_every=2"), 2),
    ],
)
def test_evaluations_follow_the_flags_that_are_typed(
    arguments: tuple[str, ...], expected: int
) -> None:
    assert command_line.of_arguments(arguments).eval_every == expected
