"""Tables of csv and parquet: their features, roles and targets, and the scaling of features."""

import csv
import json
import re
import warnings
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
import safetensors.numpy

import runs
from fedjax_inv import models
from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients, federation, sources
from fedjax_inv.data.dataset import Column, Dataset
from fedjax_inv.data.tables import Roles
from fedjax_inv.models import Scaling
from fedjax_inv.models.wrappers import unit_range
from fedjax_inv_experiments import config, evaluation, predictions
from fedjax_inv_experiments.assembly import experiment, network
from fedjax_inv_experiments.config import Config
from runs import no_figures, with_flags

Rows = Sequence[Sequence[object]]


def written(path: Path, rows: Rows) -> Path:
    """A file with a row of names: .csv as texts, .parquet with the types of the values."""
    if path.suffix == ".parquet":
        pd.DataFrame(rows[1:], columns=rows[0]).to_parquet(path, index=False)
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)
    return path


def read(path: Path, like: Dataset | None = None, **roles: Any) -> Dataset:
    return sources.load(str(path), roles=Roles(**roles) if roles else None, like=like)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_become_features(suffix: str, tmp_path: Path) -> None:
    names = ("age", "city", "smokes", "pay", "domain", "client", "test", "target")
    rows = [
        (30, "Rome", True, Decimal(1), "north", 7, 0, 1.5),
        (41.5, "Oslo", False, Decimal(2), "south", 3, 0, -2),
        (12, " Rome ", False, Decimal(3), "south", 7, 1, 0.25),  # blanks do not count
    ]
    dataset = read(written(tmp_path / f"some.{suffix}", [names, *rows]))
    cities, truth = Column("city", ("Oslo", "Rome")), Column("smokes", ("false", "true"))
    assert dataset.columns == (Column("age"), cities, truth, Column("pay"))
    assert dataset.features[1:4] == ("city=Oslo", "city=Rome", "smokes=false")
    x = [[30, 0, 1, 0, 1, 1], [41.5, 1, 0, 1, 0, 2], [12, 0, 1, 1, 0, 3]]
    np.testing.assert_array_equal(dataset.x, np.float32(x), strict=True)
    np.testing.assert_array_equal(dataset.y, np.float32([1.5, -2, 0.25]), strict=True)
    assert (dataset.task, dataset.classes) == ("values", ("target",))
    assert (dataset.domain.tolist(), dataset.domains) == ([0, 1, 1], ("north", "south"))
    assert dataset.test.tolist() == [False, False, True]
    assert dataset.user is not None
    assert dataset.user.tolist() == [1, 0, 1]


def test_columns_of_other_names(tmp_path: Path) -> None:
    rows = [("price", "site", "a", "id"), (1, "x", 5, "u"), (2, "y", 6, "v"), (3, "y", 7, "w")]
    path = written(tmp_path / "some.csv", rows)
    dataset = read(path, target=("price",), domain="site", ignored=("id",), task="values")
    assert (dataset.features, dataset.domains) == (("a",), ("x", "y"))
    without = read(path, target=("price",), domain="", client="id", test="")
    assert without.features == ("site=x", "site=y", "a")
    renamed = written(tmp_path / "other.csv", [("domain", "a"), (1, 5), (2, 6)])
    assert read(renamed, target=("domain",)).domains == ("all",)  # its default name is taken


@pytest.mark.parametrize(
    ("target", "roles", "task", "y", "classes"),
    [
        ("ba", {}, "classes", [1, 0], ("a", "b")),
        (["true", "false"], {}, "classes", [1, 0], ("false", "true")),
        ([10, 9], {}, "classes", [1, 0], ("9", "10")),
        ([10, 9], {"task": "values"}, "values", [10, 9], ("target",)),
        ([1.0, 0.0], {"task": "classes"}, "classes", [1, 0], ("0", "1")),
        (range(20), {}, "classes", [*range(20)], tuple(map(str, range(20)))),
        (range(21), {}, "values", [*range(21)], ("target",)),
        ([1, 0], {"task": "labels"}, "labels", [[True], [False]], ("target",)),
        (["true"] * 2, {"target": ("target", "t")}, "labels", [[1, 1]] * 2, ("target", "t")),
        ([3, 1], {"target": ("target", "x")}, "values", [[3, 0], [1, 1]], ("target", "x")),
    ],
)
def test_what_the_targets_are(
    target: Any, roles: Any, task: str, y: Any, classes: Any, tmp_path: Path
) -> None:
    rows = [("x", "t", "target"), *((i, "true", value) for i, value in enumerate(target))]
    dataset = read(written(tmp_path / "some.csv", rows), **roles)
    assert (dataset.task, dataset.classes) == (task, classes)
    assert dataset.y.dtype == {"classes": np.int32, "labels": bool, "values": np.float32}[task]
    np.testing.assert_array_equal(dataset.y, y)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_codes_and_large_numbers_stay_apart(suffix: str, tmp_path: Path) -> None:
    names = ("x", "client", "domain", "target")
    rows = [
        (i, ("01", "1", "001")[i % 3], ("010", "2")[i % 2], ("02", "2")[i % 2]) for i in (0, 1, 2)
    ]
    data = read(written(tmp_path / f"a.{suffix}", [names, *rows]))
    assert data.user is not None
    assert data.user.tolist() == [1, 2, 0]  # in alphabetical order
    assert (data.domains, data.classes) == (("010", "2"), ("02", "2"))
    large = [(i, 2**60 + i, 2**53 + i, i) for i in (2, 1, 0)]
    data = read(written(tmp_path / f"b.{suffix}", [names, *large]))
    assert data.user is not None
    assert data.user.tolist() == [2, 1, 0]  # by size
    assert data.domains == tuple(str(2**53 + i) for i in range(3))
    longer = [(i, 10**20 + i, 1, i) for i in range(3)]
    if suffix == "csv":  # no type of parquet holds them
        data = read(written(tmp_path / "c.csv", [names, *longer]))
        assert len(np.unique(data.user)) == 3


def test_groups_stay_together_and_splits_are_ones_own(tmp_path: Path) -> None:
    """Of random splits, too; in an .npz and with another table as in the first."""
    names, splits = ("a", "patient", "part", "domain", "target"), ("Train", "val", "test")
    rows = [(i, f"p{i // 4}", splits[i // 4 % 3], "ns"[i // 4 % 2], i % 2) for i in range(96)]
    whole = written(tmp_path / "t.csv", [names, *rows])
    patients, parts = np.arange(96) // 4, np.arange(96) // 4 % 3
    grouped = config.of(dataset=str(whole), group_column="patient", ignored_columns=("part",))
    own = config.of(dataset=str(whole), split_column="part", ignored_columns=("patient",))
    for chosen, of in ((grouped, patients), (own, parts)):
        chosen = with_flags(chosen, held_out="none", partition="iid", clients=3)
        made = experiment.make(chosen)
        (split,) = made.splits[None].values()
        held = [{*of[np.concatenate(federation.parts_of(each))]} for each in split[:3]]
        assert sum(map(len, held)) == len({*of})
        assert all(held)
    assert held == [{0}, {1}, {2}]
    half = experiment.make(with_flags(grouped, held_out="n", validation=0.5)).splits["n"][0]
    assert half.train.size.tolist() == half.valid.size.tolist()
    with pytest.raises(UsageError, match="--validation"):
        experiment.make(with_flags(own, validation=0.5))
    with pytest.raises(UsageError, match="validation"):
        clients.of_dataset(read(whole, split="part"), validation=0.5)
    new = written(tmp_path / "new.csv", [("a", "target"), (1, 1)])
    read(new, like=read(whole, split="part", ignored=("patient", "domain")), split="part")
    x, arrays = np.eye(96), {"group": patients, "valid": parts == 1, "test": parts == 2}
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(96) % 2, **arrays)
    found = sources.load(str(tmp_path / "mine.npz"))
    assert found.original is not None
    assert {*zip(found.original, patients, strict=True)} == {(i, i) for i in range(24)}
    np.testing.assert_array_equal(found.valid, parts == 1)
    written(whole, [names, *rows, (1, "p", "rest", "n", 1)])
    with pytest.raises(UsageError, match="row 97"):
        read(whole, split="part")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_of_splits(suffix: str, tmp_path: Path) -> None:
    """One meaning in each table: of features by its name, and with any of the splits missing."""
    path = tmp_path / f"t.{suffix}"

    def of(*splits: object, **roles: Any) -> Dataset:
        rows = [(i, split, i % 2) for i, split in enumerate(splits * 10)]
        return read(written(path, [("a", "split", "target"), *rows]), **roles)

    found = of("train", "val", "test")
    assert found.features == ("a",)
    assert found.valid is not None
    assert (found.test.sum(), found.valid.sum()) == (10, 10)
    with pytest.warns(UserWarning, match="'split' has no row for the test"):
        assert not of("train", "val").test.any()
    with pytest.warns(UserWarning, match="'split'"):
        assert not of(0, 1).test.any()
    for splits in (("val", "test"), ("test",), ("val",), (1, 2)):
        with pytest.raises(UsageError, match=r"'split'.* train"):
            of(*splits)
    with pytest.raises(UsageError, match=r"roles.test='a'.*'split'"):
        of("train", "test", test="a")
    drawn = of("train", "test")
    data = federation.examples_on_host(drawn.x, drawn.y)
    deal = federation.partitioner("iid", drawn, 2)
    made = federation.split(drawn, data, deal, held_out=None, seed=0)
    assert made.valid.size.tolist() == [1, 1]  # as of a column of the test alone
    assert made.test.size.tolist() == [10]


def test_names_that_differ_in_capitals_are_told(tmp_path: Path) -> None:
    rows = [("ward", "target"), ("blue", 1), ("Blue", 0), ("red", 1), ("red", 0)]
    with pytest.warns(UserWarning, match="'ward'"):
        read(written(tmp_path / "t.csv", rows))


def test_one_hot_targets_are_told(tmp_path: Path) -> None:
    rows = [("x", "a", "b"), *((i, i % 2, 1 - i % 2) for i in range(6))]
    with pytest.warns(UserWarning, match="one-hot"):
        read(written(tmp_path / "t.csv", rows), target=("a", "b"))


def test_texts_that_differ_in_blanks_or_spelling_are_one(tmp_path: Path) -> None:
    rows = [("w", "domain", "target"), ("blue", "Köln", "yes"), ("blue ", "Ko\u0308ln ", "yes ")]
    data = read(written(tmp_path / "a.csv", [*rows, ("red", "Bonn", " no")]))
    assert data.features == ("w=blue", "w=red")
    assert (data.domains, data.classes) == (("Bonn", "Köln"), ("no", "yes"))


def test_pixels_are_scaled_and_features_of_8_bits_are_not(tmp_path: Path) -> None:
    x = np.uint8([[200, 1], [0, 255]])
    pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "target": [0, 1]}).to_parquet(tmp_path / "a.parquet")
    np.testing.assert_array_equal(unit_range(read(tmp_path / "a.parquet").x), x)
    np.savez(tmp_path / "a.npz", x=x[:, None, :, None], y=[0, 1])
    seen = unit_range(read(tmp_path / "a.npz").x)
    np.testing.assert_allclose(seen[:, 0, :, 0], x / 255, rtol=1e-6)


def test_what_numbers_lose_is_told(tmp_path: Path) -> None:
    rows = [("x", "target"), (2**24, 1.0), (2**25, 0.0), (-(2**24), 1.0)]
    with pytest.warns(UserWarning, match="'target'"):
        read(written(tmp_path / "a.csv", rows))
    with warnings.catch_warnings(action="error"):
        read(tmp_path / "a.csv", task="classes")
    with pytest.warns(UserWarning, match="'x'"):
        read(written(tmp_path / "b.csv", [*rows, (2**24 + 1, 0.5)]))


def error_of(path: Path, like: Dataset | None = None, **roles: Any) -> str:
    with pytest.raises(UsageError) as error:
        read(path, like, **roles)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ""),
        ("x,target\n", ""),
        ("1.5,2\n3,4\n", ""),
        ("x,y\n1,2\n", "target"),
        ("x,Domain,target\n1,2,3\n", "'Domain'"),
        ("x,target\n1,2\n3\n", "'target' .* row 2"),
        ("x,target\n1,2\n3,4,5\n", "line 3"),
        ("x,target\n1,2,3\n4,5,6\n", ""),
        ("x,x,target\n1,2,3\n", "'x'"),
        ("Unnamed: 0,x,target\n0,2,3\n", "'Unnamed: 0'"),
        ("x;target\n1,5;2\n", ""),
        ("target\n1.5\n2.5\n", ""),
        ('x,target\na,1\n" ",2\n', "'x' .* row 2"),
        ("x,domain,target\n1,0.5,1\n", "'domain'"),
        ("x,test,target\n1,yes,1\n", "'test'"),
        ("x,target\n1,1\n1e39,2\n", "'x' .* row 2"),
        ("w=b,w,target\n1,b,1\n2,b,2\n3,c,1\n", "'w=b'"),
        ("x,target\n" + "".join(f"{i},1\n" for i in range(50)) + "?,1\n", "'x' .* row 51"),
        ("x,target\n" + 2 * "".join(f'"{i},5",1\n' for i in range(50)), "'x'"),
        ("x,target\n" + 2 * "".join(f"a{i},1\n" for i in range(1001)), "'x'"),
        ("x,target\na,1\nb,0\nc,1\n", "'x'"),
        ("sex,domain,target\nf,n,yes\nm,s,no\nsex,domain,target\nf,n,no\n", "row 3"),
    ],
)
def test_files_that_are_no_table(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text(content)
    assert re.search(f"^name={str(path)!r}: .*{words}", error_of(path))


def test_files_of_other_forms(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,target\næ,1\n", "utf-16")
    assert "a.csv" in error_of(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("x,target\næ,1\næ,2\n", "utf-8-sig")
    assert read(tmp_path / "b.csv").features == ("x=æ",)
    (tmp_path / "d.parquet").write_bytes(b"x,target\n1,2\n")
    assert "d.parquet" in error_of(tmp_path / "d.parquet")
    date = pd.Timestamp("2020-01-31")
    for first, value in ((date, date), (1, None)):
        path = written(tmp_path / "e.parquet", [("x", "target"), (first, 1), (value, 2)])
        assert "'x'" in error_of(path)
    path = written(tmp_path / "g.parquet", [("x", "target", "__index_level_0__"), (1, 1, 1)])
    assert "index" in error_of(path)
    assert read(path, ignored=("__index_level_0__",)).features == ("x",)


def test_a_table_or_sentiment140(tmp_path: Path) -> None:
    """Six columns of a table are no tweets, also if pandas numbered them: tweets are asked for."""
    for names in ("abcde", "01234", "4bcde"):
        rows = [(*names, "target"), (1, 2, 3, 4, 5, 0.5)]
        assert read(written(tmp_path / "some.csv", rows)).features == (*names,)
    tweets = [("4", "1", "d", "q", "u", "hello"), ("0", "2", "d", "q", "v", "hi")]
    path = written(tmp_path / "tweets.csv", tweets)
    assert "sentiment140:" in error_of(path)
    path.write_text(path.read_text() + "\n", "utf-8-sig")
    found = sources.load(f"sentiment140:{path}")
    assert (len(found.y), bool(found.words)) == (2, True)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (dict(target=()), "^roles.target="),
        (dict(target=("y",)), "^roles.target='y'"),
        (dict(domain="targe"), "^roles.domain=.* target"),
        (dict(domain="target"), "^roles.domain='target'.* roles.target"),
        (dict(ignored=("w",)), "^roles.ignored='w'"),
        (dict(target=("x", "z"), task="classes"), "^roles.target="),
        (dict(task="labels"), "'target'"),
    ],
)
def test_roles_that_do_not_fit(roles: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = written(tmp_path / "some.csv", [("x", "z", "target"), (1, "a", 0.5), (2, "b", 1.5)])
    assert re.search(words, error_of(path, **roles))


@pytest.fixture
def old(tmp_path: Path) -> Dataset:
    names = ("age", "city", "code", "smokes", "target")
    rows = [
        (1, "Rome", "01", True, "yes"),
        (2, "Oslo", "1", False, "no"),
        (3, "Oslo", "1", True, "no"),
    ]
    return read(written(tmp_path / "old.parquet", [names, *rows]))


def test_a_new_table_has_the_features_and_classes_of_the_old_one(
    old: Dataset, tmp_path: Path
) -> None:
    names = ("target", "city", "age", "smokes", "code")
    rows = [("no", "Paris", 5, 1, "01"), ("yes", "Rome", 6, 0, "2")]
    new = read(written(tmp_path / "new.csv", [names, *rows]), old)
    assert new.features == old.features
    assert old.features[1:5] == ("city=Oslo", "city=Rome", "code=01", "code=1")
    np.testing.assert_array_equal(new.x, [[5, 0, 0, 1, 0, 0, 1], [6, 0, 1, 0, 0, 1, 0]])
    assert [new.classes[label] for label in new.y] == ["no", "yes"]
    other = written(tmp_path / "other.csv", [names, ("no", "rome", 5, 1, "01")])
    with pytest.warns(UserWarning, match="'city'"):
        assert not read(other, old).x[:, 1:3].any()


def test_new_tables_that_do_not_fit(old: Dataset, tmp_path: Path) -> None:
    names = ("age", "city", "code", "smokes", "target")
    for names_now, row, words in (
        (names, (1, "Rome", "1", 1, "perhaps"), "row 1 .* perhaps"),
        (names, ("x", "Rome", "1", 1, "no"), "'age'"),
        (("b", *names), (2, 1, "Rome", "1", 1, "no"), "'b'"),
        (names[1:], ("Rome", "1", 1, "no"), "'age'"),
    ):
        path = written(tmp_path / "new.csv", [names_now, row])
        with pytest.raises(UsageError, match=words):
            read(path, old)
    # Other files number their classes themselves; numbers are names here.
    first = old._replace(classes=("1", "2", "3"))
    other = first._replace(y=first.y[:2], x=first.x[:2], classes=("0", "2"))
    with pytest.raises(UsageError, match="class 0"):
        predictions.known_targets("new.npz", other, first)
    named = first._replace(classes=("a", "b", "c"))
    assert predictions.known_targets("new.npz", other, named).tolist() == [2, 0]


@pytest.mark.parametrize(
    ("before", "after", "y"),
    [
        ("abc", "cb", [2, 1]),
        ((1, 2, 3), ("3.0", "2.0"), [2, 1]),
        (("false", "true"), (1, 0), [1, 0]),
        (("false", "true"), ("true", "true"), [1, 1]),
    ],
)
def test_classes_may_be_written_otherwise(
    before: Sequence[object], after: Sequence[object], y: list[int], tmp_path: Path
) -> None:
    first, new = (
        [("x", "target"), *((1, value) for value in values)] for values in (before, after)
    )
    old = read(written(tmp_path / "old.csv", first))
    found = read(written(tmp_path / "new.csv", new), old)
    assert (found.y.tolist(), found.classes) == (y, old.classes)


def test_a_scaled_model_shifts_and_scales_and_keeps_both() -> None:
    x = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    scaling = Scaling(np.float32([1, 2, 3]), np.float32([2, 0.5, 0]))
    plain = models.mlp(2, widths=(4,), norm="batch")
    model = models.scaled(plain)
    new, inside = (each.init(jax.random.key(0), x[:1]) for each in (model, plain))
    variables = models.with_scaling(new, scaling)
    expected = models.predict(plain, inside, (x - scaling.shift) * scaling.scale)
    np.testing.assert_allclose(models.predict(model, variables, x), expected, rtol=1e-6)
    assert np.abs(models.predict(model, new, x) - expected).max() > 0.1
    # Training moves the norm's statistics alone.
    _, after = models.apply(model, variables, x, np.ones(5, bool), True)
    jax.tree.map(np.testing.assert_array_equal, after.body.inputs, scaling)
    norms = zip(*map(jax.tree.leaves, (after.body.network, new.stats.body.network)), strict=True)
    assert all((now != before).any() for now, before in norms)
    with pytest.raises(AssertionError):
        models.with_scaling(new, Scaling(np.zeros(2), np.ones(2)))


# The binaries: a regression with domains. Category z occurs in the held-out domain alone, and y in
# the test split alone.

COLUMNS = ("small", "large", "kind", "constant", "domain", "client", "test", "target")


def rows_of_regression(scale: float = 1) -> list[tuple[object, ...]]:
    """The rows; `scale` changes the features of those that do not train."""
    rng = np.random.default_rng(0)
    rows: list[tuple[object, ...]] = []
    for i in range(60):
        domain, test = "abc"[i % 3], int(i % 12 == 0)
        small, large = rng.normal(3, 2), rng.normal(1000, 500)
        kind = "y" if test else "z" if domain == "c" and i % 2 else "vw"[i % 2]
        target = small / 2 + large / 1000 + (kind == "v")
        if test or domain == "c":
            small, large = scale * small, scale * large
        rows.append((small, large, kind, 0.1, domain, f"user {i % 5}", test, target))
    return rows


def flags(path: Path, **changes: Any) -> Config:
    chosen = dict(dataset=str(path), held_out="c", standardise=True, widths=(4,), rounds=2)
    more = dict(learning_rate=(0.05,), batch_size=8, run_dir=str(path.parent / "run"))
    return config.of(**(chosen | more | changes))


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("data") / "some.csv", [COLUMNS, *rows_of_regression()])


@pytest.fixture(scope="module")
def trained(regression: Path) -> Path:
    """The folder of a run on the regression."""
    with no_figures():
        runs.train(flags(regression))
    return regression.parent / "run"


def training_rows(made: experiment.Assembly) -> np.ndarray:
    (of_seed,) = made.splits.values()
    return np.concatenate(federation.parts_of(of_seed[0].train))


def test_only_training_examples_decide_shift_and_scale(regression: Path, tmp_path: Path) -> None:
    made = experiment.make(flags(regression))
    assert made.is_scaled
    scaling = made.scalers.scaling("c", 0)
    rows = training_rows(made)
    assert set(made.dataset.domain[rows]) == {0, 1}
    x = np.asarray(made.dataset.x, np.float64)[rows]
    names = ("small", "large", *(f"kind={kind}" for kind in "vwyz"), "constant")
    assert made.dataset.features == names
    np.testing.assert_allclose(scaling.shift[:2], x.mean(0)[:2], rtol=1e-6)
    np.testing.assert_allclose(scaling.scale[:2], 1 / x.std(0)[:2], rtol=1e-6)
    assert scaling.scale[2:].tolist() == [1, 1, 0, 0, 1]
    assert scaling.shift[2:6].tolist() == [0] * 4
    assert not ((x[:, 6] - scaling.shift[6]) * scaling.scale[6]).any()  # constant
    other = written(tmp_path / "other.csv", [COLUMNS, *rows_of_regression(1000)])
    again = experiment.make(flags(other)).scalers.scaling("c", 0)
    jax.tree.map(np.testing.assert_array_equal, again, scaling)
    # Without --standardise categories alone are left out.
    plain = experiment.make(flags(regression, standardise=False)).scalers.scaling("c", 0)
    assert plain.scale.tolist() == [1, 1, 1, 1, 0, 0, 1]


@pytest.mark.slow
def test_the_run_keeps_and_applies_shift_and_scale(trained: Path, regression: Path) -> None:
    """NumPy computes the predictions from the exported files and the new table."""
    new = [
        ("kind", "constant", "target", "large", "small"),
        ("w", 0.1, 1.5, 900, 2),
        ("z", 0.1, 2.5, 1500, 3),  # does not occur in training
        ("new", 0.1, 2.5, 1500, 3),  # does not occur in the file
    ]
    path, out = written(regression.parent / "new.csv", new), regression.parent / "p.csv"
    made = experiment.make(flags(regression))
    assert json.loads((trained / "inputs.json").read_text()) == made.scalers.record("c")
    networks = regression.parent / "export"
    with no_figures():
        options = dict(run=str(trained), dataset=str(path), predictions=str(out))
        text = evaluation.run(evaluation.EvaluationOptions(**options, export=str(networks)))
    assert "| all " in text
    about = json.loads((networks / "seed=0/model.json").read_text())["network"]
    assert about["features"] == list(made.dataset.features)
    predicted = [float(line["prediction"]) for line in csv.DictReader(out.open())]

    arrays = safetensors.numpy.load_file(networks / "seed=0/model.safetensors")
    x = [[2, 900, 0, 1, 0, 0, 0.1], [3, 1500, 0, 0, 0, 1, 0.1], [3, 1500, 0, 0, 0, 0, 0.1]]
    inputs = "stats/body/inputs/"
    h = (np.array(x) - arrays[f"{inputs}shift"]) * arrays[f"{inputs}scale"]
    for half in ("body", "head"):
        kernel, bias = (
            next(arrays[name] for name in arrays if f"/{half}/" in name and name.endswith(end))
            for end in ("kernel", "bias")
        )
        h = h @ kernel + bias
        h = np.maximum(h, 0) if half == "body" else h
    targets = "stats/head/targets/"  # of standardised targets, to their own units
    h = h / arrays[f"{targets}scale"] + arrays[f"{targets}shift"]
    np.testing.assert_allclose(predicted, h[:, 0], rtol=1e-4)
    assert predicted[1] == predicted[2]


def test_the_default_network_follows_the_features(regression: Path) -> None:
    chosen = flags(regression, widths=())
    assert network.arguments(chosen.network, sources.load(str(regression)))["widths"] == (32, 32)
    assert "widths" not in network.arguments(chosen.network, sources.load("digits"))
    assert [models.widths_for(number) for number in (9, 97, 98)] == [(n, n) for n in (36, 388, 390)]


@pytest.mark.parametrize("environment", ["none", "colored"])
def test_channels_of_images_are_standardised(environment: str) -> None:
    made = experiment.make(config.of(environment=environment, standardise=True))
    ((held_out, of_seed),) = made.splits.items()
    rows = np.concatenate(federation.parts_of(of_seed[0].train))
    images = made.dataset.x if made.dataset.render is None else made.dataset.render(made.dataset.x)
    x = np.asarray(images, np.float64)[rows] / (255 if environment == "none" else 1)
    assert made.is_scaled
    scaling = made.scalers.scaling(held_out, 0)
    np.testing.assert_allclose(scaling.shift, x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(scaling.scale, 1 / x.std((0, 1, 2)), rtol=1e-5)
