"""Regression on targets in any units: training sees standardised ones, scores are in the units."""

import jax
import numpy as np
import pytest

from fedjax_inv import fit, models, objectives
from fedjax_inv.algorithms import fedavg, fedmix
from fedjax_inv.data import clients, federation
from fedjax_inv.fit import plan
from fedjax_inv.types import Tree

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 3)).astype(np.float32)
Y = (X @ RNG.normal(size=(3, 2)) + RNG.normal(size=(90, 2)) / 9).astype(np.float32)
CLIENT = np.arange(90) % 3
NETWORK = models.in_units(models.mlp(2, widths=(4,)))


def of(y: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(X[c == CLIENT], y[c == CLIENT]) for c in range(2)]


def test_targets_are_standardised_by_the_training_examples_of_each_run() -> None:
    made = plan(fedavg.fedavg, NETWORK, of(Y), rounds=1, grid={"seed": [0, 3]}, validation=0.3)
    assert made.inputs.targets is not None
    splits = clients.splits_of_arrays(
        *clients.of_arrays(of(Y)), test=None, validation=0.3, seeds=[0, 3]
    )[1]
    for run, seed in enumerate((0, 3)):
        split = splits[seed]
        y = np.asarray(split.train.data.y)[np.concatenate(federation.parts_of(split.train))]
        np.testing.assert_allclose(made.inputs.targets.shift[run], y.mean(0), rtol=1e-5)
        np.testing.assert_allclose(made.inputs.targets.scale[run], 1 / y.std(0), rtol=1e-5)


@pytest.mark.parametrize("algorithm", [fedavg.fedavg, fedmix.fedmix])
def test_units_change_scores_alone(algorithm: object) -> None:
    """Of y and a y + b the same network is trained, and its outputs differ as the targets do."""
    a, b = np.array([50.0, 0.02], np.float32), np.array([300.0, -1.0], np.float32)
    found = []
    for y in (Y, a * Y + b):
        fitted = fit(
            algorithm,  # type: ignore[arg-type]
            NETWORK,
            of(y),
            rounds=4,
            learning_rate=0.05,
            test=(X[CLIENT == 2], y[CLIENT == 2]),
            callbacks=(),
            devices=1,
        )
        found.append(fitted)
    first, second = (each.network() for each in found)
    for one, other in zip(*(jax.tree.leaves(each.params) for each in (first, second)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)
    outputs = [each.predict(X) for each in found]
    np.testing.assert_allclose(outputs[1], a * outputs[0] + b, rtol=2e-3, atol=2e-3)
    for each, y, out in zip(found, (Y, a * Y + b), outputs, strict=True):
        np.testing.assert_array_equal(out, models.predict(NETWORK, each.network(), X))
        error = np.abs(out - y)[CLIENT == 2].mean()
        np.testing.assert_allclose(each.history["test_score"][0, -1], error, rtol=1e-4)


def test_diabetes_trains_at_usual_rates() -> None:
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x, y = (x / x.std(0)).astype(np.float32), y.astype(np.float32)
    held = [(x[c:400:4], y[c:400:4]) for c in range(4)]
    for network, shape in (
        (models.mlp(1, widths=(16,)), (-1,)),
        (models.mlp(1, widths=(8, 8)), (-1, 1)),
    ):
        parts = [(own_x, own_y.reshape(shape)) for own_x, own_y in held]
        fitted = fit(
            fedavg.fedavg,
            models.in_units(network),
            parts,
            rounds=20,
            grid={"learning_rate": [0.01, 0.1]},
            test=(x[400:], y[400:].reshape(shape)),
            callbacks=(),
        )
        of_mean = np.abs(y[400:] - y[:400].mean()).mean()
        assert (fitted.history["test_score"][:, -1] < 0.9 * of_mean).all()


def test_wide_targets_without_units_are_told() -> None:
    wide = [(x, 100 * y) for x, y in of(Y)]
    with pytest.warns(UserWarning, match="in_units"):
        plan(fedavg.fedavg, models.mlp(2, widths=(4,)), wide, rounds=1)


def test_a_loss_of_standardised_targets() -> None:
    shift, scale = np.array([3.0], np.float32), np.array([0.5], np.float32)
    loss = models.on_standard(objectives.huber(1.0), models.Scaling(shift, scale))
    outputs, y, mask = np.array([[1.0], [9.0]]), np.array([2.0, 1.0]), np.array([True, True])
    value: Tree = loss(outputs, y, mask)  # type: ignore[arg-type]
    assert float(value) == pytest.approx((0.5**2 / 2 + (4 - 0.5)) / 2)
