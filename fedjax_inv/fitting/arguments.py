"""The arguments of `fit`: checks, and the parts of a program that they describe."""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import (
    checks,
    local,
    models,
    platforms,
    program,
    rounds,
    schedules,
    tree,
)
from fedjax_inv.checks import UsageError, one_line
from fedjax_inv.objectives import DEFAULTS, SCORES, Score
from fedjax_inv.types import (
    Algorithm,
    Array,
    Cohort,
    Examples,
    Facts,
    Federation,
    Loss,
    Model,
    Tree,
    Variables,
    Work,
)

Factory = Callable[..., Algorithm]


def check_absent(beside: str, **values: Any) -> None:
    """Raise UsageError for a value that is not None."""
    for name, value in values.items():
        if value is not None:
            raise UsageError(name, ..., f"must be left out beside {beside}")


def check_model(model: Any) -> None:
    """Raise UsageError unless the argument is a network."""
    if not isinstance(model, Model):
        found = f"is of type {type(model).__name__}"
        raise UsageError("model", ..., f"{found}, must be a Model, as models.from_flax(module) is")
    checks.record("model", model, Model)


def check_if_given(lowest: int, **numbers: int | None) -> None:
    """Raise UsageError for a number that is neither None nor an integer of at least `lowest`."""
    for name, number in numbers.items():
        if number is not None:
            checks.integer(name, number, lowest)


def check_settings(algorithm: Factory, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for a setting that the algorithm does not have, and one that it lacks."""
    try:
        parameters = [*inspect.signature(algorithm).parameters.values()]
    except ValueError:  # as of a built-in type
        text = "must be a factory of an algorithm, such as fedavg.fedavg"
        raise UsageError("algorithm", ..., text) from None
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [each for each in parameters[:2] if each.kind in by_place]
    if len(first) < 2 and not any(each.kind is each.VAR_POSITIONAL for each in parameters[:2]):
        text = f"must be a factory of an algorithm, called as {_name(algorithm)}(model, work)"
        raise UsageError("algorithm", ..., text)
    own = parameters[2:]  # after model and work
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for each in own:
        is_needed = each.default is each.empty and each.kind not in variable
        if is_needed and each.name not in ("loss", *settings):
            text = f"must be given, as {_name(algorithm)} has no default for it"
            raise UsageError(each.name, ..., text)
    if any(each.kind is each.VAR_KEYWORD for each in own):
        return
    names = [each.name for each in own]
    for name in settings:
        if name not in names:
            allowed = f"must be an argument of fit or of {_name(algorithm)}: {', '.join(names)}"
            raise UsageError(name, ..., allowed)


def _name(algorithm: Factory) -> str:
    return getattr(_inner(algorithm), "__name__", "the algorithm")


def _inner(algorithm: Factory) -> Factory:
    while isinstance(algorithm, functools.partial):
        algorithm = algorithm.func
    return algorithm


def several(
    given: Mapping[str, Any], infinite: Collection[str] = ()
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return (the arguments that have several values, the arguments that have one).

    Args:
      given: all arguments, among them learning_rate and momentum.
      infinite: the arguments that may be NaN or infinite, which the algorithm checks.

    Raises:
      UsageError: for a rate or a momentum out of range, and for a number that is not finite.
    """
    many: dict[str, list[float]] = {}
    for name, value in given.items():
        if getattr(value, "ndim", 0) == 1:
            many[name] = np.asarray(value).tolist()
        elif type(value) in (list, tuple, range):  # by type: an optax optimizer is a tuple, too
            many[name] = list(value)
    for name, highest in (("learning_rate", np.inf), ("momentum", 1.0)):
        for value in many.get(name, [given[name]]):
            checks.real(name, value, 0, highest)
    for name in given:
        for value in many.get(name, [given[name]]):
            if name not in infinite and not checks.is_finite(value):
                raise UsageError(name, value, "must be a finite number")
    return many, {name: value for name, value in given.items() if name not in many}


def checked_seeds(seeds: Any) -> list[int]:
    """Return the seeds as a list; raise UsageError unless they are different integers."""
    if np.ndim(seeds) != 1 or not len(seeds):
        raise UsageError("seeds", seeds, "must be a list of integers, such as range(3)")
    values = checks.integers("seeds", seeds, 0, 2**31 - 1).tolist()
    if len(set(values)) < len(values):
        raise UsageError("seeds", values, "must be different")
    return values


def facts(algorithm: Factory) -> Facts:
    """Return the constant FACTS of the algorithm's module, or the defaults without one."""
    module = sys.modules.get(getattr(_inner(algorithm), "__module__", ""))
    found = getattr(module, "FACTS", None)
    return found if isinstance(found, Facts) else Facts()


class Objective(NamedTuple):
    """The loss and the score of evaluations."""

    loss: Loss
    score: Score
    settings: dict[str, Any]  # arguments of the algorithm: the loss, if it takes one
    task: str  # one of `data.dataset.TASKS`; "" if the loss takes any targets


def objective(algorithm: Factory, y: Tree, loss: Any, score: Any) -> Objective:
    """Return the loss and the score, by default those of the targets.

    Args:
      algorithm: the algorithm's factory.
      y: the targets [M, ...].
      loss: the loss, or None.
      score: a function, a `Score`, or None.

    Raises:
      UsageError: if a tree of targets has no loss or no score, and if the algorithm does not fit
        the targets or takes no loss.
    """
    for name, value in (("loss", loss), ("score", score)):
        if value is not None and not isinstance(value, Score):
            checks.function(name, value)
        if value is None and not jax.tree_util.all_leaves([y]):
            raise UsageError(name, None, "must be given for targets that are a tree")
    task = "values"
    if jax.tree_util.all_leaves([y]):
        task = {"b": "labels", "f": "values"}.get(np.dtype(y.dtype).kind, "classes")
    usual_loss, usual_score = DEFAULTS[task]
    if task != "classes" and facts(algorithm).needs_classes:
        raise UsageError("y", y, f"must be classes, integers, for {_name(algorithm)}")
    parameters = inspect.signature(algorithm).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    settings = {}
    if loss is not None or task != "classes":
        if "loss" not in parameters and not takes_any:
            raise UsageError("loss", ..., f"must be left out, as {_name(algorithm)} takes none")
        settings = {"loss": loss or usual_loss}
    elif "loss" in parameters and parameters["loss"].default is inspect.Parameter.empty:
        settings = {"loss": usual_loss}  # a default would be the algorithm's own loss of classes
    if score is not None and not isinstance(score, Score):
        listed = (each for each in SCORES.values() if each.function is score)
        score = next(listed, Score("score", score))
    return Objective(
        loss or usual_loss, score or usual_score, settings, "" if loss is not None else task
    )


def network(model: Model, examples: Examples, objective: Objective) -> tuple[Variables, int]:
    """Return the shapes of the network, and its number of classes.

    Args:
      model: the network.
      examples: the examples of all clients.
      objective: the loss.

    Returns:
      (shapes, K); K is 0 if the loss takes targets that are no classes.

    Raises:
      UsageError: for a network that fails on the examples, and for outputs that do not fit classes.
        There may be more outputs than classes, as a class may have no example yet.
    """
    x = jax.tree.map(lambda leaf: leaf[:1], examples.x)
    try:
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        outputs = jax.eval_shape(lambda at, x: models.predict(model, at, x), variables, x)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError("model", ..., f"fails on inputs {_told(x)}: {one_line(error)}") from error
    if objective.task != "classes":
        return variables, 0
    labels, shape = np.asarray(examples.y), getattr(outputs, "shape", ())
    if labels.shape[1:] == (1,):
        raise UsageError("y", labels, "classes must be [M]; pass y[:, 0]")
    if len(shape) != 2 or labels.ndim != 1:
        found = f"has outputs {shape} for targets {labels.shape}"
        remedy = "; of one-hot targets pass y.argmax(-1)" * (labels.ndim == 2)
        raise UsageError("model", ..., f"{found}, must have [B, K] for classes [B]{remedy}")
    num_outputs = outputs.shape[1]
    for wrong in labels[(labels < 0) | (labels >= num_outputs)][:1]:
        has = f"as the network has {num_outputs} outputs"
        raise UsageError(
            "y", ..., f"holds the class {wrong}, must be in 0..{num_outputs - 1}, {has}"
        )
    return variables, outputs.shape[1]


def _told(arrays: Tree) -> str:
    return ", ".join(map(checks.shown, jax.tree.leaves(arrays)))


def _made(
    optimizer: Callable[..., optax.GradientTransformation],
    learning_rate: float | Array,
    momentum: float | Array,
) -> optax.GradientTransformation:
    """Return the clients' optimizer."""
    more = {} if checks.is_known_zero(momentum) else {"momentum": momentum}
    try:
        return optimizer(learning_rate, **more)
    except TypeError as error:
        taken = " and ".join(["learning_rate", *more])
        raise UsageError("optimizer", ..., f"must take {taken} ({error})") from None


def check_optimizer(
    optimizer: Callable[..., optax.GradientTransformation],
    learning_rate: float,
    momentum: float,
    params: Tree,
) -> None:
    """Check that the clients' optimizer takes a step by gradients and parameters alone.

    Args:
      optimizer: as in `fit`.
      learning_rate: its learning rate.
      momentum: its momentum.
      params: the shapes of the parameters.

    Raises:
      UsageError: if it needs more, as `optax.lbfgs` does.
    """
    made = _made(optimizer, learning_rate, momentum)
    try:
        jax.eval_shape(lambda params: made.update(params, made.init(params), params), params)
    except Exception as error:
        text = f"must take a step by gradients and parameters alone; it fails: {one_line(error)}"
        raise UsageError("optimizer", ..., text) from error


def check_columns(
    algorithm: Algorithm, network: Variables, examples: Examples, num_clients: int, task: str
) -> None:
    """Check that an algorithm's outputs fit targets that are labels or values.

    Args:
      algorithm: the algorithm.
      network: the shapes of the network.
      examples: the examples of all clients.
      num_clients: C.
      task: "labels" or "values"; for others nothing is checked.

    Raises:
      UsageError: unless there is an output for each column of the targets.
    """
    if task not in ("labels", "values"):
        return

    def served(variables: Variables, data: Examples, size: Array, key: Array) -> Array:
        clients = Federation(data, jnp.zeros(1, jnp.int32), size, size)
        state = rounds.init(algorithm, variables, clients, key)
        own = tree.take(state.clients, 0) if algorithm.personal else ()
        return algorithm.predict(state.server, own, data.x)

    two = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype), examples
    )
    size = jax.ShapeDtypeStruct((num_clients,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    outputs, y = jax.eval_shape(served, network, two, size, key), examples.y
    shapes = [getattr(each, "shape", ()) for each in (outputs, y)]
    counts = [(*shape, 1)[1] for shape in shapes if len(shape) in (1, 2)]
    if len(counts) == 2 and counts[0] == counts[1]:
        return
    kind = {"labels": "is bool", "values": "is floating"}[task]
    text = f"{kind}, so it holds {task}, and the network has outputs {_told(outputs)}"
    if len(counts) == 2:
        text = f"{kind}, so it holds {task}, and the network has {counts[0]} outputs"
    remedy = "there must be one for each column of y"
    if task == "values" and y.ndim == 1 and not np.any(np.asarray(y) % 1):
        remedy = "for classes pass y.astype(int)"
    raise UsageError("y", y, f"{text}; {remedy}")


def check_values(
    build: Callable[[Mapping[str, Any]], Algorithm],
    runs: Sequence[program.Run],
    hyper: Mapping[str, Sequence[float]],
) -> None:
    """Raise UsageError for values that the algorithm refuses or that one program cannot hold.

    Args:
      build: hyperparameters -> the algorithm.
      runs: all runs.
      hyper: the values of the hyperparameters that have several.
    """
    for run in {tuple(run.hyper.values()): run for run in runs}.values():
        build(run.hyper)
    for name, values in hyper.items():

        def traced(value: Array, name: str = name) -> None:
            build({**runs[0].hyper, name: value})

        try:
            jax.eval_shape(traced, jax.ShapeDtypeStruct((), np.float32))
        except (UsageError, TypeError):  # JAX's errors about unknown values are TypeErrors
            allowed = "must be one value, as it is needed to compile the program; call fit for each"
            raise UsageError(name, list(values), allowed) from None


def work(
    optimizer: Callable[..., optax.GradientTransformation],
    learning_rate: float | Array,
    momentum: float | Array,
    batch_size: int | None,
    epochs: int,
    sizes: np.ndarray,
) -> Work:
    """Return local training.

    Args:
      optimizer: as in `fit`.
      learning_rate: its learning rate; may be traced.
      momentum: its momentum; may be traced.
      batch_size: as in `fit`.
      epochs: as in `fit`.
      sizes: [R, C] the examples of each client.

    Raises:
      UsageError: if the optimizer takes other arguments.
    """
    made = _made(optimizer, learning_rate, momentum)
    known = momentum if optimizer is optax.sgd else None
    if batch_size is None:
        most = int(sizes.max())
        training = local.full_batch(made, capacity=most, num_steps=epochs, momentum=known)
        return training._replace(learning_rate=learning_rate)
    batches = np.unique(-(-sizes[sizes > 0] // batch_size))
    # On a CPU a loop of known length gains nothing.
    fixed = int(batches[0]) if len(batches) == 1 and not platforms.on_cpu() else None
    training = local.epochs(
        made, batch_size=batch_size, num_epochs=epochs, num_batches=fixed, momentum=known
    )
    return training._replace(learning_rate=learning_rate)


def schedule(
    num_clients: int, rounds: int, cohort: int | None, dropout: Any, slow: Any
) -> Callable[[Array], Cohort]:
    """Return the schedule of `cohort`, `dropout` and `slow`, as in `fit`.

    Args:
      num_clients: C.
      rounds: T.
      cohort: S, or None for all.
      dropout: a probability, or [C].
      slow: a number of rounds, or [C].

    Raises:
      UsageError: for one that is out of range.
    """
    if cohort is not None:
        checks.integer("cohort", cohort, 1, num_clients, ", the clients")
    _check_of_clients("dropout", dropout, num_clients, functools.partial(checks.real, highest=1))
    _check_of_clients("slow", slow, num_clients, checks.integer)

    def draw(key: Array) -> Cohort:
        if cohort in (None, num_clients):
            drawn = schedules.everyone(num_clients, rounds)
        else:
            drawn = schedules.sampled(key, num_clients, cohort, rounds)
        if np.any(np.asarray(slow) > 1):
            drawn = schedules.slow(drawn, jnp.asarray(slow))
        if np.any(dropout):
            drawn = schedules.dropout(drawn, jax.random.fold_in(key, 1), jnp.asarray(dropout))
        return drawn

    return draw


def _check_of_clients(
    name: str, value: Any, num_clients: int, check: Callable[[str, Any], None]
) -> None:
    """Check one value for all clients, or one for each."""
    try:
        values = np.asarray(value)
    except ValueError:  # lists of different lengths
        values = np.zeros((0, 0))
    if values.ndim == 0:
        check(name, values.item() if hasattr(value, "ndim") else value)
    elif values.shape == (num_clients,):
        # As they were given: an array turns all integers beside one float into floats.
        for index, one in enumerate(value if isinstance(value, list | tuple) else values.tolist()):
            check(f"{name}[{index}]", one)
    else:
        found = f"has shape {values.shape}"
        raise UsageError(name, ..., f"{found}, must be one number, or one for each client")


def cohorts(draw: Callable[[Array], Cohort], inputs: program.Inputs, rounds: int) -> Cohort:
    """Return the cohorts of all runs.

    Args:
      draw: random key -> cohorts [T, S].
      inputs: the inputs of the runs.
      rounds: T.

    Returns:
      The cohorts [R, T, S], on the host.

    Raises:
      UsageError: if they do not fit the runs.
    """
    checks.function("schedule", draw)
    drawn = jax.device_get(program.cohorts(draw, inputs))
    checks.record("schedule", drawn, Cohort)
    if drawn.who.ndim != 3 or drawn.who.shape[1] != rounds:
        found = f"has shape {drawn.who.shape[1:]}"
        raise UsageError("schedule", ..., f"{found}, must be cohorts [{rounds}, S] of all rounds")
    for run in range(len(drawn.who)):
        one = Cohort(*(leaf[run] for leaf in drawn))
        most = int(np.max(one.delay, initial=0, where=one.present))
        schedules.check(one, inputs.train.size.shape[1], 1 + most)
    return drawn
