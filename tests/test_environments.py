"""Environments: what a rotation keeps, and how images are dealt."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fedjax_inv.data import environments, sources

RNG = np.random.default_rng(0)


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
