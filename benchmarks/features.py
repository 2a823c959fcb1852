"""Features by EfficientNet-Lite0, in timm's PyTorch and in ours, batch by batch in turns.

python -m benchmarks.features --images=1000

It needs torch and timm beside this project, and runs on the cores of this process (`taskset`), with
random weights and random images. The ratio is ours over PyTorch's, in images a second.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import frame
from benchmarks.frame import Row, flag
from fedjax_inv import models, platforms


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    images: int = flag(1000, "Images of each.")
    batch: int = flag(16, "Images of a batch.")
    side: int = flag(224, "Pixels of an image's side.")


def ours(options: Options) -> Callable[[np.ndarray], Any]:
    """Images [B, height, width, 3] -> features."""
    model = models.efficientnet_lite0(1000)
    like = np.zeros((1, options.side, options.side, 3), np.float32)
    variables = jax.jit(model.init)(jax.random.key(0), like)
    return models.encoder(model, variables, batch_size=options.batch)


def theirs(options: Options) -> Callable[[np.ndarray], Any]:
    """The same in PyTorch."""
    import timm
    import torch

    torch.set_num_threads(platforms.cores())
    network = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval()

    def features(x: np.ndarray) -> Any:
        with torch.inference_mode():
            return network(torch.from_numpy(x.transpose(0, 3, 1, 2)).contiguous())

    return features


def rows(options: Options) -> Iterator[Row]:
    """One row."""
    shape = options.batch, options.side, options.side, 3
    x = np.random.default_rng(0).random(shape, np.float32)
    functions = {"ours": ours(options), "PyTorch": theirs(options)}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(-2, -(-options.images // options.batch)):
        for name, function in functions.items():
            start = time.perf_counter()
            function(x)
            if number >= 0:  # after warm-up
                seconds[name].append(time.perf_counter() - start)
    speed = {name: options.batch / frame.median(times) for name, times in seconds.items()}
    yield {f"{name}, images/s": value for name, value in speed.items()} | {
        "ratio": speed["ours"] / speed["PyTorch"]
    }


if __name__ == "__main__":
    platforms.make_devices(platforms.cores())
    frame.main(rows, Options, __doc__)
