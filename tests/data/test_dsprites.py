"""dSprites: the latents of the original, and what its images must satisfy."""

import functools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedjax_inv.data import dsprites

SQUARE, ELLIPSE = range(2)


def draw(shape=SQUARE, scale=1.0, orientation=0.0, x=16 / 31, y=16 / 31) -> np.ndarray:
    """One image [64, 64]; by default the centre is that of pixel (32, 32)."""
    return dsprites.render(np.array([[1, 1 + shape, scale, orientation, x, y]]))[0]


@functools.cache
def sprites() -> np.ndarray:
    """Every shape, scale and orientation, in the middle: [3, 6, 40, 64, 64], read-only."""
    index = np.arange(dsprites.NUM_IMAGES).reshape(3, 6, 40, 32, 32)[..., 16, 16]
    images = dsprites.render(dsprites.latent_values(index.ravel())).reshape(3, 6, 40, 64, 64)
    images.flags.writeable = False
    return images


# latents


def test_latents_are_those_of_the_original():
    assert dsprites.NUM_IMAGES == 737_280 == 1 * 3 * 6 * 40 * 32 * 32
    assert dsprites.SIZES == (1, 3, 6, 40, 32, 32)
    assert dsprites.LATENTS == ("color", "shape", "scale", "orientation", "x", "y")
    # Every 61st, where each latent takes each of its values, and the last one.
    values = dsprites.latent_values(np.r_[:737_280:61, 737_279])
    # From the metadata of the original file.
    np.testing.assert_array_equal(values[0], [1, 1, 0.5, 0, 0, 0])
    np.testing.assert_allclose(values[-1], [1, 3, 1, 6.28318531, 1, 1])
    np.testing.assert_allclose(np.unique(values[:, 2]), [0.5, 0.6, 0.7, 0.8, 0.9, 1])
    np.testing.assert_allclose(np.unique(values[:, 3])[1:3], [0.16110732, 0.32221463])
    np.testing.assert_allclose(np.unique(values[:, 4])[1:3], [0.03225806, 0.06451613], rtol=1e-6)
    np.testing.assert_array_equal(np.unique(values[:, 4]), np.unique(values[:, 5]))


@given(st.lists(st.integers(0, 737_279), min_size=1, max_size=20))
def test_the_classes_of_an_index_count_its_latents(index):
    classes = dsprites.latent_classes(np.array(index))
    np.testing.assert_array_equal(np.ravel_multi_index(classes.T, dsprites.SIZES), index)
    for row, one in zip(classes, index, strict=True):
        expected = [dsprites.VALUES[latent][value] for latent, value in enumerate(row)]
        np.testing.assert_array_equal(dsprites.latent_values(one), expected)


# images


def outline(shape, u, v) -> bool:
    """Whether (u, v), in pixels right of and above the centroid, is in the shape of scale 1."""
    if shape == SQUARE:
        return max(abs(u), abs(v)) <= 10.3
    if shape == ELLIPSE:
        return (u / 12.2) ** 2 + (v / 6.1) ** 2 <= 1
    u, v = u / 7.9, v / 7.9 + 0.2935
    return (u**2 + v**2 - 1) ** 3 <= u**2 * v**3


@pytest.mark.parametrize("shape", range(3))
def test_render_against_a_naive_loop(shape):
    rng = np.random.default_rng(shape)
    scale, orientation, x, y = 0.5 + rng.random() / 2, 6 * rng.random(), rng.random(), rng.random()
    expected = np.zeros((64, 64))
    for row in range(64):
        for column in range(64):
            point = complex(column - 16 - 31 * x, 16 + 31 * y - row)  # right and up of the centre
            upright = point * np.exp(-1j * orientation) / scale
            expected[row, column] = outline(shape, upright.real, upright.imag)
    assert 50 < expected.sum() < 450
    np.testing.assert_array_equal(draw(shape, scale, orientation, x, y), expected)


def test_images_are_binary_and_may_be_rendered_in_any_order(monkeypatch):
    monkeypatch.setattr(dsprites, "_CHUNK", 3)  # several chunks for a shape
    index = np.random.default_rng(0).integers(0, dsprites.NUM_IMAGES, 20)
    images = dsprites.render(dsprites.latent_values(index))
    assert images.dtype == np.uint8
    assert images.shape == (20, 64, 64)
    assert set(np.unique(images)) == {0, 1}
    for image, one in zip(images, index, strict=True):
        np.testing.assert_array_equal(image, dsprites.render(dsprites.latent_values([one]))[0])
    assert dsprites.render(np.zeros((0, 6))).shape == (0, 64, 64)


def test_the_mean_pixel_is_that_of_the_original():
    np.testing.assert_allclose(sprites().mean(), 0.0426, atol=5e-4)


# the data set


def test_load(monkeypatch):
    shapes = ("ellipse", "square")
    drawn, render = [], dsprites.render
    monkeypatch.setattr(
        dsprites, "render", lambda latents: drawn.append(latents) or render(latents)
    )
    dataset = dsprites.load(shapes, num_images=60, seed=1)
    assert dataset.x.shape == (60, 64, 64, 1)
    assert dataset.x.dtype == np.uint8
    assert set(np.unique(dataset.x)) == {0, 255}
    assert dataset.classes == shapes
    assert dataset.y.dtype == np.int32
    assert set(dataset.y) == set(range(len(shapes)))
    assert (dataset.domains, set(dataset.domain)) == (("all",), {0})
    assert not dataset.test.any()
    (latents,) = drawn
    np.testing.assert_array_equal(dataset.x[..., 0], 255 * render(latents))
    for code, y in zip(latents[:, 1], dataset.y, strict=True):
        assert dsprites.SHAPES[int(code) - 1] == shapes[y]


def test_load_draws_by_its_seed_and_no_image_twice():
    first, again, other = (dsprites.load(num_images=30, seed=seed) for seed in (0, 0, 1))
    for field in ("x", "y"):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))
        assert (getattr(first, field) != getattr(other, field)).any()
