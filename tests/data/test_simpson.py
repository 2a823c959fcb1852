"""Simpson's paradox in colours: who is darker where, and what a network sees of it."""

from typing import Any

import jax
import numpy as np
import pytest
from grey_images import grey, rows_of

from fedjax_inv.data import simpson, sources
from fedjax_inv.data.dataset import Dataset, check_dataset
from fedjax_inv.data.simpson import Shaded
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import data as data_flags
from fedjax_inv_experiments.assembly import experiment


def made(dataset: Dataset | None = None, clients: int = 3, **changes: Any) -> Dataset:
    arguments: dict[str, Any] = {
        "darker": "d",
        "lighter": "b",
        "colors": simpson.ramp(clients + 1),
        "seed": 0,
    }
    return simpson.simpson(
        grey(num_classes=4) if dataset is None else dataset, **(arguments | changes)
    )


def brightness(dataset: Dataset) -> np.ndarray:
    """Of a white pixel in each example's colour, [M]."""
    assert dataset.render is not None
    white = np.full((len(dataset.y), 1, 1, 1), 255, np.uint8)
    seen = np.asarray(dataset.render(Shaded(white, dataset.x.step)))
    return seen[:, 0, 0] @ [0.299, 0.587, 0.114]


@pytest.mark.parametrize("num_test", [0, 20])
@pytest.mark.parametrize("clients", [1, 3, 5])
def test_in_a_client_one_class_is_darker_and_its_colour_is_the_others_next_door(
    num_test: int, clients: int
) -> None:
    before = grey(400, 4, num_test)
    after = made(before, clients)
    check_dataset(after)
    assert after.domains == (*map(str, range(clients)), "test")
    assert after.classes == ("d", "b")
    light = brightness(after)
    shades: dict[tuple[int, int], float] = {}
    for client in range(clients):
        for label in (0, 1):
            of = np.unique(light[(after.domain == client) & (after.y == label)])
            assert len(of) == 1
            shades[client, label] = of[0]
        assert shades[client, 0] < shades[client, 1]
    for client in range(clients - 1):
        assert shades[client, 0] == shades[client + 1, 1]
        assert shades[client + 1, 0] < shades[client, 0]
    # Whatever has one of the two classes is there once, with its label; the test split is the test.
    rows = rows_of(after)
    kept = np.isin(before.y, [1, 3])
    np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(kept))
    np.testing.assert_array_equal(after.y, (before.y[rows] == 1).astype(int))
    is_test = after.domain == clients
    if num_test:
        np.testing.assert_array_equal(is_test, before.test[rows])
    else:
        assert is_test.sum() == round(0.2 * kept.sum())
    sizes = np.bincount(after.domain)[:clients]
    assert sizes.max() - sizes.min() <= 1
    assert not after.test.any()


def test_the_test_is_painted_whatever_the_label() -> None:
    """And so is everything where nothing is to mislead."""
    many = grey(12_000, 4, 3000)
    for after, domains in ((made(many), [3]), (made(many, shading="random"), range(4))):
        for domain in domains:
            here = after.domain == domain
            counts = np.zeros((2, 4))
            np.add.at(counts, (after.y[here], after.x.step[here]), 1)
            share = counts / counts.sum(1, keepdims=True)
            np.testing.assert_allclose(share, 1 / 4, atol=6 * np.sqrt(3 / 16 / counts.sum(1).min()))


def test_everything_follows_the_seed_and_either_shading_has_the_same_test() -> None:
    first, again, other = made(), made(), made(seed=1)
    assert all(map(np.array_equal, jax.tree.leaves(first[:4]), jax.tree.leaves(again[:4])))
    assert (first.domain != other.domain).any()
    plain = made(shading="random")
    is_test = first.domain == 3
    np.testing.assert_array_equal(first.domain, plain.domain)
    np.testing.assert_array_equal(first.x.step[is_test], plain.x.step[is_test])
    assert (first.x.step != plain.x.step).any()
    # As the test is drawn before what is painted, it is one for any number of clients.
    without_split = grey(num_classes=4, num_test=0)
    tests = [
        rows_of(after)[after.domain == len(after.domains) - 1]
        for after in (made(without_split, 2), made(without_split, 5))
    ]
    np.testing.assert_array_equal(*tests)


def test_shades_against_a_naive_loop_also_under_transformations() -> None:
    rng = np.random.default_rng(0)
    colors = simpson.ramp(4)
    image = rng.integers(0, 256, (6, 3, 5, 1)).astype(np.uint8)
    x = Shaded(image, np.array([0, 1, 2, 3, 3, 0], np.int32))
    expected = np.zeros((6, 3, 5, 3))
    for i, row, column, channel in np.ndindex(*expected.shape):
        color = int(colors[x.step[i]][channel])
        expected[i, row, column, channel] = int(image[i, row, column, 0]) * color / 255**2
    np.testing.assert_allclose(simpson.shade(x, colors), expected, atol=1e-6)

    @jax.jit
    def each(x: Shaded) -> jax.Array:
        return jax.vmap(lambda one: simpson.shade(one, colors))(x)

    np.testing.assert_allclose(each(x), expected, atol=1e-6)
    beyond = each(Shaded(image, np.array([0, 1, 2, 3, 99, -5], np.int32)))
    np.testing.assert_allclose(beyond, expected, atol=1e-6)


def test_a_ramp_goes_evenly_from_one_end_to_the_other() -> None:
    colors = simpson.ramp(6)
    np.testing.assert_array_equal(colors[[0, -1]], simpson.ENDS)
    assert (np.diff(colors.astype(int), axis=0) < 0).all()


def test_a_ramp_goes_through_all_hues_and_darkens() -> None:
    np.testing.assert_array_equal(simpson.ramp(6, simpson.HUES), simpson.HUES)
    colors = simpson.ramp(11, simpson.HUES)
    np.testing.assert_array_equal(colors[::2], simpson.HUES)
    np.testing.assert_allclose(colors[1], np.mean(simpson.HUES[:2], axis=0), atol=0.5)
    assert (np.diff(colors @ [0.299, 0.587, 0.114]) < 0).all()


# the flags


def drawn(**values: Any) -> Dataset:
    chosen = config.of(dataset="digits", environment="simpson", **values)
    return data_flags.domains(chosen, sources.load("digits"), 0)


def test_the_flags_reach_the_data() -> None:
    plain = drawn()
    assert plain.domains == ("0", "1", "2", "3", "4", "test")
    assert plain.classes == ("1", "7")
    np.testing.assert_allclose(np.unique(brightness(plain)).size, 6)
    white = Shaded(np.full((6, 1, 1, 1), 255, np.uint8), np.arange(6, dtype=np.int32))
    render = drawn(hues=True).render
    assert render is not None
    np.testing.assert_allclose(255 * render(white)[:, 0, 0], simpson.HUES, atol=1e-4)
    seeds = experiment.make(config.of(environment="simpson", seeds=(0, 1)))
    assert len(seeds.splits["test"][0].domain) == 5
    assert len(seeds.source) == 2 * len(plain.y)  # each seed draws its own


def test_a_share_of_the_images_has_the_colours_of_the_paradox() -> None:
    data = grey(4000, 4, 200)
    whole, half, least, none, other = (
        made(data, 4, share=share, shading=shading)
        for share, shading in (
            *((1.0, "paradox"), (0.5, "paradox"), (0.1, "paradox"), (0.0, "paradox")),
            (1.0, "random"),
        )
    )
    for each in (half, least, none):
        np.testing.assert_array_equal(each.domain, whole.domain)
        np.testing.assert_array_equal(rows_of(each), rows_of(whole))
    np.testing.assert_array_equal(none.x.step, other.x.step)
    is_client = whole.domain < 4
    np.testing.assert_array_equal(half.x.step[~is_client], whole.x.step[~is_client])
    by_rule = [each.x.step == whole.domain + (whole.y == 0) for each in (whole, half, least)]
    assert by_rule[0][is_client].all()
    # Of the others, one of five has that colour by chance.
    for found, share in zip(by_rule[1:], (0.5, 0.1), strict=True):
        expected = share + (1 - share) / 5
        assert abs(found[is_client].mean() - expected) < 5 * np.sqrt(0.25 / is_client.sum())
    assert not (by_rule[2] & ~by_rule[1])[is_client].any()  # a smaller share is part of a larger
