"""Tables of csv and parquet: their features, roles and targets, and the scaling of features."""

import csv
import json
import warnings
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from fedjax_inv import models
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation, moments, sources, tables
from fedjax_inv.data.dataset import Column, Dataset, check_dataset
from fedjax_inv.data.federation import parts_of
from fedjax_inv.data.tables import Roles
from fedjax_inv.models import Scaling
from fedjax_inv.program import group_names
from fedjax_inv.types import Array, Tree, Variables
from fedjax_inv_experiments import evaluate, export, show_data, train
from fedjax_inv_experiments.experiment import assemble, config
from fedjax_inv_experiments.experiment.config import Config
from fedjax_inv_experiments.parts import network, partition
from fedjax_inv_experiments.reporting import figures, table_figures
from fedjax_inv_experiments.running import launch
from runs import no_figures, started

HEADER = ("age", "city", "smokes", "domain", "client", "test", "target")
ROWS = [
    (30, "Rome", "true", "north", 7, 0, 1.5),
    (41.5, "Oslo", "false", "south", 3, 0, -2),
    (12, "Rome", "false", "south", 7, 1, 0.25),
]


def written(path: Path, rows: Sequence[Sequence[object]], encoding: str = "utf-8") -> Path:
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def read(path: Path, **roles: Any) -> Dataset:
    return sources.load(str(path), roles=Roles(**roles) if roles else None)


def of_column(tmp_path: Path, target: Sequence[object], **roles: Any) -> Dataset:
    """The data set of a column of targets and a feature."""
    rows = [("x", "target"), *((index, value) for index, value in enumerate(target))]
    return read(written(tmp_path / "target.csv", rows), **roles)


# Features.


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_become_features(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path / "some.csv", [HEADER, *ROWS])
    if kind == "parquet":
        columns = dict(zip(HEADER, map(list, zip(*ROWS, strict=True)), strict=True))
        columns["smokes"] = [value == "true" for value in columns["smokes"]]
        content = pa.table(columns).set_column(
            1, "city", pa.array(columns["city"]).dictionary_encode()
        )
        path = tmp_path / "some.parquet"
        pq.write_table(content, path)
    dataset = read(path)
    assert dataset.columns == (
        Column("age"),
        Column("city", ("Oslo", "Rome")),
        Column("smokes", ("false", "true")),
    )
    names = ("age", "city=Oslo", "city=Rome", "smokes=false", "smokes=true")
    assert dataset.features == names
    np.testing.assert_array_equal(
        dataset.x,
        np.array([[30, 0, 1, 0, 1], [41.5, 1, 0, 1, 0], [12, 0, 1, 1, 0]], np.float32),
    )
    assert dataset.x.dtype == np.float32
    np.testing.assert_array_equal(dataset.y, np.float32([1.5, -2, 0.25]))
    assert (dataset.task, dataset.classes) == ("values", ("target",))
    assert (dataset.domain.tolist(), dataset.domains) == ([0, 1, 1], ("north", "south"))
    assert dataset.test.tolist() == [False, False, True]
    assert dataset.user is not None
    assert dataset.user.tolist() == [1, 0, 1]


def test_other_types_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "some.parquet"
    columns = {
        "big": pa.array(["b", "a"], pa.large_string()),
        "money": pa.array([Decimal(1), Decimal(2)]),
        "half": pa.array(np.float16([0.5, 2])),
        "target": pa.array([True, False]),
    }
    pq.write_table(pa.table(columns), path)
    dataset = read(path)
    assert dataset.features == ("big=a", "big=b", "money", "half")
    expected = [[0, 1, 1, 0.5], [1, 0, 2, 2]]
    np.testing.assert_array_equal(dataset.x, expected)
    assert (dataset.y.tolist(), dataset.classes) == ([1, 0], ("false", "true"))


def test_whole_numbers_that_float32_rounds_are_told(tmp_path: Path) -> None:
    rows = [("x", "target"), (2**24, 0.5), (2**25, 1.5), (-(2**24), 1.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(written(tmp_path / "exact.csv", rows))
    path = written(tmp_path / "rounded.csv", [*rows, (2**24 + 1, 2.5)])
    with pytest.warns(UserWarning, match=r"rounded\.csv: column 'x' holds whole numbers above"):
        dataset = read(path)
    np.testing.assert_array_equal(dataset.x[:, 0], [2**24, 2**25, -(2**24), 2**24])
    large = written(tmp_path / "large.csv", [rows[0], (2**60 + 1, 0.5), (2**60 + 2, 1.5)])
    with pytest.warns(UserWarning, match=r"large\.csv: column 'x' holds whole numbers above"):
        read(large)


@pytest.mark.parametrize("example", ["1,5", "1,234.5", "5%", "3/1/2020", "1'000"])
def test_numbers_in_another_notation_are_told(example: str, tmp_path: Path) -> None:
    rows = [("x", "target"), (example, 0.5), (example[:-1] + "7" + example[-1], 1.5), ("z", 2.5)]
    with pytest.warns(UserWarning, match="column 'x' is read as 3 categories, such as"):
        assert read(written(tmp_path / "some.csv", rows)).features[-1] == "x=z"


@pytest.mark.parametrize("example", ["a,5", "1-2", "north", "3/4"])
def test_texts_with_digits_are_categories(example: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="error"):
        read(written(tmp_path / "some.csv", [("x", "target"), (example, 0.5), ("b", 1.5)]))


def test_few_whole_targets_in_floating_point_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="column 'target' holds few different whole numbers in fl"):
        assert of_column(tmp_path, [1.0, 0.0]).task == "values"
    with warnings.catch_warnings(action="error"):
        assert of_column(tmp_path, [1.0, 0.0], task="values").task == "values"
        assert of_column(tmp_path, [1.0, 0.5]).task == "values"


def test_columns_of_other_names(tmp_path: Path) -> None:
    rows = [("price", "site", "a", "id"), (1, "x", 5, "u"), (2, "y", 6, "v")]
    path = written(tmp_path / "some.csv", rows)
    dataset = read(path, target=("price",), domain="site", ignored=("id",), task="values")
    assert (dataset.features, dataset.domains) == (("a",), ("x", "y"))
    np.testing.assert_array_equal(dataset.y, np.float32([1, 2]))
    without = read(path, target=("price",), domain="", client="id", test="")
    assert without.features == ("site=x", "site=y", "a")
    assert without.user is not None
    renamed = written(tmp_path / "other.csv", [("domain", "a"), (1, 5), (2, 6)])
    assert read(renamed, target=("domain",)).domains == ("all",)  # its default name is taken


# Targets.


@pytest.mark.parametrize(
    ("target", "roles", "task", "y", "classes"),
    [
        ("ba", {}, "classes", [1, 0], ("a", "b")),
        (["true", "false"], {}, "classes", [1, 0], ("false", "true")),
        ([10, 9], {}, "classes", [1, 0], ("9", "10")),
        ([10, 9], {"task": "values"}, "values", [10, 9], ("target",)),
        ([1.0, 0.0], {"task": "classes"}, "classes", [1, 0], ("0", "1")),
        ([0.5, 0.25], {}, "values", [0.5, 0.25], ("target",)),
        (range(20), {}, "classes", [*range(20)], tuple(map(str, range(20)))),
        (range(21), {}, "values", [*range(21)], ("target",)),
        ([1, 0], {"task": "labels"}, "labels", [[True], [False]], ("target",)),
        ([3, 1], {"target": ("target", "x")}, "values", [[3, 0], [1, 1]], ("target", "x")),
        (
            [1, 0],
            {"target": ("x", "target"), "task": "labels"},
            "labels",
            [[False, True], [True, False]],
            ("x", "target"),
        ),
    ],
)
def test_what_the_targets_are(
    target: Any, roles: Any, task: str, y: Any, classes: Any, tmp_path: Path
) -> None:
    rows = [("x", "more", "target"), *((i, 0, value) for i, value in enumerate(target))]
    dataset = read(written(tmp_path / "some.csv", rows), **roles)
    assert (dataset.task, dataset.classes) == (task, classes)
    assert dataset.y.dtype == {"classes": np.int32, "labels": bool, "values": np.float32}[task]
    np.testing.assert_array_equal(dataset.y, y)


def test_several_columns_of_true_and_false_are_labels(tmp_path: Path) -> None:
    rows = [("x", "a", "b"), (1, "true", "false"), (2, "true", "true")]
    dataset = read(written(tmp_path / "some.csv", rows), target=("a", "b"))
    assert dataset.y.tolist() == [[True, False], [True, True]]


# What cannot be read.


def error_of(path: Path, **roles: Any) -> str:
    with pytest.raises(UsageError) as error:
        read(path, **roles)
    assert "\n" not in str(error.value)
    return str(error.value)


GOOD = [("x", "z", "target"), (1, "a", 0.5), (2, "b", 1.5)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "must hold at least one example"),
        ("x,target\n", "must hold at least one example"),
        ("x,target", "must be a .csv file with as many fields .*single line"),
        ("1.5,2\n3,4\n", "must begin with a line of the columns' names, it begins with 1.5"),
        ("x,y\n1,2\n", "must hold the columns target .*by roles.target.*Sentiment140; it has x, y"),
        ("x,Target\n1,2\n", "has a column 'Target', must be 'target'"),
        ("x,Domain,target\n1,2,3\n", "has a column 'Domain', must be 'domain' to be read as such"),
        ("x,target\n1,2\n3\n", "as many fields in each line .*line 3: Expected 2 columns, got 1"),
        ("x,target\n1,2\n\n3\n", "line 4: Expected 2 columns, got 1"),
        ("x,x,target\n1,2,3\n", "must name each column differently, two are called 'x'"),
        (",x,target\n0,2,3\n", "column 1 has no name, which a data frame's index has"),
        ("x;target\n1;2\n", "must have commas between its columns"),
        ("x;target\n1,5;2\n", "must have commas between its columns, not semicolons or tabs"),
        ("x, target\n1,2\n", "has a column ' target', must be 'target' to be read as such"),
        ("target\n1.5\n2.5\n", "must hold a column of features"),
        ("x,target\n1,1\n,2\n", "column 'x' has no value in line 3"),
        (
            "x,target\na,1\nNA,2\n",
            r"no value in line 3, .*\(NA, N/A, null and nan mean none",
        ),
        ("w=b,w,target\n1,b,1\n2,c,2\n", "columns 'w=b' and 'w' make two features 'w=b'"),
        ("x,target\n\n1,1\n,2\n", "column 'x' has no value in line 4"),
        ('x,target\n"a\nb",1\n,2\n', "column 'x' has no value in line 4"),
        ("x,target\n1,1\nNaN,2\n", "column 'x' has no value in line 3"),
        ("x,target\na,1\n,2\n", "column 'x' has no value in line 3"),
        ('x,target\na,1\n"",2\n', "column 'x' has no value in line 3"),
        ("x,target\n,1\n,2\n", "column 'x' has no value in line 2"),
        ("x,target\n1,1.5\n2,\n", "column 'target' has no value in line 3"),
        ("x,domain,target\n1,a,1\n1,,1\n", "column 'domain' has no value in line 3"),
        ("x,target\n1,1\n1e39,2\n", "column 'x' must be finite in float32, line 3 is not"),
        ("x,target\n1,inf\n2,1.5\n", "column 'target' must be finite in float32, line 2 is not"),
        ("x,target\n2020-01-31,1\n", "column 'x' holds date32.*left out by roles.ignored"),
        (
            "x,target\n" + "".join(f"{i},1\n" for i in range(50)) + "?,1\n",
            r"column 'x' holds numbers, but '\?' in line 52",
        ),
        (
            "x,target\n" + "".join(f"a{i},1\n" for i in range(1001)),
            "column 'x' holds 1001 different texts, must hold at most 1000",
        ),
    ],
)
def test_files_that_are_no_table(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text(content)
    message = error_of(path)
    assert message.startswith(f"name={str(path)!r}: ")
    with pytest.raises(UsageError, match=words):
        raise UsageError(message)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (dict(target=()), r"^roles.target=\(\): must be the name of a column"),
        (dict(target="x"), r"^roles.target='x': must be names of columns"),
        (dict(target=("x", "x")), r"^roles.target=.*must be different columns"),
        (dict(target=("y",)), r"^roles.target='y': is no column of the table; it has x, z, target"),
        (dict(domain="targe"), r"^roles.domain='targe': .*did you mean target\? All: x, z"),
        (dict(domain="target"), r"^roles.domain='target': must differ from roles.target"),
        (dict(ignored=("target",)), r"^roles.ignored='target': must differ from roles.target"),
        (dict(ignored=("w",)), r"^roles.ignored='w': is no column of the table"),
        (dict(task="both"), r"^roles.task='both': must be one of auto, classes"),
        (
            dict(target=("x", "z")),
            "^roles.target='z': must hold numbers, or true/false if all targets do$",
        ),
        (
            dict(target=("target", "z"), task="labels"),
            "^roles.target='target': must hold true/false or 0/1 for roles.task='labels'$",
        ),
        (dict(target=("x", "z"), task="classes"), r"^roles.target=.* must be one column"),
        (
            dict(task="labels"),
            "^roles.target='target': must hold true/false or 0/1 for roles.task='labels'$",
        ),
        (
            dict(task="classes"),
            "^roles.target='target': must hold texts, true/false or whole numbers for roles.task=",
        ),
        (dict(target=("x",), domain="target"), "^roles.domain='target': must hold texts, true/f"),
        (dict(target=("x",), client="target"), "^roles.client='target': must hold texts, true/f"),
        (dict(target=("x",), test="target"), "^roles.test='target': must hold true/false or 0/1$"),
        (dict(test="z"), "^roles.test='z': must hold true/false or 0/1$"),
    ],
)
def test_roles_that_do_not_fit(roles: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = written(tmp_path / "some.csv", GOOD)
    with pytest.raises(UsageError, match=words):
        raise UsageError(error_of(path, **roles))


def test_files_in_other_encodings(tmp_path: Path) -> None:
    rows = [("x", "target"), ("æ", 1), ("b", 2)]
    assert "must hold texts in UTF-8" in error_of(written(tmp_path / "a.csv", rows, "latin-1"))
    assert "must be in UTF-8" in error_of(written(tmp_path / "b.csv", rows, "utf-16"))
    names = [("température", "target"), (1, 1)]
    assert "must be in UTF-8, its first" in error_of(written(tmp_path / "g.csv", names, "latin-1"))
    assert read(written(tmp_path / "c.csv", rows, "utf-8-sig")).features == ("x=b", "x=æ")
    (tmp_path / "d.parquet").write_bytes(b"x,target\n1,2\n")
    assert "must be a .parquet file" in error_of(tmp_path / "d.parquet")
    pq.write_table(pa.table({"x": [[1], [2]], "target": [1, 2]}), tmp_path / "e.parquet")
    assert "column 'x' holds list" in error_of(tmp_path / "e.parquet")
    pq.write_table(pa.table({"x": [1, None], "target": [1, 2]}), tmp_path / "f.parquet")
    assert "column 'x' has no value in row 2" in error_of(tmp_path / "f.parquet")


def test_a_table_or_sentiment140(tmp_path: Path) -> None:
    """Six columns of a table are no tweets, unless they have the tweets' names or no names."""
    rows = [("a", "b", "c", "d", "e", "target"), (1, 2, 3, 4, 5, 0.5)]
    assert read(written(tmp_path / "some.csv", rows)).features == ("a", "b", "c", "d", "e")
    tweets = [("4", "1", "d", "q", "u", "hello"), ("0", "2", "d", "q", "v", "hi")]
    assert sources.load(str(written(tmp_path / "tweets.csv", tweets))).words
    named = [("target", "ids", "date", "flag", "user", "text"), *tweets]
    assert "of Sentiment140" in error_of(written(tmp_path / "named.csv", named))
    message = error_of(tmp_path / "tweets.csv", domain="")
    assert message == "roles: must be left out for data that are not a table"


def test_columns_must_fit_the_inputs() -> None:
    y = np.array([0, 1], np.int32)
    x = np.zeros((2, 3), np.float32)
    rest = (y, ("a", "b"), y, ("d", "e"), y > 1)
    check_dataset(Dataset(x, *rest, columns=(Column("p"), Column("q", ("r", "s")))))
    with pytest.raises(UsageError, match=r"dataset.x=.* must be \[2, 2\], with the features of"):
        check_dataset(Dataset(x, *rest, columns=(Column("p"), Column("q"))))


# A new table like an old one.


@pytest.fixture
def old(tmp_path: Path) -> Dataset:
    rows = [("age", "city", "code", "target"), (1, "Rome", "01", "yes"), (2, "Oslo", "1", "no")]
    # As csv the codes would be whole numbers.
    columns = {name: [row[i] for row in rows[1:]] for i, name in enumerate(rows[0])}
    pq.write_table(pa.table(columns), tmp_path / "old.parquet")
    return read(tmp_path / "old.parquet")


def test_a_new_table_has_the_features_of_the_old_one(old: Dataset, tmp_path: Path) -> None:
    rows = [("target", "city", "age", "code"), ("no", "Paris", 5, "01"), ("yes", "Rome", 6, "2")]
    path = written(tmp_path / "new.csv", rows)
    new = sources.load(str(path), like=old)
    assert new.features == old.features == ("age", "city=Oslo", "city=Rome", "code=01", "code=1")
    np.testing.assert_array_equal(new.x, [[5, 0, 0, 1, 0], [6, 0, 1, 0, 0]])
    assert [new.classes[label] for label in new.y] == ["no", "yes"]
    other = written(tmp_path / "other.csv", [(*rows[0],), ("no", "rome", 5, "01")])
    with pytest.warns(UserWarning, match="'city' holds no category of training, Oslo, Rome, but r"):
        assert not sources.load(str(other), like=old).x[:, 1:3].any()


def test_a_test_column_without_a_test_example_is_told(tmp_path: Path) -> None:
    rows = [("x", "test", "target"), (1, 0, "a"), (2, 0, "b")]
    with pytest.warns(UserWarning, match="column 'test' is false in every row"):
        read(written(tmp_path / "data.csv", rows))


@pytest.mark.parametrize(
    ("before", "after", "y"),
    [
        ("abc", "cb", [2, 1]),
        ((1, 2, 3), (3, 2), [2, 1]),
        ((1, 2, 3), ("3.0", "2.0"), [2, 1]),
        (("false", "true"), (1, 0), [1, 0]),
        (("false", "true"), ("true", "true"), [1, 1]),
    ],
)
def test_a_new_table_has_the_classes_of_the_old_one(
    before: Sequence[object], after: Sequence[object], y: list[int], tmp_path: Path
) -> None:
    first = of_column(tmp_path, before)
    path = written(tmp_path / "new.csv", [("x", "target"), *((1, value) for value in after)])
    new = sources.load(str(path), like=first)
    assert (new.y.tolist(), new.classes) == (y, first.classes)
    assert new.y.dtype == np.int32


def test_a_column_of_true_and_false_may_be_of_0_and_1_in_a_new_table(tmp_path: Path) -> None:
    rows = [("smokes", "target"), ("true", 1.5), ("false", 2.5), ("true", 0.5)]
    first = read(written(tmp_path / "old.csv", rows))
    as_numbers = [rows[0], *((int(smokes == "true"), y) for smokes, y in rows[1:])]
    new = sources.load(str(written(tmp_path / "new.csv", as_numbers)), like=first)
    np.testing.assert_array_equal(new.x, first.x)
    wrong = written(tmp_path / "wrong.csv", [*as_numbers, (2, 1.5)])
    with pytest.raises(UsageError, match="'smokes' must hold true/false or 0/1"):
        sources.load(str(wrong), like=first)


def test_a_new_table_with_another_class_is_refused(tmp_path: Path) -> None:
    first = of_column(tmp_path, (1, 2, 3))
    path = written(tmp_path / "new.csv", [("x", "target"), (1, 2), (1, 0)])
    with pytest.raises(UsageError, match=r"has the class 0, must have those of training, 1, 2, 3$"):
        sources.load(str(path), like=first)
    # Other files number their classes themselves; numbers are names here.
    other = first._replace(y=first.y[:2], x=first.x[:2], classes=("0", "2"))
    with pytest.raises(UsageError, match=r"has the class 0, must have those of the run, 1, 2, 3$"):
        evaluate._known_targets("new.npz", other, first)
    named = first._replace(classes=("a", "b", "c"))
    assert evaluate._known_targets("new.npz", other, named)[:2].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("age", "city", "target"), (1, "a", "no")], "lacks the column 'code', must have those"),
        (
            [("age", "city", "code", "b", "target"), (1, "a", "1", 2, "no")],
            "has a column 'b', must",
        ),
        ([("age", "city", "code", "target"), ("x", "a", "1", "no")], "'age' must hold numbers, as"),
    ],
)
def test_new_tables_that_do_not_fit(
    rows: list[tuple[object, ...]], words: str, old: Dataset, tmp_path: Path
) -> None:
    path = written(tmp_path / "new.csv", rows)
    with pytest.raises(UsageError, match=words):
        sources.load(str(path), like=old)
    with pytest.raises(UsageError, match=r"^like: must be a data set of a table"):
        tables.table(path, like=old._replace(columns=()))


# Means and deviations.


def test_sums_of_clients_are_those_of_all_examples() -> None:
    rng = np.random.default_rng(0)
    # The mean is far from 0: a sum of squares minus the squared mean would lose the deviation.
    x = (rng.normal(size=(300, 3)) * [1, 1e-3, 0] + [1e6, 5, 0.1]).astype(np.float32)
    parts = [x[:1], x[1:100], x[100:100], x[100:]]
    found = moments.joined(map(moments.moments, parts))
    pooled = x.astype(np.float64)
    assert found.number == 300
    np.testing.assert_allclose(found.mean, pooled.mean(0), rtol=1e-13)
    np.testing.assert_allclose(found.deviation[:2], pooled.std(0)[:2], rtol=1e-9)
    assert found.deviation[2] == 0  # exactly, though 0.1 is no binary fraction
    images = rng.uniform(size=(7, 4, 5, 2))
    of_images = moments.joined([moments.moments(images[:3]), moments.moments(images[3:])])
    np.testing.assert_allclose(of_images.mean, images.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(of_images.deviation, images.std((0, 1, 2)), rtol=1e-12)


def test_a_scaled_model_shifts_and_scales_and_keeps_both(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    scaling = Scaling(np.float32([1, 2, 3]), np.float32([2, 0.5, 0]))
    plain = models.mlp(2, widths=(4,), norm="batch")
    model = models.scaled(plain)

    @jax.jit
    def run(key: Array) -> tuple[Variables, list[Array], Tree]:
        new, inside = model.init(key, x[:1]), plain.init(key, x[:1])
        variables = models.with_scaling(new, scaling)
        outputs = [
            models.predict(model, new, x),
            models.predict(plain, inside, x),
            models.predict(model, variables, x),
            models.predict(plain, inside, (x - scaling.shift) * scaling.scale),
        ]
        _, after = models.apply(model, variables, x, np.ones(5, bool), True)
        return variables, outputs, after

    variables, (new, of_plain, scaled, of_scaled), after = run(jax.random.key(0))
    np.testing.assert_allclose(new, of_plain, rtol=1e-6)
    np.testing.assert_allclose(scaled, of_scaled, rtol=1e-6)
    assert np.abs(scaled - new).max() > 0.1
    # Training moves the norm's statistics alone.
    jax.tree.map(np.testing.assert_array_equal, after.body.inputs, scaling)
    moved = zip(
        *map(jax.tree.leaves, (after.body.network, variables.stats.body.network)), strict=True
    )
    assert all((now != before).any() for now, before in moved)
    models.saved.save(tmp_path / "m.safetensors", variables)
    loaded = models.saved.load(tmp_path / "m.safetensors", variables)
    jax.tree.map(np.testing.assert_array_equal, loaded, variables)
    with pytest.raises(UsageError, match=r"^scaling.shift=.*must be finite numbers \[3\]"):
        models.with_scaling(variables, Scaling(np.zeros(2), np.ones(3)))
    with pytest.raises(UsageError, match=r"^scaling.scale=.*must be finite numbers"):
        models.with_scaling(variables, Scaling(np.zeros(3), np.array([1.0, np.inf, 1.0])))
    with pytest.raises(UsageError, match=r"^variables: must be those of a model of `scaled`"):
        models.with_scaling(variables._replace(stats=after._replace(body={})), scaling)


def test_default_widths_of_vectors() -> None:
    widths = [models.widths_for(number) for number in (1, 8, 9, 97, 98, 5000)]
    assert widths == [(32, 32), (32, 32), (36, 36), (388, 388), (390, 390), (390, 390)]


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
        train.train(flags(regression))
    return regression.parent / "run"


def training_rows(made: assemble.Assembled) -> np.ndarray:
    (of_seed,) = made.splits.values()
    return np.concatenate(federation.parts_of(of_seed[0].train))


def test_only_training_examples_decide_shift_and_scale(regression: Path, tmp_path: Path) -> None:
    made = assemble.assemble(flags(regression))
    scaling = made.scaling("c")
    assert scaling is not None
    rows = training_rows(made)
    assert set(made.dataset.domain[rows]) == {0, 1}
    x = np.asarray(made.dataset.x, np.float64)[rows]
    names = ("small", "large", *(f"kind={kind}" for kind in "vwyz"), "constant")
    assert made.dataset.features == names
    np.testing.assert_allclose(scaling[0].shift[:2], x.mean(0)[:2], rtol=1e-6)
    np.testing.assert_allclose(scaling[0].scale[:2], 1 / x.std(0)[:2], rtol=1e-6)
    assert scaling[0].shift[2:].tolist() == [0] * 5
    assert scaling[0].scale[2:].tolist() == [1, 1, 0, 0, 1]
    other = written(tmp_path / "other.csv", [COLUMNS, *rows_of_regression(1000)])
    again = assemble.assemble(flags(other)).scaling("c")
    jax.tree.map(np.testing.assert_array_equal, again, scaling)
    # Without --standardise categories alone are left out.
    plain = assemble.assemble(flags(regression, standardise=False)).scaling("c")
    assert plain is not None
    assert plain[0].scale.tolist() == [1, 1, 1, 1, 0, 0, 1]


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
    made = assemble.assemble(flags(regression))
    assert json.loads((trained / "inputs.json").read_text()) == made.scaling_record("c")
    started(export.run, export.Options(run=str(trained)))
    about = json.loads((trained / "export/seed=0/model.json").read_text())["network"]
    assert about["features"] == list(made.dataset.features)
    assert about["scaling"]["left_out"] == ["kind=y", "kind=z"]
    with no_figures():
        options = dict(run=str(trained), dataset=str(path), predictions=str(out))
        text = started(evaluate.run, evaluate.Options(**options))
    assert "| all " in text
    predicted = [float(line["prediction"]) for line in csv.DictReader(out.open())]

    arrays = safetensors.numpy.load_file(trained / "export/seed=0/model.safetensors")
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
    np.testing.assert_allclose(predicted, h[:, 0], rtol=1e-4)
    assert predicted[1] == predicted[2]


@pytest.mark.slow
def test_other_tables_than_those_of_the_run_are_told(
    trained: Path, regression: Path, tmp_path: Path
) -> None:
    path = written(tmp_path / "less.csv", [("kind", "target", "large"), ("w", 1.5, 900)])
    with pytest.raises(UsageError, match=r"--dataset=.*less.csv: lacks the column 'small', must"):
        started(evaluate.run, evaluate.Options(run=str(trained), dataset=str(path)))
    before = regression.read_text()
    written(regression, [COLUMNS, *rows_of_regression(2)])
    try:
        with pytest.raises(UsageError, match="was trained on other data than --dataset="):
            started(evaluate.run, evaluate.Options(run=str(trained), dataset=str(path)))
    finally:
        regression.write_text(before)


@pytest.mark.parametrize("standardise", [False, True])
def test_a_warning_where_features_are_far_apart(
    standardise: bool, regression: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = flags(regression, standardise=standardise, run_dir=str(regression.parent / "other"))
    launch.prepared(chosen, Path(chosen.run.run_dir), in_folders=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (not standardise)
    for line in lines:
        start = f"warning: --dataset={regression}: its features differ in scale by a factor of "
        assert line.startswith(start)
        assert "small by " in line
        assert "large by " in line


def test_shift_and_scale_of_other_data_are_not_exported(trained: Path, regression: Path) -> None:
    before = regression.read_bytes()
    written(regression, [COLUMNS, *rows_of_regression()[::-1]])
    try:
        with pytest.raises(UsageError, match=r"^--run=.*: was trained on other data than "):
            started(export.run, export.Options(run=str(trained)))
    finally:
        regression.write_bytes(before)


def test_users_without_training_examples_are_clients_without_examples() -> None:
    """Of some users all examples are drawn for the test, or are left out by --imbalance."""
    y, user = (np.arange(60) // 30).astype(np.int32), np.arange(60) // 2
    none = np.zeros(60, int)
    data = Dataset(np.zeros((60, 1), np.float32), y, ("a", "b"), none, ("d",), none > 0, user=user)
    examples = federation.examples(data.x, data.y)
    for imbalance in (1.0, 5.0):
        chosen = partition.Partition("user", imbalance=imbalance)
        number = chosen.num_clients(data, None)
        assert number == 30
        for seed in range(3):
            split = partition.split(
                chosen,
                data,
                examples,
                num_clients=number,
                held_out=None,
                seed=seed,
                test_fraction=0.4,
                first_row=0,
            )
            held = [np.concatenate(two) for two in zip(*map(parts_of, split[:2]), strict=True)]
            users = [set(user[rows]) for rows in held]
            present = set().union(*users)
            assert sum(map(len, users)) == len(present) < len(users) == number
            assert max(map(len, users)) == 1
            assert group_names([split]) == ["d"]


def test_columns_of_clients_are_users(regression: Path) -> None:
    made = assemble.assemble(flags(regression, partition="user"))
    split = made.splits["c"][0]
    assert split.train.num_clients == 5
    for part in federation.parts_of(split.train):
        assert made.dataset.user is not None
        assert len(set(made.dataset.user[part])) == 1
    two = assemble.assemble(flags(regression, partition="user", clients=2))
    assert two.splits["c"][0].train.num_clients == 2


def test_the_default_network_follows_the_features(regression: Path) -> None:
    chosen = flags(regression, widths=()).model
    assert network.arguments(chosen, sources.load(str(regression)))["widths"] == (32, 32)
    assert "widths" not in network.arguments(chosen, sources.load("digits"))


@pytest.mark.parametrize("environment", ["none", "colored"])
def test_channels_of_images_are_standardised(environment: str) -> None:
    made = assemble.assemble(config.of(environment=environment, standardise=True))
    ((held_out, of_seed),) = made.splits.items()
    rows = np.concatenate(federation.parts_of(of_seed[0].train))
    images = made.dataset.x if made.dataset.render is None else made.dataset.render(made.dataset.x)
    x = np.asarray(images, np.float64)[rows] / (255 if environment == "none" else 1)
    scaling = made.scaling(held_out)
    assert scaling is not None
    np.testing.assert_allclose(scaling[0].shift, x.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(scaling[0].scale, 1 / x.std((0, 1, 2)), rtol=1e-5)


def test_show_data_draws_targets_and_features(
    regression: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save", lambda figure, path, **other: drawn.append(figure))
    out = regression.parent / "data.png"
    text = started(show_data.show, flags(regression), show_data.Options(out=str(out)))
    assert text.endswith(f"Picture: {out}.")
    assert "| kind=v " in text
    holders, *panels = drawn[0].axes
    names = [panel.get_title() for panel in panels]
    assert names == ["target", "small", "large", "kind", "constant"]
    sizes = [bar.get_width() for bar in holders.patches]
    assert sum(sizes) == 55  # without the test split of other domains
    large, kind = panels[2:4]
    dataset = sources.load(str(regression))
    held_out = dataset.domain == 2
    outline = large.patches[-1].get_data()  # of the test, drawn last
    expected = np.histogram(dataset.x[held_out, 1], outline.edges)[0] / 20
    np.testing.assert_allclose(outline.values, expected)
    of_test = [bar.get_height() for bar in kind.containers[-1]]
    np.testing.assert_allclose(of_test, dataset.x[held_out][:, 2:6].mean(0))
    assert [label.get_text() for label in kind.get_xticklabels()] == ["v", "w", "y", "z"]


def test_groups_of_a_figure() -> None:
    rows = np.array_split(np.arange(40), 10)
    x, y = np.zeros((40, 1), np.float32), np.zeros(40, np.int32)
    one = Dataset(x, y, ("k",), y, ("all",), y > 0)
    many = one._replace(domain=np.arange(40) // 4, domains=tuple(map(str, range(10))))
    few = one._replace(domain=np.arange(40) // 20, domains=("d", "e"))
    names = [f"{index}: all" for index in range(10)]
    what, groups = table_figures.groups_of(few, names[:4], [*rows[:3], np.arange(20, 40)])
    assert (what, [group.name for group in groups]) == ("domain", ["d", "e (test)"])
    assert [len(group.rows) for group in groups] == [12, 20]
    what, groups = table_figures.groups_of(one, names[:4], rows[:4])
    assert (what, [group.is_test for group in groups]) == ("client", [False] * 3 + [True])
    what, groups = table_figures.groups_of(many, names, rows)
    assert (what, [len(group.rows) for group in groups]) == ("split", [36, 4])


@pytest.mark.parametrize(
    ("values", "edges"),
    [
        ([0, 2, 1], [-0.5, 0.5, 1.5, 2.5]),
        ([0.5, 0.5], np.linspace(0, 1, 31)),
        ([2.0**60, 2.0**60 + 256], [2.0**60 - 1024, 2.0**60 + 1280]),
        ([2.0**60] * 2, [2.0**60 - 1024, 2.0**60 + 1024]),
        (np.linspace(0, 1, 400), np.linspace(0, 1, 31)),
        ([*np.linspace(0, 1, 400), -1000.5], np.linspace(0, 1, 31)),  # in the outer bin
        (np.geomspace(1, 1e6, 400), np.geomspace(1, 1e6, 31)),
    ],
)
def test_bins(values: Sequence[float], edges: Sequence[float]) -> None:
    found = table_figures._edges(np.asarray(values, np.float64))
    np.testing.assert_allclose(found, edges, rtol=1e-5, atol=0.01)
    assert (np.diff(found) > 0).all()


def test_codes_that_begin_with_zeros_stay_apart(tmp_path: Path) -> None:
    rows = [("x", "client", "domain", "target")]
    rows += [(str(i), ("01", "1", "001")[i % 3], ("010", "2")[i % 2], str(i % 2)) for i in range(6)]
    data = read(written(tmp_path / "a.csv", rows))
    assert data.user is not None
    assert data.user.tolist() == [1, 2, 0, 1, 2, 0]  # in alphabetical order
    assert data.domains == ("010", "2")
    rows = [(*row[:1], row[1].lstrip("0"), *row[2:]) for row in rows]
    alike = read(written(tmp_path / "b.csv", rows))
    assert alike.user is not None
    assert alike.user.tolist() == [0] * 6


def test_the_index_of_a_frame_is_no_feature(tmp_path: Path) -> None:
    table = {"x": [1.0, 2.0], "target": ["a", "b"], "__index_level_0__": [5, 7]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"column '__index_level_0__' is a data frame's index; .*"):
        read(tmp_path / "a.parquet")
    ignored = read(tmp_path / "a.parquet", ignored=("__index_level_0__",))
    assert ignored.features == ("x",)


def test_dates_are_no_domains(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", [("x", "domain", "target"), (1, "2020-01-31", 1)])
    with pytest.raises(UsageError, match=r"^roles\.domain='domain': must hold .*, it holds date32"):
        read(path)
