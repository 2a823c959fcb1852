"""Grey images that tell their row, for the tests of environments."""

import numpy as np

from fedjax_inv.data.dataset import Dataset


def grey(num: int = 120, num_classes: int = 10, num_test: int = 20) -> Dataset:
    """Images 1 x 2 that hold the number of their row, of classes "a" to "l"."""
    rng = np.random.default_rng(num)
    row = np.arange(num)
    return Dataset(
        np.stack([row // 256, row % 256], -1).astype(np.uint8)[:, None, :, None],
        rng.integers(0, num_classes, num).astype(np.int32),
        tuple("abcdefghijkl"[:num_classes]),
        np.zeros(num, np.int32),
        ("all",),
        rng.permutation(num) < num_test,
    )


def rows_of(dataset: Dataset) -> np.ndarray:
    """Which rows of `grey` the images are."""
    pixels = dataset.x.image[:, 0, :, 0].astype(int)
    return 256 * pixels[:, 0] + pixels[:, 1]


def rate_is(hits: np.ndarray, probability: float) -> bool:
    """Whether the rate of hits is within 6 standard deviations of what is expected."""
    deviation = np.sqrt(probability * (1 - probability) / len(hits))
    return len(hits) > 0 and abs(hits.mean() - probability) <= 6 * deviation + 1e-12
