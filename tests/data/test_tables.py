"""Tables of csv and parquet: their features, roles and targets, and the scaling of features."""

import csv
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedjax_inv import models
from fedjax_inv.checks import UsageError
from fedjax_inv.data import moments, sources, tables
from fedjax_inv.data.dataset import Column, Dataset, check_dataset
from fedjax_inv.data.tables import Roles
from fedjax_inv.models import Scaling

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
        ("x,target\n1,2\n3\n", "as many fields in each line .*Expected 2 columns, got 1"),
        ("x,x,target\n1,2,3\n", "must name each column differently, two are called 'x'"),
        (",x,target\n0,2,3\n", "column 1 has no name, which a data frame's index has"),
        ("x;target\n1;2\n", "must have commas between its columns"),
        ("target\n1.5\n2.5\n", "must hold a column of features"),
        ("x,target\n1,1\n,2\n", "column 'x' has no value in row 2"),
        ("x,target\n1,1\nNaN,2\n", "column 'x' has no value in row 2"),
        ("x,target\na,1\n,2\n", "column 'x' has no value in row 2"),
        ('x,target\na,1\n"",2\n', "column 'x' has no value in row 2"),
        ("x,target\n,1\n,2\n", "column 'x' has no value in row 1"),
        ("x,target\n1,1.5\n2,\n", "column 'target' has no value in row 2"),
        ("x,domain,target\n1,a,1\n1,,1\n", "column 'domain' has no value in row 2"),
        ("x,domain,target\n1,0.5,1\n", "column 'domain' must hold texts, true/false or whole"),
        ("x,test,target\n1,2,1\n", "column 'test' must hold true/false or 0/1"),
        ("x,test,target\n1,no,1\n", "column 'test' must hold true/false or 0/1"),
        ("x,target\n1,1\n1e39,2\n", "column 'x' must be finite in float32, row 2 is not"),
        ("x,target\n1,inf\n2,1.5\n", "column 'target' must be finite in float32, row 1 is not"),
        ("x,target\n2020-01-31,1\n", "column 'x' holds date32.*left out by roles.ignored"),
        (
            "x,target\n" + "".join(f"{i},1\n" for i in range(50)) + "?,1\n",
            r"column 'x' holds numbers, but '\?' in row 51",
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
        (dict(target=("x", "z")), "column 'z' must hold numbers to be a target of values"),
        (dict(target=("x", "z"), task="classes"), r"^roles.target=.* must be one column"),
        (dict(task="labels"), "column 'target' must hold true/false or 0/1"),
        (dict(task="classes"), "column 'target' must hold texts, true/false or whole numbers"),
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
    assert found.count == 300
    np.testing.assert_allclose(found.mean, pooled.mean(0), rtol=1e-13)
    np.testing.assert_allclose(found.deviation[:2], pooled.std(0)[:2], rtol=1e-9)
    assert found.deviation[2] == 0  # exactly, though 0.1 is no binary fraction
    images = rng.uniform(size=(7, 4, 5, 2))
    of_images = moments.joined([moments.moments(images[:3]), moments.moments(images[3:])])
    np.testing.assert_allclose(of_images.mean, images.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(of_images.deviation, images.std((0, 1, 2)), rtol=1e-12)


def test_a_scaled_model_shifts_and_scales_and_keeps_both(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, 3)).astype(np.float32)
    plain = models.mlp(2, widths=(4,), norm="batch")
    model = models.scaled(plain)
    variables = model.init(jax.random.key(0), x[:1])
    before = plain.init(jax.random.key(0), x[:1])
    np.testing.assert_array_equal(
        models.predict(model, variables, x), models.predict(plain, before, x)
    )
    scaling = Scaling(np.float32([1, 2, 3]), np.float32([2, 0.5, 0]))
    variables = models.with_scaling(variables, scaling)
    np.testing.assert_allclose(
        models.predict(model, variables, x),
        models.predict(plain, before, (x - scaling.shift) * scaling.scale),
        rtol=1e-6,
    )
    # Training moves the norm's statistics alone.
    mask = np.ones(5, bool)
    _, stats = models.apply(model, variables, x, mask, True)
    jax.tree.map(np.testing.assert_array_equal, stats.body.inputs, scaling)
    assert any((leaf != 0).any() for leaf in jax.tree.leaves(stats.body.network))
    models.saved.save(tmp_path / "m.safetensors", variables)
    loaded = models.saved.load(tmp_path / "m.safetensors", model.init(jax.random.key(5), x[:1]))
    jax.tree.map(np.testing.assert_array_equal, loaded, variables)
    with pytest.raises(UsageError, match=r"^scaling.shift=.*must be numbers \[3\]"):
        models.with_scaling(variables, Scaling(np.zeros(2), np.ones(3)))
    with pytest.raises(UsageError, match=r"^variables: must be those of a model of `scaled`"):
        models.with_scaling(before, scaling)


def test_default_widths_of_vectors() -> None:
    widths = [models.widths_for(number) for number in (1, 8, 9, 97, 98, 5000)]
    assert widths == [(32, 32), (32, 32), (36, 36), (388, 388), (390, 390), (390, 390)]
