"""What many tests share: a tiny ragged federation, small networks, and the table of algorithms."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import algorithms, laws, local, models
from fedjax_inv.data.federation import parts_of
from fedjax_inv.laws import HISTORY as HISTORY
from fedjax_inv.laws import IMAGE as IMAGE
from fedjax_inv.laws import NUM_CLASSES as NUM_CLASSES
from fedjax_inv.laws import NUM_CLIENTS as NUM_CLIENTS
from fedjax_inv.laws import SIZES as SIZES
from fedjax_inv.laws import assert_close as assert_close
from fedjax_inv.laws import assert_equal as assert_equal
from fedjax_inv.laws import cohort as cohort
from fedjax_inv.laws import epochs as epochs
from fedjax_inv.laws import federation as federation
from fedjax_inv.laws import in_floats as in_floats
from fedjax_inv.laws import plain as plain
from fedjax_inv.laws import relaid as relaid
from fedjax_inv.laws import schedule as schedule
from fedjax_inv.types import Algorithm, Array, Federation, Model, Shard, Tree, Work


def rows_of(federation: Federation, who: int) -> np.ndarray:
    """The rows of a client's examples."""
    return parts_of(federation)[who]


def assert_same_bits(first: Tree, second: Tree) -> None:
    """Assert that two trees are equal bit for bit: 0 is not -0, and a NaN equals itself."""

    def bits(tree: Tree) -> Tree:
        return jax.tree.map(lambda a: np.frombuffer(a.tobytes(), np.uint8), plain(tree))

    assert_equal(first, second)  # which shows the difference
    assert_equal(bits(first), bits(second))


def shard_of(federation: Federation, who: int) -> Shard:
    """A client's view of the federation."""
    start, size = federation.start[who], federation.size[who]
    return Shard(federation.data, federation.order, start, size, jnp.int32(who))


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
    return models.cnn(NUM_CLASSES, widths=(16,))


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


def small_normed() -> Model:
    """The smallest network with statistics in both halves."""
    return models.from_blocks([NormedHidden(4), NormedLinear(NUM_CLASSES)], 1)


def normed() -> Model:
    """A network with statistics in both halves."""
    return models.from_blocks([NormedHidden(5), NormedHidden(4), Linear(NUM_CLASSES)], 1)


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


def momentum_epochs(learning_rate: float | Array) -> Work:
    return local.epochs(optax.sgd(learning_rate, momentum=0.9), batch_size=4, momentum=0.9)


def steps(learning_rate: float | Array) -> Work:
    return local.steps(optax.sgd(learning_rate), batch_size=3, num_steps=2, momentum=0.0)


def full_batch(learning_rate: float | Array) -> Work:
    return local.full_batch(
        optax.sgd(learning_rate), capacity=max(SIZES) + 1, num_steps=2, momentum=0.0
    )


# A large epsilon: rounding must not be magnified where a gradient is nearly zero.
_ADAM = optax.adam(0.05, eps=1e-2)
_MOMENTUM = optax.sgd(0.7, momentum=0.9)
_DOMAINS = {"num_domains": laws.NUM_DOMAINS}
# No float, of which the laws would expect an effect: it has one for drift_mode="features" alone.
_NO_FEATURE_DECAY = {"feature_decay": 0}


class Config(NamedTuple):
    """One way of calling a factory: factory(model(), work(learning rate), **arguments)."""

    model: Callable[[], Model]
    work: Callable[[float | Array], Work]
    arguments: Mapping[str, Any] = {}
    learning_rate: float = 0.1


# Every algorithm of the package has its configurations here: the file's name -> them. The first is
# tested always, others are slow.
TABLE: dict[str, tuple[Config, ...]] = {
    "afl": (Config(small_normed, full_batch, {"step_size": 0.3, "loss_batch_size": 3}),),
    "cafe": (
        Config(
            normed_body,
            momentum_epochs,
            {
                "alpha": 0.4,
                "beta": 0.3,
                "scale": 4.0,
                **_NO_FEATURE_DECAY,
                "server_optimizer": _MOMENTUM,
            },
        ),
        Config(
            mlp,
            momentum_epochs,
            {
                "alpha": 0.5,
                "gamma": 0.1,
                "drift_mode": "row_mean",
                **_NO_FEATURE_DECAY,
            },
        ),
    ),
    "ditto": (Config(small_normed, full_batch, {"proximal": 0.5, "server_optimizer": _MOMENTUM}),),
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
    ),
    "fedbn": (Config(small_normed, epochs),),
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
                "statistics": "all",
                "combining": "paper",
                "rows": 2,
                "chunk": 3,
            },
        ),
    ),
    "feddg_ga": (
        Config(mlp, full_batch, {"step_size": 0.5, "num_rounds": 5, "loss_batch_size": 3}),
    ),
    "feddyn": (Config(small_normed, full_batch, {"alpha": 0.3, "server_optimizer": _MOMENTUM}),),
    "fedgma": (Config(normed_body, full_batch, {"agreement": 0.6, "server_optimizer": _MOMENTUM}),),
    "fedomg": (Config(small_normed, full_batch, {"kappa": 0.4, "server_optimizer": _MOMENTUM}),),
    "fediir": (
        Config(
            small_normed, momentum_epochs, {"penalty": 0.5, "decay": 0.6, "gradient_batch_size": 3}
        ),
    ),
    "fedipg": (
        Config(
            small_normed,
            full_batch,
            {"penalty": 0.1, "server_optimizer": _ADAM},
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
    ),
    "fl_games": (
        # Opponents that are few rounds old must differ from current ones.
        Config(
            normed_head,
            steps,
            # No float, of which the laws would expect an effect: without `learned` it has none.
            {"memory": 2, "play": "sequential", "body_learning_rate": 1},
            learning_rate=1.0,
        ),
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
    "fednova": (
        Config(
            small_normed, epochs, {"proximal": 0.3, "step_size": 0.2, "server_optimizer": _MOMENTUM}
        ),
    ),
    "moon": (Config(small_normed, epochs, {"penalty": 1.0, "projection": 3, "temperature": 1.0}),),
    "fedsam": (Config(small_normed, full_batch, {"rho": 0.3, "server_optimizer": _MOMENTUM}),),
    "fedproto": (
        Config(small_normed, epochs, {"penalty": 2.0, "server_optimizer": _MOMENTUM}),
        Config(small_normed, momentum_epochs, {"penalty": 2.0, "share_weights": False}),
    ),
    "fedsr": (
        Config(small_normed, full_batch, {"l2r": 0.1, "cmi": 0.05, "server_optimizer": _MOMENTUM}),
    ),
    "irm": (
        Config(small_normed, steps, {"penalty": 0.5, "scale_loss": True, **_DOMAINS}),
        Config(
            cnn, full_batch, {"penalty": 0.5, "estimator": "halves", "warmup_rounds": 2, **_DOMAINS}
        ),
    ),
    "vrex_domains": (Config(mlp, full_batch, {"penalty": 0.5, **_DOMAINS}),),
    "coral": (Config(normed_body, full_batch, {"penalty": 0.5, **_DOMAINS}),),
    "mmd": (Config(small_normed, full_batch, {"penalty": 0.1, **_DOMAINS}),),
    "group_dro": (Config(small_normed, momentum_epochs, {"step_size": 0.5, **_DOMAINS}),),
    "fish": (Config(normed_body, steps, {"inner_rate": 0.1, **_DOMAINS}),),
    "fishr": (Config(small_normed, full_batch, {"penalty": 20.0, "ema": 0.5, **_DOMAINS}),),
    "vrex": (Config(mlp, full_batch, {"beta": 0.4, "loss_batch_size": 3}),),
    "qfedavg": (
        Config(
            small_normed,
            full_batch,
            {"q": 1.5, "step_size": 0.2, "loss_batch_size": 3, "server_optimizer": _MOMENTUM},
        ),
    ),
}


def _module(name: str) -> Any:
    return importlib.import_module(f"{algorithms.__name__}.{name}")


def build(
    name: str, config: Config, *, learning_rate: float | Array | None = None, **arguments: Any
) -> Algorithm:
    """The algorithm of a configuration, with some of its arguments replaced."""
    work = config.work(config.learning_rate if learning_rate is None else learning_rate)
    return getattr(_module(name), name)(config.model(), work, **{**config.arguments, **arguments})


# One algorithm for each shape of protocol; its first configuration obeys the law of devices, too.
SHAPES = {
    "fedavg": "averaging",
    "qfedavg": "averaging with weights of the clients' own",
    "fedbn": "parameters of a client's own",
    "ditto": "a network of a client's own",
    "scaffold": "states of the clients and of the server beside the network",
    "cafe": "a momentum and histories on the server",
    "afl": "risks before training",
    "fedcfa": "averages of examples in the first rounds",
    "fedproto": "prototypes",
    "fl_games": "players who move in turns",
    "exit_strategy": "an algorithm around another",
    "erm": "pooled training",
}


def case(name: str, config: Config) -> laws.Case:
    """The configuration as the laws take it."""
    return laws.Case(
        getattr(_module(name), name),
        hyperparameters=config.arguments,
        model=config.model(),
        work=config.work,
        learning_rate=config.learning_rate,
    )
