"""The inputs of a program, computed on the host: the runs, and the examples of each run.

Axis letter: R runs.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import devices, platforms, types
from fedjax_inv.data import federation as federations
from fedjax_inv.data.federation import Split
from fedjax_inv.devices import ClientShards, SharedExamples
from fedjax_inv.models import Scaling
from fedjax_inv.types import Array, Tree

T = TypeVar("T", ClientShards, SharedExamples)


class Run(NamedTuple):
    """The settings of one training run that may differ within a program."""

    seed: int  # seed of the network, the minibatches and the cohorts
    hyper: dict[str, float]
    left_out: str = ""  # a domain that the run trains without and is tested by (`without`)


class Watched(NamedTuple):
    """The examples that are evaluated after every round."""

    train: ClientShards
    test: SharedExamples
    warm_start: Array  # [R] int32, rounds before a stop


class Detailed(NamedTuple):
    """The test examples, split in two other ways."""

    by_class: SharedExamples  # "client" k has the examples of class k
    shards: ClientShards  # client c has examples in the proportions of its training classes


class OwnTest(NamedTuple):
    """Examples for the own networks of clients, and those for the network of a new client."""

    own: ClientShards  # [R, C]
    others: SharedExamples  # [R, 1]


class Inputs(NamedTuple):
    """The inputs in which the R runs of a program differ."""

    hyper: dict[str, Array]  # each [R]
    seed: Array  # [R]
    train: ClientShards
    valid: ClientShards
    test: SharedExamples
    group: Array  # [R, C] int32, the group of each validation client
    watched: Watched | None = None
    # [R, ...] networks to start from; None: drawn by the seed
    variables: types.Variables | None = None
    detailed: Detailed | None = None
    scaling: Scaling | None = None  # [R, D] of the inputs of a model of `models.scaled`
    own_tests: Mapping[str, OwnTest] = {}  # evaluated in place of "test", or of ones of `unseen`
    unseen_test: Array | None = None  # [R] whether the test is an unseen domain; None: not needed
    targets: Scaling | None = None  # [R, K] of the targets of a model of `models.in_units`
    unseen: Mapping[str, SharedExamples] = {}  # one shard each, as in `data.federation.Split`


def combinations(seeds: Sequence[int], **hyper: Sequence[float]) -> list[Run]:
    """Return a run for every combination of the values of each hyperparameter and every seed."""
    combinations = itertools.product(*hyper.values())
    return [
        Run(seed, dict(zip(hyper, values, strict=True)))
        for values in combinations
        for seed in seeds
    ]


def by_seed(runs: Sequence[Run]) -> np.ndarray:
    """Return the numbers of the runs [S, G]: those of a row share all but their settings.

    They have the same seed and leave out the same domain. If some seeds have more runs than others,
    each run has a row of its own, [R, 1].
    """
    kinds: dict[tuple[int, str], list[int]] = {}
    for number, run in enumerate(runs):
        kinds.setdefault((run.seed, run.left_out), []).append(number)
    if len({len(numbers) for numbers in kinds.values()}) > 1:
        return np.arange(len(runs))[:, None]
    return np.array(list(kinds.values()))


def of_runs(
    runs: Sequence[Run],
    splits: Mapping[int, Split],
    *,
    pooled: bool = False,
    watch_examples: int = 0,
    warm_start: Callable[[np.ndarray], int] = lambda sizes: 0,
    variables: Mapping[int, types.Variables] | None = None,
    num_classes: int = 0,
    scaling: Mapping[tuple[int, str], Scaling] | None = None,
    source: np.ndarray | None = None,
    standardises: bool = False,
) -> Inputs:
    """Return the inputs of R runs, each leaf with a leading R.

    The runs have the same names of hyperparameters. By seed there are splits, all of one data set
    and with one number of clients; and the networks to start from (`variables`), which by default
    are drawn. The shift and scale of the inputs (`scaling`), which replace those of the networks,
    are by seed and domain left out. If `pooled`, training is on the pooled examples of all clients.

    About `watch_examples` training examples of all clients, and about as many test examples, are
    evaluated after every round: the first of each shard, which are a sample if its rows are in
    random order, as `federation.split` leaves them. With 0, none are, and a run never stops.
    `warm_start` makes of the sizes of the training clients [C] the rounds before a stop.

    With `num_classes` K above 0 evaluations also report the scores of the test examples class by
    class and in the proportions of each client's classes, where `source` is that of
    `federation.test_shards`. `standardises` is whether the network is one of `models.in_units`.
    """
    # Stack the different splits, then select by run: they are few and large.
    kinds = list(dict.fromkeys((run.seed, run.left_out) for run in runs))
    which = np.array([kinds.index((run.seed, run.left_out)) for run in runs])
    seeds = [seed for seed, _ in kinds]
    chosen = [federations.without(splits[seed], left_out) for seed, left_out in kinds]

    trains = [split.train for split in chosen]
    train = _of_clients([*map(federations.pooled, trains)] if pooled else trains, which)
    test = _shared([split.test for split in chosen], which)
    targets = {at: _of_targets(each) for at, each in enumerate(trains)} if standardises else None
    return Inputs(
        hyper={
            name: jax.device_put(np.array([run.hyper[name] for run in runs], np.float32))
            for name in runs[0].hyper
        },
        seed=jax.device_put(np.array([run.seed for run in runs], np.int32)),
        train=train,
        valid=_of_clients([split.valid for split in chosen], which),
        test=test,
        group=jax.device_put(groups(np.stack([split.domain for split in chosen]))[which]),
        watched=_watched(train, test, watch_examples, warm_start) if watch_examples else None,
        variables=_by_run(variables, [run.seed for run in runs]),
        detailed=_detailed(splits, seeds, num_classes, source, which) if num_classes else None,
        scaling=_by_run(scaling, [(run.seed, run.left_out) for run in runs]),
        targets=_by_run(targets, which.tolist()),
        unseen={
            name: _shared([split.unseen[name] for split in chosen], which)
            for name in chosen[0].unseen
        },
    )


def _of_clients(different: Sequence[types.Federation], which: np.ndarray) -> ClientShards:
    """Return the shards of each run, of which [R] tells the one of the different federations."""
    # On the host, where nothing is compiled for it.
    fields = zip(*(each[1:4] for each in different), strict=True)
    return ClientShards(*(jax.device_put(np.stack(arrays)[which]) for arrays in fields))


def _shared(different: Sequence[types.Federation], which: np.ndarray) -> SharedExamples:
    return SharedExamples(*_of_clients(different, which))


def _by_run(values: Mapping[Any, Tree] | None, keys: Sequence[Any]) -> Any:
    """Return the values of the runs with these keys, each leaf with a leading R."""
    if values is None:
        return None
    of_runs = (values[key] for key in keys)
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *of_runs)


def _watched(
    train: ClientShards,
    test: SharedExamples,
    count: int,
    warm_start: Callable[[np.ndarray], int],
) -> Watched:
    rounds_before = [warm_start(np.asarray(sizes)) for sizes in train.size]
    before = jnp.asarray(rounds_before, jnp.int32)
    return Watched(_first(train, count), _first(test, count), before)


def _detailed(
    splits: Mapping[int, Split],
    seeds: Sequence[int],
    num_classes: int,
    source: np.ndarray | None,
    which: np.ndarray,
) -> Detailed:
    # Of the test of all runs: a domain that one leaves out may lack a class.
    by_class = [federations.by_class(splits[seed].test, num_classes) for seed in seeds]
    test_shards = [
        federations.test_shards(splits[seed], num_classes, seed, source=source) for seed in seeds
    ]
    return Detailed(_shared(_padded(by_class), which), _of_clients(_padded(test_shards), which))


def own_rule(splits: Collection[Split], num_classes: int) -> str:
    """Return the rule by which clients' own networks serve examples of the test.

    It is "own" if the clients of some are known (`Split.owners`). Else it is "proportions" for a
    test without a domain of its own, with K classes (`num_classes`): each client gets examples in
    the proportions of its classes (`federation.test_shards`). Or it is "": none are served.
    """
    owners = [split.owners["test"] for split in splits if "test" in split.owners]
    if owners:
        return "own" if any((owner >= 0).any() for owner in owners) else ""
    return "proportions" if num_classes and all(map(_has_their_classes, splits)) else ""


def own_tests(
    runs: Sequence[Run],
    splits: Mapping[int, Split],
    *,
    num_classes: int = 0,
    source: np.ndarray | None = None,
) -> tuple[dict[str, OwnTest], str]:
    """Return which examples clients' own networks serve, and which rule gives those of the test.

    By "test" and "known_domains" they are the examples whose client is known (`Split.owners`).
    `own_rule` has the rules; `source` is that of `federation.test_shards`.
    """
    kinds = list(dict.fromkeys((run.seed, run.left_out) for run in runs))
    chosen = [federations.without(splits[seed], left_out) for seed, left_out in kinds]
    which = [kinds.index((run.seed, run.left_out)) for run in runs]
    names = {name for split in chosen for name, owner in split.owners.items() if (owner >= 0).any()}
    found = {
        name: _own_test([_by_owner(split, name) for split in chosen], which)
        for name in sorted(names)
    }
    rule = own_rule(splits.values(), num_classes)
    if rule != "proportions":
        return found, rule
    pairs = []
    for (seed, left_out), split in zip(kinds, chosen, strict=True):
        own, others = _by_owner(split, "test")
        if not left_out:
            own = federations.test_shards(split, num_classes, seed, source=source)
            others = federations.of_parts(split.test.data, [np.zeros(0, int)])
        pairs.append((own, others))
    return found | {"test": _own_test(pairs, which)}, rule


def _by_owner(split: Split, name: str) -> tuple[types.Federation, types.Federation]:
    """Return the examples of clients, and those of others, of the test or of ones of `unseen`."""
    whole = split.test if name == "test" else split.unseen[name]
    (rows,) = federations.parts_of(whole)
    owner = split.owners.get(name, np.full(len(rows), -1))
    parts = [rows[owner == client] for client in range(len(split.domain))]
    others = [rows[owner < 0]]
    return federations.of_parts(whole.data, parts), federations.of_parts(whole.data, others)


def _own_test(
    pairs: Sequence[tuple[types.Federation, types.Federation]], which: Sequence[int]
) -> OwnTest:
    """Return the examples of each run, of which [R] tells the one of the different pairs."""

    def stacked(of_kinds: Sequence[types.Federation]) -> list[Array]:
        arrays = zip(*(each[1:4] for each in _padded(of_kinds)), strict=True)
        return [jax.device_put(np.stack(each)[which]) for each in arrays]

    own, others = map(stacked, zip(*pairs, strict=True))
    return OwnTest(ClientShards(*own), SharedExamples(*others))


def tests_unseen(runs: Sequence[Run], splits: Mapping[int, Split]) -> Array:
    """Return whether the test of each run is a domain that no client has, [R] bool."""
    of_runs = [bool(run.left_out) or splits[run.seed].test_domain[0] >= 0 for run in runs]
    return jax.device_put(np.array(of_runs, bool))


def _has_their_classes(split: Split) -> bool:
    """Return whether a test of no domain has an example of each class that clients have."""
    y = np.asarray(split.train.data.y)
    train, test = (y[np.concatenate(federations.parts_of(f))] for f in (split.train, split.test))
    return split.test_domain[0] < 0 and bool(np.isin(train, test).all())


def _of_targets(train: types.Federation) -> Scaling:
    """Return the shift and the scale that give the targets of examples mean 0 and deviation 1."""
    rows = np.concatenate(federations.parts_of(train))
    y = np.asarray(train.data.y)[rows].astype(np.float64).reshape(len(rows), -1)
    deviation = y.std(0)
    scale = 1 / np.where(deviation > 0, deviation, 1)
    return Scaling(y.mean(0).astype(np.float32), scale.astype(np.float32))


def _padded(of_seeds: Sequence[types.Federation]) -> list[types.Federation]:
    """Append zeros to the orders of federations, up to one length.

    The length is a power of two, so that draws of the data with other lengths share a program.
    """
    length = 1 << (max(len(each.order) for each in of_seeds) - 1).bit_length()
    orders: Any = [np.pad(each.order, (0, length - len(each.order))) for each in of_seeds]
    return [f._replace(order=order) for f, order in zip(of_seeds, orders, strict=True)]


def _first(shards: T, count: int) -> T:
    """Return about `count` of the examples of each run, the first of every shard."""
    size = np.asarray(shards.size)
    share = np.minimum(1.0, count / np.maximum(size.sum(1, keepdims=True), 1))
    return shards._replace(size=jnp.asarray(np.ceil(share * size), jnp.int32))


def groups(domain: np.ndarray) -> np.ndarray:
    """Return the validation group [..., C] of each client, its domain, numbered from 0.

    `domain` [..., C] is -1 for a client with examples of several. If any client of any axis has,
    all groups are 0.
    """
    if (domain < 0).any():
        return np.zeros(domain.shape, np.int32)
    return np.searchsorted(np.unique(domain), domain).astype(np.int32)


def group_names(splits: Sequence[Split]) -> list[str]:
    """Return the names of the validation groups of one or more splits of a data set.

    They are the names of the numbers that `groups` gives to the splits together.
    """
    domain = np.stack([split.domain for split in splits])
    if (domain < 0).any():
        return ["clients"]
    return [splits[0].domains[index] for index in np.unique(domain)]


def schedule_key(seed: int | Array) -> Array:
    """Return the random key of the schedule of a run with this seed."""
    return jax.random.fold_in(jax.random.key(seed), 2)


def cohorts(schedule: Callable[[Array], types.Cohort], inputs: Inputs) -> types.Cohort:
    """Draw the cohorts [R, T, S] of all runs, whose seeds give the keys of the schedule."""
    seeds = devices.on_host(inputs.seed)
    of_seeds = jax.vmap(lambda seed: schedule(schedule_key(seed)))
    return jax.jit(of_seeds, compiler_options=platforms.quick_to_compile())(seeds)
