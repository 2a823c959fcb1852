"""Averages: who is in which mean, what the server makes of them, what is drawn from them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
from fedjax_inv import averaging, devices, local, mean_examples, models, rounds
from fedjax_inv.aggregators import Stack
from fedjax_inv.data import federation as federations_of
from fedjax_inv.mean_examples import MeanExamples
from fedjax_inv.types import Algorithm, Array, Cohort, Examples, Federation, Setup, Shard, Visit

SIZES = (4, 0, 1, 7, 5)
NUM = sum(SIZES)
NUM_CLASSES = 3
MODEL = models.from_function(
    lambda key, x: {"w": jax.random.normal(key, (x.shape[1], NUM_CLASSES))},
    lambda params, x: x @ params["w"],
)


def held() -> Federation:
    """Example i is the i-th unit vector, so that a mean tells of whom it is."""
    rng = np.random.default_rng(0)
    x, y = np.eye(NUM, dtype=np.float32), rng.integers(0, NUM_CLASSES, NUM).astype(np.int32)
    parts = np.split(rng.permutation(NUM), np.cumsum(SIZES)[:-1])
    return federations_of.of_parts(federations_of.examples(x, y), parts)


HELD = held()
chunk_means = jax.jit(mean_examples.chunk_means, static_argnums=4)
split_means = jax.jit(mean_examples.split_means, static_argnums=4)


def check(told: MeanExamples, of: set[int], lengths: list[int]) -> None:
    """The real rows stand first and are the means of disjoint sets of `of`, of these sizes."""
    x, y, real = (np.asarray(leaf) for leaf in told)
    assert real.tolist() == [row < len(lengths) for row in range(len(real))]
    assert not x[~real].any()
    assert not y[~real].any()
    sets = [np.flatnonzero(row) for row in x[real]]
    assert [len(each) for each in sets] == lengths
    members = np.concatenate([np.zeros(0, int), *sets])
    assert len(set(members)) == len(members)
    assert set(members.tolist()) <= of
    labels = np.eye(NUM_CLASSES)[np.asarray(HELD.data.y)]
    for row, mean_x, mean_y in zip(sets, x, y, strict=False):
        np.testing.assert_allclose(mean_x[row], 1 / len(row), rtol=1e-6)
        np.testing.assert_allclose(mean_y, labels[row].mean(0), rtol=1e-6)


def masked(real: np.ndarray) -> tuple[Array, Array, Array]:
    x, y = np.array(HELD.data.x), np.eye(NUM_CLASSES)[np.asarray(HELD.data.y)]
    x[~real], y[~real] = np.nan, np.inf
    return jnp.asarray(x), jnp.asarray(y, jnp.float32), jnp.asarray(real)


@pytest.mark.parametrize(("chunk", "num_real"), [(5, 0), (5, 12), (1, NUM)])
def test_chunks_hold_every_real_example_once(chunk: int, num_real: int) -> None:
    real = np.random.default_rng(num_real).permutation(np.arange(NUM) < num_real)
    told = chunk_means(*masked(real), jax.random.key(0), chunk)
    assert len(told.real) == -(-NUM // chunk)
    left = num_real % chunk
    lengths = [chunk] * (num_real // chunk) + [left] * (left > 0)
    check(told, set(np.flatnonzero(real).tolist()), lengths)
    assert sum(lengths) == num_real


@pytest.mark.parametrize(("rows", "num_real"), [(5, 3), (5, NUM)])
def test_rows_of_the_paper_are_means_of_equal_chunks(rows: int, num_real: int) -> None:
    real = np.random.default_rng(num_real).permutation(np.arange(NUM) < num_real)
    told = split_means(*masked(real), jax.random.key(0), rows)
    each = num_real // rows
    check(told, set(np.flatnonzero(real).tolist()), [each] * rows if each else [])


def test_sums_of_16_bits_neither_overflow_nor_stop() -> None:
    large = jnp.full((300, 2), 1000, jnp.float16)
    numbers, mask = mean_examples.as_numbers(large), jnp.ones(300, bool)
    means = mean_examples.chunk_means(numbers, large[:, :1], mask, jax.random.key(0), 300)
    np.testing.assert_array_equal(means.x[0], 1000)


def test_chunks_are_random_and_do_not_depend_on_what_is_masked() -> None:
    real = np.arange(NUM) < 12
    x, y, mask = masked(real)
    means = jax.jit(lambda key: mean_examples.chunk_means(x, y, mask, key, 3).x)
    drawn = np.asarray(jax.vmap(means)(jax.random.split(jax.random.key(0), 400)))
    first = (drawn[:, 0] > 0)[:, :12]  # who is in the first row
    np.testing.assert_allclose(first.mean(0), 3 / 12, atol=5 * np.sqrt(0.25 * 0.75 / 400))
    side = first[first[:, 0], 1:].mean(0)  # and who is there with the first example
    np.testing.assert_allclose(side, 2 / 11, atol=5 * np.sqrt(2 / 11 * 9 / 11 / 80))
    # The same examples in other places, with others between them.
    spread = np.zeros(2 * NUM, bool)
    places = np.arange(12) * 2
    spread[places] = True
    wide = jnp.full((2 * NUM, NUM), jnp.nan).at[places].set(x[:12])
    wide_y = jnp.full((2 * NUM, NUM_CLASSES), jnp.nan).at[places].set(y[:12])
    key = jax.random.key(3)
    got = chunk_means(wide, wide_y, jnp.asarray(spread), key, 3)
    expected = chunk_means(x, y, mask, key, 3)
    np.testing.assert_array_equal(got.x[:6], expected.x[:6])
    assert not got.real[4:].any()


def shard_of(who: int) -> Shard:
    return federations.shard_of(HELD, who)


@pytest.mark.parametrize(
    ("rows", "length", "lengths"),
    [
        (4, 2, {0: [2, 2], 1: [], 2: [1], 3: [2, 2, 2, 1], 4: [2, 2, 1]}),
        # A client with more examples sends some of them.
        (2, 2, {0: [2, 2], 1: [], 2: [1], 3: [2, 2], 4: [2, 2]}),
        # The paper's.
        (3, None, {0: [1, 1, 1], 1: [], 2: [], 3: [2, 2, 2], 4: [1, 1, 1]}),
    ],
)
def test_a_clients_rows_are_means_of_its_own_chunks(
    rows: int, length: int | None, lengths: dict[int, list[int]]
) -> None:
    @jax.jit
    def of(who: Array) -> MeanExamples:
        shard = Shard(HELD.data, HELD.order, HELD.start[who], HELD.size[who], who)
        return mean_examples.of_shard(
            shard,
            jax.random.key(1),
            num_classes=NUM_CLASSES,
            rows=rows,
            length=shard.size // rows if length is None else length,
            batch_size=4,
        )

    for who, expected in lengths.items():
        check(of(jnp.int32(who)), set(federations.rows_of(HELD, who).tolist()), expected)


def test_draws_are_of_real_rows_and_keep_inputs_with_their_labels() -> None:
    real = jnp.arange(5) < 3
    x = jnp.where(real, jnp.arange(1.0, 6), 0)
    told = MeanExamples(x[:, None], jax.nn.one_hot(jnp.arange(5), 5) * real[:, None], real)
    draw = jax.jit(mean_examples.draw, static_argnums=2)
    drawn_x, drawn_y = map(np.asarray, draw(told, jax.random.key(0), 3000))
    assert drawn_x.shape == (3000, 1)
    np.testing.assert_array_equal(drawn_y.argmax(1) + 1, drawn_x[:, 0])
    often = np.bincount(np.asarray(drawn_x[:, 0], int), minlength=4)[1:4] / 3000
    np.testing.assert_allclose(often, 1 / 3, atol=5 * np.sqrt(2 / 9 / 3000))
    none = jax.tree.map(jnp.zeros_like, told)
    drawn_x, drawn_y = map(np.asarray, draw(none, jax.random.key(0), 7))
    assert not drawn_x.any()
    assert not drawn_y.any()


def algorithm(**arguments: object) -> Algorithm:
    work = local.full_batch(optax.sgd(0.1), capacity=max(SIZES))
    gradient = averaging.gradient(MODEL)
    return averaging.averaging(
        MODEL,
        work,
        lambda visit: gradient,
        server_optimizer=optax.sgd(1.0),
        weighting="size",
        side=mean_examples.side_state(MODEL, **arguments),
    )


def kept(attend: list[list[int]], **arguments: object) -> list[MeanExamples]:
    """What the server keeps after each round of these slots; -1 is an empty one."""
    made = algorithm(**arguments)

    @jax.jit
    def start() -> rounds.State:
        variables = MODEL.init(jax.random.key(0), HELD.data.x[:1])
        return rounds.init(made, variables, HELD, jax.random.key(0))

    state = start()
    step = jax.jit(
        lambda state, cohort: rounds.step(made, state, cohort, HELD, axis=devices.chunked(1))[0]
    )
    told = [jax.device_get(state.server.side.averages)]
    for slots in attend:
        who = np.array(slots, np.int32)
        cohort = Cohort(np.maximum(who, 0), who >= 0, np.zeros_like(who))
        state = step(state, cohort)
        told.append(jax.device_get(state.server.side.averages))
    return told


def test_the_pool_is_the_rows_of_the_rounds_clients_in_their_order() -> None:
    attend = [[3, 1, 0, -1], [4, 2, -1, -1], [-1, -1, -1, -1], *[[3, 1, 0, -1]] * 3]
    before, first, second, third, *again = kept(attend, rows=3, chunk=3)
    assert before.x.shape == (5 * 3, NUM)
    assert not before.real.any()
    own = {who: set(federations.rows_of(HELD, who).tolist()) for who in range(5)}
    check(first, own[0] | own[3], [3, 1, 3, 3, 1])
    for rows, who in ((first.x[:2], 0), (first.x[2:5], 3)):
        assert set(np.flatnonzero(np.asarray(rows).any(0)).tolist()) == own[who]
    check(second, own[2] | own[4], [1, 3, 2])
    federations.assert_equal(third, second)  # nobody came
    for told in again:
        check(told, own[0] | own[3], [3, 1, 3, 3, 1])
    assert any((told.x != first.x).any() for told in again)  # clients draw anew in every round
    other = kept([[-1, 0, 1, -1, -1, 3]], rows=3, chunk=3)[1]
    federations.assert_equal(other, first)


def test_the_papers_server_averages_clients_rows_in_equal_chunks() -> None:
    attend = [[3, 1, 0, 4], [2, -1, -1, -1], [4, 2, 1, -1]]
    before, first, second, third = kept(attend, combining="paper", rows=2, chunk=3)
    assert before.x.shape == (2, NUM)
    assert not before.real.any()
    # Three clients with two rows each make two rows of three.
    assert first.real.all()
    np.testing.assert_allclose(first.x.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(first.y.sum(1), 1, rtol=1e-6)
    members = np.asarray(first.x) > 0
    assert not (members[0] & members[1]).any()
    # Of 4, 7 and 5 examples, chunks hold 2, 3 and 2; each weighs a third of a row.
    assert members.sum() == 2 * (2 + 3 + 2)
    weights = {0: 1 / 6, 3: 1 / 9, 4: 1 / 6}
    for who, weight in weights.items():
        rows = federations.rows_of(HELD, who)
        values = np.asarray(first.x)[:, rows]
        np.testing.assert_allclose(values[values > 0], weight, rtol=1e-5)
    assert not second.real.any()  # a client with fewer examples than rows has none
    check(third, set(federations.rows_of(HELD, 4).tolist()), [2, 2])
    other = kept([[-1, 0, 4, -1, 1, 3]], combining="paper", rows=2, chunk=3)[1]
    federations.assert_close(other, first)


def test_the_papers_server_draws_anew_in_every_round() -> None:
    """Of the same rows of the same clients."""
    side = mean_examples.side_state(MODEL, combining="paper", rows=2)
    x, y = jnp.eye(10).reshape(5, 2, 10), jnp.ones((5, 2, NUM_CLASSES)) / NUM_CLASSES
    key = jax.random.key(0)
    sample = jnp.zeros((1, 10))
    start = side.init(Setup(MODEL.init(key, sample), 5, sample, key, jnp.ones(5, bool)))
    everyone, sizes = jnp.ones(5, bool), jnp.full(5, 4, jnp.int32)
    sent = Stack(MeanExamples(x, y, jnp.ones((5, 2), bool)), everyone, jnp.arange(5), sizes)

    def after(kept: mean_examples.Pool, _: None) -> tuple[mean_examples.Pool, Array]:
        kept = side.update(kept, sent, ())
        return kept, kept.averages.x

    _, drawn = jax.jit(lambda: jax.lax.scan(after, start, length=50))()
    # Each client's row is in the server's first one in about half of the rounds.
    first = np.asarray(drawn)[:, 0] > 0
    assert (first.sum(1) == 5).all()
    np.testing.assert_allclose(first.mean(0), 0.5, atol=5 * 0.5 / np.sqrt(50))


def test_painted_images_are_averaged_as_they_are_seen() -> None:
    stored, key = {"strokes": jnp.arange(6)[:, None]}, jax.random.key(0)
    painted = models.painted(MODEL, lambda x: x["strokes"].astype(jnp.float32) ** 2)
    side = mean_examples.side_state(painted, rows=1, chunk=6)
    sample = jax.tree.map(lambda leaf: leaf[:1], stored)
    start = side.init(Setup(painted.init(key, sample), 1, sample, key, jnp.ones(1, bool)))
    zero = jnp.int32(0)
    shard = Shard(
        Examples(stored, jnp.zeros(6, jnp.int32)), jnp.arange(6), zero, jnp.int32(6), zero
    )
    message = averaging.Message((), side.send(start))
    found = side.upload(Visit(message, (), shard, zero, zero, key), None)
    np.testing.assert_allclose(found.x, [[np.mean(np.arange(6) ** 2)]], rtol=1e-6)
