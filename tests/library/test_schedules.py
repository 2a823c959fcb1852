from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slow
from federations import assert_equal
from fedjax_inv import schedules, tree
from fedjax_inv.checks import UsageError
from fedjax_inv.types import Cohort, Tree


def compiled(make: Callable[[], Tree]) -> Tree:
    """Return make() on the host, compiled as one program: op by op it would take a second."""
    return jax.tree.map(np.asarray, jax.jit(make)())


def test_everyone() -> None:
    schedule = schedules.everyone(3, 4)
    assert_equal(schedule.who, np.tile(np.arange(3, dtype=np.int32), (4, 1)))
    assert schedule.present.all()
    assert not schedule.delay.any()
    assert schedule.who.dtype == schedule.delay.dtype == jnp.int32


@pytest.mark.parametrize(("num_clients", "cohort"), [(5, 2), (4, 4)])
def test_sampled_without_replacement_and_a_longer_one_starts_with_it(
    num_clients: int, cohort: int
) -> None:
    def both(key: jax.Array) -> tuple[Cohort, Cohort]:
        return tuple(schedules.sampled(key, num_clients, cohort, length) for length in (5, 9))

    keys = jax.random.split(jax.random.key(0), 20)
    schedule, longer = jax.jit(jax.vmap(both))(keys)
    assert schedule.who.shape == (20, 5, cohort)
    assert schedule.present.all()
    assert not schedule.delay.any()
    for round_ in np.asarray(schedule.who).reshape(-1, cohort):
        assert len(set(round_)) == cohort
        assert set(round_) <= set(range(num_clients))
    assert_equal(jax.tree.map(lambda a: a[:, :5], longer), schedule)


def test_sampled_is_uniform() -> None:
    num_clients, cohort, num_rounds = 5, 2, 2000
    schedule, other = compiled(
        lambda: [
            schedules.sampled(jax.random.key(seed), num_clients, cohort, num_rounds)
            for seed in range(2)
        ]
    )
    share = np.bincount(schedule.who.ravel(), minlength=num_clients) / num_rounds
    # Six standard deviations of a mean of `num_rounds` draws with probability 2/5.
    np.testing.assert_allclose(share, cohort / num_clients, atol=6 * np.sqrt(0.24 / num_rounds))
    pairs, counts = np.unique(np.sort(schedule.who, axis=1), axis=0, return_counts=True)
    assert len(pairs) == 10
    np.testing.assert_allclose(counts / num_rounds, 0.1, atol=6 * np.sqrt(0.09 / num_rounds))
    assert (other.who != schedule.who).any()


FULL = schedules.everyone(3, 400)
KEY = jax.random.key(0)


def test_dropout_extremes_and_per_client() -> None:
    per_client = jnp.array([0.0, 1.0, 0.3])
    nobody, everybody, dropped, twice = compiled(
        lambda: [
            schedules.dropout(FULL, KEY, 0.0),
            schedules.dropout(FULL, KEY, 1.0),
            dropped := schedules.dropout(FULL, KEY, per_client),
            schedules.dropout(dropped, KEY, 0.0),
        ]
    )
    assert nobody.present.all()
    assert not everybody.present.any()
    share = dropped.present.mean(0)
    assert share[0] == 1
    assert share[1] == 0
    np.testing.assert_allclose(share[2], 0.7, atol=6 * np.sqrt(0.21 / 400))
    assert_equal(dropped.who, FULL.who)
    # An absent client stays absent.
    assert_equal(twice.present, dropped.present)


def test_dropout_is_drawn_by_round_and_client_and_can_be_vmapped() -> None:
    probabilities = jnp.array([0.0, 0.4, 0.5])

    def present(probability: float | jax.Array, schedule: Cohort = FULL) -> jax.Array:
        return schedules.dropout(schedule, KEY, probability).present

    behind, shorter, one_by_one, together = compiled(
        lambda: [
            present(0.5, FULL._replace(who=FULL.who[:, ::-1])),
            present(0.5, tree.take(FULL, slice(30))),
            jnp.stack([present(p) for p in probabilities]),
            jax.vmap(present)(probabilities),
        ]
    )
    first = one_by_one[2]
    assert_equal(behind, first[:, ::-1])
    assert_equal(shorter, first[:30])
    assert_equal(together, one_by_one)
    assert len(np.unique(first, axis=0)) > 1  # rounds differ
    assert len(np.unique(first, axis=1).T) > 1  # clients differ


def test_delayed_and_every_follow_the_client() -> None:
    who = np.random.default_rng(0).permuted(np.tile(np.arange(5), (12, 1)), axis=1)[:, :3]
    delay, period = jnp.array([0, 3, 1, 2, 0]), np.array([1, 2, 3, 4, 5])
    schedule = schedules.everyone(3, 12)._replace(who=jnp.asarray(who))
    late, rare, rarer, all_late, all_rare = compiled(
        lambda: [
            schedules.delayed(schedule, delay),
            rare := schedules.every(schedule, period),
            schedules.every(rare, np.ones(5)),
            schedules.delayed(schedule, 2),
            schedules.every(schedule, 4),
        ]
    )
    assert_equal(late.delay, delay[who])
    assert_equal(rare.present, np.arange(12)[:, None] % period[who] == 0)
    assert rare.present[0].all()
    assert_equal(rarer.present, rare.present)
    # A scalar counts for every client.
    assert_equal(all_late.delay, np.full((12, 3), 2, np.int32))
    assert_equal(all_rare.present, np.tile(np.arange(12)[:, None] % 4 == 0, 3))


def test_a_slow_client_sends_an_update_of_the_network_that_it_began_with() -> None:
    """Against a simulation: download, work for m rounds, upload, download again."""
    num_rounds, needed = 13, np.array([1, 2, 3, 5])
    slow, none, all_slow = compiled(
        lambda: [
            schedules.slow(schedule := schedules.everyone(4, num_rounds), needed),
            schedules.slow(schedule, 1),
            schedules.slow(schedule, 3),
        ]
    )
    for client, m in enumerate(needed):
        # Round t makes w_{t + 1} of the updates that arrive; all clients attend the first round.
        arrives, begun = {0: 0}, 1
        while begun + m - 1 < num_rounds:
            arrives[begun + m - 1] = begun
            begun += m
        assert_equal(np.flatnonzero(slow.present[:, client]), np.array(sorted(arrives)))
        for t, heard in arrives.items():
            # The engine's oldest broadcast is that of round 0.
            assert max(t - slow.delay[t, client], 0) == heard
            assert t == 0 or heard == t + 1 - m
    assert_equal(none, schedules.everyone(4, num_rounds))
    assert_equal(all_slow, tree_of(slow, 2))


def tree_of(schedule: Cohort, client: int) -> Cohort:
    """Return the schedule in which all clients attend as one of its clients does."""
    like = jax.tree.map(lambda leaf: np.repeat(leaf[:, client, None], 4, 1), schedule)
    return like._replace(who=schedule.who)


@pytest.mark.parametrize(("num_clients", "num_slots"), [(5, 5), (5, 2), (3, 7), (1, 1)])
def test_first_all_lets_each_attend_once_and_leaves_the_rest(
    num_clients: int, num_slots: int
) -> None:
    rng = np.random.default_rng(0)
    shape = (6, num_slots)
    before = Cohort(rng.integers(0, num_clients, shape), rng.random(shape) < 0.3, np.ones(shape))
    before = before._replace(who=before.who.astype(np.int32), delay=before.delay.astype(np.int32))
    after = compiled(lambda: schedules.first_all(jax.tree.map(jnp.asarray, before), num_clients))
    needed = -(-num_clients // num_slots)
    first = tree.take(after, slice(needed))
    assert sorted(first.who[first.present]) == list(range(num_clients))
    assert not first.delay.any()
    assert_equal(tree.take(after, slice(needed, None)), tree.take(before, slice(needed, None)))


def online_by_loop(
    key: jax.Array, round_: int, *, num_clients: int, day: int, least: float, zones: float
) -> set[int]:
    """Return who is online in a round of a `diurnal` with most=0.7, client by client."""
    found = set()
    for client in range(num_clients):
        now = 1 + round_ / day - zones * client / num_clients
        share = least + (0.7 - least) * (1 - np.cos(2 * np.pi * now)) / 2
        drawn = jax.random.fold_in(jax.random.fold_in(key, int(np.floor(now))), client)
        if float(jax.random.uniform(drawn)) < share:
            found.add(client)
    return found


def test_clients_online_follow_the_time_of_their_day() -> None:
    clients, settings = 9, dict(num_clients=9, day=5, least=0.1)
    online = schedules.diurnal(KEY, clients, day=5, least=0.1, most=0.7, time_zones=0.61)
    rounds = jnp.arange(7)
    drawn = compiled(lambda: jax.vmap(lambda t: online(t, jnp.arange(clients)))(rounds))
    for t in range(7):
        expected = online_by_loop(KEY, t, zones=0.61, **settings)
        assert set(np.flatnonzero(drawn[t])) == expected
    assert 0 < drawn.mean() < 1
    # At midnight `least` of all are online, at noon `most`, and a client once in each day.
    many = schedules.diurnal(KEY, 4000, day=10, least=0.1, most=0.7)
    ten = compiled(lambda: jax.vmap(lambda t: many(t, jnp.arange(4000)))(jnp.arange(10)))
    np.testing.assert_allclose([ten[0].mean(), ten[5].mean()], [0.1, 0.7], atol=0.04)
    changes = np.diff(ten.astype(int), axis=0)
    assert ((changes == 1).sum(0) <= 1).all()
    assert ((changes == -1).sum(0) <= 1).all()


@pytest.mark.parametrize(
    "online",
    [lambda t, who: [True] * 256, lambda t, who: who / 300, lambda t, who: jnp.bool_(True)],
)
def test_what_says_who_is_online_returns_a_bool_for_each(online: schedules.Online) -> None:
    with pytest.raises(UsageError, match=r"^the result of online.*: must be one bool for each of"):
        schedules.sampled(KEY, 300, 10, 4, online=online)


@pytest.mark.parametrize("cohort", slow.after(1, [3, 100, 300]))
def test_a_cohort_is_drawn_among_the_clients_online(cohort: int) -> None:
    """Against a walk through the order in which `sampled` takes all clients."""
    clients, recorded = 300, np.random.default_rng(0).random((4, 100)) < 0.3
    recorded[2] = False

    def drawn(cohort: int, length: int, recorded: np.ndarray | None) -> Cohort:
        online = None if recorded is None else schedules.trace(recorded)
        return schedules.sampled(KEY, clients, cohort, length, online=online)

    schedule, longer, order, plain, always = compiled(
        lambda: [
            drawn(cohort, 6, recorded),
            drawn(cohort, 8, recorded),
            drawn(clients, 6, None),
            drawn(cohort, 6, None),
            drawn(cohort, 6, np.ones((1, 1), bool)),
        ]
    )
    for t in range(6):
        can_come = [who for who in order.who[t] if recorded[t % 4, who % 100]]
        assert_equal(schedule.who[t][schedule.present[t]], np.array(can_come[:cohort], np.int32))
    assert not schedule.present[2].any()
    if cohort == 300:  # fewer are online than there are slots
        assert (schedule.present.sum(1) < 150).all()
    assert_equal(jax.tree.map(lambda leaf: leaf[:6], longer), schedule)
    assert_equal(always, plain)


def test_times_of_reports_are_log_normal_by_client_and_round() -> None:
    schedule = schedules.sampled(jax.random.key(1), 1500, 3, 900)
    typical = np.linspace(0, 5, 1500)
    still, moving, scalar, behind = compiled(
        lambda: [
            schedules.report_seconds(schedule, KEY, typical, spread=0.8),
            schedules.report_seconds(schedule, KEY, typical, spread=0.8, round_spread=0.3),
            schedules.report_seconds(schedule, KEY, 2.0, spread=0.0, round_spread=0.3),
            schedules.report_seconds(
                schedule._replace(who=schedule.who[:, ::-1]), KEY, typical, spread=0.8
            )[:, ::-1],
        ]
    )
    who = np.asarray(schedule.who)
    worked = typical[who] > 0
    factor = np.log(still[worked] / typical[who][worked])
    np.testing.assert_allclose([factor.mean(), factor.std()], [0, 0.8], atol=0.08)
    assert (still[~worked] == 0).all()
    # A client is as fast in every round, but for the spread between rounds.
    for client in who[0]:
        np.testing.assert_allclose(still[who == client], still[who == client][0], rtol=1e-5)
    ratio = np.log(moving[worked] / still[worked])
    np.testing.assert_allclose([ratio.mean(), ratio.std()], [0, 0.3], atol=0.03)
    np.testing.assert_allclose(np.log(scalar / 2).std(), 0.3, atol=0.03)
    np.testing.assert_allclose(behind, still, rtol=1e-6)


@pytest.mark.parametrize("deadline", [None, 4.0, 2.0])
@pytest.mark.parametrize("count", [1, 4, 6])
def test_the_first_reports_count(count: int, deadline: float | None) -> None:
    """Against a loop over the reports in the order of time; there are ties and losses."""
    rng = np.random.default_rng(count)
    who = rng.permuted(np.tile(np.arange(9), (60, 1)), axis=1)[:, :6].astype(np.int32)
    present = rng.random((60, 6)) < 0.8
    seconds = rng.integers(1, 6, (60, 6)).astype(np.float32)
    seconds[rng.random((60, 6)) < 0.2] = np.inf
    delay = rng.integers(0, 3, (60, 6)).astype(np.int32)
    asked = jax.tree.map(jnp.asarray, Cohort(who, present, delay))
    schedule, cost = compiled(
        lambda: schedules.first_reports(asked, jnp.asarray(seconds), count, deadline=deadline)
    )
    assert schedule.who.shape == (60, count)
    waited = 0
    for t in range(60):
        asks = [
            (seconds[t, slot], who[t, slot], delay[t, slot]) for slot in np.flatnonzero(present[t])
        ]
        counted: list[tuple] = []
        now = 0.0
        for at, client, since in sorted(asks):
            if len(counted) == count or at == np.inf or (deadline is not None and at > deadline):
                break
            counted.append((client, since))
            now = at
        waits = len(counted) < min(count, len(asks))
        here = schedule.present[t]
        mine = zip(schedule.who[t][here], schedule.delay[t][here], strict=True)
        assert sorted(mine) == sorted(counted)
        assert cost.lost[t] == len(asks) - len(counted)
        assert cost.seconds[t] == (deadline if waits and deadline is not None else now)
        waited += waits
    assert waited or count == 1
    if count == 6:  # nobody changes the slot
        assert_equal(schedule.who, who)


PER_CLIENT = [
    lambda schedule, values: schedules.dropout(schedule, KEY, values),
    schedules.delayed,
    schedules.every,
    schedules.slow,
]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: schedules.everyone(0, 2), "num_clients=0: must be an integer of at least 1"),
        (lambda: schedules.everyone(2, 0), "num_rounds=0: must be an integer of at least 1"),
        (lambda: schedules.sampled(KEY, 0, 1, 2), "num_clients=0"),
        (lambda: schedules.sampled(KEY, 3, 2, 0), "num_rounds=0"),
        (
            lambda: schedules.sampled(KEY, 3, 0, 2),
            "cohort=0: must be an integer in 1..3, the clients",
        ),
        (
            lambda: schedules.sampled(KEY, 3, 4, 2),
            "cohort=4: must be an integer in 1..3, the clients",
        ),
        *(
            (lambda p=p: schedules.dropout(FULL, KEY, p), "must be between 0 and 1")
            for p in (-0.1, 1.1, np.array([0.5, 2.0, 0.1]), np.nan)
        ),
        (
            lambda: schedules.diurnal(KEY, 3, day=9, least=0.5, most=0.4),
            "least=0.5: must be at most most=0.4",
        ),
        (lambda: schedules.diurnal(KEY, 3, day=0, least=0, most=0.4), "day=0: must be an integer"),
        (
            lambda: schedules.diurnal(KEY, 3, day=9, least=0, most=1, time_zones=2),
            "time_zones=2: must be a number between 0 and 1",
        ),
        *(
            (lambda of=of: schedules.trace(of), r"recorded: is .*, must be bool \[rounds, devices]")
            for of in (np.ones(3, bool), np.ones((2, 2), int), np.ones((0, 2), bool))
        ),
        (
            lambda: schedules.report_seconds(FULL, KEY, -1.0, spread=1),
            "typical=-1.0: must be at least 0",
        ),
        (
            lambda: schedules.report_seconds(FULL, KEY, np.ones(2), spread=1),
            "typical: has 2 values, must have one for client 2 too",
        ),
        (lambda: schedules.report_seconds(FULL, KEY, 1.0, spread=-1), "spread=-1: must be a finit"),
        (
            lambda: schedules.first_reports(FULL, np.ones((3, 2)), 2),
            r"seconds: has shape \(3, 2\), must have the schedule's, \(400, 3\)",
        ),
        (
            lambda: schedules.first_reports(FULL, np.full((400, 3), np.nan), 2),
            r"seconds\[0, 0\]=nan: must be at least 0",
        ),
        (
            lambda: schedules.first_reports(FULL, np.ones((400, 3)), 4),
            "count=4: must be an integer in 1..3, the slots of the schedule",
        ),
        (
            lambda: schedules.first_reports(FULL, np.ones((400, 3)), 2, deadline=0.0),
            "deadline=0.0: must be a number above 0",
        ),
        (lambda: schedules.delayed(FULL, -1), "delay=-1: must be at least 0"),
        (
            lambda: schedules.delayed(FULL, np.array([0, -2, 3])),
            r"^delay\[1\]=-2: must be at least 0$",
        ),
        (lambda: schedules.every(FULL, 0), "period=0: must be at least 1"),
        (lambda: schedules.slow(FULL, 0), "rounds_per_update=0: must be at least 1"),
        (
            lambda: schedules.slow(FULL, np.array([1, 2, -3])),
            r"^rounds_per_update\[2\]=-3: must be at least 1$",
        ),
        (lambda: schedules.first_all(FULL, 0), "num_clients=0: must be an integer of at least 1"),
        (
            lambda: schedules.first_all(schedules.everyone(2, 3), 7),
            "has 3 rounds of 2 slots, must have at least 4, .* num_clients=7 attends once",
        ),
        *(
            (lambda make=make: make(FULL, np.ones(2)), "has 2 values, must have one for client 2")
            for make in PER_CLIENT
        ),
        *(
            (
                lambda make=make: make(FULL, np.ones((3, 1))),
                r"has shape \(3, 1\), must be a scalar",
            )
            for make in PER_CLIENT
        ),
    ],
)
def test_impossible_schedules_are_one_line(make: Callable[[], Cohort], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", PER_CLIENT)
def test_an_absent_client_needs_no_value(make: Callable[..., Cohort]) -> None:
    named = FULL._replace(who=FULL.who.at[:, 0].set(99), present=FULL.present.at[:, 0].set(False))
    assert not compiled(lambda: make(named, jnp.ones(3))).present[:, 0].any()
    # The clients of a traced schedule are unknown.
    jax.eval_shape(lambda schedule: make(schedule, np.ones(1)), FULL)


def test_sampling_rates_are_rounded_and_select_somebody() -> None:
    assert [schedules.cohort_size(100, rate) for rate in (0.1, 0.3, 0.5, 1)] == [10, 30, 50, 100]
    assert schedules.cohort_size(7, 0.5) == 4
    for rate in (0.0, -0.1, 1.1, np.nan, True):
        with pytest.raises(ValueError, match=r"^rate=.*: must be a number above 0 and at most 1$"):
            schedules.cohort_size(100, rate)
    message = r"^rate=0.01: selects none of num_clients=20, must be higher$"
    with pytest.raises(ValueError, match=message):
        schedules.cohort_size(20, 0.01)


@pytest.mark.parametrize("sparse", [0.0, 0.3, 1.0])
def test_a_part_of_the_clients_uploads_rarely(sparse: float) -> None:
    keys = jax.random.split(KEY, 200)
    draw = jax.jit(
        jax.vmap(lambda k: schedules.upload_probabilities(k, 10, sparse=sparse, frequency=0.25))
    )
    rare = np.asarray(draw(keys)) == 0.25
    assert_equal(np.where(rare, 0.25, 1.0).astype(np.float32), draw(keys))
    assert (rare.sum(1) == round(10 * sparse)).all()
    # Each client is sparse equally often.
    np.testing.assert_allclose(rare.mean(0), sparse, atol=6 * np.sqrt(0.25 / 200))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(sparse=1.2, frequency=0.5), r"^sparse=1.2: must be a number between 0 and 1$"),
        (dict(sparse=0.5, frequency=0.0), r"^frequency=0.0: must be a number above 0 and at most"),
        (dict(sparse=0.5, frequency=1.5), r"^frequency=1.5: must be a number above 0 and at most"),
    ],
)
def test_impossible_frequencies_are_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedules.upload_probabilities(KEY, 10, **arguments)


@pytest.mark.parametrize("longest", [2, 50])
def test_a_late_update_is_of_the_broadcast_that_it_began_with(longest: int) -> None:
    """Against a loop over each client's rounds."""
    probability = jnp.array([0.0, 0.6, 0.9, 1.0])
    drawn, dropped, late = compiled(
        lambda: [
            full := schedules.sampled(KEY, 4, 3, 60),
            schedules.dropout(full, KEY, probability),
            schedules.stale(full, KEY, probability, 4, longest=longest),
        ]
    )
    # The same uploads arrive; they were computed from other broadcasts.
    assert_equal(late.who, drawn.who)
    assert_equal(late.present, dropped.present)
    delays = []
    for client in range(4):
        began = None
        for t, slot in np.argwhere(drawn.who == client):
            if began is None or t - began > longest:
                began = t
            if late.present[t, slot]:
                assert late.delay[t, slot] == t - began
                delays.append(t - began)
                began = None
    assert max(delays) > (1 if longest == 2 else 5)
    assert max(delays) <= longest
    assert not late.delay[(late.who == 0) & late.present].any()


def test_a_longer_stale_schedule_starts_with_the_shorter_and_absent_clients_begin_nothing() -> None:
    def stale(length: int) -> Cohort:
        return schedules.stale(schedules.everyone(3, length), KEY, 0.5, 3, longest=9)

    short, long = compiled(lambda: [stale(8), stale(12)])
    assert_equal(jax.tree.map(lambda leaf: leaf[:8], long), short)
    # An absent client begins nothing.
    absent = schedules.everyone(1, 5)._replace(present=jnp.array([[0], [0], [1], [0], [1]], bool))
    late = compiled(lambda: schedules.stale(absent, KEY, 0.0, 1, longest=9))
    assert_equal(late.present, absent.present)
    assert not np.asarray(late.delay)[np.asarray(late.present)].any()


def test_impossible_delays_are_one_line() -> None:
    for arguments, message in (
        ((0.5, 3, 0), r"^longest=0: must be an integer of at least 1$"),
        ((1.5, 3, 2), r"^probability=1.5: must be between 0 and 1$"),
        ((jnp.ones(2), 3, 2), r"^probability: has 2 values, must have one for client 2 too$"),
    ):
        probability, num_clients, longest = arguments
        with pytest.raises(ValueError, match=message):
            schedules.stale(FULL, KEY, probability, num_clients, longest=longest)


def test_random_delays_are_geometric_and_keyed_by_round_and_client() -> None:
    """P(d) = p (1 - p)^d; the longest delay has the probability of the whole tail."""
    p, longest, num_rounds = 0.4, 3, 4000
    few = schedules.sampled(jax.random.key(1), 3, 2, 50)

    def delayed(schedule: Cohort, probability: float | jax.Array) -> Cohort:
        return schedules.randomly_delayed(schedule, jax.random.key(0), probability, longest=longest)

    everyone, one_prompt = schedules.everyone(3, num_rounds), jnp.array([p, 1.0, p])
    whole, drawn, never, of_each = compiled(
        lambda: [
            *(delayed(everyone, p), delayed(few, p), delayed(few, 1.0)),
            delayed(everyone, one_prompt),
        ]
    )
    delay = np.asarray(whole.delay)
    assert whole.delay.dtype == jnp.int32
    share = np.bincount(delay.ravel(), minlength=longest + 1) / delay.size
    expected = [p, p * (1 - p), p * (1 - p) ** 2, (1 - p) ** 3]
    np.testing.assert_allclose(share, expected, atol=0.02)
    # Neither other clients, nor the slot, nor the number of rounds matters.
    np.testing.assert_array_equal(
        drawn.delay, np.take_along_axis(delay[:50], np.asarray(few.who), axis=1)
    )
    assert not never.delay.any()
    np.testing.assert_array_equal(of_each.delay, delay * np.array([1, 0, 1]))


@pytest.mark.parametrize(
    ("probability", "longest", "words"),
    [
        (0.0, 3, "probability=0.0: must be above 0 and at most 1"),
        (1.5, 3, "probability=1.5: must be"),
        ([0.5, 0.0], 3, r"probability\[1\]=0.0: must be"),
        ([0.5], 3, "probability: has 1 values, must have one for client 1 too"),
        (0.5, 0, "longest=0: must be"),
    ],
)
def test_impossible_random_delays_are_one_line(
    probability: float | list[float], longest: int, words: str
) -> None:
    probability = np.array(probability) if isinstance(probability, list) else probability
    with pytest.raises(ValueError, match=words):
        schedules.randomly_delayed(
            schedules.everyone(2, 3), jax.random.key(0), probability, longest=longest
        )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: schedules.stale(schedules.everyone(5, 6), KEY, 0.5, 3, longest=3),
            "^num_clients=3: must be above 4, the last client of the schedule$",
        ),
        (
            lambda: schedules.stale(
                jax.tree.map(lambda a: a - 1, schedules.everyone(5, 6))._replace(
                    present=np.ones((6, 5), bool)
                ),
                KEY,
                0.5,
                5,
                longest=3,
            ),
            "^schedule: who must be at least 0 where a client is present$",
        ),
        (
            lambda: schedules.first_all(schedules.everyone(5, 6), 3),
            "^num_clients=3: must be above 4, the last client of the schedule$",
        ),
        (
            lambda: schedules.first_all(jax.tree.map(lambda a: a[:, :0], FULL), 3),
            "^schedule: has no slots, must have at least one$",
        ),
        (lambda: schedules.slow(FULL, 2.9), "^rounds_per_update=2.9.*: must be an integer$"),
        (lambda: schedules.every(FULL, 1.99), "^period=1.99.*: must be an integer$"),
        (lambda: schedules.every(FULL, np.array([1, 2.5, 1])), r"^period\[1\]=2.5: must be an int"),
        (lambda: schedules.delayed(FULL, "2"), "^delay='2': must be numbers$"),
        (lambda: schedules.delayed(FULL, True), "^delay=True: must be numbers$"),
        (lambda: schedules.dropout(FULL, 3, 0.5), "^key=3: must be one random key, such as"),
        (lambda: schedules.dropout("all", KEY, 0.5), "^schedule='all': must be a Cohort$"),
    ],
)
def test_fractions_strings_and_clients_beyond_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
