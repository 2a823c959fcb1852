"""The report of a data set: its sizes, features and cues, and its figure, for `show-data`."""

from dataclasses import replace

import numpy as np
import pandas as pd

from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.uses import Uses

from .. import outputs, run
from ..assembly import experiment, scalers
from ..config import Config
from . import data_figures, figures, forms
from .data_figures import Holders

_MARK = outputs.mark("show-data")
_FEATURES = 30  # the most features in their table


def table(dataset: Dataset, holders: Holders, is_wrong: np.ndarray | None = None) -> str:
    """A row for each holder: its sizes, and how often each cue's most frequent label is right.

    is_wrong: [M] which rows have wrong labels, to be counted; None: they are not counted.
    """
    pairs = zip(holders.rows, holders.sizes, strict=True)
    seen = np.concatenate([rows for rows, (train, valid, _) in pairs if train + valid])
    counts = pd.DataFrame(holders.sizes, columns=["training", "validation", "test"])
    total = counts.sum()
    if is_wrong is not None:
        counts["wrong labels"] = [is_wrong[rows].sum() for rows in holders.rows]
        total["wrong labels"] = is_wrong[seen].sum()
    lines = counts.astype(object).where(counts > 0, "")  # the line of sums also shows zeros
    for name, cue in data_figures.cues(dataset).items():
        guess = pd.Series(dataset.y[seen]).groupby(cue[seen]).agg(lambda y: y.mode()[0])
        right = 100 * (guess.reindex(cue, fill_value=0).to_numpy() == dataset.y)
        shares = [f"{right[rows].mean():.1f}" if len(rows) else "" for rows in holders.rows]
        lines[f"right by {name} alone, %"] = shares
    lines = pd.concat([lines, total.to_frame().T.astype(object)])
    lines.insert(0, "client: domain", [*holders.names, "in all"])
    return forms.markdown(lines, align="right")


def features(dataset: Dataset) -> str:
    """A row for each of the first features of vectors [M, D]; "" for other data."""
    if not data_figures.are_vectors(dataset):
        return ""
    num_features = dataset.x.shape[1]
    x = np.asarray(dataset.x)[:, :_FEATURES].astype(np.float64)
    lines = pd.DataFrame({"mean": x.mean(0), "standard deviation": x.std(0)})
    lines = lines.assign(smallest=x.min(0), largest=x.max(0)).map("{:.3g}".format)
    names = scalers.feature_names(dataset, num_features)[:_FEATURES]
    lines.insert(0, f"feature of {num_features}", names)
    return f"{forms.markdown(lines, align='right')}\n\n"


def used(found: Uses) -> str:
    """A row for each domain: how many of its examples have which use; then what is odd."""
    counts = pd.DataFrame(found.counts, index=found.domains)
    counts = counts.loc[:, counts.any()]
    counts.loc["in all"] = counts.sum()
    lines = counts.reset_index(names="domain: examples for")
    return "\n\n".join([forms.markdown(lines, align="right"), *found.lines()[1:]])


def show(config: Config, picture: str, images: int) -> str:
    """Draws the picture, and returns the table and the path of the picture.

    picture: its path. images: how many of each domain.
    """
    files = outputs.of_picture("out", picture)
    outputs.check("show-data", files, outputs.of_data(config.data.dataset))
    out = files[0].path
    whole = replace(config.network, train_only=())  # or images would be a frozen body's outputs
    config = replace(config, network=whole)
    assembled = experiment.make(config, config.training.seeds[:1], run.start_of(config))
    if len(assembled.splits) > 1:
        text = "must be one domain to be shown"
        raise UsageError(f"--held_out={config.data.held_out}", ..., text)
    (held_out,) = assembled.splits
    dataset, holders, is_wrong, title = shown = data_figures.shown(assembled, held_out)
    counted = is_wrong if config.partition.wrong_labels else None
    text = f"\n{title}\n\n{table(dataset, holders, counted)}\n\n"
    text += f"{used(assembled.uses(held_out))}\n\n{features(dataset)}"
    if warning := assembled.scale_warning:
        text += f"Warning: --dataset={config.data.dataset}: {warning}.\n\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    figures.save(data_figures.paint(*shown, images), out, dpi=130, creator=_MARK)
    return f"{text}Picture: {out}."
