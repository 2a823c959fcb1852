"""What is told of a run: a line per evaluation, its stops, and the evaluation that is selected."""

import math
from typing import Any

import jax
import numpy as np

from experiments.experiment.grid import Cell
from experiments.parts import selection
from experiments.parts.selection import RULES
from fedjax_inv import evaluation, stopping
from fedjax_inv.evaluation import Scores
from fedjax_inv.program import Outcome


def lines(
    cell: Cell,
    groups: list[str],
    outcome: Outcome,
    traffic: list[int],
    *,
    done: int,
    length: int,
    seconds: float,
    drops: bool,
) -> list[dict[str, Any]]:
    """One record per run: what metrics.jsonl says after a segment, or before the first.

    groups: the names of the validation groups. traffic: bytes of a client in each exchange. done:
    rounds from the beginning. length: those of this segment, 0 before the first: then there is no
    train_loss. drops: whether a client that is not finite is left out, which leaves its run what it
    is.
    """
    records = []
    for index, run in enumerate(cell.runs):
        metrics = {k: np.asarray(v)[index, :length] for k, v in outcome.metrics.items()}
        loss = metrics.pop("loss", np.zeros(0))
        means = {name: _mean(values) for name, values in metrics.items()}
        watched = {
            f"{name}_by_round": [round(float(value), 5) for value in values[index, :length]]
            for name, values in outcome.watched.items()
        }
        valid, test = jax.tree.map(lambda a, i=index: a[i], (outcome.valid, outcome.test))
        broken = outcome.broken[index, :length] >= 0
        finite = all((np.isfinite(of.loss) | (of.size == 0)).all() for of in (valid, test))
        records.append(
            {
                "round": done,
                "run": index,
                "seed": run.seed,
                "hyper": run.hyper,
                "train_loss": _number(loss[-1]) if broken.any() else _last(loss),
                **({"train_metrics": means} if means else {}),
                **watched,
                **_by_domain(cell, groups, valid, test),
                **_detailed(outcome, index),
                **_gradients(outcome, index),
                "segment_bytes": int(outcome.attended[index, :length].sum(0) @ np.array(traffic)),
                "diverged": bool(not finite if drops else broken.any()),
                **({"dropped": int(broken.sum())} if drops else {}),
                "seconds": round(seconds, 3),
            }
        )
    return records


def _detailed(outcome: Outcome, run: int) -> dict[str, Any]:
    """What --watch_classes tells: of each class and of each client's shard, None where the test
    has no example, and the means over those that it has some of."""
    if outcome.detailed is None:
        return {}
    told: dict[str, Any] = {}
    names = (("balanced", "class"), ("client", "client"))
    for (mean, of), scores in zip(names, outcome.detailed, strict=True):
        mine = jax.tree.map(lambda leaf: np.asarray(leaf)[run], scores)
        told[f"{mean}_accuracy"] = float(evaluation.balanced(mine))
        told[f"accuracy_by_{of}"] = [
            round(float(score), 5) if size else None
            for score, size in zip(mine.score, mine.size, strict=True)
        ]
    return told


def _gradients(outcome: Outcome, run: int) -> dict[str, Any]:
    """What --watch_gradients tells, client by client."""
    if outcome.gradients is None:
        return {}
    told = jax.tree.map(lambda leaf: np.asarray(leaf)[run], outcome.gradients)
    return {
        "gradients": {
            "cosine": _number(told.cosine),
            "norm": [_number(value) for value in told.norm],
            "invariance": [_number(value) for value in told.invariance.body + told.invariance.head],
        }
    }


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None  # json has no NaN


def _mean(values: np.ndarray) -> float | None:
    """Over the rounds in which somebody took part."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else None


def _last(values: np.ndarray) -> float | None:
    """Of the last round in which somebody took part."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else None


def test_name(cell: Cell, groups: list[str]) -> str:
    """What the test examples are called: the held-out domain, or their split."""
    if cell.held_out is not None:
        return cell.held_out
    more = (f"test split {number}" for number in range(2, 2 + len(groups)))
    names = ("test", "test split", *more)
    return next(name for name in names if name not in groups)


def _by_domain(cell: Cell, groups: list[str], valid: Scores, test: Scores) -> dict[str, Any]:
    """What is told of an evaluation. valid: each [groups]. test: each [1]."""
    scores = [(name, "validation", valid, index) for index, name in enumerate(groups)]
    scores.append((test_name(cell, groups), "test", test, 0))
    domains: dict[str, dict[str, Any]] = {
        name: {
            "accuracy": float(of.score[index]),
            "loss": _number(of.loss[index]),
            "examples": int(of.size[index]),
            "split": split,
        }
        for name, split, of, index in scores
    }
    accuracy = {name: domain["accuracy"] for name, domain in domains.items()}
    worst = min(accuracy, key=lambda name: accuracy[name])
    return {
        "domains": domains,
        "validation_accuracy": float(np.mean(valid.score)),
        "test_accuracy": float(test.score[0]),
        "worst_domain": worst,
        "worst_accuracy": accuracy[worst],
    }


def stops(
    cell: Cell,
    groups: list[str],
    thresholds: tuple[float, ...],
    stops: stopping.Stops,
    run: int,
) -> list[dict[str, Any]]:
    """Per threshold what there was at the stop of a run; round None if there was none."""
    records = []
    for index, threshold in enumerate(thresholds):
        record: dict[str, Any] = {"threshold": threshold, "round": None}
        train, valid, test = jax.tree.map(lambda a, i=index: a[run, i], stops.scores)
        if stops.round[run, index]:
            record |= {
                "round": int(stops.round[run, index]),
                "train_accuracy": float(train.score[0]),
                **_by_domain(cell, groups, valid, test),
            }
        records.append(record)
    return records


def summarise(cell: Cell, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per run the evaluation that each rule of selection picks, and the last.

    A run that diverged is told as such and its later evaluations do not count.
    """
    results = []
    for index, run in enumerate(cell.runs):
        mine = [line for line in lines if line["run"] == index]
        good = selection.candidates(mine)
        picked = {name: rule.pick(good) if good else None for name, rule in RULES.items()}
        results.append(
            {
                "seed": run.seed,
                "hyper": run.hyper,
                "diverged": any(line["diverged"] for line in mine),
                "selected": picked["validation"],
                "by_rule": picked,
                "last": mine[-1],
            }
        )
    return results
