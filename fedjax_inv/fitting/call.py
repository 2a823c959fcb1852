"""The function `fit`: it checks its arguments, and builds and trains a program."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_inv import checks, models, objectives, platforms, program
from fedjax_inv.checks import UsageError
from fedjax_inv.data import clients
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.data.federation import Partition
from fedjax_inv.devices import Layout
from fedjax_inv.fitting import arguments, segments
from fedjax_inv.fitting.fitted import Fitted, Serving
from fedjax_inv.types import Algorithm, Array, Cohort, Loss, Model, Tree, Variables


def fit(
    algorithm: Callable[..., Algorithm],
    model: Model,
    data: Any,
    y: Tree | None = None,
    client: Any = None,
    *,
    rounds: int,
    learning_rate: float | Sequence[float] = 0.1,
    seeds: Sequence[int] = (0,),
    test: tuple[Tree, Tree] | None = None,
    validation: float = 0.0,
    partition: Partition | None = None,
    held_out: str | None = None,
    optimizer: Callable[..., optax.GradientTransformation] = optax.sgd,
    momentum: float | Sequence[float] = 0.0,
    batch_size: int | None = 32,
    epochs: int = 1,
    loss: Loss | None = None,
    score: Loss | objectives.Score | None = None,
    variables: Variables | None = None,
    cohort: int | None = None,
    dropout: float | Sequence[float] = 0.0,
    slow: int | Sequence[int] = 1,
    schedule: Callable[[Array], Cohort] | None = None,
    evaluate_every: int = 1,
    patience: int | None = None,
    callbacks: Sequence[Callable[[Fitted], object]] = (),
    progress: bool = True,
    drop_nonfinite: bool = False,
    devices: int | None = None,
    client_chunk: int | None = None,
    run_chunk: int | None = None,
    **settings: Any,
) -> Fitted:
    """Train an algorithm on the examples of clients, for each seed and hyperparameter.

    `learning_rate`, `momentum` and each setting of the algorithm may be one value, or several
    numbers in a list, a tuple, a range or an array [n]. All combinations of the values train in one
    program, each with every seed. After every `evaluate_every` rounds the runs are evaluated; then
    the callbacks are called. Ctrl-C ends the training after the current segment, and the runs are
    returned as they are by then.

    Args:
      algorithm: a factory such as `fedavg.fedavg`, called as algorithm(model, work, **settings).
      model: the network. For classes it may have more outputs than `y` has classes.
      data: the clients' examples: a list of (x, y) for each client, each [n, ...]; or a `Dataset`,
        which brings its own test examples; or x [M, ...], with y and client.
        Inputs of uint8 are scaled to [0, 1], as images are, but for arrays [M, D] of features.
      y: targets [M, ...], if data are x: integers are classes, booleans are labels, and numbers in
        floating point are values, as in a `Dataset`.
      client: [M] integers, the client of each example, if data are x. Everywhere else clients are
        numbered 0, 1, ... in ascending order of these integers.
      rounds: T, how many rounds to play.
      learning_rate: that of the clients' optimizer.
      seeds: each seeds the network, the minibatches, the cohorts and the draw of validation
        examples, and the partition of a `Dataset`.
      test: (x, y) that no client holds, for evaluations.
      validation: the part of each client's examples that is held out for evaluations.
      partition: for a `Dataset`, how to deal rows to clients, as from `federation.partitioner`. By
        default each user is a client, or each domain if users are not known.
      held_out: for a `Dataset`, the domain that is held out for the test.
      optimizer: (learning_rate) -> the clients' optimizer, such as `optax.adam`; it is also passed
        momentum=, unless that is 0.
      momentum: that of the clients' optimizer.
      batch_size: examples in a batch; None: all of the client's.
      epochs: passes over the client's examples in a round.
      loss: the objective of training, and of evaluations; by default that of
        `objectives.DEFAULTS` for the targets. For classes an algorithm whose argument `loss` has a
        default of its own trains by that.
      score: what evaluations measure beside the loss, by default that of `objectives.DEFAULTS`. Of
        a function, a higher value is better; `objectives.SCORES` say which is better themselves.
      variables: the network to start from; by default each seed draws one.
      cohort: how many clients are drawn in each round; by default all attend. Like dropout, slow
        and schedule, it has no effect on `erm`, which trains on the pooled examples of all clients.
      dropout: the probability that a client's update does not arrive, one for all or one per
        client [C].
      slow: how many rounds a client needs for an update (`schedules.slow`), one for all or one per
        client [C].
      schedule: (random key) -> the cohorts of all rounds [T, S], instead of cohort, dropout and
        slow. Each seed has its own key.
      evaluate_every: how many rounds a segment has, in 1..T.
      patience: the training stops when for so many evaluations no run has reached a validation
        score that is better than all of its own before; by default it does not stop. The networks
        are those of the last round.
      callbacks: functions of the result so far, called after each segment; if one returns true, the
        training stops. If one raises an error, the error has the result so far as its attribute
        `fitted`. The next segment overwrites the networks of this result, but not its
        history nor what its methods have returned.
      progress: whether to show the progress on stderr, as a bar if tqdm is installed.
      drop_nonfinite: whether an update that holds NaN or infinity is left out; if not, it reaches
        the network. There is a warning at the first one.
      devices: how many devices share the runs and their clients; by default all that help. If JAX
        has not computed anything yet, each core of a CPU becomes a device.
      client_chunk: how many clients of a device train at once, 0 for all; by default 1 on CPUs, and
        all elsewhere, where fewer need less memory.
      run_chunk: the same for the runs of a device.
      **settings: the settings of the algorithm.

    Returns:
      The runs, their history and their networks. The runs of a combination follow each other, one
      for each seed; of the combinations, the last argument varies first, in the order
      learning_rate, momentum, settings.

    Raises:
      UsageError: for a wrong argument, before anything is trained.
    """
    arguments.check_model(model)
    checks.function("algorithm", algorithm)
    checks.function("optimizer", optimizer)
    checks.integer("rounds", rounds)
    checks.integer("epochs", epochs, 1, 2**31 - 1)
    arguments.check_if_given(1, batch_size=batch_size, patience=patience, devices=devices)
    arguments.check_if_given(0, client_chunk=client_chunk, run_chunk=run_chunk)
    checks.integer("evaluate_every", evaluate_every, 1, rounds, ", the rounds")
    checks.record("callbacks", callbacks, Sequence)
    for callback in callbacks:
        checks.function("callbacks", callback)
    if patience is not None and validation == 0:
        raise UsageError("validation", validation, "must be above 0, as patience watches its score")
    arguments.check_settings(algorithm, settings)

    facts = arguments.facts(algorithm)
    hyper, plain = arguments.several(
        {"learning_rate": learning_rate, "momentum": momentum, **settings}, facts.infinite
    )
    seeds = arguments.checked_seeds(seeds)
    runs = tuple(program.grid(seeds, **hyper))
    platforms.make_devices(devices or platforms.cores())

    if isinstance(data, Dataset):
        arguments.check_absent("a Dataset", y=y, client=client, test=test)
        examples, splits = clients.splits_of_dataset(
            data, partition=partition, held_out=held_out, validation=validation, seeds=seeds
        )
        columns = []
        model = model if data.render is None else models.painted(model, data.render)
    else:
        arguments.check_absent("arrays", partition=partition, held_out=held_out)
        arrays = clients.of_arrays(data, y, client)
        examples, splits = clients.splits_of_arrays(
            *arrays, test=test, validation=validation, seeds=seeds
        )
        columns = clients.columns_of(data)
        if test is not None:
            clients.check_columns("test", test[0], columns)

    if batch_size is not None:
        row = sum(leaf.nbytes // len(leaf) for leaf in jax.tree.leaves(examples))
        platforms.check_memory("batch_size", batch_size, batch_size * row)
    objective = arguments.objective(algorithm, examples.y, loss, score)
    plain = plain | objective.settings
    network, num_classes = arguments.network(model, examples, objective)
    if variables is not None:
        checks.record("variables", variables, Variables)
        found, needed = (jax.tree.map(jnp.shape, each) for each in (variables, network))
        if found != needed:
            raise UsageError("variables", ..., f"has shapes {found}, the model {needed}")
    started = None if variables is None else dict.fromkeys(seeds, variables)
    inputs = program.inputs(runs, splits, pooled=facts.pooled, variables=started)
    if patience is not None and not np.asarray(inputs.valid.size).any(1).all():
        text = "leaves no example for patience to watch"
        raise UsageError("validation", validation, text)
    # One validation score of all clients.
    inputs = inputs._replace(group=jnp.zeros_like(inputs.group))
    sizes = np.asarray(inputs.train.size)

    def build(values: Mapping[str, Any]) -> Algorithm:
        given = {**plain, **values}
        rate, decay = given.pop("learning_rate"), given.pop("momentum")
        work = arguments.work(optimizer, rate, decay, batch_size, epochs, sizes)
        made = algorithm(model, work, **given)
        checks.record("algorithm", made, Algorithm)
        return made

    arguments.check_values(build, runs, hyper)
    first = {**plain, **runs[0].hyper}
    rate, decay = first["learning_rate"], first["momentum"]
    arguments.check_optimizer(optimizer, rate, decay, network.params)
    built = build(runs[0].hyper)
    arguments.check_columns(built, network, examples, sizes.shape[1], objective.task)

    if schedule is not None and not facts.pooled:
        arguments.check_absent(
            "schedule",
            cohort=cohort,
            dropout=dropout if np.any(dropout) else None,
            slow=slow if np.any(np.asarray(slow) != 1) else None,
        )
    else:
        num_clients = splits[seeds[0]].train.num_clients
        schedule = arguments.schedule(num_clients, rounds, cohort, dropout, slow)
    if facts.pooled:  # its single client has the examples of all
        schedule = arguments.schedule(1, rounds, cohort=None, dropout=0.0, slow=1)
    cohorts = arguments.cohorts(schedule, inputs, rounds)

    experiment = program.Experiment(
        model,
        build,
        history=1 + int(np.max(cohorts.delay, initial=0, where=cohorts.present)),
        drop_nonfinite=drop_nonfinite,
        pooled=facts.pooled,
        loss=objective.loss,
        score=objective.score.function,
        precision=facts.precision,
    )
    layout = Layout.of(platforms.devices(devices), len(runs), cohorts.who.shape[2], sizes.shape[1])
    sample = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), examples)
    if layout.mesh is not None:
        examples, inputs = layout.place(jax.device_get(examples), inputs)
    at_once = 1 if platforms.on_cpu() else 0
    compiled = program.make(
        experiment,
        client_chunk=at_once if client_chunk is None else client_chunk,
        run_chunk=at_once if run_chunk is None else run_chunk,
        layout=layout,
    )
    precision = facts.precision
    serving = Serving(build, compiled, inputs, sample, num_classes, objective, precision, columns)
    with contextlib.closing(segments.Progress(rounds, is_on=progress)) as shown:
        return segments.train(
            serving,
            runs,
            examples,
            cohorts,
            every=evaluate_every,
            patience=patience,
            rank=objective.score.rank,
            callbacks=[shown.show, *callbacks],
            drop_nonfinite=drop_nonfinite,
        )
