"""FedBN against a loop over clients in float64, and what must stay with a client."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import federations
from federations import assert_close, assert_equal
from fedjax_inv import communication, devices, models, rounds, tree
from fedjax_inv.algorithms import fedbn
from fedjax_inv.types import Algorithm, Array, Cohort, Model, Tree, Variables

FEDERATION = federations.federation()
NUM_CLIENTS = federations.NUM_CLIENTS
NORMED = federations.small_normed()  # with norms in both halves
# Smooth where the norm of a single example is zero.
MODEL = models.mlp(federations.NUM_CLASSES, widths=(4,), activation="elu", norm="batch")
ALGORITHM = fedbn.fedbn(NORMED, federations.full_batch(0.3))


@cache
def initial(model: Model = NORMED) -> Variables:
    return jax.jit(partial(federations.initial, model))(jax.random.key(0))


@partial(jax.jit, static_argnums=0)
def start(algorithm: Algorithm, variables: Variables) -> rounds.State:
    key, history = jax.random.key(0), federations.HISTORY
    return rounds.init(algorithm, variables, FEDERATION, key, history=history)


@partial(jax.jit, static_argnums=0)
def step(algorithm: Algorithm, state: rounds.State, cohort: Cohort) -> rounds.State:
    return rounds.step(algorithm, state, cohort, FEDERATION, axis=devices.vmapped())[0]


def undelayed() -> Cohort:
    return federations.schedule()._replace(delay=jnp.zeros((6, 5), jnp.int32))


def run(algorithm: Algorithm, schedule: Cohort, model: Model = NORMED) -> list[rounds.State]:
    """The states before each round and after the last."""
    states, schedule = [start(algorithm, initial(model))], federations.plain(schedule)
    for t in range(len(schedule.who)):
        states.append(step(algorithm, states[-1], tree.take(schedule, t)))
    return states


@cache
def states() -> list[rounds.State]:
    return run(ALGORITHM, federations.schedule())


@pytest.fixture
def warm() -> rounds.State:
    """Every client but the one without examples has taken part, and differs from the others."""
    return states()[-1]


def attended_by(*present: int) -> Cohort:
    """A cohort of all clients, of whom some are present."""
    who = [4, 1, 0, 3, 2]
    return federations.cohort(who, [client in present for client in who])


def examples(client: int) -> tuple[np.ndarray, np.ndarray]:
    rows = federations.rows_of(FEDERATION, client)
    x = np.asarray(FEDERATION.data.x, np.float64)[rows].reshape(len(rows), 36) / 255
    return x, np.asarray(FEDERATION.data.y)[rows]


class Network(NamedTuple):
    """MODEL's variables by name."""

    shared: dict[str, Array]
    norm: dict[str, Array]  # scale, bias
    stats: dict[str, Array]  # mean, var


def by_name(variables: Variables) -> Network:
    hidden, classifier = (half["blocks_0"] for half in variables.params)
    shared = {"hidden": hidden["Dense_0"]["kernel"], **classifier["Dense_0"]}
    return Network(shared, hidden["BatchNorm_0"], variables.stats.body["blocks_0"]["BatchNorm_0"])


@jax.jit
@partial(jax.grad, argnums=(0, 1), has_aux=True)
def gradient(shared: dict, norm: dict, x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    """Of the risk, with the hidden units' mean and variance over the batch."""
    hidden = x @ shared["hidden"]
    mean, var = hidden.mean(0), ((hidden - hidden.mean(0)) ** 2).mean(0)
    hidden = (hidden - mean) / jnp.sqrt(var + 1e-5) * norm["scale"] + norm["bias"]
    logits = jax.nn.elu(hidden) @ shared["kernel"] + shared["bias"]
    losses = jax.nn.logsumexp(logits, 1) - logits[jnp.arange(len(y)), y]
    return losses.mean(), (mean, var)


def reference(schedule: Cohort) -> tuple[dict, list[tuple], tuple]:
    """(shared, each client's (norm, stats), their latest mean): two steps a round at rate 0.3, a
    server of momentum 0.6."""

    def moved(at: dict, grads: dict) -> dict:
        return {k: at[k] - 0.3 * grads[k] for k in at}

    def mean(trees: list, sizes: list[int]) -> Any:
        weights = np.array(sizes, np.float64)
        weights /= weights.sum()
        return jax.tree.map(
            lambda *leaves: sum(w * a for w, a in zip(weights, leaves, strict=True)), *trees
        )

    network = by_name(initial(MODEL))
    server, *first = jax.tree.map(lambda a: np.asarray(a, np.float64), network)
    own = [tuple(first)] * NUM_CLIENTS
    average, velocity = tuple(first), {k: 0 * v for k, v in server.items()}
    for who, present in zip(np.asarray(schedule.who), np.asarray(schedule.present), strict=True):
        deltas, kept, sizes = [], [], []
        for client in who[present]:
            x, y = examples(client)
            if len(y) == 0:
                continue
            shared, (norm, stats) = server, own[client]
            for _ in range(2):
                grads, (batch_mean, batch_var) = jax.device_get(gradient(shared, norm, x, y))
                shared, norm = moved(shared, grads[0]), moved(norm, grads[1])
                stats = {
                    "mean": 0.9 * stats["mean"] + 0.1 * batch_mean,
                    "var": 0.9 * stats["var"] + 0.1 * batch_var,
                }
            own[client] = (norm, stats)
            deltas.append({k: shared[k] - server[k] for k in server})
            kept.append(own[client])
            sizes.append(len(y))
        if deltas:
            step = mean(deltas, sizes)
            velocity = {k: 0.6 * velocity[k] + step[k] for k in step}
            server = {k: server[k] + velocity[k] for k in server}
            average = mean(kept, sizes)
    return jax.tree.map(np.asarray, (server, own, average))


def test_fedbn_is_a_loop_over_clients() -> None:
    algorithm = fedbn.fedbn(
        MODEL,
        federations.full_batch(0.3),
        server_optimizer=optax.sgd(1.0, momentum=0.6),
    )
    # The last cohort leaves clients out, so that the mean is not one over all clients.
    schedule = tree.take(undelayed(), slice(5))
    with jax.enable_x64(True):
        shared, own, average = reference(schedule)
    state = federations.plain(run(algorithm, schedule, MODEL)[-1])
    whole = fedbn.combine(state.server.side, state.server.variables)
    assert_close(by_name(whole), Network(shared, *average), rtol=1e-3, atol=1e-4)
    for client in range(NUM_CLIENTS):
        mine = fedbn.combine(tree.take(state.clients.variables, client), state.server.variables)
        assert_close(by_name(mine), Network(shared, *own[client]), rtol=1e-3, atol=1e-4)
    # Else the loop would not tell whose variables are whose.
    means = [stats["mean"] for _, stats in (*own, average)]
    for i, mean in enumerate(means):
        assert all(np.abs(mean - other).max() > 1e-2 for other in means[:i])


def shaken(own: Tree, client: int) -> Tree:
    """What all clients keep, with one client's variables tripled."""
    tripled = jax.tree.map(lambda leaf: leaf.at[client].multiply(3), own.variables)
    return own._replace(variables=tripled)


def test_nobodys_variables_reach_another_but_through_the_shared_network(
    warm: rounds.State,
) -> None:
    everyone = attended_by(0, 2, 3, 4)
    expected = step(ALGORITHM, warm, everyone)
    got = step(ALGORITHM, warm._replace(clients=shaken(warm.clients, 3)), everyone)
    for client in (0, 2, 4):
        pair = (tree.take(federations.plain(s.clients.variables), client) for s in (got, expected))
        assert_equal(*pair)
    for a, b in zip(*(jax.tree.leaves(s.clients.variables) for s in (got, expected)), strict=True):
        assert jnp.abs(a[3] - b[3]).max() > 1e-3
    # Nor do one's that stays away reach the server, nor the server's mean a client or the server.
    others = attended_by(0, 2, 4)
    expected = step(ALGORITHM, warm, others)
    mean = jax.tree.map(lambda leaf: 3 * leaf, warm.server.side)
    other = warm._replace(server=warm.server._replace(side=mean), clients=shaken(warm.clients, 3))
    got = step(ALGORITHM, other, others)
    assert_equal(got.server, expected.server)
    assert_equal(got.clients, shaken(expected.clients, 3))


def test_only_shared_variables_come_down() -> None:
    (traffic,) = communication.traffic(ALGORITHM, states()[0], FEDERATION)
    kernels = 36 * 4 + 4 * 3 + 3  # and the classifier's bias
    norms = 4 * (4 + 4)  # scale, bias, mean, var
    assert traffic == communication.Traffic(down=4 * kernels, up=4 * (kernels + norms))


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
    parts = fedbn.partition(variables, fedbn.in_norm)
    got, others = (paths(part) for part in parts)
    assert {path[-1] for path in got} == names
    assert {path[1] for path in got} == ({"body", "head"} if names else set())
    assert {path[-2] for path in got} <= {"BatchNorm_0", "GroupNorm_0"}
    assert {path[-2] for path in others} <= {"Dense_0", "Conv_0"}


def paths(tree: Tree) -> list[tuple[str, ...]]:
    """The paths that `partition` tells its predicate."""
    told = []
    fedbn.partition(tree, lambda path: bool(told.append(path)))
    return told[: len(told) // 2]


@given(chosen=st.sets(st.integers(0, 10)))
def test_combine_undoes_partition(chosen: set[int]) -> None:
    variables = initial()
    every = paths(variables)
    local_paths = {path for i, path in enumerate(every) if i in chosen}
    parts = fedbn.partition(variables, lambda path: path in local_paths)
    assert set(paths(parts[0])) == local_paths
    assert set(paths(parts[1])) == set(every) - local_paths
    assert_equal(fedbn.combine(*parts), variables)
    assert_equal(fedbn.combine(parts[1], parts[0]), variables)
