"""The job of a runner, its networks and data in PyTorch, and the dialogue with peers.py.

The runners are scripts for the peers' own environments (make_venvs.sh); this folder is no package.
A runner gets its job as JSON and prints a line when it is ready. Then it waits for a line on its
standard input before each round, and prints the seconds of the round.
"""

import json
import os
import sys
import time
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import nn


class Job(NamedTuple):
    """A workload of peers.py."""

    network: str
    num_clients: int
    num_examples: int  # of each client
    cohort: int
    batch_size: int
    num_epochs: int
    learning_rate: float
    num_rounds: int  # with warm-up
    threads: int
    device: str  # cpu or cuda


def conv_network(channels: int, window: int, padding: int, pools: int, sizes: Any) -> Any:
    """Two convolutions and two dense layers, all but the last followed by a ReLU."""
    first = nn.Conv2d(channels, 32, window, padding=padding), nn.ReLU()
    second = nn.Conv2d(32, 64, window, padding=padding), nn.ReLU()
    dense = nn.Flatten(), nn.Linear(*sizes), nn.ReLU(), nn.Linear(sizes[1], 10)
    return nn.Sequential(*first, *[nn.MaxPool2d(2)] * pools, *second, nn.MaxPool2d(2), *dense)


def mlp() -> Any:
    """784-390-390-10."""
    hidden = [nn.Linear(784, 390), nn.ReLU(), nn.Linear(390, 390), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(390, 10))


# Name -> (shape of an example, network)
NETWORKS = {
    "pfl_cifar": ((3, 32, 32), lambda: conv_network(3, 3, 0, 0, (64 * 14 * 14, 128))),
    "lenet": ((1, 28, 28), lambda: conv_network(1, 5, 2, 1, (64 * 7 * 7, 512))),
    "mlp": ((1, 28, 28), mlp),
}


def start() -> Job:
    """The job, with the threads that it grants."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(job.threads)
    # As JAX multiplies by default on a GPU; of no consequence on a CPU.
    torch.set_float32_matmul_precision("high")
    return job


def network(job: Job) -> Any:
    """The network, on the job's device."""
    return NETWORKS[job.network][1]().to(job.device)


@cache
def data(job: Job, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise: x [C, N, ...], y [C, N]."""
    shape = job.num_clients, job.num_examples
    x = torch.rand(*shape, *NETWORKS[job.network][0])
    y = torch.randint(0, 10, shape)
    return x.to(device), y.to(device)


def train(job: Job, model: Any, x: torch.Tensor, y: torch.Tensor) -> int:
    """Local training by hand; the number of steps."""
    optimizer = torch.optim.SGD(model.parameters(), job.learning_rate)
    steps = 0
    model.train()
    for _ in range(job.num_epochs):
        order = torch.randperm(len(y), device=y.device)
        for batch in order.split(job.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            steps += 1
    return steps


class Talk:
    """Answers peers.py, which lets this process and its own engine take turns."""

    def __init__(self, job: Job, model: Any, *packages: str) -> None:
        # Standard output is for the answers; whatever a framework prints goes to standard error.
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._cuda = job.device == "cuda"
        self._rounds_left = job.num_rounds
        self._began = 0.0
        self._tell(
            parameters=sum(p.numel() for p in model.parameters()),
            versions={package: version(package) for package in ("torch", *packages)},
        )

    def begin(self) -> bool:
        """Waits for a round's turn and starts the clock; false after the last round."""
        if self._rounds_left == 0:
            return False
        self._rounds_left -= 1
        if not sys.stdin.readline():
            sys.exit("peers.py is gone")
        self._began = time.perf_counter()
        return True

    def end(self, steps: int, model: Any) -> None:
        """Stops the clock and tells the round; the model shows that it was trained."""
        if self._cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        norm = sum(float(p.detach().square().sum()) for p in model.parameters()) ** 0.5
        self._tell(seconds=seconds, steps=steps, norm=norm)
        if self._rounds_left == 0:
            sys.stdin.read()  # The end of this process would disturb the last round of peers.py.

    def _tell(self, **told: Any) -> None:
        print(json.dumps(told), file=self._out, flush=True)
