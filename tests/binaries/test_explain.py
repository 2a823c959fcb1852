"""LIME masks: what the explainer sees is what the network sees, and it finds what decides."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slow
from fedjax_inv.data import federation
from fedjax_inv.types import Algorithm, Array, Tree
from fedjax_inv_experiments import explain, sweep
from fedjax_inv_experiments.experiment import config
from fedjax_inv_experiments.reporting import finished
from fedjax_inv_experiments.running import provenance, records
from runs import no_figures, parsed, ran, started

ROOT = Path(__file__).parents[2]

# A bad checkpoint leaves futures of orbax behind that nobody asks for their error; some later test
# is told of it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

TINY = config.of(
    environment="colored",
    rounds=4,
    eval_every=2,
    widths=(8,),
    cut=0,
    batch_size=64,
    seeds=(0, 1),
    client_chunk="1",
    run_chunk="1",
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where masks go if they are drawn although they should not be."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two learning rates, of which the run folder is that of its one cell."""
    folder = tmp_path_factory.mktemp("fedavg")
    with no_figures():
        sweep.sweep(config.changed(TINY, run_dir=str(folder), learning_rate=(0.1, 0.3)))
    return folder / "fedavg-0.9"


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A game that ends at its stop, before the last round."""
    chosen = config.changed(
        TINY,
        run_dir=str(tmp_path_factory.mktemp("runs") / "games"),
        algorithm=("fl_games",),
        settings=("memory=2",),
        rounds=8,
        watch_examples=50,
        stop_below=(0.99,),
        warm_start="3",
        after_stop="end",
    )
    return ran(chosen).folder


@pytest.fixture(scope="module")
def grey(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on grey images."""
    chosen = config.changed(
        TINY,
        run_dir=str(tmp_path_factory.mktemp("runs") / "grey"),
        environment="rotated",
        angles=(0.0, 40.0),
        held_out="0",
        seeds=(0,),
        rounds=2,
    )
    return ran(chosen).folder


def options(*folders: Path, **changes: Any) -> explain.Options:
    return explain.Options(tuple(map(str, folders)), **changes)


def changed(
    folder: Path,
    to: Path,
    *,
    held_out: str | None = "0.9",
    other_data: bool = False,
    **changes: Any,
) -> Path:
    """The folder as if it had been run with other flags. other_data: which are for other data."""
    shutil.copytree(folder, to)
    record = json.loads((to / "config.json").read_text())
    record["flags"].update(changes)
    result = json.loads((to / "result.json").read_text())
    for name, told in (("config.json", record), ("result.json", result)):
        told["cell"]["held_out"] = held_out
        (to / name).write_text(json.dumps(told))
    if other_data:
        data = finished.open("runs", to).data.data
        record["starts"][-1]["data"] = provenance.fingerprint(data)
        (to / "config.json").write_text(json.dumps(record))
    return to


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_rgb_holds_all_of_an_input(channels: int) -> None:
    x = np.random.default_rng(0).normal(size=(4, 5, 6, channels)).astype(np.float32)
    rgb = explain.to_rgb(x)
    assert rgb.shape == (4, 5, 6, 3)
    np.testing.assert_array_equal(explain.from_rgb(rgb, channels), x)
    # Red, green, blue; grey is as much of each; two colours are red and green.
    expected = {1: [x, x, x], 2: [x[..., :1], x[..., 1:], 0 * x[..., :1]], 3: [x]}[channels]
    np.testing.assert_array_equal(rgb, np.concatenate(expected, axis=-1))


@pytest.mark.parametrize(
    ("name", "seed", "run"),
    slow.after(
        1,
        [
            *(("fedavg", 0, 1), ("fedavg", 1, 1)),
            *(("fedavg", 1, 0), ("fedavg", 0, 0)),
            *(("games", 0, 0), ("games", 1, 0), ("grey", 0, 0)),
        ],
    ),
)
def test_the_classifier_is_the_run_that_was_asked_for(
    request: pytest.FixtureRequest, name: str, seed: int, run: int
) -> None:
    folder = request.getfixturevalue(name)
    one = explain.find(folder, options(folder, seed=seed, run=run))
    made = one.runs.data
    dataset, domain, held_out = made.dataset, explain.test_domain(one), one.runs.cell.held_out
    assert held_out is not None
    rows = np.sort(federation.parts_of(made.splits[held_out][seed].test)[0])
    np.testing.assert_array_equal(domain.y, made.data.y[rows])
    images = explain.seen_images(domain, dataset.render, range(len(rows)))
    np.testing.assert_array_equal(images.y, domain.y)
    algorithm, server = one.algorithm(rendered=True), one.served().server
    classify = explain.classifier(algorithm, server, images.x.shape[-1])
    probabilities = classify(explain.to_rgb(images.x))
    # However many there are, as LIME's last batch may be short.
    np.testing.assert_allclose(classify(explain.to_rgb(images.x[:3])), probabilities[:3], atol=1e-6)

    # On the stored test examples, by the network that renders them.
    algorithm = one.algorithm()

    @jax.jit
    def stored(server: Tree, x: Tree) -> Array:
        own = algorithm.init_client(server, jnp.int32(0))
        return jax.nn.softmax(algorithm.predict(server, own, x))

    x = jax.tree.map(lambda leaf: leaf[rows], made.data.x)
    np.testing.assert_allclose(probabilities, stored(server, x), atol=1e-6)

    # By the loss that training itself has told of this run at its end.
    result = json.loads((folder / "result.json").read_text())
    (told,) = [
        each["last"]["domains"][held_out]
        for each in result["runs"]
        if each["seed"] == seed and each["hyper"] == one.run.hyper
    ]
    loss = -np.log(probabilities[np.arange(len(rows)), images.y]).mean()
    np.testing.assert_allclose(loss, told["loss"], rtol=1e-4)
    losses = [each["last"]["domains"][held_out]["loss"] for each in result["runs"]]
    assert len({round(each, 3) for each in losses}) == len(losses)


def test_one_compilation_serves_all_batches() -> None:
    calls = []

    def predict(server: Tree, own: Tree, x: Tree) -> Array:
        calls.append(x.shape)
        return (x * server).sum((1, 2)) + own

    algorithm = Algorithm(lambda *a: None, lambda server, who: server[0, 0], (), predict)
    rng = np.random.default_rng(0)
    server = rng.normal(size=(4, 4, 2)).astype(np.float32)
    rgb = rng.normal(size=(205, 4, 4, 3)).astype(np.float32)
    classify = explain.classifier(algorithm, server, 2)
    for count in (len(rgb), 1, 7, 100):
        logits = (rgb[:count, ..., :2] * server).sum((1, 2)) + server[0, 0]
        expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(classify(rgb[:count]), expected, rtol=1e-4, atol=1e-6)
    assert len(calls) == 1


def test_squares_are_numbered_without_a_gap() -> None:
    segments = explain.squares(5, 7, 2)
    assert segments.shape == (5, 7)
    assert sorted(set(segments.flat)) == list(range(3 * 4))
    np.testing.assert_array_equal(segments[:2, :2], 0)
    np.testing.assert_array_equal(segments[2:4, 4:6], 6)
    np.testing.assert_array_equal(segments[4:, 6:], 11)


@pytest.mark.parametrize(("target", "sign"), [(0, 1), (7, 1), (7, -1), (15, -1)])
def test_the_square_that_decides_has_the_largest_weight(target: int, sign: int) -> None:
    rng = np.random.default_rng(0)
    segments = explain.squares(8, 8, 2)
    looked_at = (segments == target)[..., None]

    def classify(rgb: np.ndarray) -> np.ndarray:
        logit = sign * (rgb * looked_at).mean((1, 2, 3)) * 20
        return np.stack([1 / (1 + np.exp(logit)), 1 / (1 + np.exp(-logit))], axis=1)

    rgb = rng.uniform(0.5, 1, (8, 8, 3)).astype(np.float32)
    weights = explain.explain(rgb, classify, segments, 1, samples=300, seed=0)
    others = np.abs(weights[segments != target])
    assert len(np.unique(weights[segments == target])) == 1
    assert sign * weights[segments == target][0] > 10 * others.max()
    against = explain.explain(rgb, classify, segments, 0, samples=300, seed=0)
    np.testing.assert_allclose(against, -weights, atol=1e-6)


@pytest.mark.filterwarnings("error")
def test_shares_count_the_weight_on_the_figure() -> None:
    x = np.zeros((1, 2, 2, 2), np.float32)
    x[0, 0, 0, 1] = x[0, 1, 1, 0] = 0.5
    images = explain.Images(x, np.zeros(1, np.int32), ("a", "b"))
    weights = np.array([[[[3, -1], [0, -2]], [[0, 1], [-1, 0]], [[0, 0], [0, 0]]]])
    masks = explain.Masks(weights, np.zeros((1, 3), int), np.ones((1, 3)))
    *_, one, two, three, pixels = explain.shares(images, masks, ["one", "two", "three"]).split("\n")
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in (one, two, three, pixels)]
    assert cells[0] == ["one", "5", "1", "83.3"]
    assert cells[1] == ["two", "0", "2", "0.0"]
    assert cells[2] == ["three", "0", "0", "nan"]
    assert cells[3] == ["pixels", "2", "2", "50.0"]


@pytest.mark.slow
def test_masks_of_two_runs(fedavg: Path, games: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "masks.png"
    text = explain.run(
        options(fedavg, games, images=(5, 0), seed=1, run=0, samples=60, segment=3, out=str(out))
    )
    assert out.read_bytes().startswith(b"\x89PNG")
    with np.load(out.with_suffix(".weights.npz")) as arrays:
        weights = arrays["weights"]
        assert weights.shape == (2, 2, 8, 8)
        assert set(arrays["images"]) == {5, 0}
        assert list(arrays["runs"]) == [str(fedavg), str(games)]
        assert arrays["predicted"].shape == arrays["probability"].shape == (2, 2)
        assert (arrays["probability"] >= 0.5).all()
    record = records.read(out.with_name("masks.png.json"), records.Origin)
    assert record.command == (
        f"fedjax-inv explain --runs={fedavg.name},{games.name} --images=5,0 --seed=1 --samples=60 "
        "--segment=3"
    )
    assert record.seeds == [1]
    assert {
        *("fedjax_inv/algorithms/fedavg.py", "fedjax_inv/algorithms/fl_games.py"),
        "fedjax_inv_experiments/explain.py",
    } <= set(record.code)
    assert np.isfinite(weights).all()
    assert (np.ptp(weights, axis=(2, 3)) > 0).all()
    np.testing.assert_array_equal(
        weights[:, :, :3, 3:6], weights[:, :, :1, 3:4].repeat(3, 2).repeat(3, 3)
    )
    assert "| fedavg learning_rate=0.1 (fedavg-0.9, after round 4)" in text
    assert "| fl_games memory=2 (games, at its stop in round 3)" in text
    assert str(out) in text


def test_the_masks_of_a_seed_are_the_same_again(fedavg: Path, tmp_path: Path) -> None:
    def weights(images: tuple[int, ...]) -> np.ndarray:
        out = tmp_path / "masks.png"
        explain.run(options(fedavg, images=images, samples=30, out=str(out)))
        with np.load(out.with_suffix(".weights.npz")) as arrays:
            return arrays["weights"]

    # Nor do they depend on what else is explained.
    np.testing.assert_array_equal(weights((2, 4))[1], weights((4,))[0])


@pytest.mark.slow
def test_grey_images(grey: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.png"
    (tmp_path / "mine.npz").write_text("my own data")
    assert "| fedavg (grey, after round 2)" in explain.run(options(grey, samples=20, out=str(out)))
    assert out.exists()
    assert (tmp_path / "mine.npz").read_text() == "my own data"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(runs=()), "--runs=: must be one or several"),
        (dict(images=()), "--images=: must be one or several"),
        (dict(images=(0, 359)), r"--images=359: must be in 0\.\.358"),
        (dict(images=(-1,)), r"--images=-1: must be in 0\.\.358"),
        (dict(seed=2), "--seed=2: must be one of 0, 1, those of .*fedavg-0.9"),
        (dict(run=2), r"--run=2: must be in 0\.\.1, the runs of --seed=0 in .*fedavg-0.9"),
        (dict(run=-1), "--run=-1: must be in"),
        (dict(samples=1), "--samples=1: must be at least 2"),
        (dict(segment=-1), r"--segment=-1: must be in 0\.\.8"),
        (dict(segment=9), r"--segment=9: must be in 0\.\.8"),
        (dict(out="masks.pdf"), "--out=masks.pdf: must end in .png"),
        (dict(runs=("nowhere",)), "--runs=nowhere: must be the folder of a finished run"),
    ],
)
def test_a_bad_option_is_told_in_one_line(
    fedavg: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        started(explain.run, dataclasses.replace(options(fedavg), **changes))
    assert "\n" not in str(error.value)


def refused(message: str, *folders: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        explain.run(options(*folders))
    assert "\n" not in str(error.value)


def test_a_run_of_many_devices_and_another_data_folder(fedavg: Path, tmp_path: Path) -> None:
    folder = changed(fedavg, tmp_path / "run", devices="64")
    one = explain.find(folder, options(folder))
    one.runs.check_data()
    one.served()
    of_tfds = changed(fedavg, tmp_path / "mnist", dataset="mnist", data_dir="there")
    assert explain.find(of_tfds, options(of_tfds)).runs.config.data.data_dir == "there"
    here = explain.find(of_tfds, options(of_tfds, data_dir="here"))
    assert here.runs.config.data.data_dir == "here"


def test_folders_that_cannot_be_explained(fedavg: Path, tmp_path: Path) -> None:
    refused("must be the folder of a finished run; of a sweep", fedavg.parent)
    unfinished = changed(fedavg, tmp_path / "unfinished")
    (unfinished / "result.json").unlink()
    refused("unfinished: must be the folder of a finished run", unfinished)
    older = changed(fedavg, tmp_path / "older", fluffy=1)
    refused("older: was written by another version, with fluffy", older)
    diverged = changed(fedavg, tmp_path / "diverged")
    result = json.loads((diverged / "result.json").read_text())
    result["runs"][0]["diverged"] = True
    (diverged / "result.json").write_text(json.dumps(result))
    refused(r"diverged: its run seed=0 learning_rate=0\.1 has diverged", diverged)
    foreign = changed(fedavg, tmp_path / "foreign", widths=[9])
    refused("corrupt, or not a checkpoint of this run", foreign)


def test_other_images_are_refused(fedavg: Path, tmp_path: Path) -> None:
    same = "must have the same test images; .* differ in .*"
    refused(
        f"{same}test_flip",
        fedavg,
        changed(fedavg, tmp_path / "flip", held_out="0.8", other_data=True, test_flip=0.8),
    )
    held_out = changed(fedavg, tmp_path / "held_out", held_out="0.1")
    refused(f"{same}held_out", fedavg, held_out)
    classes = changed(fedavg, tmp_path / "classes", other_data=True, num_classes=5)
    refused(f"{same}num_classes", fedavg, classes)
    refused("1, 2 or 3 channels, not on inputs .*8, 8, 5", classes)


def test_every_part_of_the_domain_is_compared(fedavg: Path) -> None:
    one = explain.find(fedavg, options(fedavg))
    domain = explain.test_domain(one)
    for other in (
        domain._replace(y=1 - domain.y),
        domain._replace(classes=("0-4", "others")),
        domain._replace(classes=(*domain.classes, "others")),
        domain._replace(x=domain.x._replace(image=255 - domain.x.image)),
        domain._replace(x=domain.x.image),
    ):
        with pytest.raises(ValueError, match="must have the same test images"):
            explain.check_same([one, one], [domain, other])
    explain.check_same([one, one], [domain, domain])


def test_inputs_that_are_no_images_are_refused(fedavg: Path, tmp_path: Path) -> None:
    path = tmp_path / "vectors.npz"
    rng = np.random.default_rng(0)
    np.savez(path, x=rng.normal(size=(80, 4)), y=np.arange(80) % 2)
    folder = changed(
        fedavg,
        tmp_path / "run",
        held_out=None,
        other_data=True,
        dataset=str(path),
        environment="none",
        clients=2,
        partition="iid",
    )
    refused("1, 2 or 3 channels, not on inputs", folder)


def test_images_drawn_for_the_test_are_those_of_the_seed(fedavg: Path, tmp_path: Path) -> None:
    """Without a domain to hold out, each seed draws its own test images."""
    flags = dict(environment="none", partition="iid", clients=2)
    folder = changed(fedavg, tmp_path / "run", held_out=None, **flags)
    one = explain.find(folder, options(folder, seed=1))
    made = one.runs.data
    dataset, splits, domain = made.dataset, made.splits[None], explain.test_domain(one)
    rows = [np.sort(federation.parts_of(splits[seed].test)[0]) for seed in (0, 1)]
    assert not np.array_equal(rows[0], rows[1])
    images = explain.seen_images(domain, dataset.render, range(5))
    np.testing.assert_allclose(images.x * 255, dataset.x[rows[1][:5]], rtol=1e-6)


def test_the_flags() -> None:
    assert parsed(explain.BINARY) == explain.Options()
    arguments = ("--runs=a,b", "--images=1,2", "--seed=3", "--run=4", "--samples=20")
    others = ("--segment=5", "--out=x.png", "--data_dir=d", "--state=best")
    several = parsed(explain.BINARY, *arguments, *others)
    assert several == explain.Options(("a", "b"), (1, 2), 3, 4, 20, 5, "x.png", "d", "best")
    with pytest.raises(ValueError, match="--images=1,x: must be whole numbers"):
        parsed(explain.BINARY, "--images=1,x")


@pytest.mark.slow
def test_the_binary_ends_with_one_line_and_status_2(fedavg: Path) -> None:
    command = [sys.executable, "-m", "experiments.explain", f"--runs={fedavg}", "--samples=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == ("error: --samples=1: must be at least 2 and below 2^31")
    assert "Traceback" not in done.stderr
