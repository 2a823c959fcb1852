"""Time and memory against the number of clients, and against the number of seeds.

python -m benchmarks.scaling

Memory is XLA's own account of the compiled round, besides its arguments (the examples, what each
client holds, the state). The first table has clients of one size, each number of them measured
alone, smallest first. The second has sizes by a power law; its federations take turns, and sample
clients of the same sizes. The third has one federation and more and more seeds at once.
"""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_digits

from benchmarks import workloads
from fedjax_inv import devices, local, models, rounds, schedules
from fedjax_inv.algorithms import fedavg
from fedjax_inv.data import federation as federations
from fedjax_inv.types import Cohort, Examples, Federation

FLAGS = flags.FLAGS

_COHORT = 100  # clients of a round
_EXPONENT = 1.5  # P(size > s) = (smallest / s)^exponent
_MEAN_SIZE = 20
_LARGEST = 20_000


class Timed(NamedTuple):
    """A federation with its compiled round, which is a party of `workloads.in_turns`."""

    federation: Federation
    schedule: Cohort
    compiled: jax.stages.Compiled
    states: list[rounds.State]  # the newest only: a round donates it
    done: list[None]  # one for each round

    def round(self) -> workloads.Round:
        """One more round."""
        now = len(self.done) % len(self.schedule.who)
        cohort = jax.block_until_ready(jax.tree.map(lambda a: a[now : now + 1], self.schedule))
        began = time.perf_counter()
        self.states[0], report = jax.block_until_ready(
            self.compiled(self.states[0], cohort, self.federation)
        )
        seconds = time.perf_counter() - began
        self.done.append(None)
        batches = -(-np.asarray(report[0].size) // FLAGS.batch_size)
        return workloads.Round(seconds, int(batches.sum()))

    @property
    def megabytes(self) -> tuple[float, float]:
        """(of the federation, of a round besides its arguments)."""
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(self.federation))
        analysis: Any = self.compiled.memory_analysis()
        return held / 1e6, (analysis.temp_size_in_bytes + analysis.output_size_in_bytes) / 1e6


def timed(federation: Federation, schedule: Cohort, num_seeds: int = 1) -> Timed:
    """FedAvg with the library's MLP on a federation, compiled; seeds train at once."""
    model = models.mlp(10)
    work = local.epochs(optax.sgd(0.1), batch_size=FLAGS.batch_size)
    algorithm = fedavg.fedavg(model, work)
    axis = devices.chunked(FLAGS.client_chunk)

    def start(key: jax.Array) -> rounds.State:
        variables = model.init(key, federation.data.x[:1])
        return rounds.init(algorithm, variables, federation, key)

    def advance(state: rounds.State, cohort: Cohort, federation: Federation) -> Any:
        return rounds.run(algorithm, state, cohort, federation, axis=axis)

    state = jax.vmap(start)(jax.random.split(jax.random.key(0), num_seeds))
    all_seeds = jax.jit(jax.vmap(advance, in_axes=(0, None, None)), donate_argnums=0)
    first = jax.tree.map(lambda a: a[:1], schedule)
    return Timed(
        federation, schedule, all_seeds.lower(state, first, federation).compile(), [state], []
    )


def digits() -> Examples:
    """scikit-learn's digits; clients share them."""
    x, y = load_digits(return_X_y=True)
    return federations.examples((x / 16).astype(np.float32), y.astype(np.int32))


def dealt(data: Examples, sizes: np.ndarray) -> Federation:
    """Clients of these sizes, each with examples drawn from all."""
    rng = np.random.default_rng(0)
    order = rng.integers(0, len(data.y), sizes.sum(), np.int32)
    held = (order, np.cumsum(sizes) - sizes, sizes)
    return Federation(data, *(jnp.asarray(array, jnp.int32) for array in held))


def power_law(num_clients: int) -> np.ndarray:
    """Sizes whose mean is about _MEAN_SIZE and of which the largest is _LARGEST."""
    smallest = _MEAN_SIZE * (1 - 1 / _EXPONENT)
    drawn = np.random.default_rng(1).random(num_clients) ** (-1 / _EXPONENT)
    sizes = np.minimum(np.rint(smallest * drawn), _LARGEST).astype(np.int64)
    sizes[num_clients // 2] = _LARGEST
    return np.maximum(sizes, 1)


def alike(few: int, many: int, num_rounds: int) -> tuple[Timed, Timed]:
    """Two federations with sizes by a power law, whose rounds sample clients of equal sizes."""
    data, sizes = digits(), power_law(many)
    schedule = schedules.sampled(jax.random.key(0), many, _COHORT, num_rounds)
    sampled = np.unique(np.asarray(schedule.who))
    if len(sampled) > few:
        raise ValueError(f"--rounds={num_rounds}: samples {len(sampled)} clients, above {few}")
    # The small federation holds the clients that the large one samples, and others.
    chosen = np.concatenate(
        [sampled, np.setdiff1d(np.arange(2 * few), sampled)[: few - len(sampled)]]
    )
    who = jnp.asarray(np.searchsorted(sampled, np.asarray(schedule.who)), jnp.int32)
    small = timed(dealt(data, sizes[chosen]), schedule._replace(who=who))
    return small, timed(dealt(data, sizes), schedule)


def figures(name: str, value: int, party: Timed, seconds: list[float]) -> dict[str, Any]:
    """The columns of a table."""
    held, needed = party.megabytes
    size = party.federation.size
    return {
        name: value,
        "largest client": int(size.max()),
        "data and clients MB": held,
        "round MB": needed,
        "median s": workloads.median(seconds),
        "min s": min(seconds),
    }


def seconds_of(party: Timed) -> list[float]:
    """The times of --rounds rounds, after one that is not counted."""
    return [party.round().seconds for _ in range(1 + FLAGS.rounds)][1:]


def main(argv: list[str]) -> None:
    del argv
    data, rows = digits(), []
    for count in map(int, FLAGS.clients):
        cohort = min(count, _COHORT)
        schedule = schedules.sampled(jax.random.key(0), count, cohort, 1 + FLAGS.rounds)
        party = timed(dealt(data, np.full(count, _MEAN_SIZE)), schedule)
        rows.append(figures("clients", count, party, seconds_of(party)))
    workloads.show(f"{_COHORT} clients a round of {_MEAN_SIZE} examples each", rows)
    few, many = map(int, FLAGS.power_law)
    parties = alike(few, many, 1 + FLAGS.rounds)
    seconds: list[list[float]] = [[], []]
    for turn in range(1 + FLAGS.rounds):
        for party, times in zip(parties, seconds, strict=True):
            times.append(party.round().seconds)
        if turn == 0:
            seconds = [[], []]
    laws = [
        figures("clients", count, party, times)
        | {"over the smaller": workloads.median(times) / workloads.median(seconds[0])}
        for count, party, times in zip((few, many), parties, seconds, strict=True)
    ]
    workloads.show(f"power law, {_COHORT} clients a round, of the same sizes", laws)
    of_seeds = []
    for count in map(int, FLAGS.seeds):
        schedule = schedules.everyone(10, 1 + FLAGS.rounds)
        party = timed(dealt(data, np.full(10, _MEAN_SIZE)), schedule, count)
        of_seeds.append(figures("seeds", count, party, seconds_of(party)))
    workloads.show("seeds in one program, 10 clients", of_seeds)
    workloads.save(FLAGS.json, [*rows, *laws, *of_seeds])


if __name__ == "__main__":
    flags.DEFINE_list("clients", ["10", "100", "10000", "100000"], "Numbers of clients.")
    flags.DEFINE_list("power_law", ["1000", "1000000"], "The two numbers of the second table.")
    flags.DEFINE_list("seeds", ["1", "2", "4", "8", "16"], "Numbers of seeds.")
    flags.DEFINE_integer("client_chunk", 1, "Clients at once.", lower_bound=1)
    flags.DEFINE_integer("batch_size", 10, "Examples per step.", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "Timed rounds of each.", lower_bound=1)
    flags.DEFINE_string("json", "", "File for the figures.")
    app.run(main)
