"""From values to the network of an experiment. Functions raise UsageError for what does not fit."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from fedjax_inv import checks, freezing, models
from fedjax_inv.checks import UsageError, one_line
from fedjax_inv.data import augment
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.types import Model, Tree, Variables

from ..config import Network
from ..errors import flag_error, in_flags
from . import factories
from .factories import is_outside


def has_norm(network: Network) -> bool:
    """Whether it has normalisation layers."""
    takes_norm = factories.takes(factories.network(network.model), "norm")
    is_asked = network.norm != "none" and takes_norm
    return is_asked or network.model not in factories.WITHOUT_NORM


def arguments(network: Network, data: Dataset) -> dict[str, Any]:
    """The arguments of a network's factory for a data set.

    They are num_classes, which is positional, and all flags that the factory has arguments for.
    """
    factory = factories.network(network.model)
    if factories.takes(factory, "vocabulary") != bool(data.words):
        are = "are texts; must be lstm" if data.words else "are no texts"
        raise flag_error("model", network.model, f"does not fit the data, which {are}")
    values = {
        "activation": network.activation,
        "widths": network.widths or _default_widths(network, data),
        "cut": None if network.cut < 0 else network.cut,
        "norm": None if network.norm == "none" else network.norm,
        "vocabulary": len(data.words),
        "logit_scale": network.logit_scale,
        "image_size": _image_size(data) if factories.takes(factory, "image_size") else None,
    }
    taken = {k: v for k, v in values.items() if v is not None and factories.takes(factory, k)}
    return {"num_classes": len(data.classes), **taken}


def make(network: Network, data: Dataset, *, own_loss: bool = False) -> Model:
    """The network for a data set. own_loss: whether the loss comes from outside of this project."""
    settings = arguments(network, data)
    factory = factories.network(network.model)
    count = settings.pop("num_classes")
    model = factories.called("model", network.model, {}, Model, factory, count, **settings)
    if network.head_from:
        try:
            model = models.from_vectors(model, network.head_from, data.classes)
        except UsageError as error:
            raise in_flags(error, "", {"file": "head_from"}) from None
    if network.precision == "bfloat16":
        model = models.computed_in(model, "bfloat16")
    if is_scaled(network, data):
        if data.words or network.weights:
            text = "must be false, as texts and images of --weights have no scale of their own"
            raise flag_error("standardise", network.standardise, text)
        model = models.scaled(model)
    if network.weights:
        if network.model not in models.BODIES:
            text = f"must be left out: --model={network.model} has no published weights"
            raise flag_error("weights", network.weights, text)
        if not network.init_from:  # else the networks come from there
            try:
                model = models.weights.pretrained(model, network.weights)
            except UsageError as error:
                raise in_flags(error, f"--model={network.model}", {"path": "weights"}) from None
        body = models.BODIES[network.model]
        model = models.normalised(model, body.mean, body.std)
    if network.augment:
        shape = _shape(data)
        if len(shape) != 4 or shape[-1] != 3:
            text = f"must be false, as the examples are {list(shape[1:])} and no RGB images"
            raise flag_error("augment", True, text)
        model = models.augmented(model, augment.augment)
    if data.task == "values" and not own_loss:
        model = models.in_units(model)
    return models.painted(model, data.render) if data.render else model


def is_scaled(network: Network, data: Dataset) -> bool:
    """Whether the network shifts and scales its inputs.

    It also does for categories, as those that do not occur in training are 0 (`scale` is 0).
    """
    return network.standardise or any(column.categories for column in data.columns)


def _default_widths(network: Network, data: Dataset) -> tuple[int, ...] | None:
    """The default widths of the mlp on vectors; None: the network's own."""
    if network.model != "mlp" or data.words or not jax.tree_util.all_leaves([data.x]):
        return None
    return models.widths_for(data.x.shape[1]) if np.ndim(data.x) == 2 else None


def sample(x: Tree) -> Tree:
    """The shapes of a batch of one example of x."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), x)


def _shape(data: Dataset) -> tuple[int, ...]:
    """The shape of a batch of one example, as the network sees it."""
    return tuple(jax.eval_shape(data.render or (lambda x: x), sample(data.x)).shape)


def _image_size(data: Dataset) -> int:
    """The image size of a first layer (32, 64 or 224) that is nearest to the data's."""
    shape = _shape(data)
    side = shape[1] if len(shape) == 4 else 32
    return min((32, 64, 224), key=lambda size: abs(math.log(size / side)))


def shapes(
    network: Network, model: Model, data: Dataset, *, any_outputs: bool = False
) -> Variables:
    """The shapes of a network's variables, after a call on the data's shapes.

    any_outputs: whether a loss or an algorithm of one's own may need other outputs than the data's
        targets.
    """
    x = sample(data.x)
    key = jax.eval_shape(lambda: jax.random.key(0))
    mask = jax.ShapeDtypeStruct((1,), bool)
    with _calls(network, x):
        variables: Variables = jax.eval_shape(model.init, key, x)
        jax.eval_shape(
            lambda v, x, m, k: models.apply(model, v, x, m, True, k), variables, x, mask, key
        )
    if trained := network.train_only:
        try:
            freezing.check(variables.params, trained)
        except UsageError as error:
            raise in_flags(error, "", {"patterns": "train_only"}) from None
        if network.augment and freezing.is_frozen(variables.params, trained).body:
            text = f"must be false, as --train_only={','.join(trained)} trains no body"
            raise flag_error("augment", True, text)
    if is_outside(network.model) and not any_outputs:
        _check_outputs(network, model, variables, data)
    return variables


def _check_outputs(network: Network, model: Model, variables: Variables, data: Dataset) -> None:
    """Checks that a network has an output for each of the data's targets."""
    x = sample(data.x)
    with _calls(network, x):
        outputs = jax.eval_shape(functools.partial(models.predict, model), variables, x)
    count = len(data.classes)
    shape = getattr(outputs, "shape", None)
    if shape == (1, count) or (shape == (1,) and count == 1 and data.task != "classes"):
        return
    found = type(outputs).__name__ if shape is None else ["B", *shape[1:]]
    text = f"must return [B, {count}], one for each of the data's {data.task}, returns {found}"
    raise flag_error("model", network.model, text)


@contextlib.contextmanager
def _calls(network: Network, x: Tree) -> Iterator[None]:
    """Makes errors of a network that is called on x, which is shapes, errors of its flags."""
    try:
        yield
    except UsageError as error:
        names = {"path": "weights", "file": "head_from"}
        raise in_flags(error, f"--model={network.model}", names) from None
    except Exception as error:
        if not is_outside(network.model):
            raise
        shapes = ", ".join(map(checks.shown, jax.tree.leaves(x)))
        text = f"fails on inputs {shapes}: {one_line(error)}"
        raise flag_error("model", network.model, text) from None
