"""The kernels for code of one's own, on drawn shapes, against NumPy in float64.

With and without `jit`, of arrays on a device and on the host; without `jit` they are vmapped, too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import given, settings

from federations import assert_close
from fedjax_inv.algorithms import (
    cafe,
    exit_strategy,
    fedcfa,
    fediir,
    fedipg,
    fedmix,
    fedproto,
    fl_games,
    moon,
    qfedavg,
)

Arrays = tuple[Any, ...]


class Sizes(NamedTuple):
    batch: int  # B
    classes: int  # K
    features: int  # D or F


class Kernel(NamedTuple):
    draw: Callable[[np.random.Generator, Sizes], Arrays]  # arguments in float64
    kernel: Callable[..., Any]
    formula: Callable[..., Any]  # by NumPy


def normal(rng: np.random.Generator, *shapes: tuple[int, ...]) -> Arrays:
    return tuple(rng.normal(size=shape) for shape in shapes)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def padded(rng: np.random.Generator, number: int, *shapes: tuple[int, ...]) -> Arrays:
    """Arrays [number, ...], and which rows are real, at least three; the others hold NaN."""
    mask = rng.permutation(number) < rng.integers(3, number + 1)
    arrays = normal(rng, *((number, *shape) for shape in shapes))
    for array in arrays:
        array[~mask] = np.nan
    return *arrays, mask


# FedIPG, of the quadratic risk of w [D] on x [B, D] and y [B].


def risk(w: Any, x: Any, y: Any) -> Any:
    return ((x @ w - y) ** 2).mean() / 2


def regression(rng: np.random.Generator, sizes: Sizes) -> Arrays:
    return normal(rng, (sizes.features,), (sizes.batch, sizes.features), (sizes.batch,))


def slope(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x.T @ (x @ w - y) / len(y)


def penalised(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[Any, np.ndarray]:
    gradient = slope(w, x, y)
    product = gradient @ w
    of_product = gradient + x.T @ x @ w / len(y)
    return risk(w, x, y) + 0.3 * product**2, gradient + 0.6 * product * of_product


# Others.


def played(own: Any, opponents: Any, memory: Any, number: Any) -> np.ndarray:
    """An opponent counts as the mean of its action and of the mean of its last ones."""
    terms = [own]
    for action, past in zip(opponents, memory, strict=True):
        terms.append((action + past[:number].mean(0)) / 2 if number else action)
    return np.mean(terms, 0)


def decoded(factors: Any, weights: Any) -> Any:
    return (factors**2 * weights).sum((1, 2))


def extremes(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rank = scores.argsort(1).argsort(1)
    return rank < 1, rank >= scores.shape[1] - 1


def correlation(factors: np.ndarray, mask: np.ndarray) -> Any:
    pairs = np.abs(np.corrcoef(factors[mask], rowvar=False))
    return pairs[~np.eye(len(pairs), dtype=bool)].mean()


def of_leading(matrix: Any) -> Any:
    """A matrix does not depend on the sign of the direction."""
    direction = cafe.leading_direction(matrix)
    return direction[:, None] * direction


def leading(matrix: np.ndarray) -> np.ndarray:
    direction = np.linalg.svd(matrix)[2][0]
    return np.outer(direction, direction)


def rows_with_a_leading_direction(rng: np.random.Generator, sizes: Sizes) -> Arrays:
    outer, noise = normal(rng, (sizes.classes, sizes.features), (sizes.classes, sizes.features))
    left, _, right = np.linalg.svd(outer)
    return (5 * np.outer(left[0], right[0]) + 0.3 * noise,)


def calibrated(rows: np.ndarray, *directions: np.ndarray) -> np.ndarray:
    rows = rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 0.1)
    parts = [(rows @ direction)[:, None] * direction for direction in directions]
    return rows - 0.4 * parts[0] - 0.3 * parts[1]


def mixture_loss(x: Any, y: Any, weights: Any) -> Any:
    return ((x**2 @ weights - y) ** 2).sum(1).mean()


def mixture(x: Any, y: Any, mean_x: Any, mean_y: Any, weights: Any) -> Any:
    mixed = 0.8 * x
    slopes = 4 * mixed * mean_x * ((mixed**2 @ weights - y) @ weights.T)
    here, there = (mixture_loss(mixed, targets, weights) for targets in (y, mean_y))
    return 0.8 * here + 0.2 * there + 0.2 * 0.8 * slopes.sum(1).mean()


def contrast(*features: np.ndarray) -> np.ndarray:
    z, received, previous = map(unit, features)
    near, last = (np.exp((z * other).sum(1) / 0.7) for other in (received, previous))
    return -np.log(near / (near + last))


def sums_by_class(features: np.ndarray, mask: np.ndarray, y: np.ndarray) -> Arrays:
    members = np.arange(3)[:, None] == y[mask]
    return members @ features[mask], members.sum(1).astype(float)


def scaled(delta: np.ndarray, loss: np.ndarray) -> Arrays:
    gradient = delta / 0.2
    return loss**1.6 * gradient, 1.6 * loss**0.6 * (gradient**2).sum() + loss**1.6 / 0.2


KERNELS = {
    "fedipg.invariance": Kernel(
        regression,
        lambda w, x, y: fedipg.invariance(lambda w: risk(w, x, y), w),
        lambda w, x, y: slope(w, x, y) @ w,
    ),
    "fedipg.penalised_value_and_grad": Kernel(
        regression,
        lambda w, x, y: fedipg.penalised_value_and_grad(lambda w: risk(w, x, y), 0.3)(w),
        penalised,
    ),
    "exit_strategy.contribution": Kernel(
        lambda rng, n: (
            *normal(rng, (n.features,), (n.batch, n.features)),
            rng.dirichlet(np.ones(n.batch)),
        ),
        lambda *gradients: exit_strategy.contribution(*gradients, step_size=0.3, smoothness=1.7),
        lambda g, own, weights: 0.3 * weights * (own @ g - 1.7 * 0.15 * (own**2).sum(1)) / (g @ g),
    ),
    "fl_games.response_logits": Kernel(
        lambda rng, n: (
            *normal(rng, (n.batch, n.classes), (2, n.batch, n.classes)),
            *normal(rng, (2, 3, n.batch, n.classes)),
            rng.integers(0, 4),
        ),
        lambda *logits: fl_games.response_logits(*logits, memory_mix="per_opponent"),
        played,
    ),
    "fedcfa.factor_scores": Kernel(
        lambda rng, n: normal(rng, (n.batch, 2, n.features), (2, n.features)),
        lambda factors, weights: fedcfa.factor_scores(lambda f: decoded(f, weights), factors),
        lambda factors, weights: (2 * factors * weights).mean(1),
    ),
    "fedcfa.split_factors": Kernel(
        lambda rng, n: normal(rng, (n.batch, n.features)),
        lambda scores: fedcfa.split_factors(scores, 1),
        extremes,
    ),
    "fedcfa.counterfactual_labels": Kernel(
        lambda rng, n: normal(rng, (n.batch, n.classes), (n.batch, n.classes)),
        lambda labels, average: fedcfa.counterfactual_labels(labels, average, 2, 5),
        lambda labels, average: 0.4 * average + 0.6 * labels,
    ),
    "fedcfa.factor_decorrelation": Kernel(
        lambda rng, n: padded(rng, n.batch + 3, (n.features,)),
        fedcfa.factor_decorrelation,
        correlation,
    ),
    "fedcfa.chunk_means": Kernel(  # a single chunk
        lambda rng, n: padded(rng, n.batch + 3, (2, 3), (n.classes,)),
        lambda x, y, mask: fedcfa.chunk_means(x, y, mask, jax.random.key(0), len(mask))[:2],
        lambda x, y, mask: (x[mask].mean(0, keepdims=True), y[mask].mean(0, keepdims=True)),
    ),
    "cafe.leading_direction": Kernel(rows_with_a_leading_direction, of_leading, leading),
    "cafe.calibrate": Kernel(
        lambda rng, n: (
            *normal(rng, (n.classes, n.features)),
            *map(unit, normal(rng, (n.features,), (n.features,))),
        ),
        lambda *rows: cafe.calibrate(*rows, alpha=0.4, beta=0.3, gamma=0.1),
        calibrated,
    ),
    "cafe.logits": Kernel(
        lambda rng, n: normal(rng, (n.batch, n.features), (n.classes, n.features)),
        lambda features, rows: cafe.logits(features, rows, scale=3.0),
        lambda features, rows: 3 * unit(features) @ rows.T,
    ),
    "fediir.alignment": Kernel(
        lambda rng, n: normal(rng, (n.classes, n.features), (n.classes, n.features)),
        lambda grads, means: fediir.alignment({"kernel": grads}, {"kernel": means}),
        lambda grads, means: ((grads - means) ** 2).sum(),
    ),
    "fedmix.mixed_loss": Kernel(
        lambda rng, n: normal(
            rng,
            (n.batch, n.features),
            (n.batch, n.classes),
            (n.features,),
            (n.classes,),
            (n.features, n.classes),
        ),
        lambda x, y, mean_x, mean_y, weights: fedmix.mixed_loss(
            lambda x, y: mixture_loss(x, y, weights), x, y, mean_x, mean_y, ratio=0.2
        ),
        mixture,
    ),
    "moon.contrastive": Kernel(
        lambda rng, n: normal(rng, *[(n.batch, n.features)] * 3),
        lambda *features: moon.contrastive(*features, temperature=0.7),
        contrast,
    ),
    "fedproto.prototypes": Kernel(
        lambda rng, n: (
            *padded(rng, n.batch + 3, (n.features,)),
            rng.integers(0, 4, n.batch + 3),  # the last is no class
        ),
        lambda features, mask, y: fedproto.prototypes(features, y, mask, 3),
        sums_by_class,
    ),
    "qfedavg.scaled_update": Kernel(
        lambda rng, n: (*normal(rng, (n.features,)), rng.uniform(0.1, 2)),
        lambda delta, loss: qfedavg.scaled_update(delta, loss, q=1.6, step_size=0.2),
        scaled,
    ),
}


def single(argument: Any) -> np.ndarray:
    array = np.asarray(argument)
    narrow = {"f": np.float32, "i": np.int32, "b": np.bool_}
    return array.astype(narrow[array.dtype.kind])


class KernelTest(chex.TestCase):
    @chex.all_variants(with_pmap=False)
    @parameterized.named_parameters((name, name) for name in KERNELS)
    def test_it_is_its_formula(self, name: str) -> None:
        draw, kernel, formula = KERNELS[name]

        # The same shapes in each variant, whose operations are compiled once.
        @settings(max_examples=2, derandomize=True)
        @given(st.builds(Sizes, *map(st.integers, (1, 1, 2), (5, 5, 6))), st.integers(0, 999))
        def check(sizes: Sizes, seed: int) -> None:
            arguments = draw(np.random.default_rng(seed), sizes)
            got = self.variant(kernel)(*map(single, arguments))
            assert_close(got, jax.tree.map(single, formula(*arguments)))

        check()

    @parameterized.named_parameters((name, name) for name in KERNELS)
    def test_of_stacked_arguments_it_is_that_of_each(self, name: str) -> None:
        draw, kernel, formula = KERNELS[name]
        rng = np.random.default_rng(0)
        pair = [draw(rng, Sizes(5, 3, 4)) for _ in range(2)]
        stacked = [jnp.stack(list(map(single, each))) for each in zip(*pair, strict=True)]
        got = jax.vmap(kernel)(*stacked)
        expected = [formula(*arguments) for arguments in pair]
        assert_close(got, jax.tree.map(lambda *each: single(np.stack(each)), *expected))
