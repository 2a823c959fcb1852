"""FedAvg in Flower: its simulation on Ray, its strategy; local training is the plain loop.

As many clients at once as there are threads, each with one.
"""

import logging
from collections.abc import Iterable
from typing import Any

import peer_common
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


def client_app(job: peer_common.Job) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = peer_common.network(job)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = peer_common.data(job, job.device)
        who = context.node_config["partition-id"]
        steps = peer_common.train(job, model, x[who], y[who])
        metrics = MetricRecord({"num-examples": job.num_examples, "steps": steps})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(content=RecordDict(content), reply_to=message)

    return app


class Turns(FedAvg):
    """FedAvg that starts and ends a round by peers.py."""

    def __init__(self, talk: peer_common.Talk, model: torch.nn.Module, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.talk = talk
        self.model = model

    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        self.talk.begin()
        return super().configure_train(*arguments)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        aggregated = super().aggregate_train(server_round, replies)
        self.model.load_state_dict(aggregated[0].to_torch_state_dict())
        steps = [reply.content["metrics"]["steps"] for reply in replies if not reply.has_error()]
        self.talk.end(sum(steps), self.model)
        return aggregated


def main() -> None:
    job = peer_common.start()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    model = peer_common.network(job)
    talk = peer_common.Talk(job, model, "flwr", "ray")
    strategy = Turns(
        talk,
        model,
        # Half a client more, as Flower rounds the product down.
        fraction_train=min(1.0, (job.cohort + 0.5) / job.num_clients),
        fraction_evaluate=0.0,
        min_train_nodes=job.cohort,
        min_available_nodes=job.num_clients,
    )
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy.start(grid, ArrayRecord(model.state_dict()), job.num_rounds)

    share = 1.0 / job.threads if job.device == "cuda" else 0.0
    run_simulation(
        app,
        client_app(job),
        job.num_clients,
        backend_config={
            "init_args": {"num_cpus": job.threads},
            "client_resources": {"num_cpus": 1, "num_gpus": share},
        },
    )


if __name__ == "__main__":
    main()
