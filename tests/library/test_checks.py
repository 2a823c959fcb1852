"""The door of the library: what passes, and that the rest is one clear line."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import federations
from fedjax_inv import checks, schedules
from fedjax_inv.types import Cohort, Examples, Federation

NAN, INF = np.nan, np.inf


def test_a_tree_with_one_tracer_is_not_concrete() -> None:
    seen = []
    concrete = {"a": jnp.ones(2), "b": (3, np.ones(1)), "key": jax.random.key(0)}

    def traced(x: Any) -> Any:
        seen.append((checks.is_concrete({"a": 1.0, "b": [x]}), checks.is_concrete(concrete)))
        return x

    jax.vmap(jax.grad(traced))(jnp.ones(2))
    jax.eval_shape(traced, 1.0)
    assert seen == [(False, True)] * 2
    assert checks.is_concrete(concrete)
    assert checks.is_concrete(())


@pytest.mark.parametrize("value", [1, 7, np.int32(1), np.uint8(3)])
def test_whole_numbers_pass(value: Any) -> None:
    checks.integer("count", value)
    checks.integer("count", value, 0)


@pytest.mark.parametrize("value", [0, -1, 1.0, "2", True, None, np.float32(2), NAN, [1]])
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^count=.*: must be an integer of at least 1$"):
        checks.integer("count", value)
    with pytest.raises(ValueError, match=r"^count=.*: must be an integer of at least 9$"):
        checks.integer("count", value, 9)


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.5), jnp.float32(1), np.int64(1)])
def test_real_numbers_pass(value: Any) -> None:
    checks.real("rate", value)
    checks.real("rate", value, 0, 1)
    # Whatever is traced.
    jax.vmap(lambda x: checks.real("rate", x - 9, 0, 1) or x)(jnp.ones(2) * value)


@pytest.mark.parametrize("value", [-0.1, 1.5, NAN, INF, -INF, "0.5", True, None, (), np.ones(2)])
def test_what_is_no_real_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^rate=.*: must be a finite number, in \[0, 1\]$"):
        checks.real("rate", value, 0, 1)
    if not (isinstance(value, float) and value > 0):
        with pytest.raises(ValueError, match=r"^rate=.*: must be a finite number, at least 0$"):
            checks.real("rate", value)


@pytest.mark.parametrize(
    "value", [NAN, INF, 1e300, np.float32(NAN), np.array(INF), jnp.array(-INF)]
)
def test_numbers_that_are_not_finite(value: Any) -> None:
    assert not checks.is_finite(value)
    jax.eval_shape(lambda x: {True: x}[checks.is_finite(x)], value)  # whatever is traced


@pytest.mark.parametrize("value", [0, 10**400, 1e38, True, "nan", None, print, [INF]])
def test_what_is_finite_or_no_number(value: Any) -> None:
    assert checks.is_finite(value)


def test_one_of() -> None:
    checks.one_of("name", "b", ["a", "b"])
    checks.one_of("name", "b", {"a": 1, "b": 2})
    for wrong in ("c", "", "ab"):
        with pytest.raises(ValueError, match=f"^name='{wrong}': must be one of a, b$"):
            checks.one_of("name", wrong, ["a", "b"])


FEDERATION = federations.federation()  # sizes 4, 0, 1, 7, 5 of 21 examples, 25 rows


@given(
    rows=st.lists(st.integers(-2, 5), max_size=6),
    clients=st.lists(st.tuples(st.integers(-1, 7), st.integers(-1, 7)), min_size=1, max_size=3),
)
def test_a_federation_passes_iff_its_rows_are_rows_of_examples(rows, clients) -> None:
    data = Examples(np.zeros((5, 2)), np.zeros(5))
    start, size = np.array(clients).T
    fits = all(
        min(begin, count) >= 0 and begin + count <= len(rows) for begin, count in clients
    ) and all(0 <= row < 5 for row in rows)
    federation = Federation(data, np.array(rows, np.int32), start, size)
    if fits:
        checks.federation(federation)
    else:
        with pytest.raises(ValueError, match=r"^(order: holds|start\[).* must "):
            checks.federation(federation)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"data": Examples(np.zeros(3), np.zeros(4))}, r"data: .* of one length, not \[3, 4\]"),
        ({"data": Examples({}, ())}, r"data: .* of one length, not \[\]"),
        ({"order": np.zeros((2, 3), int)}, r"order=int64 \(2, 3\): must be \[L\]$"),
        (
            {"start": np.zeros((5, 1), int)},
            r"start=int64 \(5, 1\): must be \[C\], and so must size=int32 \(5,\)$",
        ),
        (
            {"size": np.zeros(4, int)},
            r"start=int32 \(5,\): must be \[C\], and so must size=int64 \(4,\)$",
        ),
        ({"order": np.full(25, 21)}, r"order: holds 21\.\.21, must be rows in 0\.\.20"),
        # Their sum wraps.
        ({"size": np.int8([4, 0, 1, 7, 5])}, r"size=int8 \(5,\): must be int32 or int64$"),
        # Not by a sum that wraps.
        (
            {"size": np.int32([0, 0, 0, 2**31 - 1, 0])},
            r"start\[3\]=5: must lie, with size\[3\]=2147483647, in the 25 rows of order$",
        ),
        (
            {"start": np.array([0, -1, 0, 0, 0])},
            r"start\[1\]=-1: must lie, with size\[1\]=0, in the 25 rows of order$",
        ),
        (
            {"size": np.array([4, 0, 1, 7, -1])},
            r"start\[4\]=12: must lie, with size\[4\]=-1, in the 25 rows of order$",
        ),
        (
            {"start": np.array([0, 0, 0, 19, 0])},
            r"start\[3\]=19: must lie, with size\[3\]=7, in the 25 rows of order$",
        ),
    ],
)
def test_a_federation_that_does_not_hold_together(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        checks.federation(FEDERATION._replace(**changed))


def test_of_a_traced_federation_shapes_alone_are_checked() -> None:
    beyond = FEDERATION._replace(size=FEDERATION.size + 99)
    jax.eval_shape(lambda federation: checks.federation(federation), beyond)
    with pytest.raises(ValueError, match=r"^start=.*: must be \[C\], and so must size="):
        jax.eval_shape(checks.federation, beyond._replace(size=jnp.zeros(4, jnp.int32)))


def naive(who: np.ndarray, present: np.ndarray, delay: np.ndarray, clients: int, kept: int) -> bool:
    """Whether a schedule fits, by a loop."""
    for round_ in zip(who, present, delay, strict=True):
        named = [(client, late) for client, here, late in zip(*round_, strict=True) if here]
        if len({client for client, _ in named}) < len(named):
            return False
        if any(not (0 <= client < clients and 0 <= late < kept) for client, late in named):
            return False
    return True


CELL = st.tuples(st.sampled_from([-1, 0, 1, 2, 2, 3, 4]), st.booleans(), st.integers(-1, 2))


@given(
    table=st.lists(st.lists(CELL, min_size=3, max_size=3), min_size=1, max_size=2),
    kept=st.integers(1, 2),
)
def test_a_schedule_passes_iff_who_is_present_fits(table: list, kept: int) -> None:
    who, present, delay = np.moveaxis(np.array(table, int), -1, 0)
    cohort = Cohort(who, present.astype(bool), delay)
    if naive(*cohort, 4, kept):
        checks.schedule(cohort, 4, kept)
    else:
        with pytest.raises(ValueError, match=r"^schedule: .*must be "):
            checks.schedule(cohort, 4, kept)
    jax.eval_shape(lambda cohort: checks.schedule(cohort, 4, kept), cohort)


@pytest.mark.parametrize(
    ("who", "delay", "words"),
    [
        ([[0, 1], [2, 3]], 0, r"round 1 names client 3: must be in 0\.\.2"),
        ([[0, -1], [2, 1]], 0, r"round 0 names client -1: must be in 0\.\.2"),
        ([[0, 1], [2, 2]], 0, "round 1 names a client twice: must be once"),
        ([[0, 1], [2, 1]], -1, r"a delay of -1: must be in 0\.\.1, .*history=2 broadcasts"),
        ([[0, 1], [2, 1]], 2, r"a delay of 2: must be in 0\.\.1, .*history=2 broadcasts"),
    ],
)
def test_what_is_wrong_with_a_schedule_is_told(who: list, delay: int, words: str) -> None:
    cohort = Cohort(np.array(who), np.ones((2, 2), bool), np.full((2, 2), delay))
    with pytest.raises(ValueError, match=f"^schedule: {words}$"):
        checks.schedule(cohort, 3, 2)


def test_a_schedule_has_rounds_and_slots() -> None:
    checks.schedule(schedules.everyone(3, 2), 3, 1)
    for wrong in (
        jax.tree.map(lambda a: a[0], schedules.everyone(3, 2)),
        schedules.everyone(3, 2)._replace(delay=np.zeros(3, int)),
    ):
        with pytest.raises(ValueError, match=r"^schedule: who .* must all be \[T, S\]$"):
            checks.schedule(wrong, 3, 1)


def test_same_shapes() -> None:
    tree = {"a": jnp.zeros((2, 3)), "b": [1.0, np.ones(2)]}
    checks.same_shapes(one=tree)
    checks.same_shapes(one=tree, other=jax.tree.map(lambda a: a + 1, tree), again=tree)
    for wrong in (tree | {"a": jnp.zeros((3, 2))}, {"a": tree["a"]}, tree | {"c": 0}):
        with pytest.raises(ValueError, match=r"^wrong: has shapes .*, must have those of one, "):
            checks.same_shapes(one=tree, other=tree, wrong=wrong)
