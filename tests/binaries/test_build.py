"""From flags to parts: optimizers, participation, networks, pixels."""

from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import runs
from fedjax_inv import models, platforms, weight_averages
from fedjax_inv.checks import UsageError
from fedjax_inv.data.federation import parts_of
from fedjax_inv.fit import LocalTraining, local_sizes
from fedjax_inv.types import Cohort, Model
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import data as data_flags
from fedjax_inv_experiments.assembly import experiment, method, network
from test_weights import WIDTHS, torchvision


def first_update(transformation: optax.GradientTransformation, grads: Any, params: Any) -> Any:
    return transformation.update(grads, transformation.init(params), params)[0]


def test_clipping_comes_before_the_decay() -> None:
    params, grads = {"w": jnp.array([2.0, -1.0])}, {"w": jnp.array([30.0, 40.0])}
    chosen = config.of(weight_decay=0.1, clip=5.0)
    values = method.local_values(chosen.training) | {"learning_rate": 0.5}
    chain = LocalTraining(**method.local_steps(chosen.training)).chain(values)
    # Clipped to norm 5: (3, 4); decayed: (3.2, 3.9).
    chex.assert_trees_all_close(first_update(chain, grads, params), {"w": jnp.array([-1.6, -1.95])})


@pytest.mark.parametrize(
    "settings", [{"local_steps": 2}, {"local_epochs": 1}, {"batch_size": 0}], ids=str
)
def test_local_training_knows_its_momentum(settings: dict[str, int]) -> None:
    def momentum(**others: Any) -> Any:
        chosen = config.of(**settings, **others)
        values = method.local_values(chosen.training) | {"learning_rate": 0.1}
        return LocalTraining(**method.local_steps(chosen.training)).work(values).momentum

    assert momentum(momentum=0.9) == 0.9
    assert momentum() == 0.0
    assert momentum(optimizer="adam") is None


def cohort(num_rounds: int, **changes: Any) -> Cohort:
    """Of one run of six clients, all rounds."""
    chosen = config.of(rounds=num_rounds, eval_every=1, **changes)
    assembled = experiment.make(chosen)
    return jax.tree.map(lambda leaf: leaf[0], assembled.plan(assembled.cells[0]).cohorts)


def test_slow_and_lossy_clients_and_a_first_round_of_all() -> None:
    flags = dict(slow=("1:3",), lossy=("0:0", "4:0.5"), partition="iid", clients=6)
    drawn = cohort(200, **flags)
    assert drawn.present[:, 1].tolist() == [t % 3 == 0 for t in range(200)]
    assert set(drawn.delay[2:, 1]) == {2}
    assert not drawn.present[:, 0].any()
    assert 70 < drawn.present[:, 4].sum() < 130
    for regular in (2, 3, 5):
        assert drawn.present[:, regular].all()
        assert not drawn.delay[:, regular].any()
    first = cohort(200, first_all=True, **flags)
    assert first.present[0].all()
    assert not first.delay[0].any()
    chex.assert_trees_all_equal(*(jax.tree.map(lambda leaf: leaf[1:], c) for c in (drawn, first)))
    assembled = experiment.make(config.of(**flags))
    assert assembled.plan(assembled.cells[0]).experiment.history == 3


def test_a_buffer_of_updates_of_clients_that_take_their_time() -> None:
    flags = dict(buffer=2, cohort=4, partition="iid", clients=6)
    drawn = cohort(60, slow=("1:9",), **flags)
    assert drawn.who.shape == (60, 2)
    assert 1 < (drawn.who == 1).sum() < 6
    assert drawn.delay[drawn.who == 1].min() > drawn.delay[drawn.who != 1].max()
    assembled = experiment.make(config.of(**flags, slow=("1:9",), rounds=16))
    # Three others deliver ten times, and half a buffer is full before: 15 networks, and the last.
    assert assembled.plan(assembled.cells[0]).experiment.history == 16
    with pytest.raises(UsageError, match="--buffer=7"):
        experiment.make(config.of(**flags | {"buffer": 7}))


def test_a_network_may_be_served_as_an_average() -> None:
    assembled = experiment.make(config.of(average=0.9, average_from=3, missing="reuse"))
    cell = assembled.cells[0]
    plan = assembled.plan(cell)
    server = plan.program.shapes(plan.data, plan.inputs).state.server
    assert isinstance(server.wrapped, weight_averages.Server)
    after = plan.build(cell.runs[0].hyper).after_round
    assert after
    start = jax.tree.map(lambda leaf: jnp.ones(leaf.shape[1:], leaf.dtype), server)
    totals = [float(after(start, jnp.int32(t)).wrapped.total) for t in (1, 2, 3)]
    assert totals == [0, pytest.approx(1.9), pytest.approx(1.9)]


def test_classes_with_a_long_tail() -> None:
    """Of handwritten digits, of which there are about as many of each."""
    flags = dict(imbalance=10.0, partition="dirichlet", environment="none", clients=20, min_size=1)
    assembled = experiment.make(config.of(held_out="none", **flags))
    split = assembled.splits[None][0]
    rows = np.concatenate([*parts_of(split.train), *parts_of(split.valid)])
    counts = np.bincount(assembled.dataset.y[rows])
    assert 9 < counts[0] / counts[9] < 11
    assert (np.diff(counts) < 3).all()
    test = parts_of(split.test)[0]
    assert np.bincount(assembled.dataset.y[test]).min() > 20


@pytest.mark.slow
def test_clients_that_upload_rarely() -> None:
    flags = dict(frequency=0.3, partition="iid", clients=6)
    dropped = cohort(200, **flags)
    share = dropped.present.mean(0)
    assert ((share == 1).sum(), ((share > 0.1) & (share < 0.5)).sum()) == (3, 3)
    # Who they are does not depend on how rarely they do.
    np.testing.assert_array_equal(method.is_sparse(6, seed=0), share < 1)
    of_seeds = {tuple(method.is_sparse(6, seed)) for seed in range(8)}
    assert len(of_seeds) > 1
    assert not dropped.delay.any()
    stale = cohort(200, late="stale", **flags)
    chex.assert_trees_all_equal(stale.present, dropped.present)
    assert 3 < stale.delay[:, share < 1][stale.present[:, share < 1]].max() <= 10
    assert not stale.delay[:, share == 1].any()
    assembled = experiment.make(config.of(late="stale", **flags))
    assert assembled.plan(assembled.cells[0]).experiment.history == 11
    assert cohort(3, sampling_rate=0.5, partition="iid", clients=6).who.shape == (3, 3)


@pytest.mark.slow
def test_updates_that_drop_out() -> None:
    flags = dict(partition="iid", clients=6)
    drawn = cohort(300, dropout=0.3, **flags)
    np.testing.assert_allclose(drawn.present.mean(0), 0.7, atol=0.1)
    assert not drawn.delay.any()
    # With --lossy, both must let it through; and who drops out by the one still does by both.
    both = cohort(300, dropout=0.3, lossy=("0:0.5", "1:0"), **flags)
    assert not both.present[:, 1].any()
    assert 0.25 < both.present[:, 0].mean() < 0.45
    assert (both.present <= drawn.present).all()
    chex.assert_trees_all_equal(both.present[:, 2:], drawn.present[:, 2:])
    late = cohort(300, dropout=0.3, late="stale", **flags)
    chex.assert_trees_all_equal(late.present, drawn.present)
    assert set(late.delay[late.present]) >= {0, 1, 2}


def test_a_pooled_algorithm_beside_others_takes_part_in_every_round() -> None:
    chosen = config.of(
        algorithm=("erm", "fedavg"),
        dropout=0.5,
        lossy=("1:0.5",),
        slow=("0:3",),
    )
    assembled = experiment.make(chosen)
    pooled, averaged = (assembled.plan(cell).cohorts for cell in assembled.cells)
    assert pooled.present.all()
    assert not pooled.delay.any()
    assert not averaged.present.all()


def test_any_algorithm_trains_on_pooled_examples_as_erm_does() -> None:
    flags = dict(rounds=1, widths=(2,), seeds=(0,), held_out="0")
    results = []
    for more in (dict(algorithm=("erm",)), dict(algorithm=("fedavg",), pooled=True)):
        assembled = experiment.make(config.of(**flags, **more))
        fitted = assembled.plan(assembled.cells[0]).train()
        results.append(dict(fitted.history.values))
    chex.assert_trees_all_close(*results, rtol=1e-6)


@pytest.mark.parametrize("partition", ["shards", "quantity"])
def test_partitions_deal_the_training_examples(partition: str) -> None:
    more: dict[str, Any] = {"shards": dict(classes_per_client=1), "quantity": dict(alpha=1.0)}
    flags = dict(partition=partition, clients=10, environment="none", held_out="none")
    assembled = experiment.make(config.of(**flags, **more[partition]))
    split = assembled.splits[None][0]
    sizes = np.array([len(part) for part in parts_of(split.train)])
    classes = [len(set(assembled.dataset.y[part])) for part in parts_of(split.train)]
    if partition == "shards":
        assert np.ptp(sizes) <= 2
        assert max(classes) <= 3
    else:
        assert sizes.max() > 2 * sizes.min()
        assert sizes.min() >= 8  # ten, of which one in ten is for validation


@pytest.mark.parametrize(("side", "stem"), [(8, 32), (28, 32), (64, 64), (96, 64), (224, 224)])
def test_a_network_is_made_for_the_size_of_the_images(side: int, stem: int, tmp_path: Path) -> None:
    y = np.arange(12) % 2
    np.savez(tmp_path / "mine.npz", x=np.zeros((12, side, side, 3), np.uint8), y=y)
    dataset = data_flags.load(config.of(dataset=str(tmp_path / "mine.npz")).data)
    assert network._image_size(dataset) == stem


@pytest.mark.parametrize("environment", ["colored", "rotated"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_drawn_test_holds_a_part_of_every_domain(environment: str, seed: int) -> None:
    assembled = experiment.make(config.of(environment=environment, held_out="none", seeds=(seed,)))
    (rows,), domains = parts_of(assembled.splits[None][seed].test), assembled.dataset.domain
    shares = np.bincount(domains[rows]) / np.bincount(domains)
    assert (abs(shares - 0.2) < 0.08).all()


def test_a_domain_with_a_comma_is_held_out_by_default() -> None:
    domains = ("x", "a,b")
    for asked in ("", "a,b"):
        assert data_flags.held_out(config.of(held_out=asked).data, domains) == ["a,b"]
    assert data_flags.held_out(config.of(held_out="x").data, domains) == ["x"]


@pytest.mark.slow
def test_weights_are_loaded_and_their_channels_normalised(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "mine.npz", x=images, y=np.arange(12) % 2)
    chosen = config.of(
        dataset=str(tmp_path / "mine.npz"), model="resnet18", widths=WIDTHS, norm="frozen"
    )
    dataset = data_flags.load(chosen.data)
    bare = models.resnet18(2, widths=WIDTHS, norm="frozen")
    arrays = torchvision(classes=2, channels=3)
    path = tmp_path / "weights.safetensors"
    save_file(arrays, path)
    variables = models.weights.load(path, bare.init(jax.random.key(0), images[:1]))
    model = network.make(runs.with_flags(chosen, weights=str(path)).network, dataset)
    loaded = model.init(jax.random.key(1), images[:1])
    chex.assert_trees_all_close(loaded, variables)
    mean, std = models.weights.IMAGENET_MEAN, models.weights.IMAGENET_STD
    seen = (images / np.float32(255) - np.asarray(mean)) / np.asarray(std)
    chex.assert_trees_all_close(
        models.predict(model, loaded, images),
        models.predict(bare, variables, seen.astype(np.float32)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_network_from_another_run_needs_no_weights_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((12, 8, 8, 3), np.uint8), y=np.arange(12) % 2)
    data = {"dataset": str(tmp_path / "mine.npz"), "model": "resnet18", "weights": "gone"}
    chosen = config.of(**data, norm="frozen", init_from="run")
    assert isinstance(network.make(chosen.network, data_flags.load(chosen.data)), Model)


@pytest.mark.slow
def test_training_images_are_augmented_and_others_are_not(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (8, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "mine.npz", x=images, y=np.arange(8) % 2)
    chosen = config.of(dataset=str(tmp_path / "mine.npz"), augment=True, widths=(4,))
    dataset = data_flags.load(chosen.data)
    model, plain = (
        network.make(runs.with_flags(chosen, augment=on).network, dataset) for on in (True, False)
    )
    variables = plain.init(jax.random.key(0), images[:1])
    mask, key = jnp.ones(8, bool), jax.random.key(1)
    for train in (False, True):
        ours, theirs = (
            models.apply(each, variables, images, mask, train, key)[0] for each in (model, plain)
        )
        assert np.allclose(ours, theirs, atol=1e-5) != train


@pytest.mark.parametrize(
    ("platform", "batch_size", "of_clients", "known"),
    [
        ("gpu", 32, [[63, 64, 0], [40, 33, 64]], 2),  # of a pass each, or none
        ("gpu", 32, [[63, 65]], None),
        ("gpu", 0, [[64, 64]], None),  # a full batch is one
        ("cpu", 32, [[64, 64]], None),
    ],
)
def test_accelerators_are_told_how_many_batches_all_clients_have(
    platform: str, batch_size: int, of_clients: list[list[int]], known: int | None
) -> None:
    with platforms.traced_for(platform):
        sizes = local_sizes(batch_size or None, np.array(of_clients))
    capacity = 1 if batch_size else 64  # rows of a full batch
    assert sizes == (capacity, known)


@pytest.mark.slow
def test_sixteen_bits_cost_little_accuracy_on_colored_digits(tmp_path: Path) -> None:
    """One run each way, with the same draws; the accuracies are of a thousand images."""
    flags = dict(environment="colored", flips=(0.2, 0.1), widths=(64,), rounds=15, eval_every=15)
    last = [
        runs.ran(config.of(run_dir=str(tmp_path / precision), precision=precision, **flags)).runs[
            0
        ]["last"]
        for precision in ("auto", "bfloat16")
    ]
    exact, rounded = last
    assert exact["validation_score"] > 0.75  # it has learned the cue
    for name in ("validation_score", "test_score"):
        assert abs(exact[name] - rounded[name]) < 0.04
    assert rounded["train_loss"] != exact["train_loss"]


def test_clients_on_disk_are_the_users_of_a_data_set(tmp_path: Path) -> None:
    client = np.repeat([0, 1, 2], [6, 9, 4])
    np.save(tmp_path / "x.npy", np.tile(client[:, None], 5).astype(np.float32))
    np.save(tmp_path / "y.npy", np.arange(len(client)) % 2)
    np.save(tmp_path / "client.npy", client)
    chosen = config.of(dataset=str(tmp_path), partition="user")
    assembled = experiment.make(chosen)
    split = assembled.splits[None][0]
    assert len(split.domain) == 3
    users = []
    for rows in map(np.concatenate, zip(parts_of(split.train), parts_of(split.valid), strict=True)):
        (user,) = np.unique(assembled.dataset.x[rows])
        users.append(user)
    assert sorted(users) == [0, 1, 2]
