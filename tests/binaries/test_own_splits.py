"""Splits of one's own as WILDS has them: id_val and id_test beside those of unseen domains."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation, sources
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import parts_of
from fedjax_inv_experiments import config, extraction, finished, predictions
from fedjax_inv_experiments.assembly import experiment
from fedjax_inv_experiments.assembly.data import KNOWN
from fedjax_inv_experiments.folder import log, selection
from runs import no_figures, train

SIZE = 300
ROWS = np.arange(SIZE)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SIZE, 2)).astype(np.float32).round(3)
# Two domains train. Of the validation of unseen domains, a part lies in one of these.
DOMAIN = np.array(["a", "b", "c", "d", "b"])[ROWS % 5]
Y = ((X[:, 0] > 0) ^ (DOMAIN == "b")).astype(np.int32)  # clients differ
INSIDE = np.array(["train", "train", "train", "id_val", "id_test"])[ROWS // 5 % 5]
SPLIT = np.select([ROWS % 5 < 2, ROWS % 5 == 3], [INSIDE, "test"], "val")


def written(path: Path, split: np.ndarray = SPLIT) -> str:
    """The data in a file, or in a folder of arrays."""
    frame = pd.DataFrame({"u": X[:, 0], "v": X[:, 1], "domain": DOMAIN, "split": split})
    frame = frame.assign(target=np.where(Y, "yes", "no"))
    arrays = {"x": X, "y": frame["target"].to_numpy(str), "domain": DOMAIN, "split": split}
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(path, index=False)
    elif path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
    return str(path)


def rows_of(split: str) -> list[int]:
    return np.flatnonzero(split == SPLIT).tolist()


def held(chosen: config.Config) -> dict[str, list[int]]:
    """The rows of each use."""
    ((split,),) = (each.values() for each in experiment.make(chosen).splits.values())
    every = {"train": split.train, "valid": split.valid, "test": split.test, **split.unseen}
    return {name: np.sort(np.concatenate(parts_of(of))).tolist() for name, of in every.items()}


@pytest.mark.parametrize("file", ["t.csv", "t.parquet", "t.npz", "folder"])
def test_each_row_of_five_splits_has_its_use(file: str, tmp_path: Path) -> None:
    chosen = config.of(dataset=written(tmp_path / file))
    expected = {"train": "train", "valid": "id_val", "test": "test"}
    expected |= {"known_domains": "id_test", "unseen_domain": "val"}
    assert held(chosen) == {use: rows_of(name) for use, name in expected.items()}
    assembled = experiment.make(chosen)
    (held_out,) = assembled.splits
    found = assembled.uses(held_out)
    assert found.counts["test of known domains"] == [12, 12, 0, 0]
    assert found.counts["unseen domain"] == [0, 60, 60, 0]
    assert found.counts["validation"] == [12, 12, 0, 0]
    assert sum(map(sum, found.counts.values())) == SIZE
    assert "24 test of known domains" in found.lines()[0]
    dataset = sources.load(chosen.data.dataset)
    assert dataset.known is not None
    np.testing.assert_array_equal(dataset.known, np.char.startswith(SPLIT, "id_"))
    np.testing.assert_array_equal(extraction._others(dataset)["split"], SPLIT)


def test_a_held_out_domain_is_the_test_with_all_its_rows(tmp_path: Path) -> None:
    chosen = config.of(dataset=written(tmp_path / "t.csv"), held_out="b")
    rows = held(chosen)
    assert rows["test"] == np.flatnonzero(DOMAIN == "b").tolist()
    assert rows["known_domains"] == np.flatnonzero((DOMAIN == "a") & (SPLIT == "id_test")).tolist()
    assert rows["unseen_domain"] == np.flatnonzero(DOMAIN == "c").tolist()
    found = experiment.make(chosen).uses("b")
    assert found.counts["nothing: in the test split, but the test is a domain"] == [0, 0, 0, 60]


def test_without_a_test_of_unseen_domains_that_of_known_ones_is_the_test(tmp_path: Path) -> None:
    """And the test of a domain that does not train is of an unseen one, whatever its name."""
    split = np.where(SPLIT == "test", "val", SPLIT)
    rows = held(config.of(dataset=written(tmp_path / "t.csv", split)))
    assert rows["test"] == rows_of("id_test")
    assert "known_domains" not in rows
    rows = held(
        config.of(dataset=written(tmp_path / "u.csv", np.where(DOMAIN == "d", "id_test", split)))
    )
    assert rows["test"] == np.flatnonzero(DOMAIN == "d").tolist()
    assert rows["known_domains"] == rows_of("id_test")


def test_without_validation_of_domains_that_train_a_part_is_drawn(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", np.where(SPLIT == "id_val", "train", SPLIT))
    for validation, number in ((0.1, 10), (0.5, 48), (0.0, 0)):
        chosen = config.of(dataset=path, validation=validation, select="unseen_domain")
        rows = held(chosen)
        assert len(rows["valid"]) == number
        assert sorted(rows["valid"] + rows["train"]) == sorted(rows_of("train") + rows_of("id_val"))
        assert rows["unseen_domain"] == rows_of("val")
    own = written(tmp_path / "own.csv")
    with pytest.raises(UsageError, match="--validation"):
        held(config.of(dataset=own, validation=0.5))


def test_a_split_that_is_none_is_refused(tmp_path: Path) -> None:
    for name in ("t.csv", "t.npz"):
        with pytest.raises(
            UsageError, match="row 1, must hold train, val, test, id_val or id_test"
        ):
            sources.load(written(tmp_path / name, np.where(ROWS == 0, "ood", SPLIT)))
    np.savez(tmp_path / "both.npz", x=X, y=Y, split=SPLIT, test=SPLIT == "test")
    with pytest.raises(UsageError, match="without test and valid"):
        sources.load(str(tmp_path / "both.npz"))


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto"])
def test_the_splits_have_columns_of_their_own(algorithm: str, tmp_path: Path) -> None:
    """Scores by hand; a personal method serves the test of known domains by own networks."""
    flags: dict[str, Any] = {"algorithm": (algorithm,), "rounds": 3, "eval_every": 1}
    flags |= {"model": "linear", "run_dir": str(tmp_path / "run"), "learning_rate": (0.5,)}
    with no_figures():
        printed = train(
            config.of(dataset=written(tmp_path / "t.csv"), select="unseen_domain", **flags)
        )
    assert KNOWN in printed
    assert f"{KNOWN}, %" in (tmp_path / "run" / "table.md").read_text()
    frame = pd.read_csv(tmp_path / "run" / "runs.csv")
    sizes = frame[frame["round"] == 1].groupby("split")["examples"].sum()
    assert sizes.to_dict() == {
        "validation": 24,
        "unseen_domain": 120,
        "known_domains": 24,
        "test": 60,
    }
    lines = [line for line in log.read(tmp_path / "run") if line.round]
    runs = finished.open("run", tmp_path / "run", "best")
    selected = runs.line(0)
    of_val = [selection.score_on(line, "unseen_domain") for line in lines]
    assert selection.score_on(selected, "unseen_domain") == max(of_val)
    is_personal = algorithm == "ditto"

    def hits(split: str, domain: str, client: int | None) -> np.ndarray:
        mine = (split == SPLIT) & (domain == DOMAIN)
        outputs = runs.fitted.predict(X[mine], client=client if is_personal else None)
        return np.asarray(outputs.argmax(-1) == Y[mine])

    by_name = {name: of.score for name, of in selected.domains.items()}
    known = np.concatenate([hits("id_test", "a", 0), hits("id_test", "b", 1)])
    np.testing.assert_allclose(by_name[KNOWN], known.mean(), atol=1e-6)
    new = np.concatenate([hits("id_test", "a", None), hits("id_test", "b", None)])
    assert (known.mean() > new.mean() + 0.1) == is_personal
    np.testing.assert_allclose(by_name["a"], hits("id_val", "a", 0).mean(), atol=1e-6)
    np.testing.assert_allclose(selected.test_score, hits("test", "d", None).mean(), atol=1e-6)
    of_parts = predictions.predicted(runs, 0, predictions.own_parts(runs, 0))
    again = predictions.rows(of_parts, runs.data.objective, runs.data.dataset.classes)
    by_part = {row["name"]: row["score"] for row in again if row["by"] == "domain"}
    np.testing.assert_allclose(by_part[f"{KNOWN}, a"], hits("id_test", "a", 0).mean(), atol=1e-6)
    np.testing.assert_allclose(by_part[f"{KNOWN}, b"], hits("id_test", "b", 1).mean(), atol=1e-6)
    unseen = np.concatenate([hits("val", "b", None), hits("val", "c", None)])
    np.testing.assert_allclose(max(of_val), unseen.mean(), atol=1e-6)


def test_copies_of_one_original_are_of_one_split() -> None:
    none = np.zeros(4, bool)
    data = Dataset(X[:4], Y[:4], ("n", "y"), none.astype(np.int32), ("all",), ROWS[:4] > 1)
    data = data._replace(original=np.array([0, 1, 2, 2]), known=ROWS[:4] > 2, valid=none)
    deal = federation.partitioner("iid", data, 1)
    examples = federation.examples(data.x, data.y)
    with pytest.raises(UsageError, match="known"):
        federation.split(data, examples, deal, held_out=None, seed=0)
