"""FedAvg's linear head for frozen.py: a plain PyTorch loop, or Flower's simulation on Ray.

run_frozen.py ARRAYS.npz JOB pytorch|flower prints the accuracies and the seconds of all seeds. The
last arrays are the test, the others a client each.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import frozen_work
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

PATH, JOB = sys.argv[1], frozen_work.Job(**json.loads(sys.argv[2]))


class Trained(NamedTuple):
    """The trained head, seconds before and in its rounds, and processor seconds of the rounds."""

    head: Any
    start: float
    seconds: float
    processor: float


def by_loop(seed: int) -> Trained:
    """A loop over rounds, clients and batches."""
    torch.manual_seed(seed)
    server, model = frozen_work.head(PATH), frozen_work.head(PATH)
    began = time.perf_counter(), time.process_time()
    sizes = [len(y) for _, y in frozen_work.data(PATH)[:-1]]
    for _ in range(JOB.rounds):
        mean = {name: torch.zeros_like(leaf) for name, leaf in server.state_dict().items()}
        for client, size in enumerate(sizes):
            model.load_state_dict(server.state_dict())
            frozen_work.train(JOB, PATH, model, client)
            for name, leaf in model.state_dict().items():
                mean[name] += size / sum(sizes) * leaf
        server.load_state_dict(mean)
    return Trained(server, 0.0, time.perf_counter() - began[0], time.process_time() - began[1])


def by_flower(seed: int) -> Trained:
    """Flower's simulation, with as many clients at once as there are threads.

    The first round is part of the start, as processes import and read what they need. Processor
    seconds are those of the server and of the clients' processes, without Ray's own.
    """
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.manual_seed(seed)
    number, model = len(frozen_work.data(PATH)) - 1, frozen_work.head(PATH)
    app, client_app = ServerApp(), ClientApp()
    called, begins, ends = time.perf_counter(), list[tuple[float, float]](), list[float]()
    of_process: dict[int, list[float]] = {}

    class Timed(FedAvg):
        """FedAvg that notes when a round begins, and what it costs the clients' processes."""

        def configure_train(self, *arguments: Any) -> Iterable[Message]:
            begins.append((time.perf_counter(), time.process_time()))
            return super().configure_train(*arguments)

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            for reply in replies:
                used = reply.content["metrics"]
                of_process.setdefault(int(used["process"]), []).append(used["processor"])
            return super().aggregate_train(server_round, replies)

    @client_app.train()
    def one(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        frozen_work.prepare(JOB, PATH)
        local = frozen_work.head(PATH)
        local.load_state_dict(message.content["arrays"].to_torch_state_dict())
        client = int(context.node_config["partition-id"])
        size = frozen_work.train(JOB, PATH, local, client)
        used = {"process": os.getpid(), "processor": time.process_time()}
        metrics = MetricRecord({"num-examples": size, **used})
        content = {"arrays": ArrayRecord(local.state_dict()), "metrics": metrics}
        return Message(content=RecordDict(content), reply_to=message)

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_evaluate=0.0, min_available_nodes=number)
        result = strategy.start(grid, ArrayRecord(model.state_dict()), JOB.rounds)
        ends.extend([time.perf_counter(), time.process_time()])
        model.load_state_dict(result.arrays.to_torch_state_dict())

    resources = {"init_args": {"num_cpus": JOB.threads}, "client_resources": {"num_cpus": 1}}
    run_simulation(app, client_app, number, backend_config=resources)
    assert len(begins) == JOB.rounds
    first, of_server = begins[1]
    processor = ends[1] - of_server + sum(max(used) - min(used) for used in of_process.values())
    return Trained(model, first - called, ends[0] - first, processor)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print goes to standard error
    torch.set_num_threads(1)  # more are slower for so small a product
    frozen_work.prepare(JOB, PATH)
    train = by_loop if sys.argv[3] == "pytorch" else by_flower
    found = [train(seed) for seed in range(JOB.seeds)]
    totals = {name: sum(getattr(run, name) for run in found) for name in Trained._fields[1:]}
    scores = [frozen_work.accuracy(PATH, run.head) for run in found]
    print(json.dumps({"scores": scores, **totals}), file=answers)


if __name__ == "__main__":
    main()
