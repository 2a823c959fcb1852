"""`fit`: arrays in, trained runs out, equal to those of the layers below."""

import functools
import signal
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fedjax_inv.fitting import arguments, segments

from federations import assert_same_bits, plain
from fedjax_inv import (
    devices,
    evaluation,
    fit,
    fitting,
    local,
    models,
    objectives,
    platforms,
    program,
    rounds,
    schedules,
)
from fedjax_inv.algorithms import erm, fedavg, fedbn
from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients, environments, federation
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.types import Array, Cohort, Federation, Tree

C, T, EVERY = 4, 5, 2  # clients, rounds, rounds of a segment
RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 3))
Y = (X[:, 0] > 0).astype(int)
CLIENT = np.arange(40) % C * 10  # numbers of clients need not follow each other
PARTS = [np.flatnonzero(10 * c == CLIENT) for c in range(C)]
TEST = X[40:], Y[40:]
SEEDS, RATES = (3, 1), (0.3, 0.1)
MODEL = models.from_function(
    lambda key, x: 0.1 * jax.random.normal(key, (x.shape[1], 2)), lambda params, x: x @ params
)
TRACES: list[str] = []


def loss(outputs: Array, y: Array, mask: Array) -> Array:
    """The cross-entropy, which counts how often it is traced."""
    TRACES.append("loss")
    return objectives.cross_entropy(outputs, y, mask)


def schedule(key: Array) -> Cohort:
    drawn = schedules.sampled(key, C, 3, T)
    return schedules.slow(drawn, jnp.array([1, 2, 1, 1]))


SETTINGS: dict[str, Any] = {
    "rounds": T,
    "test": TEST,
    "validation": 0.3,
    "batch_size": 4,
    "loss": loss,
    "schedule": schedule,
    "evaluate_every": EVERY,
    "progress": False,
    "devices": 1,
}


@functools.cache
def trained() -> tuple[fitting.Fitted, list[Any]]:
    """Two seeds and two rates, and what a callback saw after each segment."""
    seen: list[Any] = []

    def callback(fitted: fitting.Fitted) -> None:
        network = plain(fitted.network(1))
        seen.append((fitted.round, len(TRACES), fitted.history["test_score"].shape, network))

    fitted = fit(
        fedavg.fedavg,
        MODEL,
        X[:40],
        Y[:40],
        CLIENT,
        learning_rate=RATES,
        seeds=SEEDS,
        callbacks=[callback],
        **SETTINGS,
    )
    return fitted, seen


def test_runs_are_bit_for_bit_those_of_the_layers_below() -> None:
    fitted, _ = trained()
    x, y, parts = clients.of_arrays(X[:40], Y[:40], CLIENT)
    _, splits = clients.splits_of_arrays(x, y, parts, test=TEST, validation=0.3, seeds=[SEEDS[1]])
    split, seed, run = splits[SEEDS[1]], SEEDS[1], 3
    algorithm = fedavg.fedavg(MODEL, local.epochs(optax.sgd(RATES[1]), batch_size=4))
    axis, key = devices.chunked(1), jax.random.key(seed)
    # Compiled, as a draw without compilation rounds its products by themselves.
    variables = jax.jit(MODEL.init)(jax.random.fold_in(key, 0), jnp.zeros((1, 3)))
    start = jax.random.fold_in(key, 1)
    state = rounds.init(algorithm, variables, split.train, start, history=2, axis=axis)
    play = jax.jit(
        lambda *arguments: rounds.run(algorithm, *arguments, axis=axis)[0],
        compiler_options=platforms.one_thread(),
    )
    state = play(state, schedule(program.schedule_key(seed)), split.train)
    assert fitted.runs[run] == program.Run(seed, {"learning_rate": RATES[1]})
    found = fitted.state(run)
    assert_same_bits(plain(found), plain(state))
    scores = evaluation.evaluate(algorithm, state, split.valid)
    expected = evaluation.mean(scores)
    np.testing.assert_allclose(fitted.history["valid_score"][run, -1], expected[0], rtol=1e-6)
    np.testing.assert_allclose(fitted.history["valid_loss"][run, -1], expected[1], rtol=1e-6)


@pytest.mark.slow
def test_a_run_of_a_group_is_what_it_is_alone() -> None:
    """Several values give what separate calls give."""
    fitted, _ = trained()
    data = [(X[rows], Y[rows]) for rows in PARTS]
    alone = fit(fedavg.fedavg, MODEL, data, learning_rate=RATES[1], seeds=SEEDS[:1], **SETTINGS)
    assert alone.runs == (program.Run(SEEDS[0], {}),)
    for name, values in alone.history.values.items():
        np.testing.assert_allclose(fitted.history[name][2:3], values, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(fitted.predict(X, 2), alone.predict(X), rtol=1e-5)


def test_the_history_is_of_every_run_and_segment() -> None:
    fitted, seen = trained()
    history = fitted.history
    assert [run.seed for run in history.runs] == [3, 1, 3, 1]
    assert history.rounds.tolist() == [2, 4, 5]
    scores = {f"{of}_{what}" for of in ("valid", "test") for what in ("score", "loss")}
    assert set(history.values) == {"train_loss"} | scores
    assert {values.shape for values in history.values.values()} == {(4, 3)}
    assert all(np.isfinite(values).all() for values in history.values.values())
    assert (history["train_loss"][:, -1] < history["train_loss"][:, 0]).all()
    assert fitted.round == T
    assert fitted.stopped == ""
    assert [(at, shape) for at, _, shape, _ in seen] == [(2, (4, 1)), (4, (4, 2)), (5, (4, 3))]
    networks = [network for *_, network in seen]
    assert_same_bits(networks[-1], plain(fitted.network(1)))
    assert not np.array_equal(networks[0].params.head, networks[1].params.head)
    assert [*history] == [*history.values]
    assert "train_loss" in history
    assert "loss" not in history


def test_segments_share_compiled_programs() -> None:
    _, seen = trained()
    assert len({traces for _, traces, *_ in seen}) == 1


def test_predictions_are_those_of_the_served_network() -> None:
    fitted, _ = trained()
    x, y = TEST
    scores = fitted.evaluate(x, y)
    assert scores.size.tolist() == [8] * 4
    for run in range(4):
        outputs = fitted.predict(x, run)
        expected = models.predict(MODEL, fitted.network(run), x)
        np.testing.assert_allclose(outputs, expected, rtol=1e-6)
        np.testing.assert_allclose(scores.score[run], (outputs.argmax(-1) == y).mean())
        log = outputs - np.log(np.exp(outputs).sum(-1, keepdims=True))
        np.testing.assert_allclose(scores.loss[run], -log[np.arange(8), y].mean(), rtol=1e-5)
    np.testing.assert_allclose(scores.score, fitted.history["test_score"][:, -1], rtol=1e-6)
    many = np.tile(x, (80, 1))  # more than a batch
    np.testing.assert_allclose(fitted.predict(many)[-8:], fitted.predict(x), rtol=1e-6)
    found = evaluation.evaluate(fitted.algorithm(1), fitted.state(1), _test_client(), seen=False)
    np.testing.assert_allclose(found.score, scores.score[1:2])


def _test_client() -> Federation:
    return federation.of_parts(federation.examples(*TEST), [np.arange(8)])


def test_a_history_becomes_a_data_frame_if_pandas_is_there(monkeypatch: Any) -> None:
    history = trained()[0].history
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    frame = history.to_dataframe()
    assert frame["run"].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert frame["seed"].tolist() == ([3] * 3 + [1] * 3) * 2
    assert frame["learning_rate"].tolist() == [0.3] * 6 + [0.1] * 6
    assert frame["round"].tolist() == [2, 4, 5] * 4
    np.testing.assert_array_equal(frame["test_loss"], history["test_loss"].ravel())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pandas"):
        history.to_dataframe()


# Training itself, with a program that computes nothing.


class Segment:
    """Stands in for `Program.segment`; plays `steps`, functions or scores [R] of a segment."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps, self.lengths = steps, []

    def __call__(self, examples: Any, inputs: Any, training: int, cohorts: Cohort) -> Any:
        self.lengths.append(cohorts.present.sum((0, 2)).tolist())
        score = self.steps[training]
        if callable(score):
            score = score()
        score = np.array(score, np.float32)
        some = evaluation.Scores(score[:, None], -score[:, None], np.ones((len(score), 1), int))
        none = evaluation.Scores(*(np.zeros((len(score), 1)) for _ in range(3)))
        number = cohorts.who.shape[1]
        metrics = {"loss": np.arange(number) + 0 * score[:, None]}
        broken = np.where(np.isnan(score)[:, None], 7, -1) + np.zeros((1, number), int)
        shown: Any = SimpleNamespace(metrics=metrics, valid=some, test=none, broken=broken)
        shown.attended = cohorts.present.sum(2)[..., None]
        return training + 1, shown


def played(steps: list[Any], num_rounds: int, **settings: Any) -> tuple[fitting.Fitted, Segment]:
    segment = Segment(steps)
    compilable = SimpleNamespace(lower=lambda *_: SimpleNamespace(compile=lambda: None))
    compiled: Any = SimpleNamespace(
        init=lambda *_: 0,
        rounds=compilable,
        evaluate=compilable,
        segment=segment,
        gathered=lambda outcome: outcome,
    )
    serving: Any = SimpleNamespace(program=compiled, inputs=None)
    cohort = Cohort(*(np.ones((2, num_rounds, 3), kind) for kind in (int, bool, int)))
    defaults = {"every": 1, "patience": None, "rank": lambda score: score, "callbacks": []}
    runs = (program.Run(0, {"rate": 0.5}), program.Run(1, {"rate": 0.5}))
    examples: Any = None
    return segments.train(serving, runs, examples, cohort, **(defaults | settings)), segment


def test_patience_waits_for_all_runs() -> None:
    scores = [(0.5, 0.5), (0.6, 0.4), (0.5, 0.5), (0.5, 0.6), (0.6, 0.6), (0.6, 0.6), (1, 1)]
    fitted, _ = played(scores, 7, patience=2)
    assert (fitted.stopped, fitted.round) == ("patience", 6)
    np.testing.assert_allclose(fitted.history["valid_score"].T, scores[:6])
    fitted, _ = played(scores, 7, patience=3)
    assert (fitted.stopped, fitted.round) == ("", 7)
    lower_is_better = objectives.SCORES["squared_error"].rank
    fitted, _ = played(scores, 7, patience=4, rank=lower_is_better)
    assert (fitted.stopped, fitted.round) == ("patience", 6)


def test_a_callback_stops_the_training() -> None:
    called: list[int] = []

    def callback(fitted: fitting.Fitted) -> bool:
        called.append(fitted.round)
        return fitted.round >= 4

    fitted, segment = played([(0.1, 0.1)] * 9, 9, every=2, callbacks=[callback, callback])
    assert (fitted.stopped, fitted.round) == ("callback", 4)
    assert called == [2, 2, 4, 4]
    assert segment.lengths == [[6, 6], [6, 6]]


def test_an_error_in_a_callback_has_what_is_trained() -> None:
    def callback(fitted: fitting.Fitted) -> Any:
        return np.zeros(2) if fitted.round == 4 else None  # neither true nor false

    with pytest.raises(ValueError, match="truth value") as error:
        played([(0.1, 0.1)] * 9, 9, every=2, callbacks=[callback])
    assert error.value.fitted.round == 4
    assert "sys.last_value.fitted" in "".join(error.value.__notes__)


def test_the_last_segment_may_be_shorter() -> None:
    fitted, segment = played([(0.1, 0.1)] * 3, 5, every=2)
    assert segment.lengths == [[6, 6], [6, 6], [6]]
    assert fitted.history.rounds.tolist() == [2, 4, 5]
    np.testing.assert_array_equal(fitted.history["train_loss"], [[0.5, 0.5, 0.0]] * 2)
    assert "test_score" not in fitted.history.values


def test_a_history_shows_a_loss_of_nan_and_no_round_without_clients() -> None:
    def values(
        losses: list[float], broken: list[int], attended: list[int], drops: bool = False
    ) -> float:
        none = evaluation.Scores(*[np.zeros((1, 1))] * 3)
        outcome: Any = SimpleNamespace(
            metrics={"loss": np.array([losses])},
            broken=np.array([broken]),
            attended=np.array([attended])[..., None],
            valid=none,
            test=none,
        )
        return segments._values(outcome, drops)["train_loss"].item()

    assert values([1.0, np.nan, 3.0], [-1, -1, -1], [2, 0, 2]) == 2
    assert np.isnan(values([1.0, np.nan, np.nan], [-1, 4, 4], [2, 2, 2]))
    # A client whose update was left out, and nobody else took part.
    assert values([1.0, np.nan, 3.0], [-1, 4, -1], [2, 0, 2]) == 2
    # Another exchange was attended, in which a client was left out.
    assert values([1.0, np.nan, 3.0], [-1, 4, -1], [2, 2, 2], drops=True) == 2
    assert np.isnan(values([np.nan], [-1], [0]))


def test_ctrl_c_keeps_the_segment_that_it_interrupts() -> None:
    def interrupted() -> Any:
        signal.raise_signal(signal.SIGINT)
        return (0.7, 0.8)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # not that of the shell
    try:
        fitted, _ = played([(0.1, 0.2), interrupted, (0.9, 0.9)], 3)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (fitted.stopped, fitted.round) == ("interrupt", 2)
    np.testing.assert_allclose(fitted.history["valid_score"], [[0.1, 0.7], [0.2, 0.8]])


def test_the_first_update_that_is_not_finite_is_warned_of() -> None:
    scores = [(0.1, 0.1), (0.1, np.nan), (0.1, np.nan)]
    with pytest.warns(UserWarning, match="round 2, client 7, run 1") as warned:
        played(scores, 3)
    assert len(warned) == 1


# The forms of data.


def test_all_forms_of_arrays_hold_the_same_clients() -> None:
    forms: list[tuple[Any, ...]] = [
        ([(X[rows], Y[rows]) for rows in PARTS],),
        (X[:40], Y[:40], CLIENT),
        (X[:40].tolist(), Y[:40].tolist(), CLIENT.tolist()),
    ]
    signed = Y[:40].astype(np.int64), Y[:40].astype(np.uint64)
    mixed = [(X[rows], signed[c % 2][rows]) for c, rows in enumerate(PARTS)]
    forms += [(mixed,), (jnp.asarray(X[:40], jnp.bfloat16), Y[:40], CLIENT)]
    for form in forms:
        x, y, parts = clients.of_arrays(*form)
        assert y.dtype.kind in "iu"
        for part, rows in zip(parts, PARTS, strict=True):
            close = 1e-2 if x.dtype.itemsize == 2 else 1e-6
            np.testing.assert_allclose(x[part].astype(float), X[rows], rtol=close)
            np.testing.assert_array_equal(y[part], Y[rows])


def test_validation_is_a_part_of_each_client_and_the_test_is_of_nobody() -> None:
    x, y, parts = clients.of_arrays(X[:40], Y[:40], CLIENT)
    data, splits = clients.splits_of_arrays(x, y, parts, test=TEST, validation=0.25, seeds=[0, 1])
    assert data.y.shape == (48,)
    drawn = []
    for split in splits.values():
        train, valid, (test,) = (federation.parts_of(each) for each in split[:3])
        drawn.append(np.concatenate(valid).tolist())
        assert [len(part) for part in valid] == [2] * C
        for part, *mine in zip(parts, train, valid, strict=True):
            assert sorted(np.concatenate(mine)) == part.tolist()
        assert test.tolist() == [*range(40, 48)]
    assert drawn[0] != drawn[1]
    _, splits = clients.splits_of_arrays(x, y, parts, test=None, validation=0.0, seeds=[0])
    assert [p.tolist() for p in federation.parts_of(splits[0].train)] == [
        rows.tolist() for rows in parts
    ]
    assert splits[0].valid.size.tolist() == [0] * C
    assert splits[0].test.size.tolist() == [0]


DATASET = Dataset(
    X.astype(np.float32),
    Y.astype(np.int32),
    ("a", "b"),
    (np.arange(48) % 3).astype(np.int32),
    ("north", "east", "south"),
    np.zeros(48, bool),
)


def test_the_clients_of_a_data_set_are_its_users_or_domains() -> None:
    def split(dataset: Dataset, held_out: str | None) -> federation.Split:
        return clients.splits_of_dataset(
            dataset, partition=None, held_out=held_out, validation=0.25, seeds=[0]
        )[1][0]

    found = split(DATASET, "south")
    assert found.domain.tolist() == [0, 1]
    assert federation.parts_of(found.test)[0].size == 16
    assert split(DATASET, None).train.num_clients == 3
    users = DATASET._replace(user=(np.arange(48) % 4).astype(np.int32))
    assert split(users, None).train.num_clients == 4
    alone = DATASET._replace(domain=np.zeros(48, np.int32), domains=("all",))
    with pytest.raises(UsageError, match="partition"):
        split(alone, None)


def test_clients_are_not_the_environments_that_were_drawn_with_their_seed() -> None:
    size = 600
    grey = Dataset(
        np.zeros((size, 2, 2, 1), np.uint8),
        (np.arange(size) % 2).astype(np.int32),
        ("a", "b"),
        np.zeros(size, np.int32),
        ("all",),
        np.arange(size) % 3 == 0,
    )
    drawn = environments.colored(grey, flips=(0.2, 0.1), seed=5)
    _, splits = clients.splits_of_dataset(
        drawn,
        partition=federation.partitioner("iid", drawn, 2),
        held_out=drawn.domains[-1],
        validation=0.0,
        seeds=[5],
    )
    for rows in federation.parts_of(splits[5].train):
        shares = np.bincount(drawn.domain[rows]) / len(rows)
        assert shares.max() < 0.7  # the larger domain has a half


# Arguments.

ARRAYS = (X[:40], Y[:40], CLIENT)


class Rows(list[int]):
    def equals(self, other: list[int]) -> bool:
        return self == other


class Labelled(np.ndarray):
    """An array with labels of its rows and columns, as a frame of pandas has them."""

    index: Rows
    columns = ("a", "b", "c")


def labelled(array: np.ndarray, labels: Iterable[int]) -> Labelled:
    found = array.view(Labelled)
    found.index = Rows(labels)
    return found


def test_inputs_and_targets_of_frames_have_the_same_rows() -> None:
    x, y = labelled(X[:40], range(40)), labelled(Y[:40], range(39, -1, -1))
    with pytest.raises(UsageError, match="data"):
        clients.of_arrays([(x[:20], Y[:20]), (x, y)])
    with pytest.raises(UsageError, match="test"):
        clients.splits_of_arrays(X, Y, PARTS, test=(x, y), validation=0.0, seeds=[0])
    with pytest.raises(UsageError, match="y"):
        trained()[0].evaluate(x, y)


def test_columns_of_frames_have_one_order() -> None:
    """Of clients, in the test, and where a result predicts."""
    x, other = labelled(X[:40], range(40)), labelled(X[40:], range(8))
    other.columns = ("a", "c", "b")
    with pytest.raises(UsageError, match="data"):
        clients.of_arrays([(x[:20], Y[:20]), (other, Y[40:])])
    assert clients.columns_of([(X[:20], Y[:20]), (x, Y[:40])]) == ["a", "b", "c"]
    train = functools.partial(
        fit, fedavg.fedavg, MODEL, x, Y[:40], CLIENT, rounds=1, progress=False, devices=1
    )
    with pytest.raises(UsageError, match="test"):
        train(test=(other, Y[40:]))
    fitted = train()
    with pytest.raises(UsageError, match="x"):
        fitted.predict(other)
    other.columns = x.columns
    np.testing.assert_array_equal(fitted.predict(other), fitted.predict(X[40:]))


def test_numbers_of_clients_may_be_above_32_bits_and_arrays_of_any_byte_order() -> None:
    client = np.arange(40, dtype=np.uint64) % C * np.uint64(2**62) + np.uint64(5)
    x, y, parts = clients.of_arrays(X[:40].astype(">f4"), Y[:40].astype(">i8"), client)
    assert [int(client[rows[0]]) for rows in parts] == [5 + k * 2**62 for k in range(C)]
    np.testing.assert_array_equal(x, X[:40].astype(np.float32))
    np.testing.assert_array_equal(y, Y[:40])
    assert x.dtype.isnative
    assert y.dtype.isnative


def test_features_of_8_bits_are_numbers_and_images_are_scaled() -> None:
    x = (X > 0).astype(np.uint8)
    (found, *_), (number, *_) = (clients.of_arrays([(each, Y)]) for each in (x, x.astype(int)))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, number)
    image = np.zeros((2, 3, 3, 1), np.uint8)
    assert clients.of_arrays([(image, [0, 1])])[0].dtype == np.uint8
    with pytest.warns(UserWarning, match="uint8"):
        clients.of_arrays(x * np.uint8(200), Y, np.zeros(48, int))


def test_one_hot_rows_in_floating_point_are_told() -> None:
    with pytest.warns(UserWarning, match="one-hot"):
        clients.of_arrays([(X, np.eye(3)[np.arange(48) % 3])])


@pytest.mark.slow
def test_a_network_may_have_several_outputs() -> None:
    model = models.from_function(
        lambda key, x: 0.1 * jax.random.normal(key, (x.shape[1], 2)),
        lambda params, x: (x @ params, x.sum(1)),
    )

    def first(outputs: Tree, y: Array, mask: Array) -> Array:
        return objectives.cross_entropy(outputs[0], y, mask)

    x = np.tile(X, (11, 1))  # more than are predicted at once
    arguments: dict[str, Any] = {"loss": first, "score": first, "rounds": 1, "progress": False}
    logits, sums = fit(fedavg.fedavg, model, [(X, Y)], **arguments).predict(x)
    assert logits.shape == (528, 2)
    np.testing.assert_allclose(sums, x.sum(1), rtol=1e-4, atol=1e-5)


def test_targets_choose_the_loss_and_the_score() -> None:
    values = arguments.objective(fedavg.fedavg, X[:, 0], None, None)
    assert values.loss is objectives.squared_error is values.settings["loss"]
    assert not values.score.higher_is_better
    labels = arguments.objective(fedavg.fedavg, X > 0, None, None)
    assert labels.loss is objectives.binary_cross_entropy
    classes = arguments.objective(fedavg.fedavg, Y, None, loss)
    assert classes.settings == {}
    assert classes.score.function is loss
    needed = arguments.objective(lambda model, work, *, loss: None, Y, None, None)
    assert needed.settings == {"loss": objectives.cross_entropy}
    # Other arguments may be passed on to an algorithm that takes no loss.
    assert arguments.objective(lambda model, work, **settings: None, Y, None, None).settings == {}


def test_the_momentum_of_sgd_alone_is_known() -> None:
    """Another optimizer's momentum acts otherwise, and FedNova must refuse it."""
    sizes = np.array([[3, 5]])
    for optimizer, known in ((optax.sgd, 0.5), (optax.rmsprop, None)):
        for batch_size in (2, None):
            work = arguments.work(optimizer, 0.1, 0.5, batch_size, 1, sizes)
            assert work.momentum == known
    for none in (0, 0.0, np.float32(0)):  # Adam takes no momentum
        assert arguments.work(optax.adam, 0.1, none, 2, 1, sizes).momentum is None


@pytest.mark.slow
def test_two_devices_train_what_one_does() -> None:
    settings = SETTINGS | {"devices": 2, "schedule": None, "batch_size": None}
    more = {"seeds": SEEDS, "learning_rate": RATES}
    several = fit(fedavg.fedavg, MODEL, *ARRAYS, **(settings | more))
    alone = fit(fedavg.fedavg, MODEL, *ARRAYS, **(settings | more | {"devices": 1}))
    for run in range(len(alone.runs)):
        np.testing.assert_allclose(several.predict(X, run), alone.predict(X, run), rtol=1e-6)
    for name, values in alone.history.values.items():
        np.testing.assert_allclose(several.history[name], values, rtol=1e-5)


@pytest.mark.slow
def test_personal_networks_serve_their_own_client() -> None:
    model = models.mlp(2, widths=(3,), norm="batch")
    data = [(X[rows] + 3 * c, Y[rows]) for c, rows in enumerate(PARTS)]
    fitted = fit(fedbn.fedbn, model, data, rounds=2, seeds=(0, 1), progress=False, devices=1)
    algorithm, state = fitted.algorithm(1), fitted.state(1)
    x = np.concatenate([pair[0] for pair in data])
    own = federation.of_parts(
        federation.examples(x, np.concatenate([Y[rows] for rows in PARTS])),
        np.split(np.arange(40), C),
    )
    expected = evaluation.evaluate(algorithm, state, own)
    for client, (inputs, targets) in enumerate(data):
        scores = fitted.evaluate(inputs, targets, client=client)
        np.testing.assert_allclose(scores.loss[1], expected.loss[client], rtol=1e-5)
        outputs = fitted.predict(inputs, 1, client=client)
        np.testing.assert_allclose((outputs.argmax(-1) == targets).mean(), scores.score[1])
    unseen = fitted.predict(X, 1)
    assert not np.allclose(unseen, fitted.predict(X, 1, client=3))


@pytest.mark.slow
def test_training_goes_on_from_a_network_and_pools_for_erm() -> None:
    settings: dict[str, Any] = {"rounds": 1, "progress": False, "devices": 1, "batch_size": None}
    first = fit(erm.erm, MODEL, *ARRAYS, cohort=3, **settings)  # a cohort of the single client
    start = first.network()
    second = fit(erm.erm, MODEL, *ARRAYS, variables=start, learning_rate=[0.0, 0.1], **settings)
    np.testing.assert_array_equal(first.predict(X, client=3), first.predict(X))
    assert first.evaluate(X, Y, client=3).loss == first.evaluate(X, Y).loss
    with pytest.raises(UsageError, match="client"):
        first.predict(X, client=4)
    assert_same_bits(plain(second.network(0)), plain(start))
    x, y, kernel = X[:40], np.eye(2)[Y[:40]], np.asarray(start.params.head, np.float64)
    outputs = np.exp(x @ kernel)
    gradient = x.T @ (outputs / outputs.sum(1, keepdims=True) - y) / 40
    expected: Tree = kernel - 0.1 * gradient
    np.testing.assert_allclose(second.network(1).params.head, expected, rtol=1e-4, atol=1e-6)
