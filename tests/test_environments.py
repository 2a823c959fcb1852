"""Environments: rotations, and cues that are drawn with the label and rendered on the device."""

import os
from pathlib import Path

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from fedjax_inv.data import environments, federation, sources

RNG = np.random.default_rng(0)
TFDS_DIR = Path(os.environ.get("TFDS_DATA_DIR") or Path.home() / "tensorflow_datasets")


def dataset(x: np.ndarray) -> sources.Dataset:
    rows = np.arange(len(x))
    return sources.Dataset(
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
def test_angle_0_is_the_identity(dtype):
    x = images(6, 7, 3).astype(dtype)
    turned = rotate(x, 0)
    assert turned.dtype == dtype
    np.testing.assert_array_equal(turned, x)


@pytest.mark.parametrize("size", [7, 8, 28])
@pytest.mark.parametrize("quarters", [1, 2, 3, -1])
def test_quarter_turns_are_exact_and_counter_clockwise(size, quarters):
    x = images(size, size, 2)
    np.testing.assert_array_equal(rotate(x, 90 * quarters), np.rot90(x, quarters, axes=(1, 2)))


def test_four_quarter_turns_are_the_identity():
    x = turned = images(9, 9, 1)
    for _ in range(4):
        turned = rotate(turned, 90)
    np.testing.assert_array_equal(turned, x)


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


@settings(deadline=None, max_examples=20)
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


def test_a_disc_looks_the_same_at_45_degrees():
    up, right = np.indices((41, 41)) - 20
    disc = np.clip(12 - np.hypot(up, right), 0, 1) * 255
    x = np.rint(disc).astype(np.uint8)[None, ..., None]
    error = np.abs(rotate(x, 45).astype(float) - x)
    assert error.mean() < 2
    assert error[np.broadcast_to((np.hypot(up, right) < 10)[None, ..., None], x.shape)].max() == 0


@settings(deadline=None, max_examples=20)
@given(num=st.integers(0, 60), num_angles=st.integers(1, 7), seed=st.integers(0, 99))
def test_images_are_dealt_evenly(num, num_angles, seed):
    angles = [7.5 * i for i in range(num_angles)]
    before = dataset(images(3, 3, 1, num=num))
    after = environments.rotated(before, angles, seed)
    assert after.domains == tuple(("0", "7.5", "15", "22.5", "30", "37.5", "45")[:num_angles])
    assert after.domain.dtype == np.int32
    sizes = np.bincount(after.domain, minlength=num_angles)
    assert sizes.max() - sizes.min() <= 1
    assert not after.test.any()
    assert after.test.shape == (num,)
    np.testing.assert_array_equal(after.y, before.y)
    assert after.classes == before.classes


def test_each_image_is_rotated_by_the_angle_of_its_domain(monkeypatch):
    monkeypatch.setattr(environments, "_CHUNK", 4)  # several chunks for an angle
    before = dataset(images(5, 5, 1, num=50))
    original = before.x.copy()
    after = environments.rotated(before, [0, 90, 180], seed=3)
    np.testing.assert_array_equal(before.x, original)
    for index in range(3):
        rows = after.domain == index
        np.testing.assert_array_equal(after.x[rows], np.rot90(original[rows], index, axes=(1, 2)))


def test_the_deal_is_shuffled_by_the_seed():
    before = dataset(images(2, 2, 1, num=40))
    deals = [environments.rotated(before, [0, 90], seed).domain for seed in (0, 0, 1)]
    np.testing.assert_array_equal(deals[0], deals[1])
    assert (deals[0] != deals[2]).any()
    assert (deals[0] != np.arange(40) % 2).any()


@pytest.mark.parametrize("angles", [[], [15, 30, 15.0]])
def test_unfit_angles(angles):
    with pytest.raises(ValueError, match="angles="):
        environments.rotated(dataset(images(2, 2, 1)), angles, 0)


def test_vectors_cannot_be_rotated():
    with pytest.raises(ValueError, match="images"):
        environments.rotated(dataset(np.ones((6, 4), np.float32)), [0], 0)


def test_painted_images_cannot_be_rotated():
    painted = environments.colored(environments.binned(labelled(), 2), seed=0)
    with pytest.raises(ValueError, match=r"uint8 \(60, 4, 6, 1\) and int32 \(60,\): images"):
        environments.rotated(painted, [0], 0)


# classes


def labelled(num=60, num_classes=10, num_test=10, channels=1, size=(4, 6)) -> sources.Dataset:
    """Images of which many pixels are 0, in classes that are named by letters."""
    rng = np.random.default_rng(num)
    shape = (num, *size, channels)
    return sources.Dataset(
        rng.integers(0, 256, shape, np.uint8) * rng.integers(0, 2, shape, np.uint8),
        rng.integers(0, num_classes, num).astype(np.int32),
        tuple("abcdefghij"[:num_classes]),
        (np.arange(num) % 2).astype(np.int32),
        ("d", "e"),
        rng.permutation(num) < num_test,
    )


def test_grouped_keeps_the_examples_of_the_named_classes():
    before = labelled()
    after = environments.grouped(before, {"vowel": ("e", "a"), "b": ("b",), "rest": ("j", "c")})
    assert after.classes == ("vowel", "b", "rest")
    assert after.y.dtype == np.int32
    kept = [i for i, y in enumerate(before.y) if before.classes[y] in "aebjc"]
    assert 0 < len(kept) < 60
    np.testing.assert_array_equal(after.x, before.x[kept])
    np.testing.assert_array_equal(after.domain, before.domain[kept])
    np.testing.assert_array_equal(after.test, before.test[kept])
    new = {"a": 0, "e": 0, "b": 1, "c": 2, "j": 2}
    assert after.y.tolist() == [new[before.classes[before.y[i]]] for i in kept]


@pytest.mark.parametrize(
    ("num_classes", "classes"),
    [
        (2, ("a-e", "f-j")),
        (5, ("a-b", "c-d", "e-f", "g-h", "i-j")),
        (10, tuple("abcdefghij")),
    ],
)
def test_binned(num_classes, classes):
    before = labelled()
    after = environments.binned(before, num_classes)
    assert after.classes == classes
    np.testing.assert_array_equal(after.y, before.y // (10 // num_classes))
    np.testing.assert_array_equal(after.x, before.x)


@pytest.mark.parametrize("num_classes", [-2, 0, 1, 3, 20])
def test_unfit_numbers_of_classes(num_classes):
    with pytest.raises(ValueError, match=f"num_classes={num_classes} must be .* divide 10"):
        environments.binned(labelled(), num_classes)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            {"x": ("a", "z")},
            "groups needs class 'z', the data set has a, b, c, d, e, f",
        ),
        ({"x": ("a",), "y": ("b", "a")}, "groups names class 'a' twice"),
    ],
)
def test_unfit_groups(groups, words):
    with pytest.raises(ValueError, match=words):
        environments.grouped(labelled(), groups)


# the draw of environments, labels and cues


def rate_is(hits: np.ndarray, probability: float) -> bool:
    """Whether the rate of hits is within 6 standard deviations of what is expected."""
    deviation = np.sqrt(probability * (1 - probability) / len(hits))
    return len(hits) > 0 and abs(hits.mean() - probability) <= 6 * deviation


CUES = {"colored": environments.colored, "patched": environments.patched}


@pytest.mark.parametrize(
    ("cue", "num_classes"), [("patched", 2), ("colored", 2), ("colored", 5), ("colored", 10)]
)
def test_noise_and_cue_shift_the_label_as_often_as_they_should(cue, num_classes):
    before = labelled(30_000, num_classes, num_test=10_000, size=(1, 2))
    flips = (0.3, 0.05)
    size = {"size": 1} if cue == "patched" else {}
    after = CUES[cue](before, flips=flips, test_flip=0.8, label_noise=0.25, seed=5, **size)
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


@pytest.mark.parametrize(("probability", "shift"), [(0, 0), (1, 1)])
def test_certain_draws(probability, shift):
    before = labelled(num_classes=5)
    after = environments.colored(
        before, flips=[probability], test_flip=0.5, label_noise=probability, seed=0
    )
    train = after.domain == 0
    np.testing.assert_array_equal(after.y, (before.y + shift) % 5)
    np.testing.assert_array_equal(after.x.color[train], (before.y[train] + 2 * shift) % 5)


@settings(deadline=None)
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


def test_shares_are_the_sizes_of_the_training_environments():
    before = labelled(1000, 2, num_test=100)
    after = environments.colored(before, flips=(0.3, 0.2, 0.1), shares=(3, 1, 5), seed=0)
    np.testing.assert_array_equal(np.bincount(after.domain), [300, 100, 500, 100])


@pytest.mark.parametrize("cue", CUES)
def test_everything_follows_the_seed(cue):
    before = labelled(num_classes=2)
    size = {"size": 2} if cue == "patched" else {}
    first, again, other = (CUES[cue](before, seed=seed, **size) for seed in (3, 3, 4))
    for take in (lambda d: d.y, lambda d: d.domain, lambda d: d.x[1]):
        np.testing.assert_array_equal(take(first), take(again))
        assert (take(first) != take(other)).any()


@pytest.mark.parametrize("cue", CUES)
@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"flips": ()}, r"flips=\[\] must hold at least one"),
        ({"flips": (0.2, 1.1)}, r"flips=\[0.2, 1.1\] .* be in \[0, 1\]"),
        ({"flips": (-0.1, 0.2)}, r"flips=\[-0.1, 0.2\] .* be in \[0, 1\]"),
        ({"test_flip": float("nan")}, r"test_flip=nan be in \[0, 1\]"),
        ({"test_flip": 2}, r"test_flip=2 be in \[0, 1\]"),
        ({"flips": (0.2, 0.2)}, r"flips=\[0.2, 0.2\] .* must differ"),
        ({"flips": (0.2, 0.9)}, r"test_flip=0.9 must differ"),
        ({"label_noise": 1.5}, r"label_noise=1.5 must be in \[0, 1\]"),
        ({"label_noise": -0.5}, r"label_noise=-0.5 must be in \[0, 1\]"),
        ({"test_fraction": 0.0}, r"test_fraction=0.0 must be in \(0, 1\)"),
        ({"test_fraction": 1.0}, r"test_fraction=1.0 must be in \(0, 1\)"),
        ({"shares": (1, 1, 1)}, r"shares=\[1, 1, 1\] .* one for each of flips=\[0.2, 0.1\]"),
        ({"shares": (1, 0)}, r"shares=\[1, 0\] must be positive"),
        ({"shares": (1, 1e-9)}, "domain 0.1 is left without examples: 50 to train and 10 to test"),
    ],
)
def test_errors_of_the_draw(cue, kwargs, words):
    size = {"size": 2} if cue == "patched" else {}
    with pytest.raises(ValueError, match=words) as error:
        CUES[cue](labelled(num_classes=2), seed=0, **kwargs, **size)
    assert "\n" not in str(error.value)


def test_more_environments_than_examples():
    flips = environments.flip_probabilities("10")
    with pytest.raises(ValueError, match="is left without examples: 8 to train and 2 to test"):
        environments.colored(labelled(10, 2, num_test=2), flips=flips, seed=0)


@pytest.mark.parametrize("cue", CUES)
@pytest.mark.parametrize(
    "x",
    [
        np.ones((60, 4), np.uint8),
        np.ones((60, 4, 6), np.uint8),
        np.ones((60, 4, 6, 1), np.float32),
    ],
)
def test_only_images_of_8_bits_carry_a_cue(cue, x):
    with pytest.raises(ValueError, match=r"dataset has x \w+ \(60.*images \[M.*needed"):
        CUES[cue](labelled(num_classes=2)._replace(x=x), seed=0)


@pytest.mark.parametrize("cue", CUES)
def test_an_image_carries_one_cue(cue):
    painted = environments.colored(labelled(num_classes=2), seed=0)
    with pytest.raises(ValueError, match=r"images .* are needed"):
        CUES[cue](painted, seed=0)


def test_only_grey_images_are_painted():
    with pytest.raises(ValueError, match=r"grey images \[M, height, width, 1\] uint8 are needed"):
        environments.colored(labelled(num_classes=2, channels=3), seed=0)


def test_only_two_classes_are_told_apart_by_a_corner():
    with pytest.raises(ValueError, match="classes a, b, c, d, e: two are needed"):
        environments.patched(labelled(num_classes=5), seed=0)


@pytest.mark.parametrize("size", [0, 4])
def test_patches_that_meet(size):
    with pytest.raises(ValueError, match=rf"size={size} must be in 1\.\.3"):
        environments.patched(labelled(num_classes=2), size=size, seed=0)


@pytest.mark.parametrize(
    ("setting", "count"), [("2", 2), ("3", 3), ("5", 5), ("5_uneven", 5), ("10", 10)]
)
def test_flip_probabilities_fall_from_3_to_1_tenths(setting, count):
    flips = np.array(environments.flip_probabilities(setting))
    assert len(flips) == count
    assert (flips[0], flips[-1]) == (0.3, 0.1)
    assert (np.diff(flips) < 0).all()
    even = np.allclose(np.diff(flips), -0.2 / (count - 1))
    assert even == (setting != "5_uneven")
    names = environments.colored(labelled(num_classes=2), flips=flips, seed=0).domains
    assert (names[0], names[-2], names[-1]) == ("0.3", "0.1", "0.9")
    np.testing.assert_allclose([float(name) for name in names[:-1]], flips, atol=1e-6)


def test_an_unknown_setting():
    with pytest.raises(ValueError, match="setting='4' must be one of 2, 3, 5, 5_uneven, 10"):
        environments.flip_probabilities("4")


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
    patched = environments.patched(before, size=2, seed=0)
    np.testing.assert_array_equal(patched.x.image, original)


def naive_paint(x: environments.Colored, num_colors: int) -> np.ndarray:
    out = np.zeros((*x.image.shape[:-1], num_colors), np.float32)
    for i, color in enumerate(x.color):
        out[i, :, :, num_colors - 1 - color] = x.image[i, :, :, 0] / np.float32(255)
    return out


def naive_cover(x: environments.Patched, size: int) -> np.ndarray:
    out = x.image / np.float32(255)
    for i, corner in enumerate(x.corner):
        left = 0 if corner == 0 else out.shape[2] - size
        out[i, :size, left : left + size] = 0
    return out


@pytest.mark.parametrize("num_classes", [2, 5, 10])
def test_paint_against_a_naive_loop(num_classes):
    after = environments.colored(labelled(num_classes=num_classes), binarise=False, seed=0)
    assert set(after.x.color) == set(range(num_classes))
    seen = after.render(after.x)
    assert seen.dtype == jnp.float32
    np.testing.assert_allclose(seen, naive_paint(after.x, num_classes), rtol=1e-6)
    assert ((np.asarray(seen) > 0).any(axis=(1, 2)).sum(axis=1) == 1).all()  # one channel
    np.testing.assert_allclose(seen.sum(axis=-1), after.x.image[..., 0] / 255, rtol=1e-6)


def test_of_two_colours_1_is_the_first_channel():
    image = np.full((2, 1, 1, 1), 255, np.uint8)
    seen = environments.paint(environments.Colored(image, np.array([1, 0])), 2)
    np.testing.assert_array_equal(seen[:, 0, 0], [[1, 0], [0, 1]])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_cover_against_a_naive_loop(size, channels):
    before = labelled(num_classes=2, channels=channels)
    before = before._replace(x=np.maximum(before.x, 1))  # what is black is the patch
    after = environments.patched(before, size=size, seed=0)
    assert set(after.x.corner) == {0, 1}
    seen = np.asarray(after.render(after.x))
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen, naive_cover(after.x, size), rtol=1e-6)
    black = (seen == 0).all(axis=-1)
    assert (black.sum(axis=(1, 2)) == size**2).all()
    assert (black[:, 0, 0] == (after.x.corner == 0)).all()
    assert (black[:, 0, -1] == (after.x.corner == 1)).all()


@pytest.mark.parametrize("cue", CUES)
def test_render_under_transformations(cue):
    size = {"size": 2} if cue == "patched" else {}
    after = CUES[cue](labelled(num_classes=2), seed=0, **size)
    x = jax.tree.map(jnp.asarray, after.x)
    expected = after.render(x)

    def scanned(x):
        batches = jax.tree.map(lambda leaf: leaf.reshape(6, 10, *leaf.shape[1:]), x)
        seen = jax.lax.scan(lambda carry, batch: (carry, after.render(batch)), 0, batches)[1]
        return seen.reshape(expected.shape)

    for render in (jax.jit(after.render), jax.vmap(after.render), scanned):
        np.testing.assert_array_equal(render(x), expected)


@pytest.mark.parametrize("cue", CUES)
def test_a_federation_of_environments(cue):
    size = {"size": 2} if cue == "patched" else {}
    after = CUES[cue](labelled(num_classes=2), seed=0, **size)
    data = federation.examples(after)
    assert data.x[0].dtype == jnp.uint8
    np.testing.assert_array_equal(data.x[1], after.x[1])
    deal = federation.partitioner("domain", after, 2)
    split = federation.split(after, data, deal, held_out="0.9", seed=0)
    np.testing.assert_array_equal(split.domain, [0, 1])
    for domain, part in ((0, 0), (1, 1)):
        held = np.asarray(split.train.rows[part])[np.asarray(split.train.mask[part])]
        assert (after.domain[held] == domain).all()
    test = np.asarray(split.test.rows[0])[np.asarray(split.test.mask[0])]
    np.testing.assert_array_equal(np.sort(test), np.flatnonzero(labelled().test))
    batch = jax.tree.map(lambda leaf: leaf[split.test.rows[0]], data.x)
    np.testing.assert_array_equal(after.render(batch)[: len(test)], after.render(after.x)[test])


# the data sets of the papers


def test_coloured_digits():
    before = environments.binned(sources.load("digits"), 2)
    assert before.classes == ("0-4", "5-9")
    after = environments.colored(before, seed=0)
    np.testing.assert_array_equal(np.bincount(after.domain), [719, 719, 359])
    seen = after.render(after.x)
    assert seen.shape == (1797, 8, 8, 2)
    assert set(np.unique(seen)) == {0, 1}


@pytest.mark.parametrize(
    ("name", "sizes", "shape", "first"),
    [
        ("mnist", [30_000, 30_000, 10_000], (28, 28, 2), [0, 1, 2, 3, 4]),
        ("fashion_mnist", [27_000, 27_000, 9_000], (28, 28, 2), [0, 1, 2, 3, 4, 6]),
        ("cifar10", [22_500, 22_500, 9_000], (32, 32, 3), [0, 1, 8, 9]),
    ],
)
def test_real_data_sets(name, sizes, shape, first):
    if not (TFDS_DIR / name).exists():
        pytest.skip(f"{name} is not prepared in {TFDS_DIR}")
    source = sources.load(name)
    groups = environments.GROUPS.get(name)
    before = environments.grouped(source, groups) if groups else environments.binned(source, 2)
    kept = source.y != {"mnist": -1, "fashion_mnist": 8, "cifar10": 6}[name]
    np.testing.assert_array_equal(before.y, ~np.isin(source.y[kept], first))
    make = environments.patched if name == "cifar10" else environments.colored
    after = make(before, seed=0)
    np.testing.assert_array_equal(np.bincount(after.domain), sizes)
    np.testing.assert_array_equal(after.domain == 2, source.test[kept])
    for domain, flip in enumerate((0.2, 0.1, 0.9)):
        here = after.domain == domain
        assert rate_is((after.x[1] != after.y)[here], flip)
        assert rate_is((after.y != before.y)[here], 0.25)
    batch = jax.tree.map(lambda leaf: leaf[-50:], after.x)
    seen = np.asarray(after.render(batch))
    assert seen.shape == (50, *shape)
    original = source.x[kept][-50:]
    if name == "cifar10":
        np.testing.assert_allclose(seen, naive_cover(environments.Patched(original, batch[1]), 5))
    else:
        white = np.where(original > 0, 255, 0)
        np.testing.assert_allclose(seen, naive_paint(environments.Colored(white, batch[1]), 2))


def test_coloured_sprites_are_ellipses_and_squares():
    source = sources.load("dsprites", count=200)
    before = environments.grouped(source, environments.GROUPS["dsprites"])
    assert [before.classes[y] for y in before.y] == [source.classes[y] for y in source.y]
    assert before.classes == ("ellipse", "square")  # 0 and 1, as in the paper
    after = environments.colored(before, test_fraction=0.1, seed=0)
    np.testing.assert_array_equal(np.bincount(after.domain), [90, 90, 20])
    assert after.render(jax.tree.map(lambda leaf: leaf[:5], after.x)).shape == (5, 64, 64, 2)
