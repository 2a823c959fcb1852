"""Robust rules: what a server makes of uploads of which some may be wrong, or hostile.

All rules see every upload of a round [S, ...], of which `present` says which came, and count
clients alike. f is the number of wrong clients that a rule is asked to stand. A rule that drops
whoever looks different also drops the client whose domain differs.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_inv import aggregators, averaging, checks, tree, types
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Array, Tree


def _sorted(values: Array, present: Array) -> Array:
    """Return values [S, ...] in rising order along the slots, those of absent slots last."""
    return jnp.sort(jnp.where(_along(present, values), values, jnp.inf), axis=0)


def _along(of_slots: Array, values: Array) -> Array:
    """Return numbers of slots [S] in the rank of values [S, ...]."""
    return of_slots.reshape(-1, *[1] * (values.ndim - 1))


def _weighted(uploads: Tree, weights: Array) -> Tree:
    """Return the mean of uploads [S, ...] with weights [S], of which one is above 0."""
    return tree.weighted_sum(uploads, weights / weights.sum())


def median() -> types.Aggregator:
    """Return the median of each coordinate (Yin et al. 2018, arXiv 1803.01498, Definition 1)."""

    def combine(uploads: Tree, present: Array) -> Tree:
        number = present.sum()

        def leaf(values: Array) -> Array:
            rising = _sorted(values, present)
            return (rising[(number - 1) // 2] + rising[number // 2]) / 2

        return jax.tree.map(leaf, uploads)

    return aggregators.of_all(combine)


def trimmed_mean(share: float) -> types.Aggregator:
    """Return the mean of each coordinate without its extremes (Yin et al. 2018, Definition 2).

    Of n values the floor(share x n) smallest and as many of the largest are left out; `share` is in
    [0, 0.5).
    """
    checks.real("share", share, 0, 0.5)
    if share == 0.5:
        raise UsageError("share", share, "must be below 0.5")

    def combine(uploads: Tree, present: Array) -> Tree:
        number = present.sum()
        trimmed = jnp.floor(share * number + 1e-6).astype(int)  # 0.1 x 30 is 3 in float32, too
        place = jnp.arange(len(present))
        is_kept = (place >= trimmed) & (place < number - trimmed)

        def leaf(values: Array) -> Array:
            kept = _along(is_kept, values)
            return jnp.where(kept, _sorted(values, present), 0).sum(0) / is_kept.sum()

        return jax.tree.map(leaf, uploads)

    return aggregators.of_all(combine)


def geometric_median(*, num_steps: int = 8, smoothing: float = 1e-6) -> types.Aggregator:
    """Return the point of least total distance to the uploads (RFA, Pillutla et al. 2022).

    arXiv 1912.13445, Algorithm 2: the smoothed Weiszfeld algorithm from the mean. `smoothing`,
    above 0, is the least distance that a step divides by, in units of the mean distance.
    """
    checks.integer("num_steps", num_steps)
    checks.positive("smoothing", smoothing)

    def combine(uploads: Tree, present: Array) -> Tree:
        def step(weights: Array, _: None) -> tuple[Array, None]:
            centre = _weighted(uploads, weights)
            distance = jnp.sqrt(_squared_distances(uploads, centre))
            mean = jnp.where(present, distance, 0).sum() / present.sum()
            ratio = distance / jnp.where(mean > 0, mean, 1)
            return jnp.where(present, 1 / jnp.maximum(ratio, smoothing), 0), None

        weights, _ = jax.lax.scan(step, present.astype(float), length=num_steps)
        return _weighted(uploads, weights)

    return aggregators.of_all(combine)


def krum(num_wrong: int, *, num_chosen: int = 1) -> types.Aggregator:
    """Return the mean of the `num_chosen` uploads that lie closest to others; 1: Krum.

    Blanchard et al. 2017, "Machine Learning with Adversaries", Section 4. Of n uploads, the score
    of one is the sum of its squared distances to its n - f - 2 nearest others, and those of least
    score are chosen. `num_wrong` is f; a cohort has at least 2 f + 3 slots. If fewer arrive, at
    least the nearest one counts.
    """
    checks.integer("num_wrong", num_wrong, 0)
    checks.integer("num_chosen", num_chosen)

    def combine(uploads: Tree, present: Array) -> Tree:
        slots = jnp.arange(len(present))
        # One upload beside all others at a time, not S x S copies of a network.
        squared = jax.lax.map(
            lambda one: _squared_distances(uploads, tree.take(uploads, one)), slots
        )
        is_other = present & (slots != slots[:, None])
        rising = jnp.sort(jnp.where(is_other, squared, jnp.inf), axis=1)
        number = jnp.maximum(present.sum() - num_wrong - 2, 1)
        score = jnp.where((slots < number) & jnp.isfinite(rising), rising, 0).sum(1)
        order = jnp.argsort(jnp.where(present, score, jnp.inf), stable=True)
        is_chosen = jnp.zeros_like(present).at[order[:num_chosen]].set(True) & present
        return _weighted(uploads, is_chosen.astype(float))

    return aggregators.of_all(combine, least=2 * num_wrong + 3)


def clipped_mean(clip: float | Array) -> types.Aggregator:
    """Return the mean of uploads whose L2 norm is scaled down to `clip` (Sun et al. 2019).

    arXiv 1911.07963, Section 4.2, without its noise, which `private.private` adds. Of a network's
    variables only the change of the parameters is scaled, as statistics are no change.
    """
    checks.positive("clip", clip)
    plain = aggregators.mean(aggregators.uniform)

    def clipped(upload: Tree) -> Tree:
        if isinstance(upload, types.Variables):
            return upload._replace(params=tree.clipped(upload.params, clip))
        return tree.clipped(upload, clip)

    def add(total: Tree, uploads: Tree, slots: types.Slots) -> Tree:
        return plain.add(total, jax.vmap(clipped)(uploads), slots)

    return plain._replace(add=add)


def _squared_distances(uploads: Tree, to: Tree) -> Array:
    """Return the squared distance [S] of each upload [S, ...] to one."""
    difference = jax.tree.map(lambda values, one: tree.wide(values - one), uploads, to)
    return jax.vmap(lambda one: optax.tree.norm(one, squared=True))(difference)


def aggregated(algorithm: types.Algorithm, rule: types.Aggregator) -> types.Algorithm:
    """Return `algorithm` with a robust rule in place of its mean over clients.

        def make(*parts, **settings):
            return robust.aggregated(fedavg.fedavg(*parts, **settings), robust.median())

    Its only upload must be that of FedAvg, the change of the parameters, and statistics
    (BatchNorm), which the rule combines as well. Raises UsageError for another one.
    """
    exchange = averaging.sole_exchange(algorithm)

    def init_server(setup: types.Setup) -> Tree:
        server = algorithm.init_server(setup)
        averaging.check_upload(exchange, server, stats=True)
        return server

    parts = averaging.Upload(rule, aggregators.total(), aggregators.count())
    # Without a blank, so that no wrapper takes the upload for one that is averaged.
    changed = exchange._replace(aggregate=aggregators.combine(parts), blank=None)
    return algorithm._replace(init_server=init_server, exchanges=(changed,))
