"""The records of how tables came about."""

import pytest

from fedjax_inv_experiments.reporting import origin


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("--seeds=0,1", "--seeds=0,1"),
        ("--dataset=/data/mine/x.npz", "--dataset=x.npz"),
        ("--dataset=~/x.csv", "--dataset=x.csv"),
        ("--dataset=../x.csv", "--dataset=x.csv"),
        ("--set=penalty=0.1", "--set=penalty=0.1"),
        ("--nobinarise", "--nobinarise"),
        ("--data_dir=/data", None),
        ("--resume", None),
    ],
)
def test_a_command_names_no_place(word: str, shown: str | None) -> None:
    expected = ["fedjax-inv paper cafe", *([shown] if shown else [])]
    assert origin.command(["paper", "cafe", word]) == " ".join(expected)
