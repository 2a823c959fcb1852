"""Tables as text in all forms, and the record of how a table came about."""

import pandas as pd
import pytest

from fedjax_inv_experiments import report, tables

ROWS = [("a,b", 1.5, None), ("50% of $x_1$", "diverged", "")]


def test_tables_in_all_forms() -> None:
    frame = pd.DataFrame(ROWS, columns=["run", "test, %", "paper"])
    assert tables.text(frame).splitlines() == [
        "| run          | test, %   | paper   |",
        "|--------------|-----------|---------|",
        "| a,b          | 1.5       |         |",
        "| 50% of $x_1$ | diverged  |         |",
    ]
    assert tables.text(frame, align="right").splitlines()[2:] == [
        "| a,b          |       1.5 |         |",
        "| 50% of $x_1$ |  diverged |         |",
    ]
    lines = [line.strip() for line in tables.text(frame, "latex").splitlines()]
    assert lines[0] == r"\begin{tabular}{lll}"
    assert r"50\% of \$x\_1\$ & diverged  &         \\" in lines


def test_a_bar_of_a_name_is_no_border() -> None:
    frame = pd.DataFrame({"x|y": ["a|b", "c"], "n": [1, 2.5]})
    head, _, line = tables.text(frame).splitlines()[:3]
    assert head.startswith("| x\\|y ")
    assert line.startswith("| a\\|b ")
    assert line.replace("\\|", "").count("|") == 3


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("--seeds=0,1", "--seeds=0,1"),
        ("--dataset=/data/mine/x.npz", "--dataset=x.npz"),
        ("--dataset=~/x.csv", "--dataset=x.csv"),
        ("--dataset=../x.csv", "--dataset=x.csv"),
        ("--set=penalty=0.1", "--set=penalty=0.1"),
        ("--data_dir=/data", None),
        ("--resume", None),
    ],
)
def test_a_command_names_no_place(word: str, shown: str | None) -> None:
    expected = ["fedjax-inv paper cafe", *([shown] if shown else [])]
    assert report.command(["paper", "cafe", word]) == " ".join(expected)
