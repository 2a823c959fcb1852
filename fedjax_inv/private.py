"""Differential privacy of clients: clipped uploads, noise on their sum, a fixed divisor.

    w <- server step along (sum_i min(1, clip / ||D_i||) D_i + noise_multiplier clip N(0, I)) / n

McMahan et al. 2018, "Learning Differentially Private Recurrent Language Models" (arXiv 1710.06963),
Algorithm 1 with a fixed denominator. D_i is the whole change of a client's parameters, and n a
public number, never how many attended: so one client more or less changes the sum by at most `clip`
in L2 norm. A round that nobody attends has noise, too, as else it would tell who is absent, and no
finite epsilon would hold.

`epsilon` accounts for clients that attend each round with the same probability, independently
(`schedules.poisson`), or always. It is that of one run: who chooses among settings or seeds by
results spends more, and metrics, validation scores and numbers of examples have no protection. The
noise is pseudorandom and of float32: nothing is claimed against attacks on floating-point numbers,
nor against those who know the seed.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, keys, tree, types, wrapping
from fedjax_inv.types import Array, Tree


class Server(NamedTuple):
    """The server of the wrapped algorithm, and the state of the noise."""

    wrapped: Tree
    noise_key: Array  # the numbers of the noise's own random key
    round: Array  # [] int32, how many rounds have had noise
    divisor: Array  # [] what the sum is divided by


def private(
    algorithm: types.Algorithm,
    *,
    clip: float | Array,
    noise_multiplier: float | Array,
    sampling_rate: float | Array = 1.0,
    divisor: float | Array | None = None,
) -> types.Algorithm:
    """Return `algorithm` with clipped uploads and noise on their sum, in which all weigh alike.

        def make(*parts, **settings):
            inner = fedavg.fedavg(*parts, **settings)
            return private.private(inner, clip=1.0, noise_multiplier=0.9, sampling_rate=0.1)

        fit(make, model, clients, schedule=schedules.poisson(0.1), rounds=100)

    Args:
      algorithm: one whose only upload is that of FedAvg, the change of the parameters.
      clip: the largest L2 norm of a client's change, above 0.
      noise_multiplier: the deviation of the noise on the sum, in units of `clip`.
      sampling_rate: the probability that a client attends a round, in (0, 1].
      divisor: a public number, above 0; None: sampling_rate x the number of clients.

    Raises UsageError for an algorithm with another upload, such as SCAFFOLD, or a network with
    statistics (BatchNorm).
    """
    checks.positive("clip", clip)
    checks.real("noise_multiplier", noise_multiplier)
    checks.positive("sampling_rate", sampling_rate)
    checks.real("sampling_rate", sampling_rate, 0, 1)
    if divisor is not None:
        checks.positive("divisor", divisor)
    exchange = averaging.sole_exchange(algorithm)
    lifted = wrapping.lift(exchange)

    def init_server(setup: types.Setup) -> Server:
        server = algorithm.init_server(setup)
        averaging.check_upload(exchange, server, stats=False)
        key = keys.stream(setup.key, "private noise")
        number = sampling_rate * setup.num_clients if divisor is None else divisor
        return Server(server, jax.random.key_data(key), jnp.int32(0), jnp.asarray(number, float))

    def client(visit: types.Visit) -> types.Reply:
        reply = exchange.client(visit)
        upload: averaging.Upload = reply.upload
        params = tree.clipped(upload.delta.params, clip)
        delta = upload.delta._replace(params=params)
        return reply._replace(upload=upload._replace(delta=delta))

    def update(server: Server, total: averaging.Upload, cohort: types.Cohort) -> Server:
        key = jax.random.fold_in(jax.random.wrap_key_data(server.noise_key), server.round)
        params = total.delta.params
        noise = tree.scaled(noise_multiplier * clip, optax.tree.random_like(key, params))
        noisy = optax.tree.add(params, noise)
        delta = total.delta._replace(params=tree.scaled(1 / server.divisor, noisy))
        mean = averaging.Upload(delta, (), jnp.ones(()))
        return lifted.update(server, mean, cohort)._replace(round=server.round + 1)

    noisy_exchange = lifted._replace(
        client=client, aggregate=aggregators.total(), update=update, blank=None, unattended=True
    )
    return wrapping.around(algorithm, init_server, (noisy_exchange,))


# The budget. Neighbours are federations that differ in one client, which is added or removed.


def epsilon(
    *, noise_multiplier: float, sampling_rate: float, num_rounds: int, delta: float
) -> float:
    """Return the epsilon of a run for this delta, by privacy loss distributions; infinity if none.

    Each client attends each round with probability `sampling_rate`, independently. Noise below
    0.01 counts as none. It needs the package dp-accounting (the extra `privacy`).
    """
    _check_budget(sampling_rate, num_rounds, delta)
    checks.real("noise_multiplier", noise_multiplier)
    if noise_multiplier < 0.01:  # thousands a round, and more memory than there is
        return math.inf
    accountant = _accountant(2 / noise_multiplier**2)
    accountant.compose(_event(noise_multiplier, sampling_rate, num_rounds))
    return float(accountant.get_epsilon(delta))


def noise_multiplier_for(
    *, epsilon: float, sampling_rate: float, num_rounds: int, delta: float
) -> float:
    """Return the noise multiplier of a run of at most this epsilon, the smallest within 1e-3.

    `epsilon` is in (0, 1000].
    """
    import dp_accounting

    _check_budget(sampling_rate, num_rounds, delta)
    checks.positive("epsilon", epsilon)
    checks.real("epsilon", epsilon, 0, 1000)
    found = dp_accounting.calibrate_dp_mechanism(
        lambda: _accountant(epsilon),
        lambda noise_multiplier: _event(noise_multiplier, sampling_rate, num_rounds),
        epsilon,
        delta,
        tol=1e-3,
    )
    return float(found)


def _check_budget(sampling_rate: float, num_rounds: int, delta: float) -> None:
    checks.positive("sampling_rate", sampling_rate)
    checks.real("sampling_rate", sampling_rate, 0, 1)
    checks.integer("num_rounds", num_rounds)
    checks.positive("delta", delta)
    checks.real("delta", delta, 0, 1)


def _accountant(size: float) -> Any:
    """Return an accountant for an epsilon of this size, which a coarser grid of losses serves."""
    from dp_accounting import pld

    return pld.PLDAccountant(value_discretization_interval=1e-4 * max(1, size / 8))


def _event(noise_multiplier: float, sampling_rate: float, num_rounds: int) -> Any:
    """Return the rounds of a run as an event of dp-accounting."""
    import dp_accounting

    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    sampled = dp_accounting.PoissonSampledDpEvent(sampling_rate, gaussian)
    return dp_accounting.SelfComposedDpEvent(sampled, num_rounds)
