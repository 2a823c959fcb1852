"""dSprites: the latents of the original, and what its images must satisfy."""

import functools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedjax_inv.data import dsprites

SQUARE, ELLIPSE, HEART = range(3)


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


def test_the_last_latent_changes_fastest():
    one_up = [1, 32, 32 * 32, 40 * 32 * 32, 6 * 40 * 32 * 32]
    for latent, index in zip(range(5, 0, -1), one_up, strict=True):
        np.testing.assert_array_equal(dsprites.latent_classes(index), np.eye(6, dtype=int)[latent])
    odometer = dsprites.latent_classes(np.arange(5000)) @ [0, 0, 0, 32 * 32, 32, 1]
    np.testing.assert_array_equal(odometer, np.arange(5000))


@given(st.lists(st.integers(0, 737_279), min_size=1, max_size=20))
def test_index_and_classes_are_inverse(index):
    classes = dsprites.latent_classes(np.array(index))
    assert classes.shape == (len(index), 6)
    np.testing.assert_array_equal(dsprites.latent_index(classes), index)
    for row, one in zip(classes, index, strict=True):
        assert dsprites.latent_index(row) == one
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


def test_the_area_grows_with_the_scale_and_not_with_the_orientation():
    areas = sprites().sum(axis=(3, 4))  # [3, 6, 40]
    assert (np.diff(areas, axis=1) > 0).all()
    scale = dsprites.VALUES[2]
    full = np.array([20.6**2, np.pi * 12.2 * 6.1, 3.662 * 7.9**2])  # of the outlines
    expected = full[:, None, None] * scale[:, None] ** 2
    np.testing.assert_allclose(areas.mean(axis=2, keepdims=True), expected, rtol=0.03)
    np.testing.assert_allclose(areas, np.broadcast_to(expected, areas.shape), rtol=0.15)


def test_the_mean_pixel_is_that_of_the_original():
    np.testing.assert_allclose(sprites().mean(), 0.0426, atol=5e-4)


def num_different(images: np.ndarray) -> int:
    return len({image.tobytes() for image in images.reshape(-1, 64, 64)})


def test_images_differ_where_the_latents_do():
    images = sprites()
    np.testing.assert_array_equal(images[:, :, 0], images[:, :, -1])  # 0 and 2 pi
    for shape in (ELLIPSE, HEART):
        assert num_different(images[shape]) == 6 * 39
    for orientation in range(40):
        assert num_different(images[:, :, orientation]) == 3 * 6


@pytest.mark.parametrize("shape", range(3))
def test_shapes_turn_about_their_centroid(shape):
    images = sprites()[shape, -1].astype(float)
    rows = (images.sum(axis=2) * np.arange(64)).sum(axis=1) / images.sum(axis=(1, 2))
    columns = (images.sum(axis=1) * np.arange(64)).sum(axis=1) / images.sum(axis=(1, 2))
    np.testing.assert_allclose(rows, 32, atol=0.25)
    np.testing.assert_allclose(columns, 32, atol=0.25)


@pytest.mark.parametrize("shape", range(3))
def test_shapes_stay_inside_the_frame(shape):
    framed = sprites()[shape]
    rows, columns = (np.flatnonzero(framed.any(axis=(0, 1, axis))) for axis in (3, 2))
    for at in (rows, columns):  # the centre, here at 32, moves from 16 to 47
        assert at.min() - 16 > 0
        assert at.max() + 15 < 63


# the data set


@pytest.mark.parametrize("shapes", [("square", "ellipse"), ("heart",), ("ellipse", "square")])
def test_load(shapes, monkeypatch):
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
