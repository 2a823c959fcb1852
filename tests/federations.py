"""What many tests share: a tiny ragged federation, small networks, and the table of algorithms."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import algorithms, local, models
from fedjax_inv.data import federation as federations
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Examples,
    Federation,
    Model,
    Shard,
    Tree,
    Work,
)

NUM_CLASSES = 3
IMAGE = (6, 6, 1)
SIZES = (4, 0, 1, 7, 5)  # a client without examples, one with a single example
NUM_CLIENTS = len(SIZES)
HISTORY = 3


def federation(sizes: tuple[int, ...] = SIZES, *, seed: int = 0) -> Federation:
    """Clients of these sizes, with 8-bit images whose brightness depends on the class.

    No client has the last four examples, nor the last 8 rows of the order.
    """
    rng = np.random.default_rng(seed)
    num_examples = sum(sizes) + 4
    y = rng.integers(0, NUM_CLASSES, num_examples)
    x = rng.integers(0, 120, (num_examples, *IMAGE)) + 60 * y[:, None, None, None]
    data = federations.examples(x.astype(np.uint8), y.astype(np.int32))
    ends = np.cumsum(sizes)
    parts = np.split(rng.permutation(sum(sizes)), ends[:-1])
    split = federations.of_parts(data, parts)
    return split._replace(order=jnp.concatenate([split.order, jnp.zeros(8, jnp.int32)]))


def in_floats(federation: Federation) -> Federation:
    """The same federation with its images in floating point, which can hold a NaN."""
    x = federation.data.x.astype(jnp.float32) / 255
    return federation._replace(data=federation.data._replace(x=x))


def relaid(federation: Federation) -> Federation:
    """The same clients in floats, with their rows in another order of clients, amid garbage.

    The shapes are those of `federation`. Examples and rows of no client hold NaN, infinities and
    labels that are no class.
    """
    federation = in_floats(federation)
    x, y = (np.array(leaf) for leaf in federation.data)
    free = len(y) - 4 + np.arange(4)
    x[free] = np.array([np.nan, np.inf, -np.inf, 1e30])[:, None, None, None]
    y[free] = [0, 99, -7, 1]
    rng = np.random.default_rng(1)
    order = rng.choice(free, len(federation.order)).astype(np.int32)
    start = np.zeros(federation.num_clients, np.int32)
    parts, at = federations.parts_of(federation), 1
    for client in rng.permutation(federation.num_clients):
        start[client] = at
        order[at : at + len(parts[client])] = parts[client]
        at += len(parts[client]) + 1
    arrays = [jnp.asarray(array) for array in (x, y, order, start)]
    return Federation(Examples(*arrays[:2]), *arrays[2:], federation.size)


def shard_of(federation: Federation, who: int) -> Shard:
    """A client's view of the federation."""
    start, size = federation.start[who], federation.size[who]
    return Shard(federation.data, federation.order, start, size, jnp.int32(who))


def rows_of(federation: Federation, who: int) -> np.ndarray:
    """The rows of a client's examples."""
    return federations.parts_of(federation)[who]


def schedule() -> Cohort:
    """Six rounds of five slots: changing orders, dropouts, delays, a round without clients."""
    who = np.array(
        [
            [0, 1, 2, 3, 4],
            [4, 3, 2, 1, 0],
            [2, 0, 4, 3, 1],
            [1, 2, 4, 3, 0],
            [3, 4, 0, 2, 1],
            [0, 2, 1, 4, 3],
        ]
    )
    present = np.array(
        [
            [1, 1, 1, 0, 1],
            [1, 1, 0, 1, 0],
            [0, 0, 0, 0, 0],
            [0, 1, 1, 1, 1],
            [1, 1, 1, 0, 1],
            [1, 1, 1, 1, 1],
        ]
    )
    delay = np.array([0, 1, 2, 1, 0])[who]
    delay[4] = 2
    return Cohort(
        jnp.asarray(who, jnp.int32), jnp.asarray(present, bool), jnp.asarray(delay, jnp.int32)
    )


def cohort(who: list[int], present: list[bool] | None = None) -> Cohort:
    """One round's cohort without delays; everyone present by default."""
    return Cohort(
        jnp.asarray(who, jnp.int32),
        jnp.ones(len(who), bool) if present is None else jnp.asarray(present, bool),
        jnp.zeros(len(who), jnp.int32),
    )


class NormedHidden(nn.Module):
    """Dense, batch normalisation, tanh."""

    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        # Without a bias, which the norm would take away again.
        x = nn.Dense(self.width, use_bias=False)(x.reshape(x.shape[0], -1))
        # A large epsilon, so that rounding is not magnified.
        return jnp.tanh(models.BatchNorm(epsilon=0.1)(x, mask, train))


class NormedLinear(nn.Module):
    """Batch normalisation, then an affine map."""

    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        return nn.Dense(self.width)(models.BatchNorm(epsilon=0.1)(x, mask, train))


class Linear(nn.Module):
    """An affine map of the flattened input."""

    width: int

    @nn.compact
    def __call__(self, x: Array, mask: Array, train: bool) -> Array:
        del mask, train
        return nn.Dense(self.width)(x.reshape(x.shape[0], -1))


def mlp() -> Model:
    return models.mlp(NUM_CLASSES, widths=(7,))


def cnn() -> Model:
    return models.cnn(NUM_CLASSES, widths=(8,))


def normed() -> Model:
    """A network with statistics in both halves."""
    return models.from_blocks([NormedHidden(5), NormedHidden(4), Linear(NUM_CLASSES)], 1)


def small_normed() -> Model:
    """The smallest network with statistics in both halves."""
    return models.from_blocks([NormedHidden(4), NormedLinear(NUM_CLASSES)], 1)


def normed_body() -> Model:
    """A network with statistics in its body."""
    return models.from_blocks([NormedHidden(4), Linear(NUM_CLASSES)], 1)


def normed_head() -> Model:
    """The same network, all of it head; the body is empty."""
    return models.from_blocks([NormedHidden(4), Linear(NUM_CLASSES)], 0)


def softmax_regression() -> Model:
    """A linear classifier; the body is empty."""
    return models.from_blocks([Linear(NUM_CLASSES)], 0)


def initial(model: Model, key: Array) -> Tree:
    return model.init(key, jnp.zeros((1, *IMAGE), jnp.uint8))


def epochs(learning_rate: float | Array) -> Work:
    return local.epochs(optax.sgd(learning_rate), batch_size=3, num_epochs=2)


def momentum_epochs(learning_rate: float | Array) -> Work:
    return local.epochs(optax.sgd(learning_rate, momentum=0.9), batch_size=4)


def steps(learning_rate: float | Array) -> Work:
    return local.steps(optax.sgd(learning_rate), batch_size=3, num_steps=2)


def full_batch(learning_rate: float | Array) -> Work:
    return local.full_batch(optax.sgd(learning_rate), capacity=max(SIZES) + 1, num_steps=2)


# A large epsilon: rounding must not be magnified where a gradient is nearly zero.
_ADAM = optax.adam(0.05, eps=1e-2)
_MOMENTUM = optax.sgd(0.7, momentum=0.9)


class Config(NamedTuple):
    """One way of calling a factory: factory(model(), work(learning rate), **arguments)."""

    model: Callable[[], Model]
    work: Callable[[float | Array], Work]
    arguments: Mapping[str, Any] = {}
    learning_rate: float = 0.1


# Every algorithm of the package must have its configurations here: the file's name -> them.
TABLE: dict[str, tuple[Config, ...]] = {
    "cafe": (
        Config(
            normed_body,
            momentum_epochs,
            {"alpha": 0.4, "beta": 0.3, "scale": 4.0, "server_optimizer": _MOMENTUM},
        ),
        Config(
            mlp,
            momentum_epochs,
            {
                "alpha": 0.5,
                "gamma": 0.1,
                "drift_mode": "feature_ema",
                "feature_decay": 0.6,
                "history_gradient": "straight_through",
            },
        ),
    ),
    "ditto": (Config(small_normed, epochs, {"proximal": 0.5, "server_optimizer": _MOMENTUM}),),
    "erm": (Config(small_normed, momentum_epochs),),
    "exit_strategy": (
        Config(
            softmax_regression,
            steps,
            {
                "wrapped": "fedipg",
                "penalty": 0.1,
                "step_size": 0.5,
                "pretraining_rounds": 3,
                "server_optimizer": _MOMENTUM,
            },
        ),
        Config(
            normed_body,
            full_batch,
            {
                "smoothness": 0.5,
                "step_size": 0.5,
                "pretraining_rounds": 3,
                "server_optimizer": _ADAM,
            },
        ),
    ),
    "fedavg": (
        Config(mlp, epochs),
        Config(normed, epochs, {"server_optimizer": _MOMENTUM, "weighting": "uniform"}),
        Config(cnn, steps, {"server_optimizer": _ADAM}),
    ),
    "fedbn": (
        Config(small_normed, epochs),
        Config(small_normed, momentum_epochs, {"server_optimizer": _ADAM, "weighting": "uniform"}),
    ),
    "fedcfa": (
        Config(
            normed_body,
            full_batch,
            {
                "top_k": 1,
                "positive_weight": 0.5,
                "negative_weight": 0.8,
                "decorrelation_weight": 0.1,
                "detach": False,
                "combining": "paper",
                "rows": 2,
                "chunk": 3,
            },
        ),
        Config(
            mlp,
            steps,
            {"top_k": 3, "positive_weight": 0, "rows": 2, "chunk": 3, "server_optimizer": _ADAM},
        ),
    ),
    "fediir": (
        Config(
            small_normed,
            momentum_epochs,
            {"penalty": 0.5, "decay": 0.6, "gradient_batch_size": 3},
        ),
    ),
    "fedipg": (
        Config(
            small_normed,
            full_batch,
            {"penalty": 0.1, "derivative": "forward_over_reverse", "server_optimizer": _ADAM},
        ),
        Config(
            cnn,
            steps,
            {
                "penalty": 0.1,
                "warmup_rounds": 2,
                "warmup_penalty": 0.2,
                "estimator": "halves",
                "weighting": "uniform",
            },
        ),
        Config(
            mlp,
            momentum_epochs,
            {
                "penalty": 2.0,
                "penalty_on": "classifier",
                "scale_loss": True,
                "server_optimizer": _MOMENTUM,
            },
        ),
    ),
    "fl_games": (
        # Opponents that are few rounds old must differ from current ones.
        Config(normed_head, steps, {"memory": 2, "play": "sequential"}, learning_rate=1.0),
        Config(
            normed_body,
            full_batch,
            {
                "memory": 1,
                "memory_mix": "literal",
                "learned": True,
                "body_learning_rate": 0.02,
                "body_batch_size": 3,
                "fast": True,
            },
        ),
    ),
    "scaffold": (Config(small_normed, epochs, {"server_optimizer": _MOMENTUM}),),
    "fedprox": (
        Config(small_normed, full_batch, {"proximal": 0.3, "server_optimizer": _MOMENTUM}),
    ),
    "fedmix": (
        Config(normed_body, steps, {"ratio": 0.3, "rows": 2, "server_optimizer": _MOMENTUM}),
    ),
    "fedpvr": (Config(small_normed, momentum_epochs, {"server_optimizer": _MOMENTUM}),),
    "moon": (
        Config(small_normed, epochs, {"penalty": 1.0, "projection": 3, "temperature": 1.0}),
        # Not the tiny cnn: each of its channels is normalised alone, so that the mean of one is 0.
        Config(mlp, steps, {"penalty": 1.0, "projection": 0, "server_optimizer": _ADAM}),
    ),
    "fedproto": (
        Config(small_normed, epochs, {"penalty": 2.0, "server_optimizer": _MOMENTUM}),
        Config(small_normed, momentum_epochs, {"penalty": 2.0, "share_weights": False}),
    ),
    "qfedavg": (
        Config(
            small_normed,
            epochs,
            {
                "q": 1.5,
                "step_size": 0.2,
                "loss_batch_size": 3,
                "server_optimizer": _MOMENTUM,
            },
        ),
    ),
}


def _module(name: str) -> Any:
    return importlib.import_module(f"{algorithms.__name__}.{name}")


def hyperparameters(config: Config) -> dict[str, float]:
    """The numeric arguments, which may be traced."""
    return {name: value for name, value in config.arguments.items() if type(value) is float}


def build(
    name: str, config: Config, *, learning_rate: float | Array | None = None, **arguments: Any
) -> Algorithm:
    """The algorithm of a configuration, with some of its arguments replaced."""
    work = config.work(config.learning_rate if learning_rate is None else learning_rate)
    return getattr(_module(name), name)(config.model(), work, **{**config.arguments, **arguments})


def plain(tree: Tree) -> Tree:
    """`tree` on the host, with random keys as numbers."""

    def leaf(a: Array) -> np.ndarray:
        is_key = hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(a) if is_key else a)

    return jax.tree.map(leaf, tree)


def assert_equal(first: Tree, second: Tree) -> None:
    """Bit for bit, except that 0 equals -0."""
    chex.assert_trees_all_equal(plain(first), plain(second))


def assert_same_bits(first: Tree, second: Tree) -> None:
    """Bit for bit: 0 is not -0, and a NaN equals itself."""

    def bits(tree: Tree) -> Tree:
        return jax.tree.map(lambda a: np.frombuffer(a.tobytes(), np.uint8), plain(tree))

    assert_equal(first, second)  # which shows the difference
    chex.assert_trees_all_equal(bits(first), bits(second))


def assert_close(first: Tree, second: Tree, *, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    """Up to sums taken in another order.

    In float32 the runs of every configuration here differ by rounding of 1e-9 to 4e-7, a hundredth
    of the default tolerances. A broken law (an ignored delay, another seed, a halved number) causes
    differences of 20 to 6,000 times the tolerances. So the defaults are far from both.

    If an algorithm fails: compare the largest difference with the same difference after the law is
    broken on purpose (let clients hear the newest broadcast, fold the slot into the key instead of
    the client). If they are a factor of 100 apart, the cause is rounding, which the configuration
    magnifies: by division by a small number (an epsilon of Adam or of a norm), or over many steps
    at a large rate. Tame the configuration first, like those here; then choose a tolerance in the
    geometric middle of the two. If they are of one size, the law is broken.

    Against a reference in float64, most of the difference is float32 itself: 1e-3 and 1e-4 for a
    few steps through a norm, else the defaults; a test that needs more precision runs under
    `jax.enable_x64`.
    """
    chex.assert_trees_all_close(plain(first), plain(second), rtol=rtol, atol=atol)
