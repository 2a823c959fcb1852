"""FedAvg's linear head for frozen.py: a plain PyTorch loop, or Flower's simulation on Ray.

run_frozen.py ARRAYS.npz JOB pytorch|flower prints the accuracies, the seconds, and those before the
first rounds. The last arrays are the test, the others a client each.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

import frozen_work
import torch
from torch import nn

PATH, JOB = sys.argv[1], frozen_work.Job(**json.loads(sys.argv[2]))


def by_loop(seed: int) -> tuple[nn.Module, float]:
    """The trained head, and when its rounds began."""
    torch.manual_seed(seed)
    server, model, began = frozen_work.head(PATH), frozen_work.head(PATH), time.perf_counter()
    sizes = [len(y) for _, y in frozen_work.data(PATH)[:-1]]
    for _ in range(JOB.rounds):
        mean = {name: torch.zeros_like(leaf) for name, leaf in server.state_dict().items()}
        for client, size in enumerate(sizes):
            model.load_state_dict(server.state_dict())
            frozen_work.train(JOB, PATH, model, client)
            for name, leaf in model.state_dict().items():
                mean[name] += size / sum(sizes) * leaf
        server.load_state_dict(mean)
    return server, began


def by_flower(seed: int) -> tuple[nn.Module, float]:
    """The trained head, and when its rounds began; as many clients at once as there are threads."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.manual_seed(seed)
    number, model, begins = len(frozen_work.data(PATH)) - 1, frozen_work.head(PATH), list[float]()
    app, client_app = ServerApp(), ClientApp()

    class Timed(FedAvg):
        """FedAvg that notes when a round begins."""

        def configure_train(self, *arguments: Any) -> Iterable[Message]:
            begins.append(time.perf_counter())
            return super().configure_train(*arguments)

    @client_app.train()
    def one(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        client = int(context.node_config["partition-id"])
        local = frozen_work.head(PATH)
        local.load_state_dict(message.content["arrays"].to_torch_state_dict())
        size = frozen_work.train(JOB, PATH, local, client)
        metrics = MetricRecord({"num-examples": size})
        content = {"arrays": ArrayRecord(local.state_dict()), "metrics": metrics}
        return Message(content=RecordDict(content), reply_to=message)

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_evaluate=0.0, min_available_nodes=number)
        result = strategy.start(grid, ArrayRecord(model.state_dict()), JOB.rounds)
        model.load_state_dict(result.arrays.to_torch_state_dict())

    resources = {"init_args": {"num_cpus": JOB.threads}, "client_resources": {"num_cpus": 1}}
    run_simulation(app, client_app, number, backend_config=resources)
    assert len(begins) == JOB.rounds
    return model, begins[0]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print goes to standard error
    torch.set_num_threads(JOB.threads)
    frozen_work.data(PATH)
    scores, seconds, start = [], 0.0, 0.0
    for seed in range(JOB.seeds):
        began = time.perf_counter()
        model, first = (by_loop if sys.argv[3] == "pytorch" else by_flower)(seed)
        scores.append(frozen_work.accuracy(PATH, model))
        seconds += time.perf_counter() - began
        start += first - began
    print(json.dumps({"scores": scores, "seconds": seconds, "start": start}), file=answers)


if __name__ == "__main__":
    main()
