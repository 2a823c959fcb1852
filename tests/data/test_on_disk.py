"""Federations as files: writing in pieces, going on after an interruption, damages, conversions."""

import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedjax_inv.checks import UsageError
from fedjax_inv.data import convert, leaf, on_disk, prepare, sources
from fedjax_inv.data.on_disk import Piece, Source
from fedjax_inv.types import Tree

SIZES = (3, 0, 5, 1, 4, 2)
DOMAINS = ("b", "a", "b", "b", "c", "a")


def client(number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    x = rng.integers(0, 256, (SIZES[number], 2, 3, 1), np.uint8)
    return x, rng.integers(0, 4, SIZES[number])


def pieces(first: int) -> Iterator[Piece]:
    """The clients from `first` on, two rows at a time."""
    for number in range(first, len(SIZES)):
        x, y = client(number)
        for start in range(0, max(1, len(y)), 2):
            rows = slice(start, start + 2)
            yield Piece(x[rows], y[rows], DOMAINS[number], start + 2 >= len(y))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "data"
    on_disk.write(folder, pieces, name="clients", classes=list("wxyz"))
    return folder


def test_the_files_hold_the_clients_one_after_the_other(written: Path) -> None:
    assert [*contents(written)] == ["clients.npy", "meta.json", "x.npy", "y.npy"]
    mapped = on_disk.opened(written)
    assert isinstance(mapped.x, np.memmap)
    assert mapped.clients.dtype == np.int64
    np.testing.assert_array_equal(mapped.clients[:, 1], SIZES)
    for number, (first, size) in enumerate(mapped.clients):
        x, y = client(number)
        np.testing.assert_array_equal(mapped.x[first : first + size], x)
        np.testing.assert_array_equal(mapped.y[first : first + size], y)
    assert mapped.meta["complete"] is True
    assert (mapped.meta["examples"], mapped.meta["clients"]) == (15, 6)
    assert mapped.meta["classes"] == list("wxyz")
    assert [mapped.meta["domains"][i] for i in mapped.meta["domain"]] == [*DOMAINS]


def test_it_is_a_data_set_of_users(written: Path) -> None:
    dataset = sources.load(str(written))
    np.testing.assert_array_equal(dataset.user, np.repeat(np.arange(6), SIZES))
    names = np.array(dataset.domains)[dataset.domain]
    np.testing.assert_array_equal(names, np.repeat(DOMAINS, SIZES))
    assert dataset.classes == tuple("wxyz")
    assert not dataset.test.any()
    assert isinstance(dataset.x, np.memmap)
    with pytest.raises(UsageError, match="image_size=8: must be left out"):
        sources.load(str(written), image_size=8)


def test_trees_labels_and_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, y, classes in (
        ("labels", rng.random((4, 2)) < 0.5, ("0", "1")),
        ("values", rng.random(4), ("target",)),
        ("numbers", np.array([3, 0, 1, 0]), ("0", "1", "2", "3")),
    ):
        x = {"shape": rng.normal(size=(4, 3)), "count": np.arange(8).reshape(4, 2)}

        def source(first: int, x: Tree = x, y: np.ndarray = y) -> Iterator[Piece]:
            for rows in (slice(0, 1), slice(1, 4))[first:]:
                yield Piece({key: leaf[rows] for key, leaf in x.items()}, y[rows])

        on_disk.write(tmp_path / name, source, name=name)
        assert (tmp_path / name / "x" / "shape.npy").is_file()
        dataset = on_disk.load(tmp_path / name)
        np.testing.assert_array_equal(dataset.x["shape"], x["shape"].astype(np.float32))
        np.testing.assert_array_equal(dataset.x["count"], x["count"])
        np.testing.assert_array_equal(dataset.y, y.astype(dataset.y.dtype))
        assert dataset.classes == classes
        assert dataset.domains == ("all",)


def killed_after(count: int, folder: Path, copy: Path) -> Source:
    """The pieces, of which the writer is copied in the middle, as a kill would leave it."""

    def source(first: int) -> Iterator[Piece]:
        for number, piece in enumerate(pieces(first)):
            if number == count:
                shutil.copytree(folder, copy)
            yield piece

    return source


@pytest.mark.parametrize("seconds", [0.0, 99.0])
@pytest.mark.parametrize("count", [0, 1, 3, 6, 8])
def test_a_killed_writer_goes_on_and_writes_the_same(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, seconds: float
) -> None:
    monkeypatch.setattr(on_disk, "_SECONDS", seconds)
    add = on_disk._Rows.add

    def add_and_flush(file: Any, rows: np.ndarray) -> bytes:
        content = add(file, rows)
        file._file.flush()  # so that rows after the last note are in the file
        return content

    monkeypatch.setattr(on_disk._Rows, "add", add_and_flush)
    arguments: dict[str, Any] = dict(name="clients", classes=list("wxyz"))
    folder, copy = tmp_path / "whole", tmp_path / "killed"
    on_disk.write(folder, killed_after(count, folder, copy), **arguments)
    with pytest.raises(UsageError, match="is not complete; run the command that writes it again"):
        sources.load(str(copy))
    begun: list[int] = []

    def source(first: int) -> Iterator[Piece]:
        begun.append(first)
        yield from pieces(first)

    on_disk.write(copy, source, **arguments)
    assert contents(copy) == contents(folder) == contents(written)
    # It does not begin anew, unless it had noted nothing.
    done = {0: 0, 1: 0, 3: 2, 6: 3, 8: 4}[count]
    assert begun == [done if seconds == 0 else 0]
    # A finished one is left alone.
    on_disk.write(copy, killed_after(0, copy, copy), **arguments)
    assert begun == begun[:1]


def test_a_source_that_breaks_can_be_mended(written: Path, tmp_path: Path) -> None:
    def source(first: int) -> Iterator[Piece]:
        for number, piece in enumerate(pieces(first)):
            if number == 4:
                raise OSError("unplugged")
            yield piece

    arguments: dict[str, Any] = dict(name="clients", classes=list("wxyz"))
    with pytest.raises(OSError, match="unplugged"):
        on_disk.write(tmp_path / "data", source, **arguments)
    with pytest.raises(UsageError, match=r"^classes=.*: must be different names"):
        on_disk.write(tmp_path / "data", pieces, name="clients", classes=list("wxyw"))
    for other in (arguments | dict(name="others"), arguments | dict(classes=list("wxyzv"))):
        with pytest.raises(UsageError, match="holds a part of other data, must be another folder"):
            on_disk.write(tmp_path / "data", pieces, **other)
        with pytest.raises(UsageError, match="holds other data, must be another folder"):
            on_disk.write(written, pieces, **other)
    on_disk.write(tmp_path / "data", pieces, **arguments)
    assert contents(tmp_path / "data") == contents(written)


def test_a_writer_holds_little(tmp_path: Path) -> None:
    """40 MB in pieces of 0.1 MB."""

    def source(first: int) -> Iterator[Piece]:
        for number in range(first, 40):
            for part in range(10):
                x = np.full((100, 1000), number, np.uint8)
                yield Piece(x, np.full(100, part), ends=part == 9)

    tracemalloc.start()
    on_disk.write(tmp_path / "data", source, name="large")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6
    mapped = on_disk.opened(tmp_path / "data")
    assert mapped.x.nbytes == 40e6
    assert (mapped.x[::1000, 0] == np.arange(40)).all()


@pytest.mark.parametrize("name", ["x.npy", "y.npy", "clients.npy", "meta.json"])
def test_a_damaged_file_is_named(written: Path, tmp_path: Path, name: str) -> None:
    whole = (written / name).read_bytes()

    def fails(content: bytes | None, words: str) -> None:
        folder = tmp_path / "data"
        shutil.copytree(written, folder, dirs_exist_ok=True)
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        with pytest.raises(UsageError, match=words) as error:
            sources.load(str(folder))
        assert "\n" not in str(error.value)

    is_meta = name == "meta.json"
    damaged = rf"/{name}: is damaged( or truncated)?; write the folder anew$"
    fails(whole[:-1], damaged)
    fails(whole[: len(whole) // 2], damaged)
    fails(b"", damaged)
    fails(None, "must hold images" if is_meta else rf"/{name}: must be a file, there is none$")
    if is_meta:
        fails(whole.replace(b'"complete": true', b'"complete": false'), damaged)
        fails(b"[]", damaged)
    elif name == "clients.npy":
        fails(whole[:-8] + bytes(8), damaged)
    else:
        changed = whole[:-1] + bytes([whole[-1] ^ 1])
        fails(changed, "holds other examples than were written, its digest differs")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Piece(np.zeros((1, 3), np.uint8), np.zeros(1, int)), r"client 1: has x.npy of uint8 \(3,"),
        (Piece(np.zeros((1, 2)), np.zeros(1, int)), "client 1: has x.npy of float32"),
        (Piece({"a": np.zeros((1, 2))}, np.zeros(1, int)), "client 1: has x/a.npy .* no such"),
        (Piece(np.zeros((1, 2), np.uint8), np.zeros(1)), "client 1: has y.npy of float32"),
        (
            Piece(np.zeros((1, 2), np.uint8), np.zeros((1, 2), int)),
            "client 1: has y of int64 .*1, 2",
        ),
        (Piece(np.zeros((1, 2), np.uint8), np.zeros(1, bool)), r"client 1: has y of bool \(1,\)"),
        (Piece({"a/b": np.zeros((1, 2))}, np.zeros(1, int)), "client 1: has the input 'a/b', must"),
        (Piece(np.zeros((1, 2), np.uint8), np.zeros(2, int)), "client 1: has x.npy of .* as many"),
        (Piece(np.zeros((1, 2), np.uint8), np.array([2])), r"client 1: has the label .* in 0\.\.1"),
        (Piece(np.zeros((1, 2), np.uint8), np.array([-1])), "client 1: has the label -1"),
        (Piece(np.array([["a", "b"]]), np.array([0])), "client 1: has x.npy of <U1"),
        (Piece(np.array([[0, 2**33 + 5]]), np.array([0])), "client 1: .* must fit into 32 bits"),
        (Piece(np.zeros((1, 2), np.uint8), np.array([2**32])), "client 1: has y.npy of int64, mu"),
        (Piece(np.array([[0, 1e300]]), np.array([0])), "client 1: .* must be finite in 32 bits"),
        (Piece(np.array([[0, np.nan]]), np.array([0])), "client 1: has x.npy of float64, must be"),
        (Piece(np.zeros((1, 2), np.uint8), np.array([0]), ends=False), "client 1: must end"),
    ],
)
def test_pieces_that_do_not_fit_are_told(tmp_path: Path, second: Piece, message: str) -> None:
    first = Piece(np.zeros((1, 2), np.uint8), np.zeros(1, int))
    with pytest.raises(UsageError, match=message):
        on_disk.write(tmp_path / "d", lambda _: iter((first, second)), name="n", classes=("a", "b"))


def test_other_misuse(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UsageError, match="must be empty, or new"):
        on_disk.write(tmp_path, pieces, name="clients")
    with pytest.raises(UsageError, match="source: must hold at least one example"):
        on_disk.write(tmp_path / "none", lambda _: iter(()), name="nobody")
    two = (Piece(*client(0), "a", False), Piece(*client(0), "b"))
    labels = Piece(np.zeros((2, 5), np.float32), np.zeros((2, 2), bool))
    with pytest.raises(UsageError, match="client 0: has 2 columns in y, must have 3"):
        on_disk.write(tmp_path / "l", lambda _: iter((labels,)), name="l", classes=("a", "b", "c"))
    with pytest.raises(UsageError, match="client 0: is of the domains a and b"):
        on_disk.write(tmp_path / "two", lambda _: iter(two), name="two")
    with pytest.raises(UsageError, match=r"must hold meta.json"):
        on_disk.opened(tmp_path)


# Conversions


def record(*labels: int) -> dict[str, list]:
    return {"x": [[(label % 7) / 255] * 784 for label in labels], "y": [*labels]}


USERS = {"bert": record(3, 61), "anna": record(0), "carl": record(9, 8, 7)}


def save_leaf(path: Path, users: dict[str, Any], **others: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"users": [*users], **others, "user_data": users}, indent=1))
    return path


def test_leaf_is_converted_user_by_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(convert, "_CHARACTERS", 50)
    save_leaf(tmp_path / "leaf/train/a.json", USERS, num_samples=[2, 1, 3])
    save_leaf(tmp_path / "leaf/train/b.json", {"dora": record(5)})
    save_leaf(tmp_path / "leaf/test/a.json", {"bert": record(1)})
    prepare.main([str(tmp_path / "leaf"), f"--to={tmp_path / 'to'}"])
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"{tmp_path / 'to'}: 4 clients, 7 examples",
        f"{tmp_path / 'to/test'}: 1 clients, 1 examples",
    ]
    assert not err
    dataset, plain = (sources.load(str(tmp_path / name)) for name in ("to", "leaf"))
    for field in ("x", "y", "test", "classes", "domains"):
        np.testing.assert_array_equal(getattr(dataset, field), getattr(plain, field))
    np.testing.assert_array_equal(dataset.user, [0, 0, 1, 2, 2, 2, 3, 4])


def test_a_json_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_CHARACTERS", 1000)
    path = save_leaf(tmp_path / "a.json", {f"user{i}": record(*range(3)) for i in range(40)})
    longest = 0
    more = convert._Text._more

    def more_and_measure(text: convert._Text) -> bool:
        nonlocal longest
        found = more(text)
        longest = max(longest, len(text._text))
        return found

    monkeypatch.setattr(convert._Text, "_more", more_and_measure)
    assert [name for name, _ in convert.users(path)] == [f"user{i}" for i in range(40)]
    assert 0 < longest < path.stat().st_size / 8


@pytest.mark.parametrize("part", [0.0, 0.02, 0.3, 0.6, 0.99])
def test_a_truncated_json_file_is_named_with_its_last_user(tmp_path: Path, part: float) -> None:
    path = save_leaf(tmp_path / "a.json", USERS)
    text = path.read_text()
    path.write_text(text[: int(part * len(text))])
    with pytest.raises(UsageError, match=r"a.json'?: must be LEAF's json; it is damaged or cut"):
        [*convert.users(path)]
    path.write_text(text[:-1] + "}" if part else '{"users": ["x"]}')
    if part:
        assert len([*convert.users(path)]) == 3
    else:
        with pytest.raises(UsageError, match="with users in user_data"):
            [*convert.users(path)]


def save_image(path: Path, value: int, side: int = 4, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (side, side), (value,) * 3 if mode == "RGB" else value).save(path)


def test_folders_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_ROWS", 2)
    names = ["u/cat/0.png", "u/dog/0.png", "u/dog/1.png", "v/ant/0.png"]
    for value, name in enumerate(names):
        save_image(tmp_path / "images" / name, value)
        save_image(tmp_path / "nested/d" / name, value)
        save_image(tmp_path / "nested/e" / name, value + 10)
    (tmp_path / "images/w/cat").mkdir(parents=True)  # a client without images is none
    for folders, root, user, domains in (
        ("client", "images", [0, 0, 0, 1], ["all"] * 4),
        ("domain", "images", [0, 0, 0, 1], ["u", "u", "u", "v"]),
        ("domain/client", "nested", [0, 0, 0, 1, 2, 2, 2, 3], ["d"] * 4 + ["e"] * 4),
    ):
        to = tmp_path / "to" / folders.replace("/", "_")
        prepare.main([str(tmp_path / root), f"--folders={folders}", f"--to={to}", "--image_size=2"])
        dataset = sources.load(str(to))
        assert dataset.classes == ("ant", "cat", "dog")
        assert dataset.x.shape == (len(user), 2, 2, 3)
        values = [0, 1, 2, 3, 10, 11, 12, 13][: len(user)]
        np.testing.assert_array_equal(dataset.x[:, 0, 0, 0], values)
        np.testing.assert_array_equal(dataset.y, ([1, 2, 2, 0] * 2)[: len(user)])
        np.testing.assert_array_equal(dataset.user, user)
        assert [dataset.domains[i] for i in dataset.domain] == domains


def test_an_image_that_cannot_be_used_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_image(tmp_path / "images/u/a/0.png", 1, mode="L")
    save_image(tmp_path / "images/u/a/1.png", 1, mode="L")
    bad = tmp_path / "images/v/a/0.png"

    def fails(words: str, *flags: str) -> None:
        with pytest.raises(SystemExit, match="2"):
            prepare.main([str(tmp_path / "images"), f"--to={tmp_path / 'to'}", *flags])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {bad}: {words}"), line

    save_image(bad, 1, side=5, mode="L")
    fails("is of (5, 5) pixels, the first image of (4, 4)")
    save_image(bad, 1)
    fails("is in colour, the first image is grey; set channels")
    Image.new("I;16", (4, 4)).save(bad)
    fails("must have 8 bits a channel, its mode is I;16")
    save_image(bad, 1, mode="L")
    bad.write_bytes(bad.read_bytes()[:50])
    fails("must be an image that can be decoded")
    save_image(bad, 7, mode="L")
    # What was mended, goes on.
    prepare.main([str(tmp_path / "images"), f"--to={tmp_path / 'to'}"])
    np.testing.assert_array_equal(sources.load(str(tmp_path / "to")).x[:, 0, 0, 0], [1, 1, 7])


def test_colour_becomes_grey_and_grey_colour(tmp_path: Path) -> None:
    save_image(tmp_path / "images/u/a/0.png", 5)
    save_image(tmp_path / "images/v/a/0.png", 7, mode="L")
    for channels in (1, 3):
        to = tmp_path / str(channels)
        prepare.main([str(tmp_path / "images"), f"--to={to}", f"--channels={channels}"])
        x = sources.load(str(to)).x
        assert x.shape == (2, 4, 4, channels)
        np.testing.assert_array_equal(x[1, 0, 0], [7] * channels)
    with pytest.raises(UsageError, match="channels=2: must be 0, 1 or 3"):
        convert.images(tmp_path / "images", channels=2)


def three(first: int) -> Iterator[tuple]:
    """What a function of one's own yields."""
    for number in range(first, 3):
        yield np.full((2, 5), number, np.float32), np.array([0, 1]), f"domain{number % 2}"


def wrong(first: int) -> Iterator[Any]:
    yield np.zeros((2, 5))


def test_a_function_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare.main([f"{__name__}:three", f"--to={tmp_path / 'to'}"])
    dataset = sources.load(str(tmp_path / "to"))
    np.testing.assert_array_equal(dataset.x[:, 0], [0, 0, 1, 1, 2, 2])
    assert dataset.domains == ("domain0", "domain1")
    capsys.readouterr()
    for name, message in (
        (f"{__name__}:wrong", "must yield (x, y) or (x, y, domain), for client 0 it does not"),
        (f"{__name__}:nothing", "cannot be imported"),
        ("no.such_module:f", "cannot be imported"),
        (f"{__name__}:SIZES", "must be a function"),
    ):
        with pytest.raises(SystemExit, match="2"):
            prepare.main([name, f"--to={tmp_path / 'other'}"])
        assert message in capsys.readouterr().err


def test_a_disk_that_fills_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(on_disk._Rows, "add", full)
        with pytest.raises(SystemExit, match="2"):
            prepare.main([f"{__name__}:three", f"--to={tmp_path / 'to'}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written (No space left on device); then the same command goes on" in line
    prepare.main([f"{__name__}:three", f"--to={tmp_path / 'to'}"])
    assert len(on_disk.load(tmp_path / "to").y) == 6


def test_a_record_of_leaf_is_checked(tmp_path: Path) -> None:
    path = save_leaf(tmp_path / "a.json", {"bert": record(99)})
    plan = convert.leaf_json([path])
    with pytest.raises(UsageError, match=r"user 'bert' must have x"):
        on_disk.write(tmp_path / "to", plan.source, name="leaf", classes=plan.classes)
    assert plan.classes == leaf.CLASSES


def test_a_client_without_examples_may_have_arrays_of_any_type(tmp_path: Path) -> None:
    empty, full = Piece([], []), Piece(np.ones((2, 3), np.float32), np.array([0, 1]))
    pieces = [empty, full, empty, full]
    on_disk.write(tmp_path / "data", lambda first: iter(pieces[first:]), name="some")
    found = on_disk.opened(tmp_path / "data")
    assert found.clients.tolist() == [[0, 0], [0, 2], [2, 0], [2, 2]]
    assert (found.x.dtype, found.y.tolist()) == (np.float32, [0, 1, 0, 1])


def test_names_of_domains_and_classes_are_texts(tmp_path: Path) -> None:
    piece: Any = Piece(np.ones((2, 3)), np.array([0, 1]), 2010)
    with pytest.raises(UsageError, match=r"^client 0: domain=2010: must be a str"):
        on_disk.write(tmp_path / "data", lambda first: iter([piece]), name="some")
    with pytest.raises(UsageError, match=r"^classes=\[0, 1\]: must be names, which are strings"):
        on_disk.write(tmp_path / "data", lambda first: iter([]), name="some", classes=[0, 1])
