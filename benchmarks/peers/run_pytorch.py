"""FedAvg in plain PyTorch: a loop over clients, or all at once by torch.func, also compiled."""

import sys
from collections.abc import Callable
from typing import Any

import peer_common
import torch
from torch import nn
from torch.func import functional_call, grad, vmap


def loop(job: peer_common.Job, model: Any) -> Callable[[], int]:
    """A round of one client after the other, which returns the number of local steps."""
    x, y = peer_common.data(job, job.device)
    parameters = [leaf.data for leaf in model.parameters()]

    def play() -> int:
        server = [leaf.clone() for leaf in parameters]
        total = [torch.zeros_like(leaf) for leaf in parameters]
        steps = 0
        for who in torch.randperm(job.num_clients)[: job.cohort].tolist():
            for leaf, received in zip(parameters, server, strict=True):
                leaf.copy_(received)
            steps += peer_common.train(job, model, x[who], y[who])
            for sum_, leaf in zip(total, parameters, strict=True):
                sum_.add_(leaf, alpha=1 / job.cohort)  # all hold equally many examples
        for leaf, mean in zip(parameters, total, strict=True):
            leaf.copy_(mean)
        return steps

    return play


def vmapped(job: peer_common.Job, model: Any, is_compiled: bool) -> Callable[[], int]:
    """A round of all clients at once, which returns the number of local steps."""
    x, y = peer_common.data(job, job.device)
    server = {name: leaf.data for name, leaf in model.named_parameters()}

    def loss(parameters: Any, images: Any, labels: Any) -> Any:
        return nn.functional.cross_entropy(functional_call(model, parameters, (images,)), labels)

    gradients = vmap(grad(loss))

    def step(parameters: Any, images: Any, labels: Any) -> Any:
        found = gradients(parameters, images, labels)
        return {name: leaf - job.learning_rate * found[name] for name, leaf in parameters.items()}

    if is_compiled:
        step = torch.compile(step, mode="reduce-overhead")  # with CUDA graphs

    def play() -> int:
        cohort = torch.randperm(job.num_clients, device=job.device)[: job.cohort, None]
        trained = {name: leaf.repeat(job.cohort, *[1] * leaf.ndim) for name, leaf in server.items()}
        steps = 0
        for _ in range(job.num_epochs):
            order = torch.rand(job.cohort, job.num_examples, device=job.device).argsort(1)
            # The last batch begins anew, as all clients at once need equal shapes.
            for first in range(0, job.num_examples, job.batch_size):
                places = torch.arange(first, first + job.batch_size, device=job.device)
                rows = order[:, places % job.num_examples]
                if is_compiled:
                    torch.compiler.cudagraph_mark_step_begin()
                    trained = {name: leaf.clone() for name, leaf in trained.items()}
                trained = step(trained, x[cohort, rows], y[cohort, rows])
                steps += job.cohort
        for name, leaf in server.items():
            leaf.copy_(trained[name].mean(0))
        return steps

    return play


def main() -> None:
    job, how = peer_common.start(), sys.argv[2]
    model = peer_common.network(job)
    play = loop(job, model) if how == "loop" else vmapped(job, model, how == "compiled")
    talk = peer_common.Talk(job, model)
    while talk.begin():
        talk.end(play(), model)


if __name__ == "__main__":
    main()
