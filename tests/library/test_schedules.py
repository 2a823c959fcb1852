from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from federations import assert_equal
from fedjax_inv import schedules, tree
from fedjax_inv.types import Cohort, Tree


def compiled(make: Callable[[], Tree]) -> Tree:
    """Return make() on the host, compiled as one program: op by op it would take a second."""
    return jax.tree.map(np.asarray, jax.jit(make)())


def test_everyone() -> None:
    schedule = schedules.everyone(3, 4)
    assert_equal(schedule.who, np.tile(np.arange(3, dtype=np.int32), (4, 1)))
    assert schedule.present.all()
    assert not schedule.delay.any()
    assert schedule.who.dtype == schedule.delay.dtype == jnp.int32


def test_sampled_is_uniform_without_replacement_and_a_longer_one_starts_with_it() -> None:
    num_rounds = 2000
    schedule, shorter, other = compiled(
        lambda: [
            schedules.sampled(jax.random.key(seed), 5, 2, length)
            for seed, length in ((0, num_rounds), (0, 5), (1, num_rounds))
        ]
    )
    assert schedule.present.all()
    assert not schedule.delay.any()
    assert_equal(tree.take(schedule, slice(5)), shorter)
    assert (other.who != schedule.who).any()
    pairs, counts = np.unique(np.sort(schedule.who, axis=1), axis=0, return_counts=True)
    np.testing.assert_array_equal(pairs, np.stack(np.triu_indices(5, 1), 1))
    # Six standard deviations of a mean of `num_rounds` draws with probability 1/10.
    np.testing.assert_allclose(counts / num_rounds, 0.1, atol=6 * np.sqrt(0.09 / num_rounds))


FULL = schedules.everyone(3, 400)
KEY = jax.random.key(0)


def test_dropout_extremes_and_per_client() -> None:
    per_client = jnp.array([0.0, 1.0, 0.3])
    nobody, everybody, dropped, twice = compiled(
        lambda: [
            schedules.dropout(FULL, KEY, 0.0),
            schedules.dropout(FULL, KEY, 1.0),
            dropped := schedules.dropout(FULL, KEY, per_client),
            schedules.dropout(dropped, KEY, 0.0),
        ]
    )
    assert nobody.present.all()
    assert not everybody.present.any()
    share = dropped.present.mean(0)
    assert share[0] == 1
    assert share[1] == 0
    np.testing.assert_allclose(share[2], 0.7, atol=6 * np.sqrt(0.21 / 400))
    assert_equal(dropped.who, FULL.who)
    # An absent client stays absent.
    assert_equal(twice.present, dropped.present)


def test_dropout_is_drawn_by_round_and_client_and_can_be_vmapped() -> None:
    probabilities = jnp.array([0.0, 0.4, 0.5])

    def present(probability: float | jax.Array, schedule: Cohort = FULL) -> jax.Array:
        return schedules.dropout(schedule, KEY, probability).present

    behind, shorter, one_by_one, together = compiled(
        lambda: [
            present(0.5, FULL._replace(who=FULL.who[:, ::-1])),
            present(0.5, tree.take(FULL, slice(30))),
            jnp.stack([present(p) for p in probabilities]),
            jax.vmap(present)(probabilities),
        ]
    )
    first = one_by_one[2]
    assert_equal(behind, first[:, ::-1])
    assert_equal(shorter, first[:30])
    assert_equal(together, one_by_one)
    assert len(np.unique(first, axis=0)) > 1  # rounds differ
    assert len(np.unique(first, axis=1).T) > 1  # clients differ


def test_delayed_and_every_follow_the_client() -> None:
    who = np.random.default_rng(0).permuted(np.tile(np.arange(5), (12, 1)), axis=1)[:, :3]
    delay, period = jnp.array([0, 3, 1, 2, 0]), np.array([1, 2, 3, 4, 5])
    schedule = schedules.everyone(3, 12)._replace(who=jnp.asarray(who))
    late, rare, rarer, all_late, all_rare = compiled(
        lambda: [
            schedules.delayed(schedule, delay),
            rare := schedules.every(schedule, period),
            schedules.every(rare, np.ones(5, int)),
            schedules.delayed(schedule, 2),
            schedules.every(schedule, 4),
        ]
    )
    assert_equal(late.delay, delay[who])
    assert_equal(rare.present, np.arange(12)[:, None] % period[who] == 0)
    assert rare.present[0].all()
    assert_equal(rarer.present, rare.present)
    # A scalar counts for every client.
    assert_equal(all_late.delay, np.full((12, 3), 2, np.int32))
    assert_equal(all_rare.present, np.tile(np.arange(12)[:, None] % 4 == 0, 3))


def test_a_slow_client_sends_an_update_of_the_network_that_it_began_with() -> None:
    """Against a simulation: download, work for m rounds, upload, download again."""
    num_rounds, needed = 13, np.array([1, 2, 3, 5])
    slow, none, all_slow = compiled(
        lambda: [
            schedules.slow(schedule := schedules.everyone(4, num_rounds), needed),
            schedules.slow(schedule, 1),
            schedules.slow(schedule, 3),
        ]
    )
    for client, m in enumerate(needed):
        # Round t makes w_{t + 1} of the updates that arrive; all clients attend the first round.
        arrives, begun = {0: 0}, 1
        while begun + m - 1 < num_rounds:
            arrives[begun + m - 1] = begun
            begun += m
        assert_equal(np.flatnonzero(slow.present[:, client]), np.array(sorted(arrives)))
        for t, heard in arrives.items():
            # The engine's oldest broadcast is that of round 0.
            assert max(t - slow.delay[t, client], 0) == heard
            assert t == 0 or heard == t + 1 - m
    assert_equal(none, schedules.everyone(4, num_rounds))
    assert_equal(all_slow, tree_of(slow, 2))


def tree_of(schedule: Cohort, client: int) -> Cohort:
    """Return the schedule in which all clients attend as one of its clients does."""
    like = jax.tree.map(lambda leaf: np.repeat(leaf[:, client, None], 4, 1), schedule)
    return like._replace(who=schedule.who)


@pytest.mark.parametrize(("num_clients", "num_slots"), [(5, 5), (5, 2), (3, 7), (1, 1)])
def test_first_all_lets_each_attend_once_and_leaves_the_rest(
    num_clients: int, num_slots: int
) -> None:
    rng = np.random.default_rng(0)
    shape = (6, num_slots)
    before = Cohort(rng.integers(0, num_clients, shape), rng.random(shape) < 0.3, np.ones(shape))
    before = before._replace(who=before.who.astype(np.int32), delay=before.delay.astype(np.int32))
    after = compiled(lambda: schedules.first_all(jax.tree.map(jnp.asarray, before), num_clients))
    needed = -(-num_clients // num_slots)
    first = tree.take(after, slice(needed))
    assert sorted(first.who[first.present]) == list(range(num_clients))
    assert not first.delay.any()
    assert_equal(tree.take(after, slice(needed, None)), tree.take(before, slice(needed, None)))


def test_a_cohort_has_as_many_clients_as_there_are() -> None:
    for cohort in (0, 4):
        with pytest.raises(ValueError, match="cohort"):
            schedules.sampled(KEY, 3, cohort, 2)


def test_sampling_rates_are_rounded_and_select_somebody() -> None:
    assert [schedules.cohort_size(100, rate) for rate in (0.1, 0.3, 0.5, 1)] == [10, 30, 50, 100]
    assert schedules.cohort_size(7, 0.5) == 4
    for rate in (0.0, -0.1, 1.1, np.nan, 0.001):
        with pytest.raises(ValueError, match="rate"):
            schedules.cohort_size(100, rate)


def test_a_part_of_the_clients_uploads_rarely() -> None:
    sparse, keys = 0.3, jax.random.split(KEY, 200)
    draw = jax.jit(
        jax.vmap(lambda k: schedules.upload_probabilities(k, 10, sparse=sparse, frequency=0.25))
    )
    rare = np.asarray(draw(keys)) == 0.25
    assert_equal(np.where(rare, 0.25, 1.0).astype(np.float32), draw(keys))
    assert (rare.sum(1) == round(10 * sparse)).all()
    # Each client is sparse equally often.
    np.testing.assert_allclose(rare.mean(0), sparse, atol=6 * np.sqrt(0.25 / 200))


@pytest.mark.parametrize("longest", [2, 50])
def test_a_late_update_is_of_the_broadcast_that_it_began_with(longest: int) -> None:
    """Against a loop over each client's rounds."""
    probability = jnp.array([0.0, 0.6, 0.9, 1.0])
    drawn, dropped, late = compiled(
        lambda: [
            full := schedules.sampled(KEY, 4, 3, 60),
            schedules.dropout(full, KEY, probability),
            schedules.stale(full, KEY, probability, 4, longest=longest),
        ]
    )
    # The same uploads arrive; they were computed from other broadcasts.
    assert_equal(late.who, drawn.who)
    assert_equal(late.present, dropped.present)
    delays = []
    for client in range(4):
        began = None
        for t, slot in np.argwhere(drawn.who == client):
            if began is None or t - began > longest:
                began = t
            if late.present[t, slot]:
                assert late.delay[t, slot] == t - began
                delays.append(t - began)
                began = None
    assert max(delays) > (1 if longest == 2 else 5)
    assert max(delays) <= longest
    assert not late.delay[(late.who == 0) & late.present].any()


@pytest.mark.parametrize(
    ("concurrency", "buffer", "longest"), [(6, 2, None), (4, 3, None), (2, 5, None), (6, 3, 1)]
)
def test_a_buffer_fills_as_a_queue_of_events_does(
    concurrency: int, buffer: int, longest: int | None
) -> None:
    """Against a loop over clocks: of those that arrive at once, the version's order decides."""
    num_clients, num_rounds, seconds = 7, 40, np.array([1, 1, 2, 3.5, 0.25, 2, 9])
    order, got = compiled(
        lambda: [
            schedules.sampled(KEY, num_clients, num_clients, num_rounds).who,
            schedules.buffered(buffer, concurrency, seconds, longest=longest)(
                KEY, num_clients, num_rounds
            ),
        ]
    )
    most = schedules.oldest(buffer, concurrency, seconds) if longest is None else longest
    clock, ends, begun = 0.0, dict[int, float](), dict[int, int]()
    for version in range(num_rounds):
        rank, rests = order[version].tolist(), list[int]()
        for c in [c for c in ends if version - begun[c] > (longest or num_rounds)]:
            del ends[c]
        while len(rests) < buffer:
            if clock not in ends.values() or not rests:
                idle = [c for c in rank if c not in ends and c not in rests]
                for c in idle[: concurrency - len(ends)]:
                    ends[c], begun[c] = clock + seconds[c], version
            clock = min(ends.values())
            who = next(c for c in rank if ends.get(c) == clock)
            place = version, len(rests)
            assert (got.who[place], got.delay[place]) == (who, version - begun[who])
            del ends[who]
            rests.append(who)
    assert got.present.all()
    schedules.check(got, num_clients, 1 + most)
    assert got.delay.max() > 0 or concurrency < buffer
    assert (6 in got.who) == (longest is None)  # the slowest gives up before it delivers


def test_equally_fast_clients_fill_a_buffer_of_their_number_as_sampled_ones() -> None:
    for cohort in (3, 5):
        sampled, got, faster = compiled(
            lambda cohort=cohort: [
                schedules.sampled(KEY, 5, cohort, 20),
                schedules.buffered(cohort, cohort)(KEY, 5, 20),
                schedules.buffered(cohort, cohort, [0.3] * 5)(KEY, 5, 20),
            ]
        )
        assert_equal(got, sampled)
        assert_equal(faster, sampled)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("buffer", (6,)), ("concurrency", (2, 6)), ("seconds", (2, 2, [1.0, 0.0, 1, 1, 1]))],
)
def test_a_buffer_of_more_clients_than_there_are(name: str, settings: tuple) -> None:
    with pytest.raises(ValueError, match=name):
        schedules.buffered(*settings)(KEY, 5, 2)


def test_a_longer_stale_schedule_starts_with_the_shorter_and_absent_clients_begin_nothing() -> None:
    def stale(length: int) -> Cohort:
        return schedules.stale(schedules.everyone(3, length), KEY, 0.5, 3, longest=9)

    short, long = compiled(lambda: [stale(8), stale(12)])
    assert_equal(jax.tree.map(lambda leaf: leaf[:8], long), short)
    # An absent client begins nothing.
    absent = schedules.everyone(1, 5)._replace(present=jnp.array([[0], [0], [1], [0], [1]], bool))
    late = compiled(lambda: schedules.stale(absent, KEY, 0.0, 1, longest=9))
    assert_equal(late.present, absent.present)
    assert not np.asarray(late.delay)[np.asarray(late.present)].any()
