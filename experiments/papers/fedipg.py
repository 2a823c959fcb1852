"""The tables and figures of FedIPG (Hao et al. 2025, arXiv 2503.06158), and what they leave open.

python -m experiments.papers.fedipg --study=colours --data=colored_mnist

Studies: first_look (what `make run` shows), colours (FedIPG where its penalty acts, beside FL Games),
regimes (where it acts: local work x penalty x its part x its estimate), domains (Table II),
penalties (Figure 4). Any flag of `sweep` given here goes to all rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import report, study
from experiments.config import Config
from experiments.papers import fl_games
from experiments.study import Cells, Done, Row, Study
from fedjax_inv.checks import UsageError

DATA = ("colored_mnist", "colored_digits", "rotated_digits", "rotated_mnist", "pacs")
_COLORED = {"colored_mnist": "colored_mnist_14", "colored_digits": "colored_digits_small"}
_PENALTIES = ("0", "1", "100", "10000", "100000")


def _colored(data: str) -> str:
    """The preset of coloured data; raises UsageError for other data."""
    if data not in _COLORED:
        raise UsageError(f"--data={data}: must be one of {', '.join(_COLORED)} for this study")
    return _COLORED[data]


def _adaptive(data: str, work: str, *more: str) -> tuple[str, ...]:
    """Flags of work with a server that adapts. work: epochs or full_batch."""
    small = ",adaptive_small" if data == "colored_digits" else ""
    after = "".join(f",{preset}" for preset in more)
    return (f"--preset={_colored(data)},adaptive_{work}{small}{after}",)


def _fedipg(data: str, work: str) -> tuple[str, ...]:
    """FedIPG where its penalty acts. The warm-up ends when the cue has been learned."""
    warmup = {"colored_digits": 60}.get(data, 20 if work == "epochs" else 50)
    return (*_adaptive(data, work, "fedipg_acts"), f"--set=warmup_rounds={warmup}")


def _game(data: str, play: str, *flags: str) -> Row:
    """FL Games on the same data and network, told at the stop."""
    preset = f"--preset={data}_f,games_{play},{_colored(data)}"
    return Row(f"FL Games, F-{play}", (preset, *flags))


def first_look(data: str) -> list[Row]:
    """Where invariance helps, and where it has nothing to help with."""
    if data == "rotated_digits":
        work = ("--preset=rotated_digits_small",)
        return [
            Row("FedAvg", work),
            Row("FedIPG", (*work, "--algorithm=fedipg", "--set=penalty=0.001,0.01")),
        ]
    return [
        Row("FedAvg", _adaptive(data, "full_batch")),
        Row("FedIPG", _fedipg(data, "full_batch")),
        _game(data, "parallel"),
    ]


def colours(data: str) -> list[Row]:
    """FedAvg, FedIPG with local epochs and with full batches, and FL Games."""
    return [
        Row("FedAvg, epochs", _adaptive(data, "epochs")),
        Row("FedIPG, epochs", _fedipg(data, "epochs")),
        Row("FedAvg, full batch", _adaptive(data, "full_batch")),
        Row("FedIPG, full batch", _fedipg(data, "full_batch")),
        _game(data, "sequential"),
        _game(data, "parallel"),
    ]


def tell(one: Done) -> Cells:
    """Test accuracy where the row's rule selects, at the stop of games, and at the last round."""
    if not all(cell.runs for cell in one.cells):
        return {"selected by": one.config.watching.select, "test, %": "none"}
    if len(one.cells) > 1:
        return _domains(one)
    runs = one.only.runs
    picked = [run["selected"] for run in runs]
    rule = one.config.watching.select
    if one.config.watching.stop_below:
        picked = [run["stops"][0] for run in runs if run["stops"][0]["round"]]
        rule = f"the stop, {len(picked)} of {len(runs)}"
    hyper = {name: value for name, value in runs[0]["hyper"].items() if name == "penalty"}
    return {
        "selected by": rule,
        "penalty": ", ".join(f"{value:g}" for value in hyper.values()),
        "at round": report.spread([each["round"] for each in picked]) if picked else "",
        "training domains, %": _percent(picked, "validation_accuracy"),
        "test, %": _percent(picked, "test_accuracy"),
        "worst domain, %": _percent(picked, "worst_accuracy"),
        "test at the last, %": _percent([run["last"] for run in runs], "test_accuracy"),
        "MB sent by then": report.spread(
            [_bytes(run, at) for run, at in zip(runs, picked, strict=False)]
        )
        if picked
        else "",
    }


def _percent(lines: Sequence[dict[str, Any]], key: str) -> str:
    return report.percent([line[key] for line in lines]) if lines else ""


def _bytes(run: dict[str, Any], at: dict[str, Any]) -> float:
    """Megabytes up to an evaluation; every round sends as many."""
    return run["last"]["bytes"] / run["last"]["round"] * at["round"] / 1e6


def _domains(one: Done) -> Cells:
    """Of each held-out domain, of all on average and of the worst."""
    tests = {
        cell.held_out: [run["selected"]["test_accuracy"] for run in cell.runs] for cell in one.cells
    }
    by_seed = np.array(list(tests.values()))
    return {
        "selected by": one.config.watching.select,
        **{f"{domain}, %": report.percent(values) for domain, values in tests.items()},
        "mean, %": report.percent(by_seed.mean(0)),
        "worst, %": report.percent(by_seed.min(0)),
    }
