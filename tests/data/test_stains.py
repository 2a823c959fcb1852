"""Stained images: colours follow the label as often, and by the rule, that they should."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grey_images import grey, rate_is, rows_of
from hypothesis import given

from fedjax_inv.data import sources, stains
from fedjax_inv.data.dataset import Dataset, check_dataset
from fedjax_inv.data.stains import COLORS, GROUNDS, STROKES, UNSTAINED
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import data as data_flags

# the rules


@pytest.mark.parametrize("colors", [2, 5, 10])
def test_the_rule_and_its_ground_half_the_palette_away(colors: int) -> None:
    stroke, ground = stains.rule(np.arange(12), colors, 3)
    for label in range(12):
        assert stroke[label] == (label + 3) % colors
        assert ground[label] == (label + 3 + colors // 2) % colors
        assert stroke[label] != ground[label]


@given(
    num=st.integers(12, 90), num_classes=st.integers(2, 12), seed=st.integers(0, 99), data=st.data()
)
def test_a_combination_is_a_rule_that_no_other_domain_shares(
    num: int, num_classes: int, seed: int, data: st.DataObject
) -> None:
    colors = data.draw(st.integers(2, min(10, num_classes)))
    before = grey(num, num_classes)
    after = stains.combinations(before, stain="both", colors=colors, seed=seed)
    np.testing.assert_array_equal(rows_of(after), np.arange(num))
    np.testing.assert_array_equal(after.y, before.y)
    assert after.domains == tuple(str(k) for k in range(colors))
    assert not after.test.any()
    sizes = np.bincount(after.domain, minlength=colors)
    assert sizes.max() - sizes.min() <= 1
    where: dict[tuple[int, int], set[int]] = {}
    for y, k, stroke, ground in zip(
        after.y, after.domain, after.x.stroke, after.x.ground, strict=True
    ):
        assert stroke == (y + k) % colors
        assert ground == (y + k + colors // 2) % colors
        where.setdefault((y, stroke), set()).add(k)
    assert all(len(domains) == 1 for domains in where.values())


def test_every_combination_holds_every_class_and_the_held_out_one_only_new_pairs() -> None:
    after = stains.combinations(grey(3000), seed=0)
    pairs = [
        set(zip(after.y[h], after.x.stroke[h], strict=True)) for h in after.domain == np.c_[:10]
    ]
    for domain, held in enumerate(pairs):
        assert len({y for y, _ in held}) == len(held) == 10
        others = set().union(*(pairs[:domain] + pairs[domain + 1 :]))
        assert not held & others
        assert len(held | others) == 100


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("test_rule", stains.TEST_RULES)
@pytest.mark.parametrize(("num_classes", "colors"), [(10, 10), (10, 4), (2, 2)])
def test_colours_agree_as_often_as_they_should(
    test_rule: str, num_classes: int, colors: int, joint: bool
) -> None:
    before = grey(30_000, num_classes, num_test=8_000)
    agreements, test_agreement = (0.8, 0.4, 1.0), 0.9
    after = stains.stained(
        before,
        stain="both",
        colors=colors,
        agreements=agreements,
        test_agreement=test_agreement,
        joint=joint,
        test_rule=test_rule,
        label_noise=0.25,
        seed=0,
    )
    assert after.domains == ("0 (0.8)", "1 (0.4)", "2 (1)", "test")
    wrong_label = (after.y - before.y[rows_of(after)]) % num_classes
    for domain, agreement in enumerate((*agreements, test_agreement)):
        here = after.domain == domain
        right = []
        for cue, away in ((after.x.stroke, 0), (after.x.ground, colors // 2)):
            meant = (after.y + away) % colors
            if domain == 3:
                meant = colors - 1 - meant if test_rule == "reversed" else (meant + 1) % colors
                # Not by chance right: the rule of the training domains is wrong for every label.
                assert (meant != (after.y + away) % colors).all()
            off = (cue - meant) % colors
            right.append(off == 0)
            assert rate_is(right[-1][here], agreement)
            for other in range(1, colors):
                assert rate_is(off[here] == other, (1 - agreement) / (colors - 1))
            for label in range(num_classes):
                assert rate_is(right[-1][here & (after.y == label)], agreement)
            assert rate_is(right[-1][here & (wrong_label > 0)], agreement)
        # Apart or together.
        assert rate_is((right[0] & right[1])[here], agreement ** (1 if joint else 2))
        assert (right[0] == right[1])[here].all() == (joint or agreement == 1)
        for other in range(1, num_classes):
            assert rate_is(wrong_label[here] == other, 0.25 / (num_classes - 1))


def test_two_classes_and_colours_are_reversed_by_either_rule() -> None:
    made = [
        stains.stained(grey(num_classes=2), colors=2, test_rule=rule, seed=1)
        for rule in stains.TEST_RULES
    ]
    np.testing.assert_array_equal(made[0].x.stroke, made[1].x.stroke)


@pytest.mark.parametrize("stain", stains.STAINS)
def test_what_is_not_stained_stays_as_it_is(stain: str) -> None:
    for after in (
        stains.combinations(grey(), stain=stain, seed=0),
        stains.stained(grey(), stain=stain, seed=0),
    ):
        assert after.x.stroke.dtype == after.x.ground.dtype == np.int32
        assert (after.x.stroke == UNSTAINED).all() == (stain == "background")
        assert (after.x.ground == UNSTAINED).all() == (stain == "foreground")
        assert (after.x.stroke == UNSTAINED).any() == (stain == "background")
        assert (after.x.ground == UNSTAINED).any() == (stain == "foreground")


# who holds what


@given(
    num=st.integers(30, 90),
    num_test=st.integers(1, 20),
    count=st.integers(1, 4),
    size=st.one_of(st.none(), st.integers(1, 2)),
    seed=st.integers(0, 99),
)
def test_domains_have_their_size_and_the_test_split_is_the_last(
    num: int, num_test: int, count: int, size: int | None, seed: int
) -> None:
    before = grey(num, num_test=num_test)._replace(user=np.arange(num))
    after = stains.stained(before, agreements=[0.8] * count, domain_size=size, seed=seed)
    rows = rows_of(after)
    np.testing.assert_array_equal(after.user, rows)
    assert len(set(rows)) == len(rows)
    np.testing.assert_array_equal(after.y, before.y[rows])
    assert set(rows[after.domain == count]) == set(np.flatnonzero(before.test))
    sizes = np.bincount(after.domain, minlength=count + 1)[:count]
    if size is None:
        assert sizes.sum() == num - num_test
        assert sizes.max() - sizes.min() <= 1
    else:
        assert (sizes == size).all()
    assert not after.test.any()
    check_dataset(after)


@pytest.mark.parametrize("name", ["combinations", "stained"])
def test_everything_follows_the_seed(name: str) -> None:
    first, again, other = (getattr(stains, name)(grey(), seed=seed) for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, first.x, again.x)
    np.testing.assert_array_equal(first.domain, again.domain)
    assert (first.domain != other.domain).any()


# what a network sees


def naive_tint(x: stains.Stained) -> np.ndarray:
    out = np.zeros((*x.image.shape[:3], 3))
    for i, row, column, channel in np.ndindex(*out.shape):
        bright = int(x.image[i, row, column, 0])
        stroke = int(STROKES[x.stroke[i]][channel])
        ground = int(GROUNDS[x.ground[i]][channel])
        out[i, row, column, channel] = (stroke * bright + ground * (255 - bright)) / 255**2
    return out


def blurred(num: int) -> stains.Stained:
    """Images 3 x 5 of every colour, with pixels that are black, white and between."""
    rng = np.random.default_rng(num)
    image = rng.choice([0, 255, 1, 100, 254], (num, 3, 5, 1)).astype(np.uint8)
    index = np.arange(num, dtype=np.int32) % (UNSTAINED + 1)
    return stains.Stained(image, index, rng.permutation(index))


def test_tint_against_a_naive_loop_also_under_transformations() -> None:
    x = blurred(33)

    @jax.jit
    def seen(x: stains.Stained) -> tuple[Any, Any]:
        return stains.tint(x), jax.vmap(stains.tint)(x)

    for images in seen(x):
        assert images.dtype == jnp.float32
        np.testing.assert_allclose(images, naive_tint(x), rtol=1e-6)


def test_any_stroke_is_lighter_than_any_ground() -> None:
    assert len(STROKES) == len(GROUNDS) == len(COLORS) + 1
    assert len(np.unique(STROKES, axis=0)) == len(np.unique(GROUNDS, axis=0)) == len(COLORS) + 1

    def luminance(colors: np.ndarray) -> np.ndarray:  # relative, of sRGB
        linear = ((colors / 255 + 0.055) / 1.055) ** 2.4
        return linear @ [0.2126, 0.7152, 0.0722]

    assert luminance(STROKES).min() > luminance(GROUNDS).max()


# the flags


def drawn(**values: Any) -> Dataset:
    chosen = config.of(dataset="digits", **values)
    return data_flags.domains(chosen, sources.load("digits"), 0)


def test_the_flags_reach_the_data() -> None:
    """And agreements are spread evenly over the domains."""
    names = [f"{k} ({agreement:g})" for k, agreement in enumerate((0.9, 0.92, 0.94, 0.96, 0.98))]
    assert drawn(environment="stained").domains == (*names, "test")
    made = drawn(
        environment="stained",
        stain="background",
        training_domains=4,
        domain_size=100,
        test_fraction=0.1,
    )
    other = drawn(
        environment="stained",
        stain="both",
        training_domains=3,
        agreements=(0.5, 0.7),
        joint_colors=True,
    )
    assert other.domains == ("0 (0.5)", "1 (0.6)", "2 (0.7)", "test")
    np.testing.assert_array_equal(other.x.ground, (other.x.stroke + 5) % 10)
    np.testing.assert_array_equal(np.bincount(made.domain), [100, 100, 100, 100, 180])
    assert (made.x.stroke == UNSTAINED).all()
    fixed = drawn(environment="combinations", stain="both")
    assert len(fixed.domains) == 10
    np.testing.assert_array_equal(fixed.x.stroke, (fixed.y + fixed.domain) % 10)
