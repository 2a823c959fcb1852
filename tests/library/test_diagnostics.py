"""Agreement of clients against a loop over them."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import federations
from fedjax_inv import devices, diagnostics, models
from fedjax_inv.algorithms import fedipg
from fedjax_inv.data import federation as federations_of
from fedjax_inv.types import Array, Federation, Halves, Tree, Variables
from test_fedipg import point, real_examples, widened

MODEL = federations.normed_body()  # with statistics


def agreement(
    variables: Variables, federation: Federation, axis: devices.Axis | None = None
) -> diagnostics.Agreement:
    """Return the agreement, jitted, in batches of which the last is smaller."""
    fn = partial(diagnostics.agreement, MODEL, axis=axis, batch_size=3)
    return jax.jit(fn)(variables, widened(federation))


def network() -> Variables:
    """Return a network with statistics unlike those of any batch."""
    variables = point(MODEL)
    stats = jax.tree.map(lambda leaf: np.asarray(leaf) ** 2 + 0.5, variables.stats)
    return variables._replace(stats=stats)


def numbers_of(got: diagnostics.Agreement, who: int) -> np.ndarray:
    """Return the risk of a client, the norm of its gradient, and its invariance by both halves."""
    return np.stack([leaf[who] for leaf in jax.tree.leaves(got[:3])])


def flat(half: Tree) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(half)])


@cache
def by_hand() -> tuple[dict[int, np.ndarray], float]:
    """Return (`numbers_of` each client that has examples, the mean cosine of their pairs)."""
    variables = network()

    @jax.jit
    def client(x: Array, y: Array) -> tuple[Array, Halves, Array]:
        def risk(params: Halves) -> Array:
            logits = models.predict(MODEL, Variables(params, variables.stats), x)
            return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        s = fedipg.invariance(risk, variables.params)
        return *jax.value_and_grad(risk)(variables.params), s

    w, numbers, units = [flat(half) for half in variables.params], {}, []
    for who in np.flatnonzero(federations.SIZES):
        value, grads, s = client(*real_examples(who))
        halves = [flat(half) for half in grads]
        inner = [half @ weights for half, weights in zip(halves, w, strict=True)]
        np.testing.assert_allclose(sum(inner), s, rtol=1e-9)
        g = np.concatenate(halves)
        numbers[who] = np.array([value, np.linalg.norm(g), *inner])
        units.append(g / np.linalg.norm(g))
    cosines = [first @ second for first, second in itertools.combinations(units, 2)]
    assert len(cosines) == 6
    return numbers, float(np.mean(cosines))


@pytest.mark.parametrize(
    "axis",
    [
        pytest.param(None, id="default"),
        pytest.param(devices.vmapped(), id="vmapped", marks=pytest.mark.slow),
        pytest.param(devices.chunked(3), id="chunked", marks=pytest.mark.slow),
    ],
)
def test_agreement_is_a_loop_over_clients(axis: devices.Axis | None) -> None:
    with jax.enable_x64(True):
        got = agreement(network(), federations.in_floats(federations.federation()), axis)
        numbers, cosine = by_hand()
        for who in range(federations.NUM_CLIENTS):
            expected = numbers.get(who, np.zeros(4))
            np.testing.assert_allclose(numbers_of(got, who), expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(got.cosine, cosine, rtol=1e-9)
        assert abs(cosine) > 1e-2


@pytest.mark.slow
def test_others_rows_and_their_order_do_not_matter() -> None:
    with jax.enable_x64(True):
        federation = federations.federation()
        expected = agreement(network(), federations.in_floats(federation))
        federations.assert_equal(agreement(network(), federations.relaid(federation)), expected)


def test_clients_of_the_same_examples_agree_and_one_alone_with_nobody() -> None:
    with jax.enable_x64(True):
        federation = federations.in_floats(federations.federation((4,)))
        rows = jnp.arange(3, dtype=jnp.int32)
        for num_clients, expected in ((3, 1.0), (1, 0.0)):
            same = federation._replace(
                order=rows,
                start=jnp.zeros(num_clients, jnp.int32),
                size=jnp.full(num_clients, 3, jnp.int32),
            )
            got = agreement(network(), same)
            np.testing.assert_allclose(got.cosine, expected, rtol=1e-12)
            assert got.norm.shape == (num_clients,)


@pytest.mark.slow
def test_the_number_of_pairs_of_clients_may_be_above_32_bits() -> None:
    federation = federations.in_floats(federations.federation((4,)))
    number = 50_000
    same = federation._replace(
        order=jnp.arange(3, dtype=jnp.int32),
        start=jnp.zeros(number, jnp.int32),
        size=jnp.full(number, 3, jnp.int32),
    )
    np.testing.assert_allclose(agreement(network(), same).cosine, 1, rtol=1e-2)


def test_a_wrong_argument_is_refused_in_one_line() -> None:
    federation = federations.federation()
    variables = federations.initial(MODEL, jax.random.key(0))
    with pytest.raises(ValueError, match=r"^batch_size=0: must be an integer of at least 1$"):
        diagnostics.agreement(MODEL, variables, federation, batch_size=0)
    beyond = federation._replace(order=federation.order + 99)
    with pytest.raises(ValueError, match=r"^order: holds .*, must be rows in"):
        diagnostics.agreement(MODEL, variables, beyond)
    few = federations_of.compact(federation, np.array([0, 2]))
    with pytest.raises(ValueError, match=r"^federation: is compact, must have all its clients$"):
        diagnostics.agreement(MODEL, variables, few)
