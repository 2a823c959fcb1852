"""FedAvg with all clients at once by torch.func; compiled with CUDA graphs if asked."""

import sys
from typing import Any

import peer_common
import torch
from torch import nn
from torch.func import functional_call, grad, vmap


def main() -> None:
    job = peer_common.start()
    is_compiled = sys.argv[2:] == ["compiled"]
    x, y = peer_common.data(job, job.device)
    model = peer_common.network(job)
    server = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}

    def loss(parameters: Any, images: Any, labels: Any) -> Any:
        return nn.functional.cross_entropy(functional_call(model, parameters, (images,)), labels)

    gradients = vmap(grad(loss))

    def step(parameters: Any, images: Any, labels: Any) -> Any:
        found = gradients(parameters, images, labels)
        return {name: leaf - job.learning_rate * found[name] for name, leaf in parameters.items()}

    if is_compiled:
        step = torch.compile(step, mode="reduce-overhead")
    talk = peer_common.Talk(job, model)
    while talk.begin():
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
        server = {name: leaf.mean(0) for name, leaf in trained.items()}
        with torch.no_grad():
            for name, leaf in model.named_parameters():
                leaf.copy_(server[name])
        talk.end(steps, model)


if __name__ == "__main__":
    main()
