"""Wrong labels in experiments: the same data for all commands, and rows that tell their source."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import parts_of
from fedjax_inv_experiments import config, predictions
from fedjax_inv_experiments.assembly import data as data_flags
from fedjax_inv_experiments.assembly import experiment
from fedjax_inv_experiments.assembly.experiment import Assembly
from fedjax_inv_experiments.finished import Runs
from fedjax_inv_experiments.folder import provenance

FLAGS: dict[str, Any] = dict(
    widths=(4,), partition="mixed", clients=4, angles=(0.0, 45.0, 75.0), seeds=(0, 1)
)
WRONG = FLAGS | dict(wrong_labels=0.5, wrong_clients=0.5)


@pytest.fixture(scope="module", params=["each", "0"])
def made(request: pytest.FixtureRequest) -> Assembly:
    """Two seeds, with draws of their own and with one draw; two held-out domains."""
    return experiment.make(config.of(**WRONG, held_out="0,75", data_seed=request.param))


def test_a_held_out_domain_alone_has_the_same_data(made: Assembly) -> None:
    chosen = dict(data_seed=made.config.environment.data_seed)
    alone = experiment.make(config.of(**WRONG, **chosen, held_out="75"))
    assert provenance.fingerprint(alone.data) == provenance.fingerprint(made.data)
    less = experiment.make(config.of(**WRONG | dict(wrong_clients=0.25), **chosen))
    assert provenance.fingerprint(less.data) == provenance.fingerprint(made.data)


def test_nothing_but_labels_of_clients_changes(made: Assembly) -> None:
    chosen = dict(data_seed=made.config.environment.data_seed, held_out="0,75")
    right = experiment.make(config.of(**FLAGS, **chosen))
    data, size = made.data, len(made.dataset.y)
    draws = len(right.data.y) // size
    np.testing.assert_array_equal(right.source, np.tile(np.arange(size), draws))
    wrong_clients = []
    for domain, of_seed in made.splits.items():
        for seed, split in of_seed.items():
            before = right.splits[domain][seed]
            counts = []
            for new, old in zip(split[:3], before[:3], strict=True):
                for rows, others in zip(parts_of(new), parts_of(old), strict=True):
                    np.testing.assert_array_equal(data.x[rows], right.data.x[others])
                    np.testing.assert_array_equal(made.source[rows], right.source[others])
                    counts.append((data.y[rows] != right.data.y[others]).sum())
            assert counts[-1] == 0
            wrong_clients.append(tuple(np.flatnonzero(counts[:4])))
            assert len(wrong_clients[-1]) == 2
    # By seed, whatever domain is held out.
    assert wrong_clients[:2] == wrong_clients[2:]


def test_examples_of_all_draws_and_their_copies_keep_their_domains() -> None:
    how = WRONG | dict(held_out="75", data_seed="each")
    chosen = config.of(**how, algorithm=("irm",))
    found = experiment.make(chosen)
    for seed, split in found.splits["75"].items():
        drawn = data_flags.domains(chosen, found.loaded, seed).domain
        rows = np.concatenate([row for each in split[:3] for row in parts_of(each)])
        assert rows.max() >= len(found.dataset.y)
        np.testing.assert_array_equal(found.data.domain[rows], drawn[found.source[rows]])
    assert experiment.make(config.of(**how)).data.domain is None


def test_domains_inside_of_clients_need_clients_that_have_several() -> None:
    alone = FLAGS | dict(clients=2, partition="domain", algorithm=("irm",))
    with pytest.raises(UsageError, match="--algorithm"):
        experiment.make(config.of(**alone)).check_fit()
    experiment.make(config.of(**alone, pooled=True)).check_fit()


def test_the_reports_see_the_labels_that_clients_have(made: Assembly) -> None:
    dataset, split = made.as_seen("75", 0)
    of_run = made.splits["75"][0]
    for seen, own in zip(split[:3], of_run[:3], strict=True):
        for rows, others in zip(parts_of(seen), parts_of(own), strict=True):
            np.testing.assert_array_equal(dataset.y[rows], made.data.y[others])
            np.testing.assert_array_equal(np.asarray(dataset.x)[rows], made.data.x[others])
    assert (dataset.y != made.dataset.y).any()


def test_predictions_name_rows_of_the_data_set(made: Assembly) -> None:
    *_, cell = made.cells
    start: Any = None
    runs = Runs("", Path(), "best", made.config, cell, start, start, lambda: made)
    for index in range(len(cell.runs)):
        parts = predictions.own_parts(runs, index)
        assert [part.client for part in parts] == [0, 1, 2, 3, -1]
        rows = np.concatenate([part.source for part in parts])
        assert rows.max() < len(made.dataset.y)
        assert len(np.unique(rows)) == len(rows)
    (test,) = [part for part in parts if part.client < 0]
    if made.config.environment.data_seed == "0":  # the first draw, which `dataset` is
        np.testing.assert_array_equal(test.y, made.dataset.y[test.source])
