"""Settings that cannot act in an experiment, which a warning tells before it runs."""

import numpy as np

from fedjax_inv.data.federation import parts_of

from . import factories, method
from .experiment import Assembly

_OF_TWO = ("coral", "mmd", "fishr")  # penalties on the spread of a domain's examples in a batch
_OF_ONE = ("group_dro", "vrex_domains", "fish")
_OF_FEATURES = ("coral", "mmd", "moon")


def settings(setup: Assembly) -> list[str]:
    """Why settings have no effect, a text for each; [] if all act."""
    training = setup.config.training
    texts = []
    for flag, of in (("momentum", "optimizer"), ("server_momentum", "server_optimizer")):
        value, optimizer = getattr(training, flag), getattr(training, of)
        if value and optimizer != "sgd":
            why = f"it is for --{of}=sgd, not {optimizer}"
            texts.append(f"--{flag}={value} has no effect here, because {why}")
    network = setup.config.network
    has_cut = factories.takes(factories.network(network.model), "cut")
    for algorithm in setup.config.method.algorithm:
        why = ""
        count = 2 if algorithm in _OF_TWO else 1
        if algorithm in _OF_FEATURES and network.cut == 0 and has_cut:
            why = "with --cut=0 its features are the inputs, which no training changes"
        elif algorithm in (*_OF_TWO, *_OF_ONE) and not _meet(setup, algorithm, count):
            batch = f"--batch_size={training.batch_size}"
            why = f"no batch of {batch} has {count} or more examples of each of two domains"
        if why:
            texts.append(
                f"the penalty of --algorithm={algorithm} has no effect here, because {why}"
            )
    return texts


def _meet(setup: Assembly, algorithm: str, count: int) -> bool:
    """Whether a batch can have `count` examples of each of two domains."""
    is_pooled = method.facts(setup.config, algorithm).pooled
    for of_seed in setup.splits.values():
        for split in of_seed.values():
            domain = np.asarray(split.train.data.domain)
            clients = parts_of(split.train)
            for rows in [np.concatenate(clients)] if is_pooled else clients:
                size = min(setup.config.training.batch_size or len(rows), len(rows))
                held = np.unique(domain[rows], return_counts=True)[1]
                if size >= 2 * count and (held >= count).sum() >= 2:
                    return True
    return False
