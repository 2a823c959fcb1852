import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from sklearn import metrics

import federations
from federations import assert_close, assert_equal
from fedjax_inv import devices, evaluation, objectives, rounds
from fedjax_inv.data import federation as built
from fedjax_inv.types import Algorithm, Array, Federation, Tree

# More batches of 3 than any axis has parts; some clients have no examples.
SIZES = (0, 20, 1, 0, 33, 7, 0)
BATCH = 3
assert sum(SIZES) > 16 * BATCH
UNSEEN = 0.5
OWN = np.arange(len(SIZES)) * 0.3
FEDERATION = federations.in_floats(federations.federation(SIZES))
RELAID = federations.relaid(federations.federation(SIZES))


def predict(server: Tree, own: Any, x: Array) -> Array:
    """Return a constant, the client's number minus a pixel, and the brightness."""
    flat = x.reshape(len(x), -1)
    own = server["unseen"] if isinstance(own, tuple) else own  # () of a shared model
    return jnp.stack([jnp.full(len(x), server["constant"]), own - flat[:, 0], flat.mean(1) * 3], 1)


def algorithm(personal: bool) -> Algorithm:
    """Return an algorithm: a client that took part has its own number, others the server's."""
    return Algorithm(
        lambda setup: setup.variables,
        lambda server, who: server["unseen"],
        (),
        predict,
        personal=personal,
    )


def state(num_clients: int = len(SIZES)) -> rounds.State:
    server = {"constant": jnp.float32(0.8), "unseen": jnp.float32(UNSEEN)}
    own = jnp.asarray(OWN[:num_clients], jnp.float32)
    return rounds.State(server, own, (), jnp.int32(0), jax.random.key(0))


def expected(federation: Federation, own: np.ndarray) -> evaluation.Scores:
    """Compute the scores by a loop over clients, in double precision."""
    score, loss, size = [], [], []
    for rows, mine in zip(built.parts_of(federation), own, strict=True):
        x = np.asarray(federation.data.x, np.float64)[rows].reshape(len(rows), 36)
        labels = np.asarray(federation.data.y)[rows]
        logits = np.stack([np.full(len(x), 0.8), mine - x[:, 0], x.mean(1) * 3], 1)
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(rows)), labels]
        score.append(np.mean(logits.argmax(1) == labels) if len(rows) else 0)
        loss.append(losses.mean() if len(rows) else 0)
        size.append(len(rows))
    return evaluation.Scores(np.float32(score), np.float32(loss), np.int32(size))


def predictions(federation: Federation, own: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Return the classes, the predictions and the domains of each client's examples."""
    found = []
    for rows, mine in zip(built.parts_of(federation), own, strict=True):
        x = np.asarray(federation.data.x, np.float64)[rows].reshape(len(rows), 36)
        logits = np.stack([np.full(len(x), 0.8), mine - x[:, 0], x.mean(1) * 3], 1)
        y, domain = (np.asarray(leaf)[rows] for leaf in federation.data[1:])
        found.append((y, logits.argmax(1), domain))
    return found


COUNTS: dict[str, tuple[objectives.Counts, Callable[..., float]]] = {
    "balanced_accuracy": (objectives.balanced_accuracy, metrics.balanced_accuracy_score),
    "macro_f1": (objectives.macro_f1, functools.partial(metrics.f1_score, average="macro")),
    "worst_group": (objectives.worst_group(3), metrics.accuracy_score),
}


def by_sklearn(score: str, parts: list[tuple[np.ndarray, ...]]) -> np.ndarray:
    """Return scikit-learn's score of each part; 0 of one without examples."""

    def of_part(*part: np.ndarray) -> float:
        *pair, domain = part
        if score != "worst_group":
            return COUNTS[score][1](*pair)
        groups = {*zip(pair[0], domain, strict=True)}
        which = [(pair[0] == k) & (domain == d) for k, d in groups]
        return min(COUNTS[score][1](*(each[some] for each in pair)) for some in which)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a predicted class does not occur
        return np.array([of_part(*part) if len(part[0]) else 0 for part in parts])


def mostly_right() -> Federation:
    """Return the relaid clients with labels that a shared network mostly predicts, none of them 1.

    So there are groups in which some predictions are right, and a class that is predicted alone.
    """
    clients, rng = federations.federation(SIZES), np.random.default_rng(2)
    number = len(clients.data.y)
    whole = built.of_parts(FEDERATION.data, [np.arange(number)])
    ((_, predicted, _),) = predictions(whole, np.array([UNSEEN]))
    y = np.where(rng.random(number) < 0.8, predicted, rng.choice([0, 2], number))
    y, domain = (jnp.asarray(each, jnp.int32) for each in (y, rng.integers(0, 3, number)))
    data = clients.data._replace(y=y, domain=domain)
    return federations.relaid(clients._replace(data=data))


GROUP = np.array([1, 0, 1, 2, 0, 1, -1])  # of the clients


@pytest.mark.parametrize("number", [1, 2], ids=["alone", "shared"])
@pytest.mark.parametrize("personal", [False, True], ids=["one", "personal"])
@pytest.mark.parametrize("score", COUNTS)
def test_counts_of_clients_and_groups_follow_sklearn(
    score: str, personal: bool, number: int
) -> None:
    """Also of two runs, amid NaN, and if devices share clients and have a part of each shard."""
    held = mostly_right()
    by_class = built.by_class(built.pooled(held), 3)
    sets = [evaluation.Set(held, seen=True), evaluation.Set(by_class, shared=True)]
    axis = devices.chunked(2)
    axis = devices.sharded("clients", axis) if number > 1 else axis

    def evaluate(state: rounds.State, shards: list[Federation]) -> Any:
        clients, classes = evaluation.evaluate_each(
            algorithm(personal),
            state,
            [set_._replace(shards=each) for set_, each in zip(sets, shards, strict=True)],
            axis=axis,
            batch_size=BATCH,
            needed=True,
            loss=objectives.cross_entropy,
            score=COUNTS[score][0],
        )
        groups = evaluation.by_group(clients, jnp.asarray(GROUP), 3)
        return clients, groups, classes, evaluation.mean(clients)

    def runs(state: rounds.State, shards: list[Federation]) -> Any:
        return jax.vmap(evaluate, (0, None))(state, shards)

    if number > 1:
        mesh = jax.make_mesh((number,), ("clients",), axis_types=(AxisType.Auto,))
        runs = devices.over(mesh, runs)
    both = [state(), state()._replace(server={**state().server, "constant": jnp.float32(0.2)})]
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *both)
    found = jax.jit(runs)(states, [each.shards for each in sets])
    clients, groups, classes, mean = jax.tree.map(lambda leaf: leaf[0], found)
    parts = predictions(held, own_of(personal)[: len(SIZES)])
    expected_scores = by_sklearn(score, parts)
    np.testing.assert_allclose(clients.score, expected_scores, rtol=1e-5)

    def pooled(chosen: np.ndarray) -> tuple[np.ndarray, ...]:
        kept = (part for part, is_in in zip(parts, chosen, strict=True) if is_in)
        return tuple(map(np.concatenate, zip(*kept, strict=True)))

    of_groups = by_sklearn(score, [pooled(group == GROUP) for group in range(3)])
    np.testing.assert_allclose(groups.score, of_groups, rtol=1e-5)
    assert 0 < expected_scores[1] < 1
    everyone = by_sklearn(score, [pooled(GROUP < 3)])
    np.testing.assert_allclose(mean[0], everyone[0], rtol=1e-5)
    of_classes = by_sklearn(score, predictions(by_class, own_of(False)[:3]))
    np.testing.assert_allclose(classes.score, of_classes, rtol=1e-5)
    assert_close(clients.loss, expected(held, own_of(personal)[: len(SIZES)]).loss)
    np.testing.assert_array_equal(clients.size, SIZES)
    # The other run predicts otherwise.
    assert not np.allclose(found[0].score[1], found[0].score[0])


@functools.cache
def program(personal: bool, runs: bool = False) -> Callable[..., Any]:
    """Return a jitted evaluation; of several runs if federations are [R], with shared examples."""

    def evaluate(state: rounds.State, federation: Federation) -> evaluation.Scores:
        return evaluation.evaluate(algorithm(personal), state, federation, batch_size=BATCH)

    return jax.jit(jax.vmap(evaluate, (None, Federation(None, 0, 0, 0))) if runs else evaluate)


def test_a_sum_over_many_examples_keeps_its_digits() -> None:
    number = 300_000
    data = built.examples(np.zeros((number, 1), np.float32), np.zeros(number, np.int32))
    held = built.of_parts(data, [np.arange(number), []])

    @jax.jit
    def loss(federation: Federation) -> Array:
        return evaluation.evaluate(algorithm(False), state(2), federation, batch_size=256).loss[0]

    logits = np.array([0.8, UNSEEN, 0.0])
    np.testing.assert_allclose(loss(held), np.log(np.exp(logits).sum()) - 0.8, rtol=1e-4)


def own_of(personal: bool, seen: bool = True) -> np.ndarray:
    return OWN if personal and seen else np.full(9, UNSEEN)


@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
def test_evaluate_follows_numpy(personal: bool) -> None:
    want = expected(FEDERATION, own_of(personal)[: len(SIZES)])
    assert len({round(score, 3) for score in want.score.tolist()}) > 2
    evaluate = program(personal)
    assert_close(evaluate(state(), FEDERATION), want)
    # Another order of clients, amid NaN and labels that are no class.
    assert_close(evaluate(state(), RELAID), want)
    # No client has an example.
    empty = FEDERATION._replace(size=jnp.zeros_like(FEDERATION.size))
    nothing = jax.tree.map(np.zeros_like, want)
    assert_equal(evaluate(state(), empty), nothing)


# Chunks divide neither the clients nor the parts.
@pytest.mark.parametrize(
    "axis", [devices.chunked(3), devices.sharded("clients", devices.chunked(1))]
)
@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
def test_several_sets_are_evaluated_as_each_alone(personal: bool, axis: devices.Axis) -> None:
    """Also if each device has a part of each shard, and if nobody has examples."""
    everything, nobody = np.arange(sum(SIZES)), np.arange(0)
    parts = [[everything], [everything[40:], nobody, everything[:7]], [nobody]]
    parts += [np.array_split(everything, 9)]  # of more clients than the run had
    alone = [built.of_parts(FEDERATION.data, part) for part in parts]
    sets = [evaluation.Set(FEDERATION, seen=True)]
    sets += [evaluation.Set(each, shared=shared) for each in alone for shared in (False, True)]

    def evaluate(state: rounds.State, shards: list[Federation]) -> list[evaluation.Scores]:
        return evaluation.evaluate_each(
            algorithm(personal),
            state,
            [set_._replace(shards=each) for set_, each in zip(sets, shards, strict=True)],
            axis=axis,
            batch_size=BATCH,
            needed=True,
            loss=objectives.cross_entropy,
            score=objectives.accuracy,
        )

    if axis.name is not None:
        mesh = jax.make_mesh((4,), ("clients",), axis_types=(AxisType.Auto,))
        evaluate = devices.over(mesh, evaluate)
    found = jax.jit(evaluate)(state(), [each.shards for each in sets])
    for each, scores in zip(sets, found, strict=True):
        own = own_of(personal, each.seen)[: each.shards.num_clients]
        assert_close(scores, expected(each.shards, own))


# As many runs as clients, and one client: XLA's CPU compiler gets some vmapped scatters wrong.
@pytest.mark.parametrize("num_clients", [4, 1])
@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
def test_runs_of_federations_of_other_sizes(num_clients: int, personal: bool) -> None:
    rng = np.random.default_rng(0)
    cuts = rng.integers(0, sum(SIZES), (4, num_clients - 1))
    parts = [np.split(rng.permutation(sum(SIZES)), np.sort(cut)) for cut in cuts]
    if num_clients == 1:
        parts = [[part[: 20 * run]] for run, (part,) in enumerate(parts)]
    runs = [built.of_parts(FEDERATION.data, part) for part in parts]
    longest = sum(SIZES)
    orders = [np.pad(run.order, (0, longest - len(run.order))) for run in runs]
    start, size = (np.stack([run[field] for run in runs]) for field in (2, 3))
    assert len(np.unique(size, axis=0)) == 4
    stacked = Federation(FEDERATION.data, np.stack(orders), start, size)
    got = program(personal, runs=True)(state(num_clients), stacked)
    own = own_of(personal)[:num_clients]
    for index, run in enumerate(runs):
        assert_close(jax.tree.map(lambda a, i=index: a[i], got), expected(run, own))


@pytest.mark.parametrize("personal", [False, True], ids=["shared", "personal"])
def test_nothing_is_predicted_if_it_is_not_needed(personal: bool) -> None:
    looked = []

    def watched(server: Tree, own: Tree, x: Tree) -> Array:
        jax.debug.callback(lambda: looked.append(1))
        return predict(server, own, x)

    @jax.jit
    def evaluate(needed: Array) -> evaluation.Scores:
        watching = algorithm(personal)._replace(predict=watched)
        return evaluation.evaluate(watching, state(), FEDERATION, batch_size=BATCH, needed=needed)

    batches = [-(-size // BATCH) for size in (SIZES if personal else [sum(SIZES)])]
    for needed, expected_looks in ((False, 0), (True, sum(batches))):
        looked.clear()
        jax.block_until_ready(evaluate(jnp.bool_(needed)))
        jax.effects_barrier()
        assert len(looked) == expected_looks


SCORES = evaluation.Scores(
    np.float32([0.5, 0.0, 1.0, 0.25]), np.float32([1.0, 0.0, 0.2, 2.0]), np.int32([4, 0, 1, 8])
)


def test_the_mean_is_over_examples() -> None:
    score, loss = evaluation.mean(SCORES)
    np.testing.assert_allclose(score, (4 * 0.5 + 1 + 8 * 0.25) / 13, rtol=1e-6)
    np.testing.assert_allclose(loss, (4 + 0.2 + 16) / 13, rtol=1e-6)
    nobody = SCORES._replace(size=np.zeros(4, np.int32))
    assert_equal(evaluation.mean(nobody), (np.float32(0), np.float32(0)))


by_group = jax.jit(evaluation.by_group, static_argnums=2)


def test_by_group_pools_examples_and_leaves_out_negatives() -> None:
    scores = by_group(SCORES, np.array([2, 0, 2, -1]), 3)
    np.testing.assert_allclose(scores.score, [0, 0, 3 / 5], rtol=1e-6)
    np.testing.assert_allclose(scores.loss, [0, 0, 4.2 / 5], rtol=1e-6)
    np.testing.assert_array_equal(scores.size, [0, 0, 5])
    together = by_group(SCORES, np.zeros(4, np.int32), 1)
    np.testing.assert_allclose(together.score[0], evaluation.mean(SCORES)[0], rtol=1e-6)


def test_by_group_of_several_runs_in_one_program() -> None:
    # XLA's CPU compiler drops terms of a vmapped segment sum of as many runs as clients.
    def pooled(scores: evaluation.Scores) -> evaluation.Scores:
        return evaluation.by_group(scores, jnp.zeros_like(scores.size), 1)

    runs = jax.tree.map(lambda a: np.stack([a, a[::-1], a, a]), SCORES)
    together = jax.jit(jax.vmap(pooled))(runs)
    np.testing.assert_array_equal(together.size, np.full((4, 1), 13))
    mean = evaluation.mean(SCORES)[0]
    np.testing.assert_allclose(together.score, np.full((4, 1), mean), rtol=1e-6)


def test_scores_of_several_runs_are_those_of_each_run() -> None:
    runs, group = jax.tree.map(lambda a: np.stack([a, a[::-1]]), SCORES), np.array([2, 0, 2, -1])
    for of in (evaluation.mean, evaluation.balanced, lambda scores: by_group(scores, group, 3)):
        alone = [of(jax.tree.map(lambda a, r=run: a[r], runs)) for run in range(2)]
        assert_close(of(runs), jax.tree.map(lambda *leaves: np.stack(leaves), *alone))


def test_an_infinite_loss_stays_in_its_group() -> None:
    scores = SCORES._replace(loss=np.float32([np.inf, 0.0, 0.2, 2.0]))
    loss = by_group(scores, np.array([0, 1, 1, 2]), 3).loss
    np.testing.assert_allclose(loss, [np.inf, 0.2, 2.0], rtol=1e-6)
    loss = by_group(scores, np.array([-1, 1, 1, 2]), 3).loss
    np.testing.assert_allclose(loss, [0, 0.2, 2.0], rtol=1e-6)


def test_balanced_is_the_mean_of_the_recalls_of_classes_that_occur() -> None:
    by_class = built.by_class(built.pooled(FEDERATION), 5)
    assert not by_class.size[3:].any()  # of three classes
    score = jax.jit(
        lambda: evaluation.balanced(
            evaluation.evaluate(algorithm(False), state(), by_class, batch_size=BATCH)
        )
    )
    scores = expected(by_class, np.full(5, UNSEEN))
    assert len(set(scores.score[:3])) == 3
    assert_close(score(), np.float32(np.mean(scores.score[:3])))
    nobody = scores._replace(size=np.zeros(5, np.int32))
    assert evaluation.balanced(jax.tree.map(jnp.asarray, nobody)) == 0
