"""FedAvg in FedLab: its standalone pipeline, its serial trainer, its server handler.

FedLab averages without weights; all clients of a workload hold equally many examples.
"""

from typing import Any

import peer_common
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader, TensorDataset


class Clients(FedDataset):
    """A loader of each client's examples, as in FedLab's own data sets."""

    def __init__(self, job: peer_common.Job) -> None:
        super().__init__()
        pairs = zip(*peer_common.data(job, "cpu"), strict=True)
        self.datasets = [TensorDataset(x, y) for x, y in pairs]

    def get_dataset(self, id: int, type: str = "train") -> TensorDataset:
        return self.datasets[id]

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
        return DataLoader(self.datasets[id], batch_size, shuffle=True)


class Pipeline(StandalonePipeline):
    """Ends a round where FedLab would evaluate."""

    def __init__(self, handler: Any, trainer: Any, talk: peer_common.Talk) -> None:
        super().__init__(handler, trainer)
        self.talk = talk
        self.steps = 0

    def count(self, *_: Any) -> None:
        self.steps += 1

    def evaluate(self) -> None:
        self.talk.end(self.steps, self.handler.model)
        self.steps = 0
        self.talk.begin()


def main() -> None:
    job = peer_common.start()
    cuda = job.device == "cuda"
    model = peer_common.network(job)
    # Half a client more, as FedLab rounds the product down.
    ratio = min(1.0, (job.cohort + 0.5) / job.num_clients)
    handler = FedAvgServerHandler(model, job.num_rounds, ratio, cuda, job.device)
    trainer = FedAvgSerialClientTrainer(model, job.num_clients, cuda, job.device)
    trainer.setup_dataset(Clients(job))
    trainer.setup_optim(job.num_epochs, job.batch_size, job.learning_rate)
    pipeline = Pipeline(handler, trainer, peer_common.Talk(job, model, "fedlab"))
    trainer.optimizer.register_step_post_hook(pipeline.count)
    pipeline.talk.begin()
    pipeline.main()


if __name__ == "__main__":
    main()
