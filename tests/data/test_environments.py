"""Environments: rotations, and cues that are drawn with the label and rendered on the device."""

from functools import partial

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from grey_images import rate_is
from hypothesis import given

from fedjax_inv.data import dsprites, environments
from fedjax_inv.data.dataset import Dataset

RNG = np.random.default_rng(0)


def dataset(x: np.ndarray) -> Dataset:
    rows = np.arange(len(x))
    return Dataset(
        x,
        (rows % 3).astype(np.int32),
        ("a", "b", "c"),
        (rows % 2).astype(np.int32),
        ("d", "e"),
        rows % 5 == 0,
    )


def rotate(x: np.ndarray, angle: float) -> np.ndarray:
    return environments.rotated(dataset(x), [angle], seed=0).x


def images(height, width, channels, num=6):
    return RNG.integers(0, 256, (num, height, width, channels), np.uint8)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("size", [7, 8])
def test_quarter_turns_are_exact_and_counter_clockwise(size, dtype):
    x = images(size, size, 2).astype(dtype)
    for quarters in (0, 1, 2, 3, -1):
        turned = rotate(x, 90 * quarters)
        assert turned.dtype == dtype
        np.testing.assert_array_equal(turned, np.rot90(x, quarters, axes=(1, 2)))


def naive_rotation(image: np.ndarray, angle: float) -> np.ndarray:
    """Bilinear, 0 outside: each pixel looks up where it came from. [height, width]."""
    height, width = image.shape
    cos, sin = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle))
    padded = np.pad(image.astype(float), 1)
    out = np.zeros((height, width))
    for i in range(height):
        for j in range(width):
            up, right = (height - 1) / 2 - i, j - (width - 1) / 2
            source_up, source_right = cos * up - sin * right, sin * up + cos * right
            row, col = (height - 1) / 2 - source_up, source_right + (width - 1) / 2
            top, left = int(np.floor(row)), int(np.floor(col))
            if -1 <= top < height and -1 <= left < width:
                a, b = row - top, col - left
                window = padded[top + 1 : top + 3, left + 1 : left + 3]
                out[i, j] = [1 - a, a] @ window @ [1 - b, b]
    return out


@given(
    angle=st.floats(-359, 359).filter(lambda angle: angle % 90 > 1e-3),
    height=st.integers(2, 8),
    width=st.integers(2, 8),
)
def test_rotation_against_a_naive_loop(angle, height, width):
    x = images(height, width, 2, num=2)
    expected = [[naive_rotation(image[..., channel], angle) for channel in range(2)] for image in x]
    expected = np.transpose(expected, (0, 2, 3, 1))
    np.testing.assert_allclose(rotate(x.astype(np.float32), angle), expected, atol=1e-2)
    np.testing.assert_allclose(rotate(x, angle), expected, atol=0.51)  # rounded to 8 bits


@given(
    num=st.integers(1, 80),
    shares=st.lists(st.sampled_from([0.3, 1.0, 2.5, 7.0]), min_size=1, max_size=5).map(
        lambda shares: shares if max(shares) >= 1 else [share / sum(shares) for share in shares]
    ),
    seed=st.integers(0, 9),
)
def test_angles_have_their_shares_of_the_images_and_of_any_first_ones(num, shares, seed):
    before = dataset(images(2, 2, 1, num=num))
    after = environments.rotated(before, range(len(shares)), seed, shares)
    assert not after.test.any()
    np.testing.assert_array_equal(after.y, before.y)
    order = np.random.default_rng(seed).permutation(num)
    for first in (1, num // 2, num):
        sizes = np.bincount(after.domain[order[:first]], minlength=len(shares))
        assert np.abs(sizes - first * np.array(shares) / sum(shares)).max() < len(shares)
    # Equal ones are no shares: the images are dealt evenly.
    equal = environments.rotated(before, range(len(shares)), seed, [1.7] * len(shares))
    plain = environments.rotated(before, range(len(shares)), seed)
    np.testing.assert_array_equal(equal.domain, plain.domain)
    np.testing.assert_array_equal(plain.domain[order], np.arange(num) % len(shares))


def test_each_image_is_rotated_by_the_angle_of_its_domain(monkeypatch):
    monkeypatch.setattr(environments, "_CHUNK", 4)  # several chunks for an angle
    before = dataset(images(5, 5, 1, num=50))
    original = before.x.copy()
    after = environments.rotated(before, [0, 90, 180], seed=3)
    np.testing.assert_array_equal(before.x, original)
    for index in range(3):
        rows = after.domain == index
        np.testing.assert_array_equal(after.x[rows], np.rot90(original[rows], index, axes=(1, 2)))


# classes


def labelled(num=60, num_classes=10, num_test=10, channels=1, size=(4, 6)) -> Dataset:
    """Images of which many pixels are 0, in classes that are named by letters."""
    rng = np.random.default_rng(num)
    shape = (num, *size, channels)
    return Dataset(
        rng.integers(0, 256, shape, np.uint8) * rng.integers(0, 2, shape, np.uint8),
        rng.integers(0, num_classes, num).astype(np.int32),
        tuple("abcdefghij"[:num_classes]),
        (np.arange(num) % 2).astype(np.int32),
        ("d", "e"),
        rng.permutation(num) < num_test,
    )


def test_grouped_keeps_the_examples_of_the_named_classes():
    before = labelled()
    before = before._replace(user=np.arange(len(before.y)))
    after = environments.grouped(before, {"vowel": ("e", "a"), "b": ("b",), "rest": ("j", "c")})
    assert after.classes == ("vowel", "b", "rest")
    assert after.y.dtype == np.int32
    kept = [i for i, y in enumerate(before.y) if before.classes[y] in "aebjc"]
    assert 0 < len(kept) < 60
    np.testing.assert_array_equal(after.x, before.x[kept])
    np.testing.assert_array_equal(after.domain, before.domain[kept])
    np.testing.assert_array_equal(after.test, before.test[kept])
    np.testing.assert_array_equal(after.user, kept)
    new = {"a": 0, "e": 0, "b": 1, "c": 2, "j": 2}
    assert after.y.tolist() == [new[before.classes[before.y[i]]] for i in kept]


@pytest.mark.parametrize(
    ("num_classes", "classes"),
    [(2, ("a-e", "f-j")), (5, ("a-b", "c-d", "e-f", "g-h", "i-j")), (10, tuple("abcdefghij"))],
)
def test_binned(num_classes, classes):
    before = labelled()
    after = environments.binned(before, num_classes)
    assert after.classes == classes
    np.testing.assert_array_equal(after.y, before.y // (10 // num_classes))
    np.testing.assert_array_equal(after.x, before.x)


# the draw of environments, labels and cues


CUES = {"colored": environments.colored, "patched": partial(environments.patched, patch_size=1)}


@pytest.mark.parametrize(
    ("cue", "num_classes"), [("patched", 2), ("colored", 2), ("colored", 5), ("colored", 10)]
)
def test_noise_and_cue_shift_the_label_as_often_as_they_should(cue, num_classes):
    before = labelled(30_000, num_classes, num_test=10_000, size=(1, 2))
    flips = (0.3, 0.05)
    after = CUES[cue](before, flips=flips, test_flip=0.8, label_noise=0.25, seed=5)
    noise = (after.y - before.y) % num_classes
    flip = (after.x[1] - after.y) % num_classes
    assert after.y.dtype == after.x[1].dtype == np.int32
    assert set(noise) == set(flip) == {0, 1}
    assert after.domains == ("0.3", "0.05", "0.8")
    for domain, probability in enumerate((*flips, 0.8)):
        here = after.domain == domain
        assert rate_is(noise[here], 0.25)
        assert rate_is(flip[here], probability)
        for noisy in (0, 1):  # the two are independent, of each other and of the class
            assert rate_is(flip[here & (noise == noisy)], probability)
        for label in range(num_classes):
            assert rate_is(flip[here & (after.y == label)], probability)
            assert rate_is(noise[here & (before.y == label)], 0.25)
    if num_classes == 2:  # what a cue alone reaches, and what the shape alone reaches
        train = after.domain < 2
        assert rate_is(after.y[train] == after.x[1][train], 1 - np.mean(flips))
        assert rate_is(after.y == before.y, 0.75)


@given(
    num=st.integers(30, 90),
    num_test=st.integers(1, 20),
    num_flips=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_training_environments_are_equal_and_the_test_split_is_the_last(
    num, num_test, num_flips, seed
):
    before = labelled(num, 2, num_test)
    flips = [i / 10 for i in range(num_flips)]
    after = environments.colored(before, flips=flips, seed=seed)
    assert after.domain.dtype == np.int32
    np.testing.assert_array_equal(after.domain == num_flips, before.test)
    sizes = np.bincount(after.domain, minlength=num_flips + 1)
    assert sizes.sum() == num
    assert sizes[:-1].max() - sizes[:-1].min() <= 1
    assert not after.test.any()
    assert after.test.shape == (num,)


def test_a_random_part_is_the_test_environment_where_there_is_no_test_split():
    before = labelled(1000, 2, num_test=0)
    first, again, other = (
        environments.colored(before, test_fraction=0.3, seed=seed).domain for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(np.bincount(first), [350, 350, 300])
    np.testing.assert_array_equal(first, again)
    for environment in range(3):  # drawn, not cut: mean row of n of 1000
        rows = np.flatnonzero(first == environment)
        assert abs(rows.mean() - 499.5) <= 6 * 1000 / np.sqrt(12 * len(rows))
        assert ((first == environment) != (other == environment)).any()
    assert len(np.flatnonzero(environments.colored(before, seed=0).domain == 2)) == 200


@pytest.mark.parametrize("cue", CUES)
def test_everything_follows_the_seed(cue):
    before = labelled(num_classes=2)
    first, again, other = (CUES[cue](before, seed=seed) for seed in (3, 3, 4))
    for take in (lambda d: d.y, lambda d: d.domain, lambda d: d.x[1]):
        np.testing.assert_array_equal(take(first), take(again))
        assert (take(first) != take(other)).any()


# what a network sees


@pytest.mark.parametrize("binarise", [False, True])
def test_the_image_stays_what_it_is(binarise):
    before = labelled(num_classes=2)
    original = before.x.copy()
    after = environments.colored(before, binarise=binarise, seed=0)
    np.testing.assert_array_equal(before.x, original)
    expected = [[255 if pixel else 0 for pixel in image.ravel()] for image in original]
    expected = np.reshape(expected, original.shape) if binarise else original
    assert after.x.image.dtype == np.uint8
    np.testing.assert_array_equal(after.x.image, expected)
    patched = environments.patched(before, patch_size=2, seed=0)
    np.testing.assert_array_equal(patched.x.image, original)


def naive_paint(x: environments.Colored, num_colors: int) -> np.ndarray:
    out = np.zeros((*x.image.shape[:-1], num_colors), np.float32)
    for i, color in enumerate(x.color):
        out[i, :, :, num_colors - 1 - color] = x.image[i, :, :, 0] / np.float32(255)
    return out


def naive_cover(x: environments.Patched, patch_size: int) -> np.ndarray:
    out = x.image / np.float32(255)
    for i, corner in enumerate(x.corner):
        left = 0 if corner == 0 else out.shape[2] - patch_size
        out[i, :patch_size, left : left + patch_size] = 0
    return out


@pytest.mark.parametrize("num_classes", [2, 5])
def test_paint_against_a_naive_loop(num_classes):
    after = environments.colored(labelled(num_classes=num_classes), binarise=False, seed=0)
    assert set(after.x.color) == set(range(num_classes))
    seen = np.asarray(jax.jit(after.render)(after.x))
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen, naive_paint(after.x, num_classes), rtol=1e-6)
    assert ((seen > 0).any(axis=(1, 2)).sum(axis=1) == 1).all()  # one channel
    np.testing.assert_allclose(seen.sum(axis=-1), after.x.image[..., 0] / 255, rtol=1e-6)


@pytest.mark.parametrize(("patch_size", "channels"), [(1, 3), (2, 1), (3, 3)])
def test_cover_against_a_naive_loop(patch_size, channels):
    before = labelled(num_classes=2, channels=channels)
    before = before._replace(x=np.maximum(before.x, 1))  # what is black is the patch
    after = environments.patched(before, patch_size=patch_size, seed=0)
    assert set(after.x.corner) == {0, 1}
    seen = np.asarray(jax.jit(after.render)(after.x))
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen, naive_cover(after.x, patch_size), rtol=1e-6)
    black = (seen == 0).all(axis=-1)
    assert (black.sum(axis=(1, 2)) == patch_size**2).all()
    assert (black[:, 0, 0] == (after.x.corner == 0)).all()
    assert (black[:, 0, -1] == (after.x.corner == 1)).all()


# the data sets of the papers


def test_coloured_sprites_are_ellipses_and_squares():
    source = dsprites.load(num_images=60)
    before = environments.grouped(source, environments.GROUPS["dsprites"])
    assert [before.classes[y] for y in before.y] == [source.classes[y] for y in source.y]
    assert before.classes == ("ellipse", "square")  # 0 and 1, as in the paper
    after = environments.colored(before, test_fraction=0.1, seed=0)
    np.testing.assert_array_equal(np.bincount(after.domain), [27, 27, 6])
    seen = jax.eval_shape(after.render, after.x)
    assert seen.shape == (60, 64, 64, 2)
