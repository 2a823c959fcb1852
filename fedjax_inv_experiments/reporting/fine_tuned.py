"""The networks of clients that fine-tune the global network of a finished run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import fine_tuning, rounds
from fedjax_inv.types import Algorithm, Tree
from fedjax_inv_experiments.flags.flag import flag_error
from fedjax_inv_experiments.parts import training
from fedjax_inv_experiments.reporting.finished import OneRun, Runs


def check(runs: Runs, algorithm: Algorithm, epochs: int) -> None:
    """Raises UsageError if --fine_tune cannot follow the runs.

    It cannot if their algorithm has no global network, serves clients with their own already,
    trains some parameters only, or computes outputs in a way of its own.
    """
    if algorithm.network is None or algorithm.personal:
        text = "serves each client with its own network already"
        text = text if algorithm.personal else "has no global network"
        raise flag_error("fine_tune", epochs, f"--algorithm={runs.cell.algorithm} {text}")
    if runs.config.model.train_only:
        only = ",".join(runs.config.model.train_only)
        text = f"trains all parameters, but the run was trained with --train_only={only}"
        raise flag_error("fine_tune", epochs, text)
    if algorithm.own_outputs:
        text = f"--algorithm={runs.cell.algorithm} computes outputs in a way of its own"
        raise flag_error("fine_tune", epochs, text)


def networks(one: OneRun, algorithm: Algorithm, epochs: int) -> tuple[Algorithm, Tree]:
    """(an algorithm that serves each client with its own network, the networks [C, ...]).

    Each client trains on its own training examples as in the run, but from a new optimizer state
    and at the initial learning rate. `check` comes first.
    """
    runs, server = one.runs, one.served().server
    assembled, chosen = runs.data, runs.config.clients
    train = assembled.splits[runs.cell.held_out][one.run.seed].train
    work = training.work(
        dataclasses.replace(chosen, local_epochs=epochs, local_steps=0),
        one.run.hyper["learning_rate"],
        training.sizes(chosen, np.asarray(train.size)),
    )
    key = jax.random.key(one.run.seed)
    personal, state = fine_tuning.fine_tuned(
        algorithm,
        rounds.State(server, (), (), jnp.int32(0), key),
        train,
        model=assembled.model,
        work=work,
        key=key,
        loss=assembled.task.loss,
    )
    return personal, state.clients
