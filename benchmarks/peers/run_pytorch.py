"""FedAvg as a loop of plain PyTorch, without a framework."""

import peer_common
import torch


@torch.no_grad()
def copy(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    for here, there in zip(source, target, strict=True):
        there.copy_(here)


@torch.no_grad()
def add(total: list[torch.Tensor], parameters: list[torch.Tensor], weight: float) -> None:
    for sum_, parameter in zip(total, parameters, strict=True):
        sum_.add_(parameter, alpha=weight)


def main() -> None:
    job = peer_common.start()
    x, y = peer_common.data(job, job.device)
    model = peer_common.network(job)
    parameters = list(model.parameters())
    server = [parameter.detach().clone() for parameter in parameters]
    talk = peer_common.Talk(job, model)
    while talk.begin():
        cohort = torch.randperm(job.num_clients)[: job.cohort].tolist()
        total = [torch.zeros_like(parameter) for parameter in server]
        num_examples = sum(len(y[who]) for who in cohort)
        steps = 0
        for who in cohort:
            copy(server, parameters)
            steps += peer_common.train(job, model, x[who], y[who])
            add(total, parameters, len(y[who]) / num_examples)
        server = total
        copy(server, parameters)
        talk.end(steps, model)


if __name__ == "__main__":
    main()
