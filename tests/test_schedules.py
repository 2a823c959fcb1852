import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federations import assert_equal
from fedjax_inv import schedules, tree

sampled = jax.jit(schedules.sampled, static_argnums=(1, 2, 3))


def test_everyone() -> None:
    schedule = schedules.everyone(3, 4)
    assert_equal(schedule.who, np.tile(np.arange(3), (4, 1)))
    assert schedule.present.all()
    assert not schedule.delay.any()
    assert schedule.who.dtype == schedule.delay.dtype == jnp.int32


@given(seed=st.integers(0, 999), size=st.sampled_from([(1, 1), (5, 2), (4, 4)]))
def test_sampled_without_replacement_and_a_longer_one_starts_with_it(
    seed: int, size: tuple[int, int]
) -> None:
    (num_clients, cohort), key = size, jax.random.key(seed)
    schedule = sampled(key, num_clients, cohort, 5)
    assert schedule.who.shape == (5, cohort)
    for round_ in np.asarray(schedule.who):
        assert len(set(round_)) == cohort
        assert set(round_) <= set(range(num_clients))
    longer = sampled(key, num_clients, cohort, 9)
    assert_equal(tree.take(longer, slice(5)), schedule)


def test_sampled_is_uniform() -> None:
    num_clients, cohort, num_rounds = 5, 2, 2000
    schedule = schedules.sampled(jax.random.key(0), num_clients, cohort, num_rounds)
    share = np.bincount(np.asarray(schedule.who).ravel(), minlength=num_clients) / num_rounds
    # Six standard deviations of a mean of `num_rounds` draws with probability 2/5.
    np.testing.assert_allclose(share, cohort / num_clients, atol=6 * np.sqrt(0.24 / num_rounds))
    pairs = {tuple(sorted(pair)) for pair in np.asarray(schedule.who).tolist()}
    assert len(pairs) == 10
    other = schedules.sampled(jax.random.key(1), num_clients, cohort, num_rounds)
    assert (other.who != schedule.who).any()


@pytest.mark.parametrize("cohort", [0, 4])
def test_sampled_refuses_an_impossible_cohort(cohort: int) -> None:
    with pytest.raises(ValueError, match=f"cohort={cohort}: must be between 1 and the 3 clients"):
        schedules.sampled(jax.random.key(0), 3, cohort, 2)


def test_turns_after_a_round_of_all() -> None:
    schedule = schedules.turns(2, 7, together=True)
    np.testing.assert_array_equal(schedule.who, [[0, 1]] * 7)
    cycle = [[1, 1], [1, 0], [0, 1]]
    np.testing.assert_array_equal(schedule.present, [*cycle, *cycle, cycle[0]])


def test_turns() -> None:
    schedule = schedules.turns(3, 7)
    assert_equal(schedule.who, np.array([[0], [1], [2], [0], [1], [2], [0]]))
    assert schedule.present.all()


def test_dropout_extremes_and_per_client() -> None:
    full, key = schedules.everyone(3, 400), jax.random.key(0)
    assert schedules.dropout(full, key, 0.0).present.all()
    assert not schedules.dropout(full, key, 1.0).present.any()
    dropped = schedules.dropout(full, key, jnp.array([0.0, 1.0, 0.3]))
    share = np.asarray(dropped.present).mean(0)
    assert share[0] == 1
    assert share[1] == 0
    np.testing.assert_allclose(share[2], 0.7, atol=6 * np.sqrt(0.21 / 400))
    assert_equal(dropped.who, full.who)
    # What is absent stays absent.
    assert_equal(schedules.dropout(dropped, key, 0.0).present, dropped.present)


def test_dropout_is_drawn_by_round_and_client() -> None:
    key = jax.random.key(0)
    ahead = schedules.everyone(6, 30)
    behind = ahead._replace(who=ahead.who[:, ::-1])
    first = schedules.dropout(ahead, key, 0.5).present
    assert_equal(schedules.dropout(behind, key, 0.5).present, first[:, ::-1])
    longer = schedules.dropout(schedules.everyone(6, 40), key, 0.5)
    assert_equal(longer.present[:30], first)
    assert len(np.unique(first, axis=0)) > 1  # rounds differ
    assert len(np.unique(first, axis=1).T) > 1  # clients differ


@pytest.mark.parametrize("probability", [-0.1, 1.1, [0.5, 2.0]])
def test_dropout_refuses_what_is_no_probability(probability: float | list[float]) -> None:
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        schedules.dropout(schedules.everyone(2, 2), jax.random.key(0), jnp.asarray(probability))


def test_dropout_can_be_vmapped_over_its_probability() -> None:
    full = schedules.everyone(4, 50)

    def present(probability: jax.Array) -> jax.Array:
        return schedules.dropout(full, jax.random.key(0), probability).present

    probabilities = jnp.array([0.0, 0.4, 1.0])
    one_by_one = jnp.stack([present(p) for p in probabilities])
    assert_equal(jax.vmap(present)(probabilities), one_by_one)


def test_delayed_and_every_follow_the_client() -> None:
    schedule = schedules.sampled(jax.random.key(0), 5, 3, 12)
    who = np.asarray(schedule.who)
    delay, period = np.array([0, 3, 1, 2, 0]), np.array([1, 2, 3, 4, 5])
    assert_equal(schedules.delayed(schedule, jnp.asarray(delay)).delay, delay[who])
    rare = schedules.every(schedule, jnp.asarray(period))
    expected = [[t % period[client] == 0 for client in round_] for t, round_ in enumerate(who)]
    assert_equal(rare.present, np.array(expected))
    assert rare.present[0].all()
    assert_equal(schedules.every(rare, jnp.ones(5, jnp.int32)).present, rare.present)
