"""A frozen body whose outputs are computed once, before training, where that changes nothing."""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fedjax_inv import freezing, models
from fedjax_inv.checks import UsageError
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.types import Model, Tree, Variables

from ..config import Config
from ..errors import in_flags
from . import factories, machine


@dataclass(frozen=True, eq=False)
class FrozenBody:
    """A body that does not train."""

    variables: Variables  # with empty heads
    model: Model  # the whole network
    dataset: Dataset  # what it sees, of the first seed
    config: Config

    @functools.cached_property
    def outputs(self) -> Callable[[Tree], np.ndarray]:
        """The function from inputs [M, ...] to its outputs [M, ...]; it compiles once."""
        devices = machine.devices_of(self.config.machine)
        return models.encoder(self.model, self.variables, devices=devices)


def _why_not(config: Config) -> str:
    """Why training on the outputs of a frozen body would not be that through the body; or ""."""
    names = config.method.algorithm
    if config.network.init_from:
        return "each seed has the body that --init_from gives it"
    if not config.network.weights:
        return "without --weights each seed draws its own body"
    if config.evaluation.unseen_norms != "mean":
        return "--unseen_norms gives the body other statistics on an unseen domain"
    for name in names:
        if factories.is_outside(name):
            return f"--algorithm={name} may change inputs"
        if factories.takes(factories.algorithm(name), "mixable"):
            return f"--algorithm={name} averages inputs"
    return ""


def of(config: Config, model: Model, shapes: Variables, dataset: Dataset) -> FrozenBody | None:
    """The network's body, if it is frozen and its outputs may be computed once; else None.

    shapes: of the network's variables.
    """
    patterns = config.network.train_only
    if not patterns or not freezing.is_frozen(shapes.params, patterns).body:
        return None
    if why := _why_not(config):
        _say(f"the frozen body's outputs are not computed once, as {why}")
        return None
    alone = Variables(shapes.params._replace(head={}), shapes.stats._replace(head={}))
    try:
        variables = models.weights.load(config.network.weights, alone)
    except UsageError as error:
        where = f"--model={config.network.model}"
        raise in_flags(error, where, {"path": "weights"}) from None
    return FrozenBody(variables, model, dataset, config)


def encoded(body: FrozenBody, draws: Mapping[int, Dataset]) -> tuple[Model, dict[int, Dataset]]:
    """The head as a network, and draws of the data with the body's outputs in place of inputs."""
    count = sum(len(draw.y) for draw in draws.values())
    _say(f"the frozen body's outputs for {count:,} examples are computed once, for all runs")
    found: dict[int, Dataset] = {}
    for seed, draw in draws.items():
        x = body.outputs(draw.x)
        found[seed] = draw._replace(x=x, render=None, columns=())
    return models.without_body(body.model, body.dataset.x), found


def _say(text: str) -> None:
    if machine.leads():
        print(text, file=sys.stderr)
