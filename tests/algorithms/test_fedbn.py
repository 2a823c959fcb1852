"""FedBN against a loop over clients in NumPy, in float64, and what is local."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import federations
import linear_networks as linear
from federations import assert_equal
from fedjax_inv import communication, fit, models, rounds
from fedjax_inv import tree as trees
from fedjax_inv.algorithms import fedbn
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Halves, Model, Tree, Variables

SERVER_MOMENTUM, DECAY = 0.6, 0.9


def encode(
    params: Tree, stats: Tree, x: Array, mask: Array, train: bool, key: Any = None, /
) -> Any:
    """Units of mean 0 over the batch, each with a scale."""
    units = x @ params["kernel"]
    mean = jnp.where(mask[:, None], units, 0).sum(0) / mask.sum()
    running = stats["unit"]["mean"]
    moved = {"unit": {"mean": DECAY * running + (1 - DECAY) * mean}}
    centred = units - (mean if train else running)
    return centred * params["unit"]["scale"], moved if train else stats


def init(key: Array, x: Array) -> Variables:
    body, head = linear.MODEL.init(key, x).params
    named = {"kernel": body, "unit": {"scale": jnp.ones(3)}}
    return Variables(Halves(named, head), Halves({"unit": {"mean": jnp.zeros(3)}}, ()))


MODEL = Model(init, encode, linear.MODEL.decode)
Own = list[np.ndarray]  # scale [3], running mean [3]


def trained(w: linear.Weights, own: Own, examples: linear.Examples) -> tuple[linear.Weights, Own]:
    """The change of the shared weights, and a client's own variables: the chain rule by hand."""
    (x, y), (kernel, head), (scale, running) = examples, w, own
    velocity: Any = [0.0] * 3
    for _ in range(linear.NUM_STEPS):
        centred = x @ kernel - (x @ kernel).mean(0)
        p = np.exp(centred * scale @ head)
        error = (p / p.sum(1, keepdims=True) - np.eye(3)[y]) / len(y)
        by_centred = error @ head.T * scale
        by_kernel = x.T @ (by_centred - by_centred.mean(0))
        by_head, by_scale = (centred * scale).T @ error, (error @ head.T * centred).sum(0)
        running = DECAY * running + (1 - DECAY) * (x @ kernel).mean(0)
        grads = by_kernel, by_head, by_scale
        velocity = [linear.MOMENTUM * v + g for v, g in zip(velocity, grads, strict=True)]
        kernel, head, scale = (
            a - linear.RATE * v for a, v in zip((kernel, head, scale), velocity, strict=True)
        )
    return [kernel - w[0], head - w[1]], [scale, running]


def test_fedbn_is_a_loop_over_clients() -> None:
    with jax.enable_x64(True):
        held, optimizer = linear.held(), optax.sgd(1.0, SERVER_MOMENTUM)
        algorithm = fedbn.fedbn(MODEL, linear.work(), server_optimizer=optimizer, weighting="size")
        first, *states = linear.run(algorithm, held, model=MODEL)
        params = first.server.variables.params
        w = [np.asarray(params.body["kernel"]), np.asarray(params.head)]
        own = [[np.ones(3), np.zeros(3)] for _ in linear.SIZES]
        velocity, examples = [np.zeros_like(part) for part in w], linear.examples_of(held)
        for cohort, state in zip(linear.ATTEND, states, strict=True):
            clients, moved = linear.present(cohort), []
            for who in clients:
                delta, own[who] = trained(w, own[who], examples[who])
                moved.append(delta)
            sizes = [linear.SIZES[who] for who in clients]
            step = linear.mean(moved, sizes)
            velocity = [SERVER_MOMENTUM * v + d for v, d in zip(velocity, step, strict=True)]
            w = [a + v for a, v in zip(w, velocity, strict=True)]
            # Those that attended the round make the mean, which serves who was never seen.
            mean = linear.mean([own[who] for who in clients], sizes)
            unseen = algorithm.init_client(state.server, jnp.int32(0)).variables
            pairs = [(state.server.variables.params.body["kernel"], w[0])]
            pairs += [(state.server.variables.params.head, w[1])]
            for variables, wanted in (
                (unseen, mean),
                (state.clients.variables, [np.stack(part) for part in zip(*own, strict=True)]),
            ):
                pairs += [(variables.params.body["unit"]["scale"], wanted[0])]
                pairs += [(variables.stats.body["unit"]["mean"], wanted[1])]
            for got, wanted in pairs:
                np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-11)
        assert np.ptp(np.stack([scale for scale, _ in own]), axis=0).min() > 1e-3
        # Each client is served with its own.
        last, x = states[-1], np.asarray(held.data.x)
        for who, (scale, running) in enumerate(own):
            mine = trees.take(last.clients, who)
            got = algorithm.predict(last.server, mine, x)
            if linear.SIZES[who]:
                expected = (x @ w[0] - running) * scale @ w[1]
                np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-11)
        # Only shared variables come down.
        (traffic,) = rounds.traffic(algorithm, first, held)
        assert traffic == communication.Traffic(down=8 * (12 + 9), up=8 * (12 + 9 + 3 + 3))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (models.mlp(3, widths=(4, 4), cut=1, norm="batch"), {"scale", "bias", "mean", "var"}),
        (models.cnn(3, widths=(8, 16), cut=1), {"scale", "bias"}),
        (models.mlp(3, widths=(4, 4)), set()),
    ],
    ids=["BatchNorm", "GroupNorm", "none"],
)
def test_what_is_local_by_default(model, names: set[str]) -> None:
    """Each variable of a norm, in both halves, and none of another layer."""
    variables = jax.eval_shape(partial(federations.initial, model), jax.random.key(0))
    parts = trees.partition(variables, fedbn.in_norm(variables))
    got, others = (paths(part) for part in parts)
    assert {path[-1] for path in got} == names
    assert {path[1] for path in got} == ({"body", "head"} if names else set())
    assert {path[-2] for path in got} <= {"BatchNorm_0", "GroupNorm_0"}
    assert {path[-2] for path in others} <= {"Dense_0", "Conv_0"}


class Named(nnx.Module):
    """Layers with names of all kinds."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.normal = nnx.Linear(3, 4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.norm1 = nnx.LayerNorm(4, rngs=rngs)
        self.enormous = nnx.Linear(4, 4, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Array, mask: Array) -> Array:
        x = self.bn(self.normal(x), mask=mask[:, None])
        return self.head(self.enormous(self.norm1(x)))


@pytest.mark.parametrize("wrap", [lambda model: model, models.scaled])
def test_layers_are_local_by_their_statistics_or_whole_words(wrap: Any) -> None:
    model = wrap(models.from_nnx(lambda rngs: Named(rngs=rngs), cut="head"))
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 3)))
    got = paths(trees.partition(variables, fedbn.in_norm(variables))[0])
    params = {path[2:] for path in got if path[0] == "params"}
    assert params == {(layer, leaf) for layer in ("bn", "norm1") for leaf in ("scale", "bias")}
    assert {path[-2:] for path in got if path[0] == "stats"} == {("bn", "mean"), ("bn", "var")}


def test_a_network_of_which_nothing_stays_at_home_is_refused() -> None:
    model = models.scaled(models.mlp(2))
    clients = [(np.ones((4, 3), np.float32), np.arange(4) % 2)] * 2
    with pytest.raises(UsageError, match=r"^model: .*statistics"):
        fit(fedbn.fedbn, model, clients, rounds=1, callbacks=())


def paths(tree: Tree) -> list[tuple[str, ...]]:
    """The paths that `partition` tells its predicate."""
    told = []
    trees.partition(tree, lambda path: bool(told.append(path)))
    return told[: len(told) // 2]


@given(chosen=st.sets(st.integers(0, 4)))
def test_combine_undoes_partition(chosen: set[int]) -> None:
    variables = MODEL.init(jax.random.key(0), jnp.ones((1, 4)))
    every = paths(variables)
    local_paths = {path for i, path in enumerate(every) if i in chosen}
    parts = trees.partition(variables, lambda path: path in local_paths)
    assert set(paths(parts[0])) == local_paths
    assert set(paths(parts[1])) == set(every) - local_paths
    assert_equal(trees.combine(*parts), variables)
    assert_equal(trees.combine(parts[1], parts[0]), variables)
