"""The pictures of environments and partitions show what the data have, and leave none out."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation
from fedjax_inv_experiments.experiment import command_line
from fedjax_inv_experiments.parts import environments
from fedjax_inv_experiments.parts.partition import Partition
from fedjax_inv_experiments.reporting import figures
from tools import data_pictures
from tools.data_pictures import EVERY, Held, Picture, Seen

TEXT = (data_pictures.ROOT / data_pictures.PAGE).read_text(encoding="utf-8")
FOLDER = data_pictures.ROOT / data_pictures.PICTURES


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    data_pictures.write_own(folder)
    return folder


@pytest.fixture(scope="module")
def found(own: Path) -> dict[str, Picture]:
    return {name: data_pictures.picture(name, own) for name in EVERY}


@pytest.mark.slow
def test_the_page_and_the_pictures_are_what_the_tool_writes(found: dict[str, Picture]) -> None:
    assert data_pictures.written(TEXT, found) == TEXT
    assert re.findall(r"^<!-- data: (\S+) -->$", TEXT, re.MULTILINE) == [*EVERY]
    for name, each in found.items():
        assert figures.digest_in(FOLDER / f"{name}.png") == each.digest, name
    there = [*FOLDER.iterdir()]
    assert {path.stem for path in there} == {*EVERY}
    assert sum(path.stat().st_size for path in there) < 1.5e6
    for path in there:
        with Image.open(path) as image:
            assert image.width == 800


def test_no_environment_and_no_partition_is_left_out() -> None:
    environments_of = {
        flag.partition("=")[2]
        for each in EVERY.values()
        for flag in each.flags
        if flag.startswith("--environment=")
    }
    assert {*environments.LISTED} - {"none"} <= environments_of
    assert "none" in EVERY  # a file of one's own, which has that environment
    held = [each for each in EVERY.values() if isinstance(each, Held)]
    partitions = {flag for each in held for flag in each.flags if flag.startswith("--partition=")}
    (choices,) = (
        field.metadata["choices"]
        for field in Partition.__dataclass_fields__.values()
        if field.name == "partition"
    )
    assert partitions == {f"--partition={name}" for name in choices}
    assert all(len({*each.panels}) == 2 for each in held)


def test_every_picture_has_a_text_and_a_sentence() -> None:
    sections = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
    assert len(sections) == len(EVERY)
    for section in sections:
        _, sentence, *_ = section.split("\n\n")
        assert len(sentence.split()) > 10
        assert re.search(r"^!\[[^\]]{40,}\]\(pictures/data/\w+\.png\)$", section, re.MULTILINE)


def test_the_commands_are_read(own: Path) -> None:
    whole = TEXT.replace(" \\\n", " ")
    commands = re.findall(r"^    \.venv/bin/fedjax-inv show-data (.*)$", whole, re.MULTILINE)
    assert len(commands) == len(EVERY)
    for text in commands:
        text = re.sub(r"(?<=--dataset=)(?=\w+\.(npz|csv))", f"{own}/", text)
        command_line.of_arguments(text.split())


def test_the_cue_is_right_as_often_as_the_flags_say(own: Path) -> None:
    item = EVERY["colored"]
    assert isinstance(item, Seen)
    dataset, split, _ = data_pictures._data(item.flags, own)
    lines = data_pictures.lines_of(dataset, split, item.domain)
    assert [line.name for line in lines] == ["client 1", "client 2", "test"]
    for line, part, expected in zip(lines, (0, 1, None), (80, 90, 10), strict=True):
        rows = federation.parts_of(split.test if part is None else split.train)[part or 0]
        color = np.asarray(dataset.x.color)[rows]
        np.testing.assert_allclose(line.right, 100 * np.mean(color == dataset.y[rows]))
        assert line.right == pytest.approx(expected, abs=3)
        assert {*line.rows} <= {*rows}
        assert line.labels == sorted(line.labels)


def test_the_counts_are_those_of_the_clients(own: Path) -> None:
    for name, total in (("wrong_labels", 2), ("user", 12), ("domain", 5)):
        item = EVERY[name]
        assert isinstance(item, Held)
        dataset, split, is_wrong = data_pictures._data([*item.flags, *item.panels[1]], own)
        panel = data_pictures.panel_of(item.by, "x", dataset, split, is_wrong)
        sizes = [len(rows) for rows in federation.parts_of(split.train)]
        assert panel.counts.shape == (len(sizes), total)
        assert panel.counts.sum(1).tolist() == sizes
        if name == "wrong_labels":
            wrong = [is_wrong[rows].sum() for rows in federation.parts_of(split.train)]
            assert panel.counts[:, 1].tolist() == wrong
            assert 0 < sum(count > 0 for count in wrong) < len(wrong)
        if name == "user":  # no hospital is split
            assert ((panel.counts > 0).sum(0) == 1).all()


def test_a_damaged_picture_is_drawn_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_pictures, "ROOT", tmp_path)
    path = tmp_path / data_pictures.PICTURES / "iid.png"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"damaged")
    (tmp_path / data_pictures.PAGE).write_text("")
    drawn = Picture("", "digest", lambda: Figure(figsize=(1, 1)))
    monkeypatch.setattr(data_pictures, "pictures", lambda: iter([("iid", drawn)]))
    assert data_pictures.run(data_pictures.Options()).startswith("Written: ")
    assert figures.digest_in(path) == "digest"


def test_an_unknown_picture_is_refused(found: dict[str, Picture]) -> None:
    with pytest.raises(UsageError, match=r"^no: must be a picture"):
        data_pictures.written("<!-- data: no -->\n<!-- end -->\n", found)
