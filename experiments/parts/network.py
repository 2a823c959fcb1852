"""The network."""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_inv import checks, freezing, models
from fedjax_inv.checks import UsageError, one_line
from fedjax_inv.data import augment
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.types import Model, Tree, Variables

from .. import factories
from ..config import Config
from ..errors import flag_error, in_flags
from ..factories import is_outside
from ..flags import MODELS


def has_norm(chosen: Config) -> bool:
    """Whether the network has normalisation layers."""
    is_asked = chosen.norm != "none" and factories.takes(factories.network(chosen.model), "norm")
    return is_asked or chosen.model not in factories.WITHOUT_NORM


def check(chosen: Config) -> None:
    """Raises UsageError for an unknown network."""
    factories.check_factory("model", chosen.model, MODELS)


def arguments(chosen: Config, data: Dataset) -> dict[str, Any]:
    """The arguments of a network's factory for a data set.

    They are num_classes, which is positional, and all flags that the factory has arguments for.
    """
    factory = factories.network(chosen.model)
    if factories.takes(factory, "vocabulary") != bool(data.words):
        use = "for texts, which the data are not"
        if data.words:
            use = "not for texts, which the data are; must be lstm"
        raise flag_error("model", chosen.model, f"is {use}")
    values = {
        "activation": chosen.activation,
        "widths": chosen.widths or _default_widths(chosen, data),
        "cut": None if chosen.cut < 0 else chosen.cut,
        "norm": None if chosen.norm == "none" else chosen.norm,
        "vocabulary": len(data.words),
        "image_size": _image_size(data) if factories.takes(factory, "image_size") else None,
    }
    taken = {
        name: value
        for name, value in values.items()
        if value is not None and factories.takes(factory, name)
    }
    return {"num_classes": len(data.classes), **taken}


def make(chosen: Config, data: Dataset) -> Model:
    """The network for a data set. Raises UsageError if the flags do not fit it."""
    settings = arguments(chosen, data)
    num_classes = settings.pop("num_classes")
    factory = factories.network(chosen.model)
    model = factories.called("model", chosen.model, {}, Model, factory, num_classes, **settings)
    if chosen.dtype != "float32":
        model = models.computed_in(model, chosen.dtype)
    if is_scaled(chosen, data):
        _check_scaled(chosen, data)
        model = models.scaled(model)
    if chosen.weights:
        try:
            model = models.weights.pretrained(model, chosen.weights)
        except UsageError as error:
            raise in_flags(error, f"--model={chosen.model}", {"path": "weights"}) from None
        model = models.normalised(model, models.weights.IMAGENET_MEAN, models.weights.IMAGENET_STD)
    if chosen.augment:
        shape = _shape(data)
        if len(shape) != 4 or shape[-1] != 3:
            text = f"must be false, as the examples are {list(shape[1:])} and no RGB images"
            raise flag_error("augment", True, text)
        model = models.augmented(model, augment.augment)
    if data.render:
        model = models.painted(model, data.render)
    return model


def is_scaled(chosen: Config, data: Dataset) -> bool:
    """Whether the network shifts and scales its inputs.

    It also does for categories, as those that do not occur in training are 0 (`scale` is 0).
    """
    return chosen.standardise or any(column.categories for column in data.columns)


def _check_scaled(chosen: Config, data: Dataset) -> None:
    """Raises UsageError if the shift and scale of inputs do not fit the data or other flags."""
    if data.words:
        raise flag_error("standardise", True, "must be false, as the data are words of texts")
    if chosen.weights and not chosen.standardise:
        text = "must be left out, as the data have categories, and no images"
        raise flag_error("weights", chosen.weights, text)
    if chosen.weights:
        text = f"must be false with --weights={chosen.weights}, whose images have their own scale"
        raise flag_error("standardise", True, text)


def _default_widths(chosen: Config, data: Dataset) -> tuple[int, ...] | None:
    """The default widths of the mlp on vectors; None: the network's own."""
    if chosen.model != "mlp" or data.words or not jax.tree_util.all_leaves([data.x]):
        return None
    return models.widths_for(data.x.shape[1]) if np.ndim(data.x) == 2 else None


def sample(x: Tree) -> Tree:
    """The shapes of a batch of one example of x."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), x)


def _shape(data: Dataset) -> tuple[int, ...]:
    """The shape of a batch of one example, as the network sees it."""
    return jax.eval_shape(data.render or (lambda x: x), sample(data.x)).shape


def _image_size(data: Dataset) -> int:
    """The image size of a first layer (32, 64 or 224) that is nearest to the data's."""
    shape = _shape(data)
    side = shape[1] if len(shape) == 4 else 32
    return min((32, 64, 224), key=lambda size: abs(math.log(size / side)))


def check_outputs(chosen: Config, model: Model, variables: Variables, data: Dataset) -> None:
    """Raises UsageError unless a network has an output for each of the data's targets.

    variables: their shapes, from `shapes`.
    """
    x = sample(data.x)
    with _calls(chosen, x):
        outputs = jax.eval_shape(partial(models.predict, model), variables, x)
    count, shape = len(data.classes), getattr(outputs, "shape", None)
    if shape == (1, count) or (shape == (1,) and count == 1 and data.task != "classes"):
        return
    found = type(outputs).__name__
    if shape is not None:
        found = f"outputs [{', '.join(['B', *map(str, shape[1:])])}]"
    each = {"classes": "class", "labels": "label", "values": "value"}[data.task]
    text = f"must return [B, {count}], one for each {each} of --dataset={chosen.dataset}"
    raise flag_error("model", chosen.model, f"returns {found}, {text}")


@contextlib.contextmanager
def _calls(chosen: Config, x: Tree) -> Iterator[None]:
    """Makes errors of a network that is called on x, which is shapes, errors of its flags."""
    try:
        yield
    except UsageError as error:
        raise in_flags(error, f"--model={chosen.model}", {"path": "weights"}) from None
    except Exception as error:
        if not is_outside(chosen.model):
            raise
        shapes = ", ".join(map(checks.shown, jax.tree.leaves(x)))
        text = f"fails on inputs {shapes}: {one_line(error)}"
        raise flag_error("model", chosen.model, text) from None


def shapes(chosen: Config, model: Model, data: Dataset) -> Variables:
    """The shapes of a network's variables.

    Raises UsageError if the network does not fit the data, the weights do not fit the network, or
    --train_only chooses nothing of it or everything.
    """
    x, key = sample(data.x), jax.eval_shape(lambda: jax.random.key(0))
    mask = jax.ShapeDtypeStruct((1,), bool)
    with _calls(chosen, x):
        variables = jax.eval_shape(model.init, key, x)
        jax.eval_shape(
            lambda v, x, m, k: models.apply(model, v, x, m, True, k), variables, x, mask, key
        )
    if chosen.train_only:
        try:
            freezing.check(variables.params, chosen.train_only)
        except UsageError as error:
            raise in_flags(error, "", {"patterns": "train_only"}) from None
        if chosen.augment and freezing.is_frozen(variables.params, chosen.train_only).body:
            text = f"must be false, as --train_only={','.join(chosen.train_only)} trains no body"
            raise flag_error("augment", True, text)
    return variables
