import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_inv import objectives


def test_nothing_under_the_mask_reaches_the_gradient() -> None:
    values, mask = jnp.array([1.0, jnp.nan, 4.0]), jnp.array([True, False, True])
    grads = jax.grad(lambda scale: objectives.masked_mean(scale * values, mask))(jnp.ones(3))
    np.testing.assert_array_equal(grads[jnp.array([0, 2])], [0.5, 2.0])
    grads = jax.grad(objectives.masked_mean)(values, mask)
    np.testing.assert_array_equal(grads, [0.5, 0.0, 0.5])
    assert jnp.isnan(objectives.masked_mean(values, ~mask))  # a real NaN is not hidden


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_makes_the_loss_nan(label: int) -> None:
    logits, labels, mask = jnp.ones((2, 3)), jnp.array([0, label]), jnp.array([True, True])
    traced = jax.value_and_grad(jax.jit(objectives.cross_entropy))
    assert jnp.isnan(traced(logits, labels, mask)[0])
    value, grads = traced(logits, labels, mask.at[1].set(False))
    assert jnp.isfinite(value)
    assert jnp.isfinite(grads).all()


@pytest.mark.parametrize("loss", [objectives.cross_entropy, objectives.focal(0.0)])
def test_losses_of_outputs_of_16_bits_have_32(loss) -> None:
    dtype = jnp.bfloat16
    logits, mask = jnp.array([[6.0, 0.0], [1.0, 4.0]], dtype), jnp.ones(2, bool)
    exact = np.mean(np.log1p(np.exp([-6.0, -3.0])))
    np.testing.assert_allclose(loss(logits, jnp.array([0, 1]), mask), exact, rtol=1e-4)
    if loss is objectives.cross_entropy:
        soft = objectives.soft_cross_entropy(logits, jnp.eye(2, dtype=dtype), mask)
        np.testing.assert_allclose(soft, exact, rtol=1e-4)


@pytest.mark.parametrize("loss", [objectives.binary_cross_entropy, objectives.focal(2.0)])
@pytest.mark.parametrize("label", [255])
def test_a_label_that_is_neither_true_nor_false_has_no_loss(loss, label: int) -> None:
    logits, mask = jnp.array([[5.0, -5.0]] * 2), jnp.array([True, False])
    labels = jnp.array([[1, 0], [1, label]])
    assert jnp.isfinite(loss(logits, labels, mask))
    assert jnp.isnan(loss(logits, labels, ~mask))


@pytest.mark.parametrize("objective", [objectives.cross_entropy, objectives.accuracy])
def test_labels_of_8_bits_may_be_of_more_classes_than_these_can_count(objective) -> None:
    logits, mask = jnp.tile(jnp.arange(300.0), (3, 1)), jnp.ones(3, bool)
    expected = objective(logits, jnp.array([1, 100, 120]), mask)
    for dtype in (jnp.uint8, jnp.int8):
        labels = jnp.array([1, 100, 120], dtype)
        assert objective(logits, labels, mask) == jax.jit(objective)(logits, labels, mask)
        np.testing.assert_allclose(objective(logits, labels, mask), expected)


# Labels and values, against NumPy in float64.

RNG = np.random.default_rng(1)
OUTPUTS = (RNG.normal(size=(5, 3)) * 3).astype(np.float32)
LABELS = RNG.random((5, 3)) < 0.5
VALUES = RNG.normal(size=(5, 3)).astype(np.float32)
CLASSES = RNG.integers(0, 3, 5)
MASK = np.array([True, True, False, True, True])


def _softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _of_class(x, y):
    return np.take_along_axis(_softmax(x), y[:, None], 1)[:, 0]


def _of_labels(x, y):
    return np.where(y, _sigmoid(x), 1 - _sigmoid(x))


def _huber(error, delta):
    return np.where(abs(error) <= delta, error**2 / 2, delta * (abs(error) - delta / 2))


TABLE = {
    "cross entropy": (objectives.cross_entropy, CLASSES, lambda x, y: -np.log(_of_class(x, y))),
    "accuracy": (objectives.accuracy, CLASSES, lambda x, y: x.argmax(1) == y),
    "soft": (
        objectives.soft_cross_entropy,
        _softmax(VALUES),
        lambda x, y: -(y * np.log(_softmax(x))).sum(1),
    ),
    "focal of classes": (
        objectives.focal(2.0),
        CLASSES,
        lambda x, y: -((1 - _of_class(x, y)) ** 2) * np.log(_of_class(x, y)),
    ),
    "focal of labels": (
        objectives.focal(0.5),
        LABELS,
        lambda x, y: (-((1 - _of_labels(x, y)) ** 0.5) * np.log(_of_labels(x, y))).mean(1),
    ),
    "binary": (
        objectives.binary_cross_entropy,
        LABELS,
        lambda x, y: -np.log(_of_labels(x, y)).mean(1),
    ),
    "squared": (objectives.squared_error, VALUES, lambda x, y: ((x - y) ** 2).mean(1)),
    "absolute": (objectives.absolute_error, VALUES, lambda x, y: abs(x - y).mean(1)),
    "huber": (objectives.huber(1.5), VALUES, lambda x, y: _huber(x - y, 1.5).mean(1)),
    "label accuracy": (objectives.label_accuracy, LABELS, lambda x, y: ((x > 0) == y).mean(1)),
    "exact match": (objectives.exact_match, LABELS, lambda x, y: ((x > 0) == y).all(1)),
}


@pytest.mark.parametrize("name", TABLE)
def test_an_objective_follows_numpy(name) -> None:
    objective, y, naive = TABLE[name]
    expected = naive(OUTPUTS.astype(np.float64), y)[MASK].mean()
    dirty = np.where(MASK[:, None], OUTPUTS, np.nan)
    both = jax.jit(jax.value_and_grad(objective))
    for outputs in (OUTPUTS, dirty):
        value, grads = both(outputs, y, MASK)
        np.testing.assert_allclose(value, expected, rtol=2e-6)
        assert np.isfinite(np.asarray(grads)[MASK]).all()
    assert both(OUTPUTS, y, np.zeros(5, bool))[0] == 0


@pytest.mark.parametrize(
    ("score", "y"),
    [
        (objectives.accuracy, [1, 0]),
        (objectives.label_accuracy, [[False, True]] * 2),
        (objectives.exact_match, [[False, True]] * 2),
    ],
)
def test_a_nan_is_never_right(score, y) -> None:
    """For argmax it is the largest logit, so that a network of NaN would be right about class 0."""
    logits, y = jnp.array([[-1.0, 2.0], [jnp.nan, 1.0]]), jnp.array(y)
    for of in (score, jax.jit(score)):
        assert jnp.isnan(of(logits, y, np.array([True, True])))
        assert of(logits, y, np.array([True, False])) == 1


@pytest.mark.parametrize(
    "name", ["soft", "focal of labels", "binary", "squared", "huber", "absolute"]
)
def test_a_nan_under_the_mask_reaches_no_gradient(name) -> None:
    objective, y, _ = TABLE[name]
    hidden = ~MASK[:, None]
    y = np.where(hidden, np.nan, y) if y.dtype == np.float32 else y
    outputs = jnp.where(hidden, jnp.nan, OUTPUTS)
    grads = jax.jit(jax.grad(objective))(outputs, y, MASK)
    np.testing.assert_array_equal(grads[2], 0)
    assert jnp.isfinite(grads).all()


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_the_focal_loss_of_a_certain_prediction_has_a_finite_gradient(gamma) -> None:
    logits, mask = jnp.array([[200.0, -200.0], [-200.0, 200.0]]), np.ones(2, bool)
    for targets in (jnp.array([0, 0]), jnp.array([[True, False], [True, False]])):
        both = jax.jit(jax.value_and_grad(objectives.focal(gamma)))
        value, grads = both(logits, targets, mask)
        assert jnp.isfinite(value)
        assert jnp.isfinite(grads).all()
    # Without the exponent it is the cross-entropy.
    value = objectives.focal(gamma)(logits / 100, jnp.array([0, 0]), mask)
    if gamma == 0:
        expected = objectives.cross_entropy(logits / 100, jnp.array([0, 0]), mask)
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_one_value_may_have_an_axis_or_not() -> None:
    y, mask = jnp.asarray(VALUES[:, 0]), MASK
    each = [
        objectives.squared_error(outputs, targets, mask)
        for outputs in (OUTPUTS[:, 0], OUTPUTS[:, :1])
        for targets in (y, y[:, None])
    ]
    assert len({float(value) for value in each}) == 1


def test_the_defaults_fit_their_tasks() -> None:
    for task, (loss, score) in objectives.DEFAULTS.items():
        assert task in score.tasks
        y = {"classes": CLASSES, "labels": LABELS, "values": VALUES}[task]
        for function in (loss, score.function):
            assert jnp.isfinite(function(jnp.asarray(OUTPUTS), jnp.asarray(y), MASK))


@pytest.mark.parametrize(
    "score", [objectives.balanced_accuracy, objectives.macro_f1, objectives.worst_group(2)]
)
def test_counts_of_nan_are_nan_and_of_nothing_0(score: objectives.Counts) -> None:
    logits, labels = jnp.array([[0.0, 1.0], [jnp.nan, 0.0]]), jnp.array([1, 0])
    assert jnp.isnan(score(logits, labels, jnp.ones(2, bool)))
    assert score(logits, labels, jnp.array([True, False])) == 1
    assert score(logits, labels, jnp.zeros(2, bool)) == 0
