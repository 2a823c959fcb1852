"""The result of `fit`: the trained runs, their history, and what their networks predict.

Axis letters: R runs, E evaluations.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_inv import checks, evaluation, platforms, rounds, tree, types, unseen_norms
from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients, federation
from fedjax_inv.inputs import Run
from fedjax_inv.one_run import Outcome, Training, first_network
from fedjax_inv.types import Array, Tree

_BATCH = 512  # the examples that are predicted at once
# The networks that the test score is of, by the rules of `inputs.own_tests`.
SERVED = {
    "own": "each client's own network on the test examples of that client, a new client's on the "
    "others",
    "proportions": "each client's own network on test examples in the proportions of the client's "
    "classes, a mean over clients",
    "": "the network of a client that was never seen",
}


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """The evaluations of R runs, each after a segment of rounds.

    `history[name]` is an array [R, E]. Names are "valid_score" and "valid_loss" if there are
    examples for validation, "test_score" and "test_loss" if there are examples for a test,
    "unseen_domain_score" and the like for each of `data.federation.UNSEEN` that the split has, and
    "train_loss" and the like for each metric that the algorithm reports: its mean over the local
    steps, clients and rounds of the segment, NaN if nobody took part.
    """

    runs: tuple[Run, ...]
    rounds: np.ndarray  # [E] int, how many rounds were over
    values: Mapping[str, np.ndarray]  # each [R, E]

    def __repr__(self) -> str:
        shape = f"{len(self.runs)} runs, {len(self.rounds)} evaluations"
        return f"<History: {shape} of {', '.join(self.values)}>"

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the values [R, E] of a name."""
        if name not in self.values:
            raise UsageError("name", name, f"must be one of {', '.join(self.values)}")
        return self.values[name]

    def __iter__(self) -> Iterator[str]:
        """Return the names of the values."""
        return iter(self.values)

    def __contains__(self, name: object) -> bool:
        """Whether there are values of a name."""
        return name in self.values

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with a row for each run and evaluation.

        Its columns are run, seed, the hyperparameters in which runs differ, round, and the names
        of the values.
        """
        pandas = importlib.import_module("pandas")
        num_runs, number = len(self.runs), len(self.rounds)
        columns: dict[str, Any] = {"run": np.repeat(np.arange(num_runs), number)}
        columns["seed"] = np.repeat([run.seed for run in self.runs], number)
        for name in self.runs[0].hyper:
            columns[name] = np.repeat([run.hyper[name] for run in self.runs], number)
        if any(run.left_out for run in self.runs):
            columns["left_out"] = np.repeat([run.left_out for run in self.runs], number)
        columns["round"] = np.tile(self.rounds, num_runs)
        return pandas.DataFrame(columns | {k: v.reshape(-1) for k, v in self.values.items()})


def _check_like(name: str, given: Tree, sample: Tree, kind: Callable[[Any], str]) -> None:
    """Raise UsageError unless arrays [B, ...] have the shapes and kinds of others [M, ...]."""
    found = clients.form(given, kind)
    needed = clients.form(sample, kind)
    lengths = clients.lengths(given)
    if found != needed or len(lengths) != 1 or -1 in lengths:
        text = f"must hold examples of {needed}, as in training, in one number; holds {found}"
        raise UsageError(name, given if hasattr(given, "shape") else ..., text)


class Diverged(ArithmeticError):
    """A client's loss or update became NaN or infinite."""

    def __init__(self, round: int, client: int, index: int, run: Run) -> None:
        """Name the round (from 1), the client, and the run with its number."""
        self.round = round
        self.client = client
        self.index = index
        parts = [f"seed={run.seed}", *(f"{k}={v:g}" for k, v in run.hyper.items())]
        of = ", ".join(parts + [f"without {run.left_out}"] * bool(run.left_out))
        where = f"round {round}, client {client}, run {index} ({of})"
        super().__init__(f"{where}: its loss or its update is NaN or infinite")


class NonfiniteWarning(UserWarning):
    """An update became NaN or infinite, and the training goes on."""


def _batches(number: int) -> Iterator[tuple[np.ndarray, int]]:
    """Return the rows of each batch, and how many of them count: the others fill it up.

    The sizes are powers of two, as a program is compiled for each size.
    """
    for first in range(0, max(number, 1), _BATCH):
        rows = np.arange(first, min(first + _BATCH, number))
        size = 1 << (len(rows) - 1).bit_length() if len(rows) else 0
        yield np.resize(rows, size), len(rows)


class Fitted:
    """R runs, trained or in training: every combination of hyperparameters with every seed.

    It holds compiled programs, so it cannot be pickled; `network()`, `state()` and `history` can.

    Attributes:
      plan: how the runs are trained (`plan.Plan`); after the training without the examples.
      runs: the seed of each, and the hyperparameters of the grid.
      round: how many rounds were played.
      stopped: what stopped the training: what a callback answered, "callback" or "interrupt"; ""
        if nothing did.
      outcome: the report on the last segment (`one_run.Outcome`), on the host; None before one.
      is_broken: whether an update was not finite.
      training: the states of all runs, as the program has them.
    """

    def __init__(self, plan: Any) -> None:
        """Begin with no rounds played."""
        self.plan, self.runs, self.round, self.stopped = plan, plan.runs, 0, ""
        self.outcome: Outcome | None = None
        self.is_broken = False
        self.training: Training | None = None
        self._rounds: list[int] = []
        self._lines: list[dict[str, np.ndarray]] = []
        self._stored: tuple[int, Training] | None = None

    def __repr__(self) -> str:
        rest = f", stopped by {self.stopped}" if self.stopped else ""
        return f"<Fitted: {len(self.runs)} runs, {self.round} rounds{rest}>"

    @property
    def served(self) -> str:
        """Which networks the test score is of, in words."""
        return SERVED[self.plan.own_rule]

    @property
    def latest(self) -> dict[str, np.ndarray]:
        """The values [R] of the last evaluation, by the names of `History`."""
        return self._lines[-1]

    @property
    def history(self) -> History:
        """The evaluations so far."""
        names = dict.fromkeys(name for line in self._lines for name in line)
        lacking = np.full(len(self.runs), np.nan)  # before the first round
        values = {
            name: np.stack([line.get(name, lacking) for line in self._lines], 1) for name in names
        }
        return History(self.runs, np.array(self._rounds, int), values)

    @property
    def is_over(self) -> bool:
        """Whether no rounds are left, or all runs have stopped and end with that."""
        if self.round >= self.plan.rounds:
            return True
        if not self.plan.evaluations.end_at_stop or self.training is None:
            return False
        met = np.asarray(self.plan.program.gathered(self.training.stops.round)) > 0
        return met.size > 0 and bool(met.all())

    def add(self, outcome: Outcome, length: int) -> None:
        """Add an evaluation after so many further rounds."""
        self.outcome = outcome
        self.round += length
        self._rounds.append(self.round)
        self._lines.append(_values(outcome, drops=self.plan.evaluations.nonfinite == "drop"))

    def restore(self, stored: Training, round: int) -> None:
        """Continue from states that `stored` returned after a round. `Callback.begin` calls it.

        The history then begins after that round.
        """
        self.training = self.plan.program.placed(stored)
        self.round = round

    def stored(self) -> Training:
        """Return the states of all runs and clients [R, C, ...], the same on any devices.

        The next segment takes their memory: copy what must stay.
        """
        if self._stored is None or self._stored[0] != self.round:
            made = self.plan.program.stored(self.plan.inputs, self.training)
            self._stored = self.round, made
        return self._stored[1]

    @functools.cached_property
    def _predict(self) -> Any:
        def predict(hyper: Mapping[str, Array], server: Tree, own: Tree, x: Tree) -> Array:
            with platforms.products_at(self.plan.experiment.precision):
                return self.plan.build(hyper).predict(server, own, x)

        return jax.jit(predict)

    @functools.cached_property
    def _predict_unseen(self) -> Any:
        experiment = self.plan.experiment

        def predict(network: types.Variables, x: Tree) -> Tree:
            with platforms.products_at(experiment.precision):
                return unseen_norms.predict(experiment.unseen_norms, experiment.model, network, x)

        return jax.jit(predict)

    @functools.cached_property
    def _evaluate(self) -> Any:
        def evaluate(
            hyper: Mapping[str, Array], state: rounds.State, clients: types.Federation, seen: bool
        ) -> evaluation.Scores:
            task = self.plan.task
            with platforms.products_at(self.plan.experiment.precision):
                return evaluation.evaluate(
                    self.plan.build(hyper),
                    state,
                    clients,
                    seen=seen,
                    loss=task.loss,
                    score=task.score.of_domains(),
                )

        return jax.jit(evaluate, static_argnums=3)

    def _inputs_of(self, x: Any) -> Tree:
        """Return x as arrays; raise UsageError unless it has the shapes and kinds of training."""
        x, sample = clients.arrays_of(x, "x"), self.plan.sample.x
        if jax.tree.map(np.ndim, x) == jax.tree.map(lambda leaf: len(leaf.shape), sample):
            x = jax.tree.map(
                lambda a, b: a if b.dtype == np.uint8 else clients.widened(a), x, sample
            )
        # Of kinds: unscaled bytes, for example, would be another image.
        _check_like("x", x, sample, clients.kind_of_inputs)
        for leaf in jax.tree.leaves(x):
            if leaf.dtype.kind in "iu" and leaf.dtype.itemsize > 4:
                checks.integers("x", leaf, -(2**31), 2**31 - 1)
        return x

    def _targets_of(self, y: Any) -> Tree:
        """Return y as arrays; raise UsageError unless it has the shapes and kinds of training."""
        y = clients.arrays_of(y, "y")
        _check_like("y", y, self.plan.sample.y, clients.kind)
        if self.plan.num_classes:
            checks.integers("y", y, 0, self.plan.num_classes - 1)
        return y

    def algorithm(self, run: int = 0) -> types.Algorithm:
        """Return the algorithm of a run, for the functions of `rounds` and `evaluation`."""
        self._check_run(run)
        return self.plan.build(self.runs[run].hyper)

    def state(self, run: int = 0) -> rounds.State:
        """Return the state of a run, with the states of all clients [C, ...]."""
        self._check_run(run)
        return jax.tree.map(lambda leaf: leaf[run], self.stored().state)

    def network(self, run: int = 0) -> types.Variables:
        """Return the parameters and statistics of the network of a client that was never seen.

        `models.predict(model, fitted.network(), x)` are its outputs, except for an algorithm that
        computes outputs in a way of its own (CAFE), for which only `predict` gives them. There is
        a UsageError if the algorithm has no single network.
        """
        network = self.algorithm(run).network
        if network is None:
            raise UsageError("run", run, "has no single network; `predict` gives its outputs")
        return network(self.state(run).server)

    def soup(self, runs: Sequence[int] | None = None) -> types.Variables:
        """Return the mean of the networks of runs, by default of all (a uniform model soup).

        Wortsman et al. 2022 (arXiv 2203.05482). The runs may differ in seeds and hyperparameters,
        but must start from one network, as far-apart networks have no mean that makes sense: from
        that of the model's `init`, or of the clients' `variables`. Statistics (BatchNorm) are
        averaged too. As of `network`, there is a UsageError if the algorithm has none.
        """
        chosen = range(len(self.runs)) if runs is None else runs
        networks = [jax.device_get(self.network(run)) for run in chosen]
        inputs = self.plan.inputs
        first = functools.partial(first_network, self.plan.experiment)
        own_inputs = inputs.seed, inputs.variables, inputs.scaling, inputs.targets
        kept = self.plan.program.gathered(own_inputs)

        @jax.jit
        def start(seed: Array, variables: Tree, *scalings: Tree) -> types.Variables:
            own = inputs._replace(seed=seed, variables=variables)
            own = own._replace(**dict(zip(("scaling", "targets"), scalings, strict=True)))
            return first(own, self.plan.sample.x)

        starts = [jax.device_get(start(*tree.take(kept, run))) for run in chosen]
        for other in starts[1:]:
            if not all(jax.tree.leaves(jax.tree.map(np.array_equal, starts[0], other))):
                raise UsageError("runs", ..., "must have started from one network, as of `init`")
        return jax.tree.map(
            lambda *leaves: np.mean(leaves, 0, np.float64).astype(leaves[0].dtype), *networks
        )

    def predict(
        self, x: Tree, run: int = 0, *, client: int | None = None, unseen: bool = False
    ) -> Any:
        """Return the outputs of a run's network on inputs x [B, ...], on the host.

        They are [B, ...], or a tree if the network has several; logits [B, K] of classifiers, whose
        classes are argmax(-1). `client` is the client that is served, for an algorithm with
        personal networks, or None for one that was never seen. `unseen` is whether x are all inputs
        of a domain that no client has, as `Evaluations.unseen_norms` normalises them.
        """
        algorithm = self.algorithm(run)
        state = self.stored().state
        x = self._inputs_of(x)
        self._check_client(client)
        if unseen and client is not None:
            raise UsageError("client", client, "must be None, as no client has an unseen domain")
        if unseen and self.plan.experiment.unseen_norms != "mean":
            return jax.device_get(self._predict_unseen(self.network(run), x))
        server = jax.tree.map(lambda leaf: leaf[run], state.server)
        own: Tree = ()
        if algorithm.personal and (client is None or self._is_pooled):
            own = algorithm.init_client(server, jax.numpy.int32(0))
        elif algorithm.personal:
            own = jax.tree.map(lambda leaf: leaf[run, client], state.clients)
        outputs = []
        for rows, number in _batches(len(jax.tree.leaves(x)[0])):
            batch = jax.tree.map(lambda leaf, rows=rows: np.asarray(leaf)[rows], x)
            of_batch = jax.device_get(self._predict(self.runs[run].hyper, server, own, batch))
            outputs.append(jax.tree.map(lambda leaf, number=number: leaf[:number], of_batch))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *outputs)

    def evaluate(self, x: Tree, y: Tree, *, client: int | None = None) -> evaluation.Scores:
        """Return the mean score [R] and loss [R] of every run on B examples, and B [R].

        x are inputs [B, ...], y targets [B, ...], and `client` is as in `predict`.
        """
        x, y = self._inputs_of(x), self._targets_of(y)
        if len(sizes := clients.lengths((x, y))) > 1:
            raise UsageError("y", y, f"must be as long as x, the lengths are {sorted(sizes)}")
        self._check_client(client)
        data = federation.examples(x, y)
        rows = np.arange(len(jax.tree.leaves(x)[0]))
        if self._is_pooled:  # one network, and no client's own examples
            client = None
        parts, number = [rows], client or 0
        if client is not None:
            parts = [rows if c == client else rows[:0] for c in range(self._num_clients)]
        served = federation.of_parts(data, parts)
        scores = []
        for run in range(len(self.runs)):
            of_run = self._evaluate(
                self.runs[run].hyper, self.state(run), served, client is not None
            )
            scores.append(jax.tree.map(lambda leaf: np.asarray(leaf)[number], of_run))
        return jax.tree.map(lambda *leaves: np.stack(leaves), *scores)

    @property
    def _num_clients(self) -> int:
        inputs = self.plan.inputs
        return (inputs.valid if self._is_pooled else inputs.train).size.shape[1]

    @property
    def _is_pooled(self) -> bool:
        """Whether training is on one client with the examples of all."""
        inputs = self.plan.inputs
        return inputs.train.size.shape[1] == 1 < inputs.valid.size.shape[1]

    def _check_run(self, run: int) -> None:
        checks.integer("run", run, 0, len(self.runs) - 1, ", the runs")

    def _check_client(self, client: int | None) -> None:
        if client is not None:
            checks.integer("client", client, 0, self._num_clients - 1, ", the clients")


def _values(outcome: Outcome, *, drops: bool) -> dict[str, np.ndarray]:
    """Return the values [R] of an evaluation and of the rounds before it, as in `History`.

    `drops` is whether an update that is not finite is left out, and so has no part in a mean.
    """
    values = {}
    # Such a round's NaN is a loss; another round's says that nobody took part.
    diverged = (np.asarray(outcome.broken) >= 0) & np.asarray(outcome.attended).any(-1)
    diverged &= not drops
    for name, metric in outcome.metrics.items():
        of_rounds = np.asarray(metric)
        counts = ~np.isnan(of_rounds) | diverged
        count = counts.sum(1)
        mean = np.where(counts, of_rounds, 0).sum(1) / np.maximum(count, 1)
        values[f"train_{name}"] = np.where(count > 0, mean, np.nan)
    for kind, scores in {"valid": outcome.valid, "test": outcome.test, **outcome.unseen}.items():
        size = np.asarray(scores.size)
        if size.any():
            count = size.sum(1)
            for name in ("score", "loss"):
                total = (np.where(size, getattr(scores, name), 0) * size).sum(1)
                mean = total / np.maximum(count, 1)
                if name == "score" and scores.sums is not None:
                    mean = np.asarray(scores.sums.pooled)
                values[f"{kind}_{name}"] = np.where(count > 0, mean, np.nan)
    return values
