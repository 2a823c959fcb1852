"""What runs are trained and scored by: the loss and the score that fit the targets of the data."""

import difflib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import checks, models, types
from fedjax_inv.checks import UsageError, one_line
from fedjax_inv.objectives import DEFAULTS, SCORES, Score
from fedjax_inv.types import Tree

_WIDE = 10.0  # a deviation of targets at which usual learning rates diverge
Factory = Callable[..., types.Algorithm]


class Task(NamedTuple):
    """The loss and the score of evaluations, and the kind of targets that they are for."""

    loss: types.Loss
    score: Score
    settings: dict[str, Any]  # arguments of the algorithm: the loss, if it takes one
    kind: str  # one of `data.dataset.TASKS`; "" if the loss takes any targets

    def num_classes(self, model: types.Model, examples: types.Examples) -> int:
        """Return K, the outputs of the network for classes; 0 for other targets.

        There may be more outputs than classes in the examples, as a class may have no example yet.
        """
        x = shapes_of_one(examples.x)

        def served(x: Tree) -> Tree:
            return models.predict(model, model.init(jax.random.key(0), x), x)

        try:
            outputs = jax.eval_shape(served, x)
        except UsageError:
            raise
        except Exception as error:
            text = f"fails on inputs {_told(x)}: {one_line(error)}"
            raise UsageError("model", ..., text) from error
        if self.kind != "classes":
            if self.kind:
                self._check_columns(outputs, examples.y)
            self._check_means(outputs, examples.y)
            return 0
        labels = np.asarray(examples.y)
        shape: Any = getattr(outputs, "shape", ())
        if labels.shape[1:] == (1,):
            raise UsageError("y", labels, "classes must be [M]; pass y[:, 0]")
        if len(shape) != 2 or labels.ndim != 1:
            found = f"has outputs {shape} for targets {labels.shape}"
            remedy = "; of one-hot targets pass y.argmax(-1)" * (labels.ndim == 2)
            raise UsageError("model", ..., f"{found}, must have [B, K] for classes [B]{remedy}")
        for wrong in labels[(labels < 0) | (labels >= shape[1])][:1]:
            text = f"holds the class {wrong}, must be in 0..{shape[1] - 1}, the network's outputs"
            raise UsageError("y", ..., text)
        self._check_means(outputs, labels)
        return shape[1]

    def in_units(self, model: types.Model, examples: types.Examples) -> bool:
        """Return whether the network is one of `models.in_units`; warn of values that want one."""
        y = examples.y
        if not (jax.tree_util.all_leaves([y]) and jnp.issubdtype(y.dtype, jnp.floating)):
            return False
        variables = jax.eval_shape(model.init, jax.random.key(0), shapes_of_one(examples.x))
        found = isinstance(variables.stats.head, models.InUnits)
        deviation = float(np.asarray(y).std(0).max(initial=0))
        if self.kind and not found and deviation > _WIDE:
            text = f"y has the deviation {deviation:.3g}; models.in_units(model) trains on "
            warnings.warn(f"{text}standardised targets", stacklevel=4)
        return found

    def _check_means(self, outputs: Tree, y: Tree) -> None:
        """Raise UsageError unless the loss and the score are means of a batch, []."""
        one = shapes_of_one(y)
        mask = jax.ShapeDtypeStruct((1,), bool)
        for name, function in (("loss", self.loss), ("score", self.score.of_domains())):
            try:
                # JAX keeps the function, and cannot keep `Counts`.
                found = jax.eval_shape(lambda *batch, of=function: of(*batch), outputs, one, mask)
            except UsageError:
                raise
            except Exception as error:
                text = f"fails on outputs {_told(outputs)} and targets {_told(one)}: "
                raise UsageError(name, ..., text + one_line(error)) from error
            if getattr(found, "shape", None) != ():
                text = f"must return the mean of a batch [], not {_told(found)}, as "
                raise UsageError(name, ..., f"{text}`objectives.masked_mean(values, mask)` does")

    def _check_columns(self, outputs: Tree, y: Any) -> None:
        """Raise UsageError unless there is an output for each column of labels or values."""
        shapes = [getattr(each, "shape", ()) for each in (outputs, y)]
        counts = [(*shape, 1)[1] for shape in shapes if len(shape) in (1, 2)]
        if len(counts) == 2 and counts[0] == counts[1]:
            return
        remedy = "there must be an output for each column of y"
        if self.kind == "values" and y.ndim == 1 and not np.any(np.asarray(y) % 1):
            remedy = "for classes pass y.astype(int)"
        text = f"holds {self.kind}, and the network has outputs {_told(outputs)}; {remedy}"
        raise UsageError("y", y, text)


def shapes_of_one(arrays: Tree) -> Tree:
    """Return the shapes of one example; to take it would compile a program."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype), arrays)


def _told(arrays: Tree) -> str:
    return ", ".join(map(checks.shown, jax.tree.leaves(arrays)))


def task_of(algorithm: Factory, y: Tree, loss: Any, score: Any) -> Task:
    """Return the loss and the score for targets [M, ...], by default those of the targets.

    Of a score that is a function a higher value is better.
    """
    is_array = jax.tree_util.all_leaves([y])
    for name, value in (("loss", loss), ("score", score)):
        if value is None and not is_array:
            raise UsageError(name, None, "must be given for targets that are a tree")
        if value is not None and not (callable(value) or isinstance(value, Score)):
            raise UsageError(name, value, "must be a function of (outputs, y, mask)")
    kind = "values"
    if is_array:
        kind = {"b": "labels", "f": "values"}.get(np.dtype(y.dtype).kind, "classes")
    usual_loss, usual_score = DEFAULTS[kind]
    if kind != "classes" and facts_of(algorithm).needs_classes:
        raise UsageError("y", y, f"must be classes, integers, for {_name(algorithm)}")
    parameters = inspect.signature(algorithm).parameters
    settings = {}
    if loss is not None or kind != "classes":
        if "loss" not in parameters and not _takes_any(algorithm):
            raise UsageError("loss", ..., f"must be left out, as {_name(algorithm)} takes none")
        settings = {"loss": loss or usual_loss}
    elif "loss" in parameters and parameters["loss"].default is inspect.Parameter.empty:
        settings = {"loss": usual_loss}  # a default would be the algorithm's own loss of classes
    if score is not None and not isinstance(score, Score):
        listed = (each for each in SCORES.values() if each.function is score)
        score = next(listed, Score("score", score))
    kind = "" if loss is not None else kind
    return Task(loss or usual_loss, score or usual_score, settings, kind)


def facts_of(algorithm: Factory) -> types.Facts:
    """Return the constant FACTS of the factory or of its module, or the defaults without one."""
    inner = _inner(algorithm)
    module = sys.modules.get(getattr(inner, "__module__", ""))
    found = getattr(inner, "FACTS", getattr(module, "FACTS", None))
    return found if isinstance(found, types.Facts) else types.Facts()


def _takes_any(algorithm: Factory) -> bool:
    parameters = inspect.signature(algorithm).parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


def _inner(algorithm: Factory) -> Factory:
    while isinstance(algorithm, functools.partial):
        algorithm = algorithm.func
    return algorithm


def _name(algorithm: Factory) -> str:
    return getattr(_inner(algorithm), "__name__", "the algorithm")


def check_settings(algorithm: Factory, given: Mapping[str, Any], local: Mapping[str, Any]) -> None:
    """Raise UsageError for a setting that the algorithm does not have, and one that it lacks.

    `local` are those that local training has, too.
    """
    try:
        parameters = [*inspect.signature(algorithm).parameters.values()]
    except (TypeError, ValueError):  # no function, or one of a built-in type
        parameters = []
    if len(parameters) < 2:
        text = "must be a factory of an algorithm, called as algorithm(model, work)"
        if inspect.ismodule(algorithm):
            file = algorithm.__name__.rpartition(".")[2]
            text += f", such as {file}.{file}; this is a module"
        raise UsageError("algorithm", ..., text)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [each for each in parameters[2:] if each.kind not in variable]  # after model and work
    for each in own:
        if each.default is each.empty and each.name not in ("loss", "num_domains", *given):
            text = f"must be given, as {_name(algorithm)} has no default for it"
            raise UsageError(each.name, ..., text)
    for each in own:
        if isinstance(each.default, optax.GradientTransformation) and each.name in given:
            kind = optax.GradientTransformation
            checks.record(each.name, given[each.name], kind, ", such as optax.adam(0.01)")
    names = [each.name for each in own]
    for name in given:
        if name not in (*names, *local) and not _takes_any(algorithm):
            known = [*names, *local]
            near = [each for each in known if name == "".join(w[0] for w in each.split("_"))]
            near += difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            allowed = f"must be an argument of fit or of {_name(algorithm)}: {', '.join(names)}"
            raise UsageError(name, ..., allowed + hint)
