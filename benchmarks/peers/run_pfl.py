"""FedAvg in pfl: its simulated backend, its federated averaging, its PyTorch model."""

import os
from typing import Any

import peer_common
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn


class Network(nn.Module):
    """A network with the methods that pfl needs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.train()
        return nn.functional.cross_entropy(self.network(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(x, y).item(), len(y))}  # of the first round only


class Turns(TrainingProcessCallback):
    """Ends a round and starts the next one."""

    def __init__(self, talk: peer_common.Talk) -> None:
        self.talk = talk
        self.steps = 0

    def count(self, *_: Any) -> None:
        self.steps += 1

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.talk.end(self.steps, model.pytorch_model)
        self.steps = 0
        return not self.talk.begin(), Metrics()


def main() -> None:
    job = peer_common.start()
    os.environ["PFL_PYTORCH_DEVICE"] = job.device
    network = Network(peer_common.network(job))
    turns = Turns(peer_common.Talk(job, network, "pfl"))

    def local_optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr)
        optimizer.register_step_post_hook(turns.count)
        return optimizer

    model = PyTorchModel(network, local_optimizer, torch.optim.SGD(network.parameters(), lr=1.0))
    x, y = peer_common.data(job, job.device)
    # Cached, because a data set keeps its batches.
    users = [Dataset([x[who], y[who]], user_id=str(who)) for who in range(job.num_clients)]
    sampler = get_user_sampler("minimize_reuse", list(range(job.num_clients)))
    dataset = FederatedDataset(users.__getitem__, sampler)
    backend = SimulatedBackend(dataset, dataset, [WeightByDatapoints()])
    # pfl always evaluates the first round; it is warm-up.
    algorithm_params = NNAlgorithmParams(
        central_num_iterations=job.num_rounds,
        evaluation_frequency=job.num_rounds + 1,
        train_cohort_size=job.cohort,
        val_cohort_size=0,
    )
    train_params = NNTrainHyperParams(
        local_batch_size=job.batch_size,
        local_num_epochs=job.num_epochs,
        local_learning_rate=job.learning_rate,
    )
    turns.talk.begin()
    FederatedAveraging().run(
        algorithm_params,
        backend,
        model,
        train_params,
        callbacks=[turns],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
