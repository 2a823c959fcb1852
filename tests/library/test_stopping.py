"""The stop rule against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_inv import stopping

# Multiples of 1/8, so that accuracies may equal a threshold; then they are not below it.
EIGHTHS = st.integers(0, 8).map(lambda n: n / 8)


def played(accuracies, thresholds, warm_start, above=False):
    """Return the stops after a curve of accuracies; the score of a round is twice its accuracy."""

    def one(stops, at):
        num_rounds, accuracy = at

        def measure(needed):
            return {"score": jnp.where(needed, 2 * accuracy, jnp.nan), "round": num_rounds}

        stops = stopping.update(
            stops,
            accuracy,
            thresholds=jnp.array(thresholds, jnp.float32),
            num_rounds=num_rounds,
            warm_start=warm_start,
            measure=measure,
            above=above,
        )
        return stops, stopping.all_met(stops)

    shapes = {"score": jax.ShapeDtypeStruct((), jnp.float32), "round": jnp.int32(0)}
    start = stopping.init(len(thresholds), shapes)
    rounds = jnp.arange(1, len(accuracies) + 1, dtype=jnp.int32)
    return jax.lax.scan(one, start, (rounds, jnp.array(accuracies, jnp.float32)))


jitted = jax.jit(played, static_argnames="above")


@settings(max_examples=25, deadline=None)
@given(
    accuracies=st.lists(EIGHTHS, min_size=6, max_size=6),
    thresholds=st.lists(EIGHTHS, min_size=3, max_size=3),
    warm_start=st.integers(0, 8),
    above=st.booleans(),
)
def test_each_threshold_stops_in_the_first_round_below_it(
    accuracies, thresholds, warm_start, above
):
    """Or, with `above`, in the first round that reaches it."""
    stops, ended = jax.tree.map(
        np.asarray,
        jitted(np.array(accuracies), np.array(thresholds), warm_start, above=above),
    )
    rounds = []
    for index, threshold in enumerate(thresholds):
        met = [
            t
            for t, accuracy in enumerate(accuracies, 1)
            if (accuracy >= threshold) == above and t >= warm_start
        ]
        rounds.append(met[0] if met else 0)
        assert stops.round[index] == rounds[-1]
        assert stops.scores["round"][index] == rounds[-1]
        expected = 2 * accuracies[met[0] - 1] if met else 0
        assert stops.scores["score"][index] == expected
    last = max(rounds) if all(rounds) else len(accuracies) + 1
    np.testing.assert_array_equal(ended, np.arange(1, len(accuracies) + 1) >= last)


@pytest.mark.parametrize("above", [False, True])
def test_a_nan_accuracy_stops_nothing(above):
    stops, ended = played([jnp.nan, jnp.nan], [0.9], 0, above)
    assert not stops.round.any()
    assert not ended.any()


@pytest.mark.parametrize("above", [False, True])
def test_an_accuracy_is_compared_in_32_bits_outside_of_programs_too(above) -> None:
    stops = stopping.update(
        stopping.init(1, jax.ShapeDtypeStruct((), jnp.float32)),
        np.float32(0.7),
        thresholds=np.array([0.7]),  # of 64 bits, and above the number of 32 bits
        num_rounds=np.int32(3),
        warm_start=0,
        measure=lambda now: jnp.zeros(()),
        above=above,
    )
    assert stops.round == 3 * above


@pytest.mark.parametrize("accuracy", [0.2, 0.9])
def test_measure_learns_whether_it_is_needed(accuracy):
    needed = []
    stopping.update(
        stopping.init(2, jnp.float32(0)),
        jnp.float32(accuracy),
        thresholds=jnp.array([0.5, 0.4]),
        num_rounds=jnp.int32(3),
        warm_start=1,
        measure=lambda is_needed: needed.append(bool(is_needed)) or jnp.float32(0),
    )
    assert needed == [accuracy < 0.5]
