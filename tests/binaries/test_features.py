"""The command `features`, and frozen bodies whose outputs `train` computes once."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

import runs
from federations import assert_close, assert_equal
from fedjax_inv import models
from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources
from fedjax_inv_experiments import config, evaluation, export, extraction, finished
from fedjax_inv_experiments.assembly import experiment
from fedjax_inv_experiments.config import Config
from fedjax_inv_experiments.extraction import FeatureOptions
from test_weights import WIDTHS, torchvision

SIDE = 48  # for which resnet18 has the windows of published weights
RNG = np.random.default_rng(0)
PREPROCESSING: dict[str, Any] = {
    "model": "resnet18",
    "widths": WIDTHS,
    "image_size": SIDE,
    "precision": "auto",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images by domain and class, of several sizes, some grey; and weights of a small ResNet."""
    root = tmp_path_factory.mktemp("images")
    for domain in ("art", "photo"):
        for number in range(22):
            place = root / "images" / domain / ("cat", "dog")[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            shape = (30 + number, 40) if number % 5 == 0 else (40, 30, 3)
            Image.fromarray(RNG.integers(0, 256, shape, np.uint8)).save(place / f"{number}.png")
    save_file(torchvision(7, channels=3), root / "resnet.safetensors")
    return root


def chosen(folder: Path, **values: Any) -> Config:
    given = PREPROCESSING | {"weights": str(folder / "resnet.safetensors")}
    return config.of(**given | {"dataset": str(folder / "images")} | values)


def expected(folder: Path) -> np.ndarray:
    """The features, one image after the other."""
    model = models.resnet18(1, image_size=224, widths=WIDTHS)
    path = folder / "resnet.safetensors"
    variables = models.weights.load(
        path, model.init(jax.random.key(0), np.zeros((1, SIDE, SIDE, 3)))
    )
    body = models.BODIES["resnet18"]
    model = models.normalised(model, body.mean, body.std)
    files = sorted((folder / "images").glob("*/*/*.png"))
    pixels = [
        np.asarray(Image.open(file).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        for file in files
    ]
    params, stats = variables
    encode = jax.jit(model.encode, static_argnums=4)
    ones = np.ones(len(files), bool)
    return encode(params.body, stats.body, np.stack(pixels), ones, False)[0]


@pytest.mark.slow
def test_features_are_those_of_the_images(folder: Path, tmp_path: Path) -> None:
    """With colours and sizes of their own, in a folder of arrays."""
    extraction.run(chosen(folder), FeatureOptions(str(tmp_path / "arrays"), unit_length=True))
    features = np.asarray(expected(folder))
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    loaded = sources.load(str(tmp_path / "arrays"))
    assert_close(loaded.x, features / lengths, rtol=1e-4, atol=1e-4)
    images = sources.load(str(folder / "images"), image_size=SIDE)
    assert_equal((loaded.y, loaded.domain), (images.y, images.domain))
    assert (loaded.classes, loaded.domains) == (images.classes, images.domains)


def test_a_start_goes_on_with_the_parts_of_an_earlier_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "_PART", 16)
    out, batches = tmp_path / "features.npz", []

    def means(x: np.ndarray) -> np.ndarray:
        batches.append(len(x))
        if len(batches) == 2:
            raise KeyboardInterrupt
        return x.mean((1, 2), np.float32)

    monkeypatch.setattr(models, "encoder", lambda *given, **options: means)
    with pytest.raises(KeyboardInterrupt):
        extraction.run(chosen(folder), FeatureOptions(str(out)))
    assert not out.exists()
    with pytest.raises(UsageError, match="parts of other features"):
        extraction.run(chosen(folder), FeatureOptions(str(out), crop=True))
    extraction.run(chosen(folder), FeatureOptions(str(out)))
    assert batches == [16, 16, 16, 12]
    assert [path.name for path in tmp_path.iterdir()] == ["features.npz"]
    files = [Image.open(path) for path in np.load(out)["path"]]
    pixels = [np.asarray(file.convert("RGB").resize((SIDE, SIDE), 2)) for file in files]
    assert_close(np.load(out)["x"], np.stack(pixels).mean((1, 2)))
    assert "already" in extraction.run(chosen(folder), FeatureOptions(str(out)))
    with pytest.raises(UsageError, match="other content"):
        extraction.run(chosen(folder), FeatureOptions(str(out), unit_length=True))


def test_features_of_another_network_are_not_evaluated(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.npz") for name in ("old", "new", "mine")]
    for path, record in zip(paths, ({"weights": "a"}, {"weights": "b"}, None), strict=True):
        about = {} if record is None else {"record": np.array(json.dumps(record))}
        np.savez(path, x=np.ones((2, 3)), **about)
    extraction.check_alike(paths[0], paths[0])
    extraction.check_alike(paths[0], paths[2])
    extraction.check_alike("digits", paths[1])
    with pytest.raises(UsageError, match=r"--dataset=.*new.npz.* weights b"):
        extraction.check_alike(*paths[:2])


@pytest.mark.parametrize(
    ("flags", "options", "message"),
    [
        ({"model": "mlp"}, {}, "--model=mlp"),
        ({"weights": ""}, {}, "--weights=: must be"),
        ({"widths": (2, 3, 3, 5)}, {}, "holds another network.*resnet18"),
        ({}, {"out": "features.csv"}, "--out=features.csv"),
        ({}, {"mean": (0.5,)}, "--mean=0.5"),
        ({"dataset": "digits", "stride": 1}, {"out": "RUN"}, "--out"),
    ],
)
def test_wrong_commands_are_a_line(
    folder: Path, tmp_path: Path, flags: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    (tmp_path / "there.npz").write_bytes(b"mine")
    out = {"out": str(tmp_path / "new.npz")} | options
    out = out | {"out": str(tmp_path / "there.npz")} if out["out"] == "RUN" else out
    with pytest.raises(UsageError, match=message):
        extraction.run(chosen(folder, **flags), FeatureOptions(**out))
    assert (tmp_path / "there.npz").read_bytes() == b"mine"


TRAINING: dict[str, Any] = {
    "held_out": "photo",
    "clients": 2,
    "partition": "iid",
    "rounds": 2,
    "batch_size": 4,
    "train_only": ("head",),
    "devices": "1",
}


@pytest.mark.slow
def test_a_frozen_body_s_outputs_are_computed_once(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exported network is whole, and its outputs are those of the evaluation."""
    frozen = runs.ran(chosen(folder, run_dir=str(tmp_path / "once"), **TRAINING))
    assert "computed once" in capfd.readouterr().err
    assembled = experiment.make(frozen.job.config)
    assert assembled.frozen is not None
    assert assembled.data.x.shape[1:] == (WIDTHS[-1],)
    opened = finished.open("run", frozen.folder, "best")
    options = evaluation.EvaluationOptions(str(frozen.folder), dataset=str(folder / "images"))
    found, _ = evaluation.predict(opened, options)
    place = export.export(opened, 0, tmp_path / "networks")
    model = models.resnet18(2, image_size=64, widths=WIDTHS)
    x = sources.load(str(folder / "images"), image_size=SIDE).x
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = models.saved.load(place / "model.safetensors", shapes)
    body = models.BODIES["resnet18"]
    model = models.normalised(model, body.mean, body.std)
    logits = jax.jit(lambda v: models.predict(model, v, x))(variables)
    assert_close(found[0].outputs, logits, rtol=1e-4, atol=1e-4)
    assert np.ptp(logits, 0).min() > 1e-2


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": "fedmix"},
        {"weights": "", "model": "lenet", "widths": ()},
        {"unseen_norms": "batch"},
    ],
)
def test_where_it_is_not_exact_the_body_runs_in_each_step(
    folder: Path, capfd: pytest.CaptureFixture[str], values: dict[str, Any]
) -> None:
    assembled = experiment.make(chosen(folder, **TRAINING | values))
    assert assembled.frozen is None
    assert "not computed once, as" in capfd.readouterr().err
    assert assembled.data.x.shape[1:] == (SIDE, SIDE, 3)


def test_a_head_starts_from_a_file_and_round_0_is_zero_shot(tmp_path: Path) -> None:
    vectors, y = RNG.normal(size=(3, 6)), np.repeat(np.arange(3), 10)
    names = np.array(["cat", "dog", "rat"])
    x = vectors[y] + 0.1 * RNG.normal(size=(30, 6))
    np.savez(tmp_path / "features.npz", x=x.astype(np.float32), y=names[y])
    np.savez(tmp_path / "classes.npz", names=names, vectors=vectors)
    values = dict(dataset=str(tmp_path / "features.npz"), clients=2, partition="iid", rounds=1)
    values |= dict(model="cosine", head_from=str(tmp_path / "classes.npz"))
    ran = runs.ran(config.of(**values, run_dir=str(tmp_path / "run"), devices="1"))
    assert runs.metrics(ran.folder)[0]["test_score"] == 1.0
    assert "zero-shot" in (ran.folder / "table.md").read_text()
    with pytest.raises(UsageError, match="--head_from"):
        experiment.make(config.of(**values | {"model": "linear"}))
    np.savez(tmp_path / "classes.npz", names=names[:2], vectors=vectors[:2])
    with pytest.raises(UsageError, match=r"--head_from=.*rat"):
        experiment.make(config.of(**values))
