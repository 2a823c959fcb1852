"""The augmentation: each part against a naive loop, and its draws."""

import colorsys
from functools import partial

import jax
import numpy as np
import pytest

from federations import assert_close, assert_equal
from fedjax_inv.data import augment as augmentation
from fedjax_inv.data.augment import augment

KEY = jax.random.key(0)
HEIGHT, WIDTH = 7, 10
NOTHING = dict(scale=(1.0, 1.0), ratio=(WIDTH / HEIGHT,) * 2, flip=0.0, jitter=0.0, greyed=0.0)


def images(number: int = 4, seed: int = 0) -> np.ndarray:
    """Random colours, with greys, pure colours and ties of two channels among them."""
    x = np.random.default_rng(seed).random((number, HEIGHT, WIDTH, 3), np.float32)
    x[:, 0, 0] = 0
    x[:, 0, 1] = 1
    x[:, 0, 2] = 0.25
    x[:, 1, :3] = np.eye(3)
    x[:, 2, :3] = 1 - np.eye(3)
    return x


def luma(image: np.ndarray) -> np.ndarray:
    return 0.299 * image[..., 0] + 0.587 * image[..., 1] + 0.114 * image[..., 2]


@pytest.mark.parametrize(
    "window", [(0, 0, HEIGHT, WIDTH), (2, 1, 4, 7), (3, 9, 4, 1), (6, 0, 1, 10), (0, 3, 7, 3)]
)
def test_a_crop_is_a_loop_over_pixels(window: tuple[int, int, int, int]) -> None:
    image = images(1)[0]
    top, left, height, width = window
    cropped = np.float64(image)[top : top + height, left : left + width]

    def between(array: np.ndarray, place: float) -> np.ndarray:
        """Linear interpolation along the first axis."""
        place = min(max(place, 0.0), len(array) - 1)
        low = int(place)
        high = min(low + 1, len(array) - 1)
        return array[low] * (1 - (place - low)) + array[high] * (place - low)

    expected = np.zeros(image.shape)
    for row, column in np.ndindex(HEIGHT, WIDTH):
        of_row = between(cropped, (row + 0.5) * height / HEIGHT - 0.5)
        expected[row, column] = between(of_row, (column + 0.5) * width / WIDTH - 0.5)
    assert_close(augmentation.resized_crop(image, *window), expected, atol=1e-5)


def windows(height: int, width: int, scale, ratio, number: int = 2000) -> np.ndarray:
    """[number, 4] of drawn windows."""
    draw = partial(augmentation.crop_window, height=height, width=width, scale=scale, ratio=ratio)
    return np.stack(jax.jit(jax.vmap(draw))(jax.random.split(KEY, number)), 1)


def test_windows_lie_in_the_image_with_area_and_ratio_as_asked() -> None:
    height, width, scale, ratio = 90, 120, (0.3, 0.6), (0.8, 1.5)
    top, left, rows, columns = drawn = windows(height, width, scale, ratio).T
    assert (drawn[:2] >= 0).all()
    assert (top + rows).max() <= height
    assert (left + columns).max() <= width
    area, shape = rows * columns / (height * width), columns / rows
    slack = 0.02  # sides are whole pixels
    for values, (low, high) in ((area, scale), (shape, ratio)):
        assert low * (1 - slack) < values.min() < low * (1 + 4 * slack)
        assert high * (1 - 4 * slack) < values.max() < high * (1 + slack)
    # The ones rejected are few, as most fit: means of the uniform laws, 5 standard errors.
    for values, (low, high) in ((area, scale), (np.log(shape), np.log(ratio))):
        error = (high - low) / 12**0.5 / len(values) ** 0.5
        assert abs(values.mean() - (low + high) / 2) < 5 * error + 0.005
    place = top / np.maximum(height - rows, 1)
    assert place.min() == 0
    assert place.max() == 1
    assert abs(place.mean() - 0.5) < 5 * 12**-0.5 / len(place) ** 0.5


@pytest.mark.parametrize(
    ("width", "ratio", "window"),
    [
        (100, (0.4, 0.5), (0, 35, 60, 30)),  # nothing so wide: the widest that is allowed
        (120, (3.0, 4.0), (10, 0, 40, 120)),
        (100, (1.66, 1.68), (0, 0, 60, 100)),
    ],
)
def test_where_no_draw_fits_the_largest_window_is_taken(width: int, ratio, window) -> None:
    """An area beyond the image's fits with no ratio."""
    drawn = windows(60, width, (1.1, 1.1), ratio, 3)
    assert_equal(drawn, np.tile(np.int32(window), (3, 1)))


def test_colours_are_loops_over_pixels() -> None:
    image = images(1)[0]
    exact = np.float64(image)
    mean = luma(exact).mean()
    for factor in (0.0, 0.7, 1.0, 1.3):
        cases = {
            augmentation.brightened: factor * exact,
            augmentation.contrasted: mean + factor * (exact - mean),
            augmentation.saturated: luma(exact)[..., None] * (1 - factor) + factor * exact,
        }
        for function, expected in cases.items():
            assert_close(function(image, factor), np.clip(expected, 0, 1), atol=1e-5)
    assert_close(augmentation.grey(image), np.repeat(luma(exact)[..., None], 3, -1))
    for shift in (-0.5, -0.3, 0.0, 0.1, 1 / 3, 0.3):
        expected = np.zeros(image.shape)
        for place in np.ndindex(image.shape[:2]):
            hue, saturation, value = colorsys.rgb_to_hsv(*exact[place])
            expected[place] = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
        assert_close(augmentation.hue_shifted(image, shift), expected, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_jitters_come_in_their_order(order: tuple[int, ...]) -> None:
    image, amounts = images(1)[0], np.array([1.3, 0.7, 1.2, 0.2], np.float32)
    names = ("brightened", "contrasted", "saturated", "hue_shifted")
    expected = image
    for number in order:
        expected = getattr(augmentation, names[number])(expected, amounts[number])
    got = jax.jit(augmentation.jittered)(image, np.array(order), amounts)
    assert_close(got, expected)


AUGMENTED = jax.jit(augment)


def test_flips_and_greys_of_half_of_the_examples() -> None:
    x = np.tile(images(1), (400, 1, 1, 1))
    cases = {
        "flip": (x[0, :, ::-1], dict(NOTHING, flip=0.3)),
        "greyed": (np.repeat(luma(x[0])[..., None], 3, -1), dict(NOTHING, greyed=0.3)),
    }
    for changed, strengths in cases.values():
        out = np.asarray(jax.jit(partial(augment, **strengths))(x, KEY))
        is_changed, is_same = (
            np.abs(out - image).max((1, 2, 3)) < 1e-5 for image in (changed, x[0])
        )
        assert (is_changed != is_same).all()
        assert abs(is_changed.mean() - 0.3) < 5 * (0.3 * 0.7 / len(x)) ** 0.5


def test_an_example_is_drawn_by_its_place_alone() -> None:
    x, others = images(6), images(6, seed=1)
    out = np.asarray(AUGMENTED(x, KEY))
    others[2] = x[2]
    assert_equal(np.asarray(AUGMENTED(others, KEY))[2], out[2])
    assert_close(jax.jit(augment)(x[:3], KEY), out[:3], atol=1e-6)
    same = AUGMENTED(np.tile(x[:1], (6, 1, 1, 1)), KEY)
    assert len(np.unique(np.asarray(same), axis=0)) == 6
    assert_equal(AUGMENTED(x, KEY), out)
    assert (np.abs(AUGMENTED(x, jax.random.key(1)) - out).max((1, 2, 3)) > 1e-2).all()
