"""Methods on the features of a frozen network, under one budget."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestCentroid

from fedjax_inv import fit, models
from fedjax_inv_experiments.assembly import grid
from fedjax_inv_experiments.studies import row_runs, study
from fedjax_inv_experiments.studies.class_means import class_means
from runs import others


def test_class_means_are_those_of_all_examples_of_ragged_clients() -> None:
    x, y = load_digits(return_X_y=True)
    x = x.astype(np.float32)
    clients = [(x[rows], y[rows]) for rows in np.split(np.arange(1500), [7, 300, 1301])]
    fitted = fit(class_means, models.linear(10), clients, rounds=2, learning_rate=0.1)
    nearest = NearestCentroid().fit(x[:1500], y[:1500]).predict(x[1500:])
    assert (fitted.predict(x[1500:]).argmax(-1) == nearest).all()


def test_a_class_that_nobody_has_is_never_predicted() -> None:
    x, y = load_digits(return_X_y=True)
    x = x.astype(np.float32)
    has = y != 3
    fitted = fit(class_means, models.linear(10), [(x[has], y[has])], rounds=1, learning_rate=0.1)
    assert 3 not in fitted.predict(x).argmax(-1)


@pytest.mark.parametrize("name", ["heads", "units"])
def test_methods_on_frozen_features_have_one_budget(name: str, tmp_path: Path) -> None:
    own = {"run_dir", "algorithm", "set", "learning_rate", "momentum", "cut", "batch_size"}
    own |= {"partition", "mixing", "server_learning_rate", "rounds", "eval_every"}
    of_study = study.paper("frozen").studies[name]
    for data in of_study.data:
        rows = of_study.rows(data)
        configs = row_runs.configs(rows, tmp_path)
        assert len({str(others(one, own)) for one in configs}) == 1
        for row, one in zip(rows, configs, strict=True):
            settings = {len(cell.runs) for cell in grid.cells(one, [None])}
            trains = row.label != "class-means"
            assert settings == {(6 if trains else 1) * len(one.training.seeds)}
            assert one.training.rounds == configs[-1].training.rounds or not trains
            assert one.training.batch_size == (96 if one.method.algorithm == ("erm",) else 32)
