"""LEAF's FEMNIST from json files that the tests write."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources


def written(path: Path, users: dict[str, tuple[list, list]], **changes: Any) -> Path:
    """A file as LEAF writes it: of each user the images and the labels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(record | changes))
    return path


def images(levels: list[int]) -> list[list[float]]:
    """An image for each level of grey, but for one pixel in the second row."""
    x = np.repeat(np.array(levels)[:, None] / 255, 784, 1)
    x[:, 30] = 1
    return x.tolist()


ANNA, BERT, CARL = (images([3, 255]), [0, 61]), (images([100]), [10]), (images([0, 7, 9]), [1] * 3)


def test_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "some.json", {"anna": ANNA, "carl": ([], []), "bert": BERT})
    dataset = sources.load(str(path))
    assert dataset.x.shape == (3, 28, 28, 1)
    assert dataset.x.dtype == np.uint8
    np.testing.assert_array_equal(dataset.x[:, 0, 0, 0], [3, 255, 100])
    np.testing.assert_array_equal(dataset.x[:, 1, 2, 0], 255)
    assert [dataset.classes[label] for label in dataset.y] == ["0", "z", "A"]
    assert len(dataset.classes) == 62
    assert dataset.user is not None
    np.testing.assert_array_equal(dataset.user, [0, 0, 1])
    assert not dataset.test.any()
    assert dataset.domains == ("all",)


def test_levels_of_grey_are_those_that_were_written(tmp_path: Path) -> None:
    """Also where their decimals were cut off."""
    levels = np.arange(256)
    x = np.tile((levels / 255).round(4), 4)[:784][None].tolist()
    dataset = sources.load(str(written(tmp_path / "some.json", {"anna": (x, [0])})))
    np.testing.assert_array_equal(dataset.x.ravel(), np.tile(levels, 4)[:784])


def test_a_folder_of_files(tmp_path: Path) -> None:
    written(tmp_path / "all_data_0.json", {"bert": BERT})
    written(tmp_path / "all_data_1.json", {"anna": ANNA})
    (tmp_path / "notes.json").write_text("[]")
    dataset = sources.load(str(tmp_path))
    np.testing.assert_array_equal(dataset.x[:, 0, 0, 0], [100, 3, 255])
    np.testing.assert_array_equal(dataset.user, [1, 0, 0])


def test_the_splits_of_a_folder(tmp_path: Path) -> None:
    written(tmp_path / "train" / "a.json", {"bert": BERT, "anna": ANNA})
    written(tmp_path / "test" / "b.json", {"anna": CARL})
    dataset = sources.load(str(tmp_path))
    np.testing.assert_array_equal(dataset.test, [False] * 3 + [True] * 3)
    np.testing.assert_array_equal(dataset.user, [1, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    "held",
    [
        {"x": [[0.5] * 784]},
        {"x": [["a tweet"]], "y": [0]},
        {"x": [[0.5] * 783], "y": [0]},
        {"x": [[0.5] * 784], "y": [0, 1]},
        {"x": [[0.5] * 784], "y": [62]},
        {"x": [[0.5] * 784], "y": [0.5]},
        {"x": [[0.5] * 783 + [1.1]], "y": [0]},
    ],
)
def test_a_user_that_does_not_fit_is_named(held: object, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"users": ["anna"], "user_data": {"anna": held}}))
    with pytest.raises(UsageError, match="'anna'"):
        sources.load(str(path))
