"""Time and memory by the number of clients, and by the number of seeds.

python -m benchmarks.scaling

Memory is XLA's account of the compiled round without its arguments (the examples, the clients and
the state). The first table has clients of equal sizes; each number of clients is measured alone. In
the second, sizes follow a power law; its two federations take turns, and sample clients of the same
sizes. The third has one federation and increasing numbers of seeds at once.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from benchmarks import frame
from fedjax_inv import devices, local, models, rounds, schedules
from fedjax_inv.algorithms import fedavg
from fedjax_inv.checks import UsageError
from fedjax_inv.data import federation as federations
from fedjax_inv.types import Cohort, Examples, Federation
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.flag import at_least, flag

_COHORT = 100  # clients of a round
_EXPONENT = 1.5  # P(size > s) = (smallest / s)^exponent
_MEAN_SIZE = 20
_LARGEST = 20_000


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    clients: tuple[int, ...] = flag((10, 100, 10000, 100000), "Numbers of clients.", at_least(1))
    power_law: tuple[int, ...] = flag(
        (1000, 1000000), "The two numbers of clients of the second table.", at_least(1)
    )
    seeds: tuple[int, ...] = flag((1, 2, 4, 8, 16), "Numbers of seeds.", at_least(1))
    client_chunk: int = flag(1, "Clients at once.", at_least(1))
    batch_size: int = flag(10, "Examples per step.", at_least(1))
    rounds: int = flag(5, "Timed rounds of each.", at_least(1))
    json: str = flag("", "File for the figures.")


class Timed(NamedTuple):
    """A federation with its compiled round."""

    federation: Federation
    schedule: Cohort
    compiled: jax.stages.Compiled
    states: list[rounds.State]  # only the newest, since a round donates it
    seconds: list[float]  # a time per round

    def round(self) -> None:
        """Runs one more round."""
        now = len(self.seconds) % len(self.schedule.who)
        cohort = jax.block_until_ready(jax.tree.map(lambda a: a[now : now + 1], self.schedule))
        began = time.perf_counter()
        self.states[0], _ = jax.block_until_ready(
            self.compiled(self.states[0], cohort, self.federation)
        )
        self.seconds.append(time.perf_counter() - began)

    @property
    def megabytes(self) -> tuple[float, float]:
        """The megabytes of (the federation, a round without its arguments)."""
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(self.federation))
        analysis: Any = self.compiled.memory_analysis()
        return arrays / 1e6, (analysis.temp_size_in_bytes + analysis.output_size_in_bytes) / 1e6


def timed(options: Options, federation: Federation, schedule: Cohort, num_seeds: int = 1) -> Timed:
    """FedAvg with the library's MLP on a federation, compiled; all seeds train at once."""
    model = models.mlp(10)
    work = local.epochs(optax.sgd(0.1), batch_size=options.batch_size)
    algorithm = fedavg.fedavg(model, work)
    axis = devices.chunked(options.client_chunk)

    def start(key: jax.Array) -> rounds.State:
        variables = model.init(key, federation.data.x[:1])
        return rounds.init(algorithm, variables, federation, key)

    def advance(state: rounds.State, cohort: Cohort, federation: Federation) -> Any:
        return rounds.run(algorithm, state, cohort, federation, axis=axis)

    state = jax.vmap(start)(jax.random.split(jax.random.key(0), num_seeds))
    all_seeds = jax.jit(jax.vmap(advance, in_axes=(0, None, None)), donate_argnums=0)
    first = jax.tree.map(lambda a: a[:1], schedule)
    compiled = all_seeds.lower(state, first, federation).compile()
    return Timed(federation, schedule, compiled, [state], [])


def digits() -> Examples:
    """The examples of scikit-learn's digits."""
    x, y = load_digits(return_X_y=True)
    return federations.examples((x / 16).astype(np.float32), y.astype(np.int32))


def federation_of(data: Examples, sizes: np.ndarray) -> Federation:
    """A federation with clients of these sizes, whose examples are drawn from all of `data`."""
    rng = np.random.default_rng(0)
    order = rng.integers(0, len(data.y), sizes.sum(), np.int32)
    shards = (order, np.cumsum(sizes) - sizes, sizes)
    return Federation(data, *(jnp.asarray(array, jnp.int32) for array in shards))


def power_law(num_clients: int) -> np.ndarray:
    """Sizes by a power law, with a mean of about _MEAN_SIZE; the largest is _LARGEST."""
    smallest = _MEAN_SIZE * (1 - 1 / _EXPONENT)
    drawn = np.random.default_rng(1).random(num_clients) ** (-1 / _EXPONENT)
    sizes = np.minimum(np.rint(smallest * drawn), _LARGEST).astype(np.int64)
    sizes[num_clients // 2] = _LARGEST
    return np.maximum(sizes, 1)


def alike(options: Options, few: int, many: int) -> tuple[Timed, Timed]:
    """Two federations with power-law sizes, whose rounds sample clients of the same sizes."""
    num_rounds = 1 + options.rounds
    data, sizes = digits(), power_law(many)
    schedule = schedules.sampled(jax.random.key(0), many, _COHORT, num_rounds)
    sampled = np.unique(np.asarray(schedule.who))
    if len(sampled) > few:
        allowed = f"must be lower: samples {len(sampled)} clients, above {few} of --power_law"
        raise UsageError(f"--rounds={options.rounds}", ..., allowed)
    # The small federation has the clients that the large one samples, and others.
    chosen = np.concatenate(
        [sampled, np.setdiff1d(np.arange(2 * few), sampled)[: few - len(sampled)]]
    )
    who = jnp.asarray(np.searchsorted(sampled, np.asarray(schedule.who)), jnp.int32)
    small = timed(options, federation_of(data, sizes[chosen]), schedule._replace(who=who))
    return small, timed(options, federation_of(data, sizes), schedule)


def figures(name: str, value: int, party: Timed) -> dict[str, Any]:
    """The columns of a table; the first round does not count."""
    arrays, needed = party.megabytes
    return {
        name: value,
        "largest client": int(party.federation.size.max()),
        "data and clients MB": arrays,
        "round MB": needed,
        "median s": frame.median(party.seconds[1:]),
        "min s": min(party.seconds[1:]),
    }


def tables(options: Options) -> Iterator[frame.Table]:
    if len(options.power_law) != 2:
        power_law = ",".join(map(str, options.power_law))
        raise UsageError(f"--power_law={power_law}", ..., "must be two numbers of clients")
    data, num_rounds = digits(), 1 + options.rounds

    def measured(name: str, value: int, party: Timed) -> dict[str, Any]:
        frame.in_turns({"": party.round}, options.rounds)
        return figures(name, value, party)

    rows = []
    for count in options.clients:
        schedule = schedules.sampled(jax.random.key(0), count, min(count, _COHORT), num_rounds)
        federation = federation_of(data, np.full(count, _MEAN_SIZE))
        rows.append(measured("clients", count, timed(options, federation, schedule)))
    yield frame.Table(f"{_COHORT} clients a round of {_MEAN_SIZE} examples each", rows)
    few, many = options.power_law
    parties = dict(zip((few, many), alike(options, few, many), strict=True))
    frame.in_turns({count: party.round for count, party in parties.items()}, options.rounds)
    laws = [figures("clients", count, party) for count, party in parties.items()]
    for row in laws:
        row["over the smaller"] = row["median s"] / laws[0]["median s"]
    yield frame.Table(f"power law, {_COHORT} clients a round, of the same sizes", laws)
    of_seeds = []
    for count in options.seeds:
        federation = federation_of(data, np.full(10, _MEAN_SIZE))
        party = timed(options, federation, schedules.everyone(10, num_rounds), count)
        of_seeds.append(measured("seeds", count, party))
    yield frame.Table("seeds in one program, 10 clients", of_seeds)


BINARY = frame.binary(tables, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
