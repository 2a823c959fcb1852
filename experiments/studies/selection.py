"""How much of invariance is the rule that selects: methods by rules of selection.

fedjax-inv paper selection

Colored MNIST as in DomainBed (Gulrajani & Lopez-Paz 2021, arXiv 2007.01434): the colour is right in
80 and 90 per cent of the training images and in 10 of the test's, and a quarter of the labels are
wrong. All methods have the same data, network, optimizers, examples in a step and number of
settings. Those that compare domains in each step train on pooled examples, as DomainBed does; the
federated ones have a client for each domain. A penalty starts after 20 rounds of FedAvg; "at once"
is without them. Any flag of `train` applies to all rows, such as --stride=1 for 28x28 pixels.
"""

from collections.abc import Sequence
from pathlib import Path

from .. import selection
from ..selection import Chosen
from ..studies import drawings, study
from ..studies.study import Cells, Row, RowResult, Study

# A step has as many examples of all clients together.
_POOLED = ("--pooled", "--batch_size=1000")
_LATER = ("--set=warmup_rounds=20", "--set=scale_loss=true")
_LARGE = "100.0,10000.0"
_RATES = "--learning_rate=0.05,0.1"
_IRM = ("--algorithm=irm", f"--set=penalty={_LARGE}", *_POOLED)
_IPG = ("--algorithm=fedipg", f"--set=penalty={_LARGE}", "--set=penalty_on=classifier")
_AT_ONCE = "--set=scale_loss=true"
METHODS: dict[str, tuple[str, ...]] = {
    "ERM": ("--algorithm=fedavg", _RATES, *_POOLED),
    "FedAvg": ("--algorithm=fedavg", _RATES),
    "IRM": (*_IRM, *_LATER),
    "IRM-at-once": (*_IRM, _AT_ONCE),
    "V-REx": (*("--algorithm=vrex_domains", f"--set=penalty={_LARGE}"), *(*_LATER, *_POOLED)),
    "GroupDRO": ("--algorithm=group_dro", "--set=step_size=0.01,0.1", *_POOLED),
    "Fishr": ("--algorithm=fishr", f"--set=penalty={_LARGE}", "--set=warmup_rounds=20", *_POOLED),
    "CORAL": ("--algorithm=coral", "--set=penalty=1.0,10.0", *_POOLED),
    "FedIIR": ("--algorithm=fediir", "--set=penalty=0.01,1.0"),
    "FedIPG": (*_IPG, *_LATER),
    "FedIPG-at-once": (*_IPG, _AT_ONCE),
}

# Rule of selection -> heading of its column.
HEADINGS = {
    "validation": "training domains, %",
    "leave_one_out": "leave one out, %",
    "unseen_domain": "unseen domain, %",
    "last_if_agreed": "last if agreed, %",
    "oracle": "oracle (looks at the test), %",
}


def rows(data: str) -> list[Row]:
    """A row for each method, on the only data set."""
    preset = f"--preset=selection_{data}"
    return [Row(name, (preset, *flags)) for name, flags in METHODS.items()]


def _chosen(result: RowResult) -> dict[str, Chosen]:
    """What each rule selects, by the heading of its column; a rule may select nothing."""
    of = result.row.label, result.only.result
    found = {heading: selection.choose(*of, rule) for rule, heading in HEADINGS.items()}
    return {heading: one for heading, one in found.items() if one}


def _columns(result: RowResult) -> Cells:
    found = _chosen(result)
    cells = dict.fromkeys(HEADINGS.values(), "none")
    for heading, one in found.items():
        none = sum(selection.picked(run, one.rule) is None for run in one.runs)
        text = study.percent(one.selected, "test_score")
        cells[heading] = f"{text} (none for {none})" if none else text
    return cells


def _scores(result: RowResult) -> study.ByHeading:
    return {
        heading: {run["seed"]: run["selected"]["test_score"] for run in one.runs}
        for heading, one in _chosen(result).items()
    }


def draw(path: Path, data: str, results: Sequence[RowResult]) -> str:
    """The test accuracies of each method, a series for each rule."""
    points: dict[str, list[tuple[str, Sequence[float]]]] = {name: [] for name in HEADINGS.values()}
    for result in results:
        for heading, one in _chosen(result).items():
            points[heading].append((result.row.label, study.percents(one.selected)))
    return drawings.against(path, data, "", {"test accuracy, %": points}, is_joined=False)


PAPER = study.Paper(
    "selection",
    ("colored_mnist",),
    {"rules": Study(rows, _columns, scores=_scores, figures={"": draw}, draws_rows=False)},
    caption=(
        "Test accuracy by the rule that selects the round and one of two settings: the best "
        "validation accuracy on the training domains; the best mean on each training domain of a "
        "run without it; the best on a domain that no client has; the last round, if the training "
        "domains ever agreed; the best in the test. Mean ± standard deviation over seeds, each of "
        "which draws its own environments; a seed for which a rule picks none counts with its "
        "last round. The optimum is 75. DomainBed prints for this test and fourteen methods 9.8 to "
        "10.5 by training domains, at most 23.1 ± 10.7 by leave one out and at most 58.5 ± 3.3 by "
        "the oracle."
    ),
    diverged=lambda result: dict.fromkeys(HEADINGS.values(), study.why_none(result)),
)
