"""FedAvg of linear heads in PyTorch, seeds x learning rates: a loop over runs, or all at once."""

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import peer_common
import torch
from torch import nn
from torch.func import functional_call, grad, vmap


class Job(NamedTuple):
    """The work of heads.py."""

    sizes: list[int]  # examples of each client
    features: int
    classes: int
    batch_size: int
    num_seeds: int
    rates: list[float]
    threads: int
    num_rounds: int
    device: str


def loop(job: Job, heads: Any, data: list[tuple[Any, Any]]) -> Callable[[], int]:
    """A round of one run after the other, which returns the number of local steps."""
    model = nn.Linear(job.features, job.classes)
    weights = [size / sum(job.sizes) for size in job.sizes]

    def play() -> int:
        steps = 0
        for run, head in enumerate(heads):
            total = [torch.zeros_like(leaf) for leaf in head.parameters()]
            for weight, (x, y) in zip(weights, data, strict=True):
                model.load_state_dict(head.state_dict())
                optimizer = torch.optim.SGD(model.parameters(), job.rates[run // job.num_seeds])
                for rows in torch.randperm(len(y)).split(job.batch_size):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                    optimizer.step()
                    steps += 1
                for sum_, leaf in zip(total, model.parameters(), strict=True):
                    sum_.add_(leaf.data, alpha=weight)
            for leaf, mean in zip(head.parameters(), total, strict=True):
                leaf.data.copy_(mean)
        return steps

    return play


def vmapped(job: Job, heads: Any, data: list[tuple[Any, Any]]) -> Callable[[], int]:
    """A round of all runs at once, which returns the number of local steps."""
    model = nn.Linear(job.features, job.classes)
    number, rates = len(heads), torch.tensor(job.rates).repeat_interleave(job.num_seeds)
    servers = {
        name: torch.stack([dict(head.named_parameters())[name].data for head in heads])
        for name in ("weight", "bias")
    }

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(functional_call(model, parameters, (x,)), y)

    gradients = vmap(grad(loss))

    def play() -> int:
        steps, total = 0, {name: torch.zeros_like(leaf) for name, leaf in servers.items()}
        for size, (x, y) in zip(job.sizes, data, strict=True):
            trained = dict(servers)
            # Each seed has its own order.
            orders = torch.rand(job.num_seeds, size).argsort(1).repeat(len(job.rates), 1)
            for rows in orders.split(job.batch_size, 1):
                found = gradients(trained, x[rows], y[rows])
                trained = {
                    name: leaf - rates.view(-1, *[1] * (leaf.ndim - 1)) * found[name]
                    for name, leaf in trained.items()
                }
                steps += number
            for name, leaf in trained.items():
                total[name] += size / sum(job.sizes) * leaf
        servers.update(total)
        return steps

    return play


def main() -> None:
    job, how = Job(**json.loads(sys.argv[1])), sys.argv[2]
    torch.set_num_threads(job.threads)
    heads = [nn.Linear(job.features, job.classes) for _ in range(len(job.rates) * job.num_seeds)]
    data = [
        (torch.rand(size, job.features), torch.randint(0, job.classes, (size,)))
        for size in job.sizes
    ]
    play = (loop if how == "loop" else vmapped)(job, heads, data)
    talk: Any = peer_common.Talk(job, heads[0])  # type: ignore[arg-type]
    while talk.begin():
        talk.end(play(), heads[0])


if __name__ == "__main__":
    main()
