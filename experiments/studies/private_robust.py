"""What robust rules and differential privacy cost a domain that few clients have.

fedjax-inv paper private_robust --study=robust --data=rotated_digits

Studies: robust (15 clients, of which 1, 2 or 3 hold the domain that differs, and none or two
attack) and private (1,000 clients, of which a tenth attends a round, by the budget). All rows are
FedAvg in which clients count alike, with as many learning rates, of which validation selects one.
The data set pacs is a file of features, pacs.npz (docs/frozen.md).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..folder import files
from ..report import runs_csv, tables
from ..report.differences import ScoreColumn
from . import drawings, study
from .row_runs import RowResult
from .rows import Row
from .study import Study, StudyOptions

_COMMON = (
    "--held_out=none",
    "--batch_size=32",
    "--set=weighting=uniform",
    "--noeval_start",
    "--eval_every=1000",  # at the end
    "--seeds=0,1,2,3,4,5,6,7,8,9",
    "--metrics=brier",  # with metrics come the scores on each domain of the test
    "--compile=quick",
)
_ROTATED = ("--environment=rotated", "--angles=0,90")
_COLORED = ("--environment=colored", "--flips=0.1", "--test_fraction=0.3", "--label_noise=0")
_PACS = ("--dataset=pacs.npz", "--model=linear")
_SMALL = (
    "--dataset=digits",
    "--model=mlp",
    "--widths=32",
    "--learning_rate=0.1,0.3",
    "--rounds=60",
)


class RareDomain(NamedTuple):
    """A data set with a domain that few clients have."""

    domain: str
    flags: tuple[str, ...]
    clip: str  # the norm at which updates are clipped


ROBUST = {
    "rotated_digits": RareDomain("90", (*_SMALL, *_ROTATED), "0.5"),
    "colored_digits": RareDomain("0.9", (*_SMALL, *_COLORED), "0.5"),
    "pacs": RareDomain(
        "sketch", (*_PACS, "--standardise", "--learning_rate=0.003,0.01", "--rounds=20"), "0.5"
    ),
}
PRIVATE = {
    "rotated_mnist": RareDomain(
        "90",
        (
            *_ROTATED,
            "--dataset=mnist",
            "--stride=2",
            "--max_examples=45000",
            "--model=linear",
            "--learning_rate=0.3,1",
        ),
        "0.5",
    ),
    "pacs": RareDomain("sketch", (*_PACS, "--learning_rate=0.1,0.3"), "0.5"),
}
_CLIENTS = 15
# Each rule is asked to stand two wrong clients, as many as attack.
_RULES = {
    "FedAvg": "mean",
    "norm clipping": "clipped_mean",
    "geometric median": "geometric_median",
    "trimmed mean": "trimmed_mean:0.14",
    "median": "median",
    "multi-Krum": "multi_krum:2:11",
    "Krum": "krum:2",
}
_ATTACKERS = "--attackers=0,7"  # of the domains that do not differ, which come first
_ATTACKS = {
    "no attack": (),
    "sign flip": ("--attack=sign_flip:10", _ATTACKERS),
    "noise": ("--attack=scaled_noise:10", _ATTACKERS),
    "wrong labels": ("--wrong_labels=1", f"--wrong_clients={2 / _CLIENTS:.4f}"),
}
_BUDGETS = {"infinite": (), "8": ("--epsilon=8",), "2": ("--epsilon=2",)}


def robust(data: str) -> list[Row]:
    """Each rule, where 1, 2 or 3 clients hold the domain that differs; under attack, 2 do."""
    rare = ROBUST[data]
    rows = []
    for attack, attacking in _ATTACKS.items():
        for rule, aggregate in _RULES.items():
            if rule == "norm clipping":
                aggregate = f"{aggregate}:{rare.clip}"
            for few in (1, 2, 3) if attack == "no attack" else (2,):
                flags = (
                    *_COMMON,
                    *rare.flags,
                    *attacking,
                    "--local_steps=5",
                    f"--clients={_CLIENTS}",
                    f"--rare_domain={rare.domain}:{few / _CLIENTS:.4f}",
                    f"--aggregate={aggregate}",
                )
                label = f"{attack}-{rule}-{few}".replace(" ", "-")
                rows.append(Row(label, flags, rule, f"{attack}, {few} of {_CLIENTS}"))
    return rows


def private(data: str) -> list[Row]:
    """Each budget, where 2, 10 or 33% of the clients hold the domain that differs."""
    rare = PRIVATE[data]
    rows = []
    for epsilon, budget in _BUDGETS.items():
        for percent in (2, 10, 33):
            flags = (
                *_COMMON,
                *rare.flags,
                *budget,
                f"--private_clip={rare.clip}",
                "--rounds=100",
                "--clients=1000",
                "--sampling=poisson",
                "--sampling_rate=0.1",
                f"--rare_domain={rare.domain}:{percent / 100}",
            )
            label = f"epsilon-{epsilon}-{percent}"
            rows.append(Row(label, flags, f"epsilon {epsilon}", f"held by, {percent}%"))
    return rows


def scores(result: RowResult) -> pd.DataFrame:
    """The accuracies of each seed on the domain that differs and on the whole test."""
    seeds = pd.Index(sorted(result.config.training.seeds), name="seed")
    if not result.is_complete:
        return pd.DataFrame(np.nan, seeds, ["differs", "all"])
    domain = result.config.partition.rare_domain.rpartition(":")[0]
    metrics = pd.read_csv(Path(result.config.output.run_dir) / "metrics.csv")
    is_its_test = (metrics["by"] == "domain") & (metrics["name"] == f"test, {domain}")
    whole = {run.seed: run.choice.test_score for run in result.only.runs}
    differs = metrics[is_its_test].set_index("seed")["score"]
    return pd.DataFrame({"differs": differs, "all": pd.Series(whole)}, seeds)


def write(path: Path, results: list[RowResult], options: StudyOptions) -> str:
    """Writes a table of each of both accuracies, and all of them by seed; returns the tables."""
    del options
    found = {(result.row.series, result.row.x): scores(result) for result in results}
    frame = pd.concat(found, names=["method", "column"]).reset_index()
    files.write(path.with_suffix(".csv"), frame.to_csv(index=False, float_format="%.5g"))
    cells = study.cells_of(results)
    runs_csv.write(path.with_name(f"{path.name}_runs.csv"), cells)
    differs, whole = (_table(found, name) for name in ("differs", "all"))
    return tables.write(path, cells, differs, caption=_CAPTION, more=[whole.table])


def _table(found: dict[tuple[str, str], pd.DataFrame], name: str) -> tables.Main:
    """A row for each method, a column for each number of clients."""
    methods = dict.fromkeys(method for method, _ in found)
    columns = [
        ScoreColumn(
            heading,
            pd.DataFrame({m: found[m, heading][name] for m in methods if (m, heading) in found}),
        )
        for heading in dict.fromkeys(heading for _, heading in found)
    ]
    shown = [(column.heading, tables.marked(column)) for column in columns]
    title = "domain that differs, %" if name == "differs" else "whole test, %"
    return tables.Main(tables.table(title, methods, shown), columns)


def draw(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """The accuracy on the domain that differs by the clients that hold it."""
    series: dict[str, list[tuple[str, Sequence[float]]]] = {}
    for result in results:
        values = 100 * scores(result)["differs"].dropna()
        x = result.row.x.replace(", ", "\n")
        series.setdefault(result.row.series, []).append((x, values.tolist()))
    points = {"domain that differs, %": series}
    return drawings.against(path, data, "clients that hold it", points, is_joined=False)


_CAPTION = (
    "Test accuracy, mean ± standard deviation over seeds, each with its own clients and test. The "
    "columns tell how many clients hold the domain that differs. The learning rate is selected by "
    "validation, the round is the last."
)
PAPER = study.Paper(
    "private_robust",
    (),
    {
        "robust": Study(robust, figures={"": draw}, data=tuple(ROBUST), draws_rows=False),
        "private": Study(private, figures={"": draw}, data=tuple(PRIVATE), draws_rows=False),
    },
    caption=_CAPTION,
    write=write,
)
