"""`fit`: arrays in, trained runs out, equal to those of the layers below."""

import dataclasses
import functools
import signal
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grey_images import grey

import slow
from federations import assert_close, assert_same_bits, plain
from fedjax_inv import (
    devices,
    evaluation,
    fit,
    local,
    models,
    objectives,
    platforms,
    rounds,
    schedules,
)
from fedjax_inv.algorithms import erm, fedavg, fedbn, fedipg, fedproto
from fedjax_inv.callbacks import Callback, Patience, Progress
from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients, environments, federation
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.devices import Devices
from fedjax_inv.fit import LocalTraining, plan
from fedjax_inv.fitted import Diverged, Fitted
from fedjax_inv.inputs import Run, schedule_key
from fedjax_inv.plan import Evaluations, Plan
from fedjax_inv.task import task_of
from fedjax_inv.types import Array, Cohort, Tree

C, T, EVERY = 4, 5, 2  # clients, rounds, rounds of a segment
RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 3))
Y = (X[:, 0] > 0).astype(int)
PARTS = [np.arange(40)[c::C] for c in range(C)]
CLIENTS = [(X[rows], Y[rows]) for rows in PARTS]
TEST = X[40:], Y[40:]
SEEDS, RATES = [3, 1], [0.3, 0.1]
MODEL = models.from_function(
    lambda key, x: 0.1 * jax.random.normal(key, (x.shape[1], 2)), lambda params, x: x @ params
)
TRACES: list[str] = []


def loss(outputs: Array, y: Array, mask: Array) -> Array:
    """The cross-entropy, which counts how often it is traced."""
    TRACES.append("loss")
    return objectives.cross_entropy(outputs, y, mask)


def schedule(key: Array, num_clients: int, num_rounds: int) -> Cohort:
    drawn = schedules.sampled(key, num_clients, 3, num_rounds)
    return schedules.slow(drawn, jnp.array([1, 2, 1, 1]))


FLAT: dict[str, Any] = {"rounds": 1, "callbacks": (), "devices": 1}
SETTINGS: dict[str, Any] = {
    "rounds": T,
    "grid": {"seed": SEEDS, "learning_rate": RATES},
    "test": TEST,
    "validation": 0.3,
    "batch_size": 4,
    "loss": loss,
    "schedule": schedule,
    "evaluations": EVERY,
    "devices": 1,
}


class Seen(Callback):
    """What a callback sees; one with the name "a" ends the training after round 4."""

    def __init__(self, name: str = "", acts: list[tuple[str, str, int]] | None = None) -> None:
        self.name, self.acts = name, [] if acts is None else acts
        self.traces: list[int] = []
        self.networks: list[Tree] = []
        self.stored: list[Tree] = []

    def begin(self, fitted: Fitted) -> None:
        self.acts.append((self.name, "begin", fitted.round))

    def evaluated(self, fitted: Fitted) -> str:
        self.acts.append((self.name, "evaluated", fitted.round))
        self.traces.append(len(TRACES))
        self.networks.append(plain(fitted.network(1)))
        self.stored.append(jax.tree.map(jnp.copy, fitted.stored()))
        assert fitted.history["test_score"].shape == (4, len(self.networks))
        return "enough" if (self.name, fitted.round) == ("a", 4) else ""

    def end(self, fitted: Fitted) -> None:
        self.acts.append((self.name, "end", fitted.round))


@functools.cache
def planned() -> Plan:
    """Two seeds and two rates."""
    return plan(fedavg.fedavg, MODEL, CLIENTS, **SETTINGS).placed()


@functools.cache
def trained() -> tuple[Fitted, Seen]:
    seen = Seen()
    return planned().train([seen]), seen


def test_runs_are_those_of_the_layers_below() -> None:
    """But for rounding: a product of several settings with a batch is one."""
    x, y, parts = clients.of_arrays(CLIENTS)
    seed, run = SEEDS[1], 3
    _, splits = clients.splits_of_arrays(x, y, parts, test=TEST, validation=0.3, seeds=[seed])
    train = jax.tree.map(jnp.asarray, splits[seed].train)
    algorithm = fedavg.fedavg(MODEL, local.epochs(optax.sgd(RATES[1]), batch_size=4))
    axis, key = devices.chunked(1), jax.random.key(seed)
    # Compiled, as a draw without compilation rounds its products by themselves.
    variables = jax.jit(MODEL.init)(jax.random.fold_in(key, 0), jnp.zeros((1, 3)))
    start = jax.random.fold_in(key, 1)
    state = rounds.init(algorithm, variables, train, start, history=2, axis=axis)
    play = jax.jit(
        lambda *arguments: rounds.run(algorithm, *arguments, axis=axis)[0],
        compiler_options=platforms.one_thread(),
    )
    state = play(state, schedule(schedule_key(seed), C, T), train)
    found, _ = trained()
    assert found.runs[run] == Run(seed, {"learning_rate": RATES[1]})
    assert_close(plain(found.state(run)), plain(state), rtol=1e-6, atol=1e-7)
    scores = evaluation.evaluate(algorithm, state, splits[seed].valid)
    expected = evaluation.mean(scores)
    np.testing.assert_allclose(found.history["valid_score"][run, -1], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found.history["valid_loss"][run, -1], expected[1], rtol=1e-6)


def test_the_history_is_of_every_run_and_segment() -> None:
    """The last segment is shorter. No further one is traced."""
    found, seen = trained()
    history = found.history
    assert [run.seed for run in history.runs] == [3, 1, 3, 1]
    assert history.rounds.tolist() == [2, 4, 5] == [at for _, _, at in seen.acts[1:-1]]
    scores = {f"{of}_{what}" for of in ("valid", "test") for what in ("score", "loss")}
    assert {*history} == {"train_loss"} | scores
    assert {values.shape for values in history.values.values()} == {(4, 3)}
    assert all(np.isfinite(values).all() for values in history.values.values())
    assert (history["train_loss"][:, -1] < history["train_loss"][:, 0]).all()
    assert (found.round, found.stopped) == (T, "")
    assert_same_bits(seen.networks[-1], plain(found.network(1)))
    assert not np.array_equal(seen.networks[0].params.head, seen.networks[1].params.head)
    assert seen.traces[0] == seen.traces[1]
    assert "train_loss" in history
    with pytest.raises(UsageError, match="train_loss"):
        history["loss"]


def test_predictions_are_those_of_the_served_network() -> None:
    found, _ = trained()
    x, y = TEST
    scores = found.evaluate(x, y)
    assert scores.size.tolist() == [8] * 4
    for run in range(4):
        outputs = found.predict(x, run)
        expected = models.predict(MODEL, found.network(run), x)
        np.testing.assert_allclose(outputs, expected, rtol=1e-6)
        np.testing.assert_allclose(scores.score[run], (outputs.argmax(-1) == y).mean())
        log = outputs - np.log(np.exp(outputs).sum(-1, keepdims=True))
        np.testing.assert_allclose(scores.loss[run], -log[np.arange(8), y].mean(), rtol=1e-5)
    np.testing.assert_allclose(scores.score, found.history["test_score"][:, -1], rtol=1e-6)
    many = np.tile(x, (80, 1))  # more than a batch
    np.testing.assert_allclose(found.predict(many)[-8:], found.predict(x), rtol=1e-6)
    for number in range(9):
        alone = found.predict(x[:number])
        np.testing.assert_allclose(alone, found.predict(x)[:number], rtol=1e-6)
    assert found._predict._cache_size() <= 7  # batches of 512, 128, 0, 1, 2, 4 and 8
    for wrong in (x[:, :2], x[0], x.astype(int)):
        with pytest.raises(UsageError, match="x"):
            found.predict(wrong)
    with pytest.raises(UsageError, match="run"):
        found.predict(x, 4)
    with pytest.raises(UsageError, match="y"):
        found.evaluate(x, y / 2)
    with pytest.raises(UsageError, match=r"^y.* \["):
        found.evaluate(x, y[:-1])


def test_a_soup_is_the_mean_of_networks_that_started_from_one() -> None:
    def weights(network: Tree) -> np.ndarray:
        (leaf,) = jax.tree.leaves(network)
        return np.asarray(leaf)

    fitted, _ = trained()
    same_seed = [run for run, one in enumerate(fitted.runs) if one.seed == SEEDS[1]]
    networks = [weights(fitted.network(run)) for run in same_seed]
    assert np.abs(networks[0] - networks[1]).max() > 1e-3
    np.testing.assert_allclose(weights(fitted.soup(same_seed)), np.mean(networks, 0), rtol=1e-6)
    assert_same_bits(fitted.soup([2]), fitted.network(2))
    assert_same_bits(fitted.soup([2, 2, 2]), fitted.network(2))
    with pytest.raises(UsageError, match="runs"):  # two seeds
        fitted.soup()
    one = MODEL._replace(init=lambda key, x: MODEL.init(jax.random.key(7), x))
    seeds = fit(fedavg.fedavg, one, CLIENTS, grid={"seed": SEEDS}, **FLAT)
    mean = np.mean([weights(seeds.network(run)) for run in (0, 1)], 0)
    np.testing.assert_allclose(weights(seeds.soup()), mean, rtol=1e-6)


def test_a_history_becomes_a_data_frame() -> None:
    history = trained()[0].history
    frame = history.to_dataframe()
    columns = frame[["run", "seed", "learning_rate", "round"]].to_numpy().tolist()
    runs = zip([3, 1, 3, 1], [0.3, 0.3, 0.1, 0.1], strict=True)
    assert columns == [[i, *run, at] for i, run in enumerate(runs) for at in (2, 4, 5)]
    np.testing.assert_array_equal(frame["test_loss"], history["test_loss"].ravel())


# Callbacks.


def test_a_training_that_continues_gives_the_same_bits() -> None:
    found, seen = trained()

    class Continued(Callback):
        def begin(self, fitted: Fitted) -> None:
            fitted.restore(jax.tree.map(jnp.copy, seen.stored[0]), 2)

    again = planned().train([Continued()])
    assert again.history.rounds.tolist() == [4, 5]
    assert_same_bits(plain(again.stored()), plain(found.stored()))
    for name in found.history:
        np.testing.assert_array_equal(again.history[name], found.history[name][:, 1:])


def test_callbacks_act_in_their_order_and_end_after_an_error(capsys: Any) -> None:
    acts: list[tuple[str, str, int]] = []
    last = [lambda fitted: fitted.round > 2, Seen("b", acts), Progress()]
    found = planned().train([Seen("a", acts), *last])
    assert (found.stopped, found.round) == ("enough", 4)
    of_both = [(name, "evaluated", at) for at in (2, 4) for name in "ab"]
    begun, ended = [[(name, act, at) for name in "ab"] for act, at in (("begin", 0), ("end", 4))]
    assert acts == [*begun, *of_both, *reversed(ended)]
    assert "train_loss" in capsys.readouterr().err
    acts.clear()
    with pytest.raises(ZeroDivisionError) as error:
        planned().train([Seen("b", acts), lambda fitted: 1 // (4 - fitted.round) > 9])
    assert error.value.fitted.round == 4  # type: ignore[attr-defined]
    assert acts[-1] == ("b", "end", 4)


def test_ctrl_c_keeps_the_segment_that_it_interrupts() -> None:
    seen = Seen()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # not that of the shell
    try:
        found = planned().train([lambda fitted: signal.raise_signal(signal.SIGINT), seen])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (found.stopped, found.round, len(seen.networks)) == ("interrupt", 2, 1)
    assert_same_bits(seen.networks[0], trained()[1].networks[0])


def test_patience_waits_for_all_runs() -> None:
    scores = [(0.5, 0.5), (0.6, 0.4), (0.5, 0.5), (0.5, 0.6), (0.6, 0.6), (0.6, 0.6), (1, 1)]

    def last(evaluations: int, score: objectives.Score) -> int:
        inputs = SimpleNamespace(valid=SimpleNamespace(size=np.ones((2, 1))), unseen={})
        made = SimpleNamespace(inputs=inputs, task=SimpleNamespace(score=score))
        patience, number = Patience(evaluations), 0
        so_far: Any = SimpleNamespace(plan=made, runs=(0, 1))
        patience.begin(so_far)
        for number in range(1, 8):
            so_far.latest = {"valid_score": np.array(scores[number - 1])}
            if patience.evaluated(so_far):
                break
        return number

    assert [last(n, objectives.SCORES["accuracy"]) for n in (2, 3)] == [6, 7]
    assert last(4, objectives.SCORES["squared_error"]) == 6  # lower is better
    with pytest.raises(UsageError, match="validation"):
        fit(fedavg.fedavg, MODEL, CLIENTS, **FLAT | {"callbacks": [Patience(2)]})
    with pytest.raises(UsageError, match="score"):
        fit(fedavg.fedavg, MODEL, CLIENTS, **FLAT | {"callbacks": [Patience(2, "test_score")]})


def test_patience_watches_a_domain_that_no_client_has() -> None:
    """Without a rate no evaluation is better than the first."""
    domain = (np.arange(48) % 4).astype(np.int32)
    whole = Dataset(X, Y, ("a", "b"), domain, tuple("nesw"), np.zeros(48, bool))
    data = clients.of_dataset(whole, held_out="n", validate="e")
    flat = FLAT | {"rounds": 5, "learning_rate": 1e-20, "evaluations": 1}
    flat["devices"] = Devices(1, stream=True)
    patience = Patience(2, "unseen_domain_score")
    found = fit(fedavg.fedavg, MODEL, data, **flat | {"callbacks": [patience]})
    assert (found.stopped, found.round) == ("patience", 3)
    expected = found.evaluate(X[domain == 1], Y[domain == 1])
    np.testing.assert_allclose(found.history["unseen_domain_loss"][:, -1], expected.loss, rtol=1e-5)


def test_a_clip_of_0_in_a_grid_clips_nothing() -> None:
    """There it is traced, and a norm of 0 would be the largest."""
    grid = {"clip": [0.0, 1e-3], "learning_rate": [0.5]}
    found = fit(fedavg.fedavg, MODEL, CLIENTS, grid=grid, **FLAT)
    alone = fit(fedavg.fedavg, MODEL, CLIENTS, grid={"learning_rate": [0.5]}, **FLAT)
    np.testing.assert_allclose(found.predict(X, 0), alone.predict(X), rtol=1e-5)
    assert np.abs(found.predict(X, 1) - alone.predict(X)).max() > 1e-3


def test_an_update_that_is_not_finite_is_warned_of_left_out_or_stops() -> None:
    data = [*CLIENTS[:3], (1e30 * X[:10], Y[:10])]
    made = plan(fedavg.fedavg, MODEL, data, rounds=3, batch_size=2, devices=1)
    with pytest.warns(UserWarning, match="round 1, client 3, run 0") as warned:
        found = made.train()
    assert not np.isfinite(found.predict(X)).all()
    assert np.isnan(found.history["train_loss"][0, -1])
    assert len(warned) == 1
    with pytest.raises(Diverged) as error:
        dataclasses.replace(made, evaluations=Evaluations(nonfinite="stop")).train()
    assert (error.value.round, error.value.client, error.value.index) == (1, 3, 0)
    drops = FLAT | {"rounds": 3, "batch_size": 2, "evaluations": Evaluations(nonfinite="drop")}
    with pytest.warns(UserWarning, match="client 3"):
        found = fit(fedavg.fedavg, MODEL, data, **drops)
    assert np.isfinite(found.predict(X)).all()
    assert np.isfinite(found.history["train_loss"]).all()


# Data, devices and networks.


@pytest.mark.parametrize(
    "used",
    slow.after(1, [(Devices(1, stream=True),), (Devices(2),), (Devices(1, None, None, 0, 3),)]),
)
def test_examples_from_the_host_and_other_devices_give_the_same(used: Devices) -> None:
    start = {"evaluations": Evaluations(EVERY, start=True), "devices": used}
    found, other = trained()[0], plan(fedavg.fedavg, MODEL, CLIENTS, **SETTINGS | start).train()
    assert other.history.rounds.tolist() == [0, 2, 4, 5]
    assert np.isnan(other.history["train_loss"][:, 0]).all()
    for name, values in found.history.values.items():
        np.testing.assert_allclose(other.history[name][:, 1:], values, rtol=1e-5)
    for run in range(4):
        np.testing.assert_allclose(other.predict(X, run), found.predict(X, run), rtol=1e-5)


@pytest.mark.parametrize("number", [1, 2])
def test_runs_of_a_seed_that_share_their_batches_are_the_runs_alone(number: int) -> None:
    """Also where runs are in no order, and leave out domains."""
    grid = [
        Run(seed, {"learning_rate": rate}, left_out)
        for rate in RATES
        for left_out in ("", "b")
        for seed in SEEDS
    ]
    net = models.mlp(2, widths=(3,))
    how: dict[str, Any] = {"rounds": 3, "devices": number}
    how |= {"schedule": schedules.attending(2, dropout=0.2)}
    together = plan(fedavg.fedavg, net, DOMAINS, grid=grid, **how).train()
    assert together.plan.layout.settings == len(RATES)
    for run in (0, 3, 6):
        alone = plan(fedavg.fedavg, net, DOMAINS, grid=[grid[run]], **how | {"devices": 1}).train()
        for name, values in alone.history.values.items():
            np.testing.assert_allclose(together.history[name][run], values[0], rtol=1e-5)
        assert_close(together.state(run).server, alone.state().server, rtol=1e-5, atol=1e-6)


def test_larger_networks_of_a_cpu_share_nothing() -> None:
    how: dict[str, Any] = {"grid": {"learning_rate": RATES}, "rounds": 1, "devices": 1}
    settings = [
        plan(fedavg.fedavg, models.mlp(2, widths=widths), CLIENTS, **how).layout
        for widths in ((3,), (300, 300))
    ]
    assert [layout.settings for layout in settings] == [2, 1]


def test_runs_shared_by_two_devices_compile_three_programs_and_draws(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three runs are padded to four on the host, where nothing is compiled for each shape."""
    grid = {"seed": [0, 1, 2]}
    jax.config.update("jax_log_compiles", True)  # of all threads, as a context is not
    try:
        with caplog.at_level("WARNING", "jax"):
            fit(fedavg.fedavg, MODEL, CLIENTS, **FLAT | {"devices": 2, "grid": grid, "steps": 3})
    finally:
        jax.config.update("jax_log_compiles", False)
    lines = [record.getMessage() for record in caplog.records]
    names = [line.split("jit(")[1].split(")")[0] for line in lines if "XLA compilation" in line]
    assert {"init", "play", "evaluate"} <= {*names}  # as in a profile
    assert len(names) <= 5, names


def test_fit_leaves_the_devices_of_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[str] = []
    monkeypatch.setattr(type(jax.config), "update", lambda self, name, value: changed.append(name))
    plan(fedavg.fedavg, MODEL, CLIENTS, rounds=1, devices=2)
    assert "jax_num_cpu_devices" not in changed


def test_a_data_set_brings_its_clients_its_test_and_its_images() -> None:
    whole = grey(60, 2, 20)
    drawn = environments.colored(whole, flips=(0.2, 0.1), seed=5)
    held_out = clients.of_dataset(drawn, held_out=drawn.domains[0], validation=0.2)
    for data in (drawn._replace(test=whole.test), held_out):
        inputs = plan(fedavg.fedavg, models.mlp(2), data, rounds=1, devices=1).inputs
        assert np.asarray(inputs.train.size).sum() > 0 < np.asarray(inputs.test.size).sum()
    assert np.asarray(inputs.valid.size).any()


@pytest.mark.slow
def test_a_network_may_have_several_outputs() -> None:
    model = models.from_function(
        lambda key, x: 0.1 * jax.random.normal(key, (x.shape[1], 2)),
        lambda params, x: (x @ params, x.sum(1)),
    )

    def first(outputs: Tree, y: Array, mask: Array) -> Array:
        return objectives.cross_entropy(outputs[0], y, mask)

    x = np.tile(X, (11, 1))  # more than are predicted at once
    scored = {"loss": first, "evaluations": Evaluations(score=first)}
    logits, sums = fit(fedavg.fedavg, model, [(X, Y)], **FLAT | scored).predict(x)
    assert logits.shape == (528, 2)
    np.testing.assert_allclose(sums, x.sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_personal_networks_serve_their_own_client() -> None:
    data = [(x + 3 * c, y) for c, (x, y) in enumerate(CLIENTS)]
    model = models.mlp(2, widths=(3,), norm="batch")
    found = fit(fedbn.fedbn, model, data, grid={"seed": [0, 1]}, **FLAT | {"rounds": 2})
    x, y = (np.concatenate(each) for each in zip(*data, strict=True))
    own = federation.of_parts(federation.examples(x, y), np.split(np.arange(40), C))
    expected = evaluation.evaluate(found.algorithm(1), found.state(1), own)
    for client, (inputs, targets) in enumerate(data):
        scores = found.evaluate(inputs, targets, client=client)
        np.testing.assert_allclose(scores.loss[1], expected.loss[client], rtol=1e-5)
        outputs = found.predict(inputs, 1, client=client)
        np.testing.assert_allclose((outputs.argmax(-1) == targets).mean(), scores.score[1])
    assert not np.allclose(found.predict(X, 1), found.predict(X, 1, client=3))


@pytest.mark.slow
def test_training_goes_on_from_a_network_and_pools_for_erm() -> None:
    settings: dict[str, Any] = FLAT | {"batch_size": None}
    first = fit(erm.erm, MODEL, CLIENTS, **settings)
    start = first.network()
    model = MODEL._replace(init=lambda key, x: start)
    second = fit(erm.erm, model, CLIENTS, grid={"learning_rate": [0.0, 0.1]}, **settings)
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


# Arguments.


def test_targets_choose_the_loss_and_the_score() -> None:
    values = task_of(fedavg.fedavg, X[:, 0], None, None)
    assert values.loss is objectives.squared_error is values.settings["loss"]
    assert not values.score.higher_is_better
    labels = task_of(fedavg.fedavg, X > 0, None, None)
    assert labels.loss is objectives.binary_cross_entropy
    classes = task_of(fedavg.fedavg, Y, None, loss)
    assert classes.settings == {}
    assert classes.score.function is loss
    needed = task_of(lambda model, work, *, loss: None, Y, None, None)
    assert needed.settings == {"loss": objectives.cross_entropy}
    # Other arguments may be passed on to an algorithm that takes no loss.
    assert task_of(lambda model, work, **settings: None, Y, None, None).settings == {}


def test_the_momentum_of_sgd_alone_is_known() -> None:
    """Another optimizer's momentum acts otherwise, and FedNova must refuse it."""
    values = {"learning_rate": 0.1, "momentum": 0.5, "weight_decay": 0.0, "clip": 0.0}
    for optimizer, known in ((optax.sgd, 0.5), (optax.rmsprop, None)):
        for batch_size in (2, None):
            training = LocalTraining(optimizer, batch_size, 1, None)
            assert training.work(values).momentum == known
    for none in (0, 0.0, np.float32(0)):  # Adam takes no momentum
        training = LocalTraining(optax.adam, 2, 1, None)
        assert training.work(values | {"momentum": none}).momentum is None


WRONG: dict[str, list[Any]] = {
    "rounds": [0, 2**31],
    "server_optimizer": [optax.adam],  # not called
    "learning_rate": [-1, 1e-46, [0.1, 0.2]],  # a list goes into the grid
    "momentum": [2],
    "weight_decay": [np.inf],
    "seed": [-1, "a", [0, 1]],
    "weighting": ["no"],
    "penalty": [1.0],  # FedAvg has none
    "grid": [
        [0.1],
        {"seed": [1, 1]},
        {"seed": [0.5]},
        *({"learning_rate": values} for values in (0.1, [], [0.1, "a"], [[1], [1, 2]])),
        {"weighting": [1.0, 2.0]},
        {"penalty": [1.0]},
    ],
    "validation": [1.5, "a"],
    "learning_rate_schedule": [0.5],
    "evaluations": [
        *(2, Evaluations(nonfinite="no"), Evaluations(watched=-1), Evaluations(by_class=1)),
        *(
            Evaluations(thresholds=(0.5,)),
            Evaluations(thresholds=0.5),
            Evaluations(stop_above=True),
        ),
        *(Evaluations(end_at_stop=True), Evaluations(watched=9, thresholds=("a",))),
    ],
    "schedule": [
        3,
        *(schedules.attending(cohort=5), schedules.attending(dropout=1.5)),
        schedules.attending(slow=[1, 2, 0, 1]),
        schedules.attending(slow=[1, 2.7, 1, 1]),
        schedules.buffered(2, seconds=[1, 1, np.inf, 1]),
        lambda *arguments: schedules.everyone(*arguments[1:])._replace(
            present=jnp.zeros((arguments[2], arguments[1]), bool)
        ),
        lambda key, num_clients, num_rounds: schedules.everyone(num_clients, 3),
    ],
    "optimizer": [optax.sgd(0.1)],  # not a function of the learning rate
    "batch_size": [0],
    "callbacks": [
        *([1], [Patience], Patience(1)),
        *([lambda fitted, answer=answer: answer] for answer in (0, 0.5, np.zeros(2), np.ones(()))),
    ],
    "test": [5, X, (X[:, :2], Y)],
    "loss": [
        *(1, lambda outputs, y, mask: y[:, :, None] / 0),
        optax.softmax_cross_entropy_with_integer_labels,
        lambda outputs, y, mask: optax.softmax_cross_entropy_with_integer_labels(outputs, y),
    ],
    "devices": [64, Devices(0), Devices(client_chunk=-1), Devices(precision="hihgest")],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_argument(name: str, value: Any) -> None:
    inner = [*value] if isinstance(value, dict) else ["cohort", "dropout", "slow", "seconds"]
    with pytest.raises(UsageError, match="|".join([name, *inner])):
        fit(fedavg.fedavg, MODEL, CLIENTS, **FLAT | {name: value})


def test_inputs_and_targets_that_look_like_others_are_told() -> None:
    one_hot, of = np.eye(2)[Y], np.arange(len(Y)) % 2
    images = np.zeros((len(Y), 3, 8, 8), np.uint8)
    for x, y, word in ((X, one_hot, "one-hot"), (images, Y, "transpose")):
        data = Dataset(x, y, ("n", "y"), of, ("a", "b"), of < 0)
        for given in (clients.by_client(x, y, of), data):
            with pytest.warns(UserWarning, match=word):
                plan(fedavg.fedavg, models.mlp(2, widths=(4,)), given, rounds=1)


def test_a_callback_goes_on_or_ends_the_training() -> None:
    for answer, stopped in ((None, ""), (False, ""), ("", ""), (True, "callback"), ("why", "why")):
        found = fit(fedavg.fedavg, MODEL, CLIENTS, **FLAT | {"callbacks": [lambda _, a=answer: a]})
        assert found.stopped == stopped


def test_a_client_that_is_slower_than_the_training_keeps_no_more_than_its_rounds() -> None:
    """A billion broadcasts would not fit into memory; all of them are the first one."""
    slow = [schedules.attending(slow=[1, 1, 1, needed]) for needed in (3, 10**9)]
    few, many = (plan(fedavg.fedavg, MODEL, CLIENTS, rounds=3, schedule=each) for each in slow)
    assert few.experiment.history == many.experiment.history <= 3
    np.testing.assert_array_equal(few.cohorts.delay, many.cohorts.delay)


def test_what_was_meant() -> None:
    for wrong, meant in (({"lr": 0.1}, "learning_rate"), ({"server_optimiser": 1}, "optimizer")):
        with pytest.raises(UsageError, match=f"did you mean .*{meant}"):
            fit(fedavg.fedavg, MODEL, CLIENTS, **FLAT | wrong)
    with pytest.raises(UsageError, match=r"fedavg\.fedavg"):
        fit(fedavg, MODEL, CLIENTS, **FLAT)


def test_a_wrong_factory_network_or_data() -> None:
    fails = models.from_function(lambda key, x: (), lambda params, x: x.reshape(-1, 7))
    wrong: list[tuple[str, Any, Any, Any, dict[str, Any]]] = [
        ("algorithm", lambda model: model, MODEL, CLIENTS, {}),
        ("gamma", lambda model, work, *, gamma: model, MODEL, CLIENTS, {}),
        ("algorithm", lambda model, work: model, MODEL, CLIENTS, {}),
        ("penalty", fedipg.fedipg, MODEL, CLIENTS, {"grid": {"penalty": [0.1, -1.0]}}),
        (
            "learning_rate",
            fedavg.fedavg,
            MODEL,
            CLIENTS,
            {"learning_rate": 0.1, "grid": {"learning_rate": [0.1]}},
        ),
        ("y", fedproto.fedproto, MODEL, [(X, X[:, 0])], {}),  # which needs classes
        ("y", fedavg.fedavg, MODEL, [(X, Y + 1)], {}),
        ("y", fedavg.fedavg, MODEL, [(X, Y.astype(float))], {}),  # values, for two outputs
        ("model", fedavg.fedavg, fails, CLIENTS, {}),
        ("model", fedavg.fedavg, MODEL.init, CLIENTS, {}),
        ("clients", fedavg.fedavg, MODEL, X, {}),
        ("validation", fedavg.fedavg, MODEL, lambda seeds: None, {"validation": 0.1}),
        ("test", fedavg.fedavg, MODEL, lambda seeds: None, {"test": TEST}),
    ]
    for name, factory, model, data, settings in wrong:
        with pytest.raises(UsageError, match=name):
            fit(factory, model, data, **FLAT | settings)


DOMAINS = Dataset(
    X,
    Y,
    ("no", "yes"),
    np.arange(48, dtype=np.int32) % 3,
    ("a", "b", "c"),
    np.arange(48) >= 40,
)


@pytest.mark.parametrize("algorithm", [fedavg.fedavg, erm.erm])
def test_a_run_without_a_domain_is_one_on_clients_that_do_not_have_it(algorithm: Any) -> None:
    """Mixed clients: the first has domain b alone, so it never attends."""
    parts = [np.arange(1, 30, 3), np.array([0, 2, 31, 34]), np.array([3, 5, 6, 8, 33, 37, 39])]
    own = clients.of_dataset(DOMAINS, partition=lambda rows, rng: parts, validation=0.3)
    runs = [
        *(Run(seed, {"learning_rate": 0.3}) for seed in SEEDS),
        *(Run(seed, {"learning_rate": 0.2}, "b") for seed in SEEDS),
    ]
    settings: dict[str, Any] = {"rounds": 3, "batch_size": 4, "callbacks": (), "devices": 1}
    both = fit(algorithm, MODEL, own, grid=runs, **settings)

    def alone(seeds: list[int]) -> federation.Splits:
        splits = own(seeds)
        for seed in seeds:
            of = splits.of_seed[seed]
            held = {kind: federation.parts_of(getattr(of, kind)) for kind in ("train", "valid")}
            kept = {k: [rows[rows % 3 != 1] for rows in each] for k, each in held.items()}
            tested = np.sort(np.concatenate([*held["train"], *held["valid"]]))
            made = {k: federation.of_parts(splits.data, each) for k, each in kept.items()}
            made["test"] = federation.of_parts(splits.data, [tested[tested % 3 == 1]])
            splits.of_seed[seed] = of._replace(**made)
        return splits

    grid = {"seed": SEEDS, "learning_rate": [0.2]}
    only = fit(algorithm, MODEL, alone, grid=grid, **settings)
    whole = fit(algorithm, MODEL, own, grid=grid | {"learning_rate": [0.3]}, **settings)
    for name in both.history:
        for found, needed in ((both.history[name][:2], whole), (both.history[name][2:], only)):
            np.testing.assert_allclose(found, needed.history[name], rtol=1e-5, err_msg=name)
    assert [*both.history.to_dataframe()["left_out"]] == [""] * 6 + ["b"] * 6


def test_runs_are_those_of_a_grid_or_any_others() -> None:
    grid = {"seed": SEEDS, "learning_rate": RATES}
    needed = fit(fedavg.fedavg, MODEL, CLIENTS, grid=grid, **FLAT)
    listed = [needed.runs[at] for at in (3, 0, 1)]  # not a product
    found = fit(fedavg.fedavg, MODEL, CLIENTS, grid=listed, **FLAT)
    assert_same_bits(found.history["train_loss"], needed.history["train_loss"][[3, 0, 1]])
    # The factor of a schedule multiplies a number of each run.
    one = [Run(seed, {}) for seed in SEEDS]
    half = {"learning_rate_schedule": lambda at: 0.5, "learning_rate": 0.6}
    scheduled = fit(fedavg.fedavg, MODEL, CLIENTS, grid=one, **half, **FLAT)
    assert_same_bits(scheduled.history["train_loss"], needed.history["train_loss"][:2])


def test_runs_are_refused_that_do_not_fit() -> None:
    for runs, where in (
        ([Run(0, {"learning_rate": 0.1}), Run(0, {})], "grid"),
        ([Run(0, {}, "a")], "left_out"),  # a list has no names of domains
        ([0, 1], "grid"),
    ):
        with pytest.raises(UsageError) as caught:
            fit(fedavg.fedavg, MODEL, CLIENTS, grid=runs, **FLAT)  # type: ignore[arg-type]
        assert caught.value.argument == where
    with pytest.raises(UsageError) as caught:
        fit(fedavg.fedavg, MODEL, DOMAINS, grid=[Run(0, {}, "d")], **FLAT)
    assert caught.value.argument == "left_out"
