"""The work of run_frozen.py, in a module of its own, as Ray's processes import it."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


class Job(NamedTuple):
    """The work of frozen.py."""

    seeds: int
    rounds: int
    batch_size: int
    learning_rate: float
    threads: int


@cache
def data(path: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """x and y of each client, then of the test."""
    arrays = np.load(path)
    return [
        (torch.from_numpy(arrays[f"x{at}"]), torch.from_numpy(arrays[f"y{at}"]).long())
        for at in range(len(arrays.files) // 2)
    ]


def head(path: str) -> Any:
    """A linear head for the data, drawn as `fit` draws its own (LeCun's truncated normal)."""
    made = nn.Linear(data(path)[0][0].shape[1], int(data(path)[-1][1].max()) + 1)
    # A normal distribution that is cut at two deviations has 0.88 of its deviation.
    deviation = made.in_features**-0.5 / 0.87962566
    nn.init.trunc_normal_(made.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    nn.init.zeros_(made.bias)
    return made


@cache
def prepare(job: Job, path: str) -> None:
    """Reads the data and trains a head, for what PyTorch does when it is first called."""
    train(job, path, head(path), 0)


def train(job: Job, path: str, model: Any, client: int) -> int:
    """One pass over a client's examples; their number."""
    x, y = data(path)[client]
    optimizer = torch.optim.SGD(model.parameters(), job.learning_rate)
    for rows in torch.randperm(len(y)).split(job.batch_size):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return len(y)


def accuracy(path: str, model: Any) -> float:
    """That of the test."""
    x, y = data(path)[-1]
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
