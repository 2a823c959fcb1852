"""Wrong arguments of every public function: a call works, or raises one line that names one.

EXAMPLES holds valid arguments of each public function of the package, and EXEMPT the reason for
each function that is not tried; a new function must be in one of them.
"""

import functools
import importlib
import inspect
import os
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings

import federations
import fedjax_inv
from fedjax_inv import (
    aggregators,
    averages,
    averaging,
    devices,
    evaluation,
    local,
    models,
    objectives,
    parts,
    program,
    rounds,
    schedules,
    servers,
    stopping,
)
from fedjax_inv.algorithms import (
    LISTED,
    afl,
    cafe,
    exit_strategy,
    fedavg,
    fedcfa,
    feddg_ga,
    feddyn,
    fedgma,
    fedipg,
    fedmix,
    fedproto,
    fedprox,
    fedsr,
    fl_games,
    moon,
    qfedavg,
    vrex,
)
from fedjax_inv.checks import UsageError
from fedjax_inv.data import (
    dsprites,
    environments,
    federation,
    moments,
    simpson,
    stains,
    tables,
)
from fedjax_inv.data.dataset import Dataset
from fedjax_inv.types import Reply

_PLACE = "fedjax_inv."
KNOWN = fedproto.Prototypes(jnp.ones((3, 4)), jnp.ones(3, bool))


def public_functions() -> dict[str, FunctionType]:
    """Return the public functions of the package by module and name."""
    found = {}
    for each in pkgutil.walk_packages(fedjax_inv.__path__, _PLACE):
        module = importlib.import_module(each.name)
        for name, value in vars(module).items():
            own = getattr(value, "__module__", None) == each.name
            if isinstance(value, FunctionType) and own and not name.startswith("_"):
                found[f"{each.name.removeprefix(_PLACE)}.{name}"] = value
    return found


FUNCTIONS = public_functions()

_KERNEL = "a kernel on arrays, called in compiled programs, whose shapes JAX checks"
_CHECK = "a check of any value, which test_checks tries"
_OF_RUN = "called by the engine alone, with records of its own"
_NOTHING = "takes no argument"
_NO_ARGUMENT = ("aggregators.count", "aggregators.total", "aggregators.stacked")
_OF_FIT = "a part of `fit`, whose arguments test_fitting tries"
_FORMS = (
    "arrays_of",
    "columns_of",
    "check_columns",
    "check_rows",
    "widened",
    "of_arrays",
    "kind",
    "kind_of_inputs",
    "splits_of_arrays",
    "splits_of_dataset",
)

EXEMPT = {
    **dict.fromkeys(
        (
            *("tree.take", "tree.put", "tree.scaled", "tree.weighted_sum", "tree.all_finite"),
            "tree.wide",
            *("averaging.uniform_over", "averaging.kept"),
            *("aggregators.by_size", "aggregators.uniform", "averaging.embedding"),
            *("permutation.at", "local.take_batch", "models.wrappers.unit_range"),
            "models.wrappers.like_inputs",
            *(f"averages.{name}" for name in ("chunk_means", "split_means", "of_shard", "draw")),
            "averages.columns",
            *(f"algorithms.cafe.{name}" for name in ("unit", "leading_direction", "orthogonal")),
            *(f"algorithms.cafe.{name}" for name in ("rows_over_norms", "without", "calibrate")),
            *("algorithms.cafe.logits", "algorithms.exit_strategy.contribution"),
            "algorithms.exit_strategy.largest_curvature",
            "algorithms.exit_strategy.random_direction",
            *("algorithms.exit_strategy.power_step", "algorithms.fedbn.partition"),
            *("algorithms.fedbn.combine", "algorithms.fedbn.in_norm"),
            *("algorithms.fedcfa.factor_scores", "algorithms.fedcfa.split_factors"),
            *("algorithms.fedcfa.replaced", "algorithms.fedcfa.counterfactual_labels"),
            "algorithms.fedcfa.default_top_k",
            *("algorithms.fedcfa.factor_decorrelation", "algorithms.fediir.alignment"),
            *("algorithms.fedipg.invariance", "algorithms.fedipg.half_masks"),
            *("algorithms.fedmix.mixed_loss", "algorithms.fedproto.prototypes"),
            *("algorithms.fedproto.distances", "algorithms.fedprox.proximal_gradient"),
            *("algorithms.fl_games.response_logits", "algorithms.moon.contrastive"),
            *("algorithms.qfedavg.scaled_update", "algorithms.scaffold.corrected_gradient"),
            *("algorithms.afl.ascend", "algorithms.feddg_ga.adjusted", "algorithms.fedgma.mask"),
            *("algorithms.feddyn.dynamic_gradient", "algorithms.fednova.effective_steps"),
            *("algorithms.fedsr.divergence", "algorithms.fedsr.squared_norm"),
            *("algorithms.vrex.factor", "averaging.mean_loss"),
            *(f"data.augment.{name}" for name in ("resized_crop", "crop_window", "grey")),
            *(f"data.augment.{name}" for name in ("brightened", "contrasted", "saturated")),
            *("data.augment.hue_shifted", "data.augment.jittered"),
        ),
        _KERNEL,
    ),
    **{name: _CHECK for name in FUNCTIONS if name.startswith("checks.")},
    **{
        name: "a law or its part, called with a case, which `testing.check` makes"
        for name in FUNCTIONS
        if name.startswith("testing.") and name != "testing.report.check"
    },
    **dict.fromkeys(
        (
            *("averaging.risk", "aggregators.check_prefix", "rounds.check_num_clients"),
            "devices.placement.local_view",
            *("algorithms.exit_strategy.server_in", "algorithms.exit_strategy.outcome"),
            *("algorithms.exit_strategy.check_someone_stays", "devices.placement.is_shards"),
            *("types.as_stored", "types.always", "types.nothing", "wrapping.layers"),
            *("devices.ownership.first_client", "devices.ownership.owner"),
            *("devices.ownership.number_of_lanes", "devices.placement.mesh"),
            *("devices.placement.cut", "devices.placement.on_host"),
            *(f"devices.loops.{name}" for name in ("turns", "mapped", "isolated", "room")),
            "devices.loops.written",
            *(f"evaluation.{name}" for name in ("evaluate_each", "add_part", "finish")),
            "data.federation.rows_of",
            *(f"program.parts.{name}" for name in ("on_host", "repeated", "room", "needed")),
            *("program.parts.batches", "program.streams.plan", "program.compiled.over_runs_of"),
            "program.compiled.compiler_options",
        ),
        _OF_RUN,
    ),
    **dict.fromkeys((*_NO_ARGUMENT, "platforms.on_cpu"), _NOTHING),
    **dict.fromkeys(("platforms.on_tpu", "devices.loops.compiler_options"), _NOTHING),
    **dict.fromkeys(("platforms.quick_to_compile", "platforms.quickest_to_compile"), _NOTHING),
    "fitting.call.fit": "test_fitting tries its arguments",
    "own_objectives.check_mean": _OF_FIT,
    **dict.fromkeys(
        (name for name in FUNCTIONS if name.startswith("fitting.") and name != "fitting.call.fit"),
        _OF_FIT,
    ),
    **dict.fromkeys((f"data.clients.{name}" for name in _FORMS), _OF_FIT),
    "parts.needing_head": "called by factories, with their own algorithm",
    "data.federation.validation_size": "called by `split` and `fit`, which check its arguments",
    "platforms.cores": "takes a folder, which its own tests try",
    "data.tables.is_rounded": "called by the readers of tables and of .npz files",
    "data.sources.image_of": "takes a path, which test_streams tries",
    "data.stored.of_records": "takes any sequence, which test_streams tries",
    "data.prepare.main": "a command line, which its own tests try",
    "data.leaf.files": "called by `sources.load` alone, with a path",
    "data.leaf.femnist": "called by `sources.load` alone, with what `files` found",
    "data.leaf.arrays": "called by the readers of LEAF, with a record of a file",
    **{
        name: "reads or writes files, which test_on_disk tries"
        for name in FUNCTIONS
        if name.startswith(("data.on_disk.", "data.convert."))
    },
    **dict.fromkeys(
        (
            *("data.sources.visible", "data.sources.image", "data.sources.check_mode"),
            *("data.sources.resized", "data.sources.tfds_rows", "data.sources.tfds_splits"),
        ),
        "called by the readers of images and of TFDS",
    ),
    **dict.fromkeys(("models.saved.named", "tree.on_device"), "takes any tree"),
}

KEY = jax.random.key(0)
SGD = optax.sgd(0.1)
MODEL = models.mlp(3, widths=(2,))
VECTORS = np.zeros((2, 3), np.float32)
WORK = local.epochs(SGD, batch_size=2)
SCHEDULE = schedules.everyone(3, 4)
RNG = np.random.default_rng(0)
LABELS = np.arange(12) % 3
GREY = Dataset(
    np.zeros((12, 4, 4, 1), np.uint8),
    LABELS.astype(np.int32),
    ("a", "b", "c"),
    (np.arange(12) % 2).astype(np.int32),
    ("d", "e"),
    np.zeros(12, bool),
)
TWO = GREY._replace(y=GREY.y % 2, classes=("a", "b"))
EXAMPLES_OF = federation.examples(GREY.x, GREY.y)
FEDERATION = federation.of_parts(EXAMPLES_OF, [np.arange(5), np.arange(5, 12)])
IMAGES = np.zeros((2, 4, 4, 1), np.uint8)
CUE = np.zeros(2, np.int32)
ALGORITHM = fedavg.fedavg(MODEL, WORK)
SCORES = evaluation.Scores(np.ones(2), np.ones(2), np.ones(2, np.int32))
LOGITS = {
    "logits": jnp.ones((2, 3)),
    "labels": jnp.array([0, 2]),
    "mask": jnp.array([True, False]),
}
VALUES = {"outputs": jnp.ones((2, 3)), "y": jnp.ones((2, 3)), "mask": jnp.array([True, False])}


@functools.cache
def variables() -> Any:
    return MODEL.init(KEY, jnp.zeros((1, 4, 4, 1)))


@functools.cache
def state() -> rounds.State:
    return rounds.init(ALGORITHM, variables(), FEDERATION, KEY)


@functools.cache
def split() -> federation.Split:
    tested = GREY._replace(test=np.arange(12) >= 9)  # an example of each class
    return federation.split(tested, EXAMPLES_OF, _deal, held_out=None, seed=0)


@pytest.fixture(scope="module", autouse=True)
def folder_of_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the tests run in a folder of their own, as "no" is the path of a file, too."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("files"))
    yield
    os.chdir(before)


@functools.cache
def folder() -> Path:
    return Path.cwd()


@functools.cache
def table_file() -> Path:
    (folder() / "table.csv").write_text("x,target\n1,a\n2,b\n")
    return folder() / "table.csv"


@functools.cache
def saved_file() -> Path:
    models.saved.save(folder() / "saved.safetensors", variables())
    return folder() / "saved.safetensors"


@functools.cache
def tweets() -> Path:
    path = folder() / "tweets.csv"
    path.write_text("".join(f'"{i % 2 * 4}","{i}","d","q","u{i % 3}","a b"\n' for i in range(20)))
    return path


def _deal(rows: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    return np.array_split(rows, 2)


def _grid(seeds: Any, penalty: Any) -> Any:
    return program.grid(seeds, penalty=penalty)


_WORK = {"optimizer": SGD, "momentum": 0.0}
_OVER = {"server_optimizer": optax.sgd(1.0), "weighting": "size"}
_CUES = {"flips": (0.2, 0.1), "test_flip": 0.9, "label_noise": 0.1, "seed": 0}
_DIVIDED = {"shares": (1, 2), "test_fraction": 0.3}
_IMAGE_MODEL = {"num_classes": 3, "cut": 1, "conv": "lax"}

# function -> its valid arguments, when they are needed
EXAMPLES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "aggregators.weight_of": lambda: {"weighting": "size"},
    "aggregators.mean": lambda: {"weight": aggregators.by_size},
    "aggregators.weight_sum": lambda: {"weight": aggregators.by_size},
    "algorithms.fedgma.mean_and_sign": lambda: {"weight": aggregators.by_size},
    "aggregators.combine": lambda: {"aggregators": aggregators.total()},
    **{
        f"algorithms.{name}.{name}": functools.partial(
            lambda name: {"model": MODEL, "work": WORK} | _defaults(f"algorithms.{name}.{name}"),
            name,
        )
        for name in LISTED
    },
    "algorithms.cafe.cafe": lambda: {
        "model": MODEL,
        "work": local.epochs(optax.sgd(0.1, 0.9), batch_size=2, momentum=0.9),
        **_defaults("algorithms.cafe.cafe"),
    },
    "algorithms.exit_strategy.wrap": lambda: {
        "algorithm": ALGORITHM,
        **_defaults("algorithms.exit_strategy.wrap"),
    },
    "algorithms.fedipg.penalised_value_and_grad": lambda: {
        "risk": jnp.sum,
        "penalty": 0.1,
        "derivative": "reverse_over_forward",
        "has_aux": False,
    },
    "algorithms.fedipg.penalty_schedule": lambda: {
        "penalty": 0.1,
        "warmup_rounds": 2,
        "warmup_penalty": 0.0,
    },
    "algorithms.fedpvr.without_memory": lambda: {"optimizer": SGD, "part": parts.EVERYTHING},
    "algorithms.scaffold.with_variates": lambda: {
        "model": MODEL,
        "work": WORK,
        "part": parts.EVERYTHING,
        "loss": objectives.cross_entropy,
        **_OVER,
    },
    "averages.as_numbers": lambda: {"x": jnp.ones((2, 3))},
    "averages.exchanged": lambda: {"model": MODEL} | _defaults("averages.exchanged"),
    "averaging.gradient": lambda: {"model": MODEL, "loss": objectives.cross_entropy},
    "averaging.averaging": lambda: {
        "model": MODEL,
        "work": WORK,
        "gradient_from": lambda visit: None,
        **_OVER,
        "side": averaging.NOTHING,
        "init_client": lambda server, who: (),
    },
    "averaging.serving_the_server": lambda: {
        "model": MODEL,
        "server_optimizer": optax.sgd(1.0),
        "exchanges": ALGORITHM.exchanges,
    },
    "averaging.averaging_of": lambda: {"model": MODEL, "train": lambda visit: None, **_OVER},
    "communication.size": lambda: {"shapes": jnp.ones(3)},
    "communication.traffic": lambda: {
        "algorithm": ALGORITHM,
        "state": state(),
        "federation": FEDERATION,
    },
    "cse.eliminate_common_subexpressions": lambda: {"fn": jnp.sin},
    "data.augment.augment": lambda: (
        {"x": jnp.zeros((1, 4, 4, 3)), "key": KEY} | _defaults("data.augment.augment")
    ),
    "data.dataset.check_dataset": lambda: {"dataset": GREY},
    "data.dataset.originals": lambda: {"dataset": GREY},
    "data.dsprites.latent_classes": lambda: {"index": np.arange(3)},
    "data.dsprites.latent_index": lambda: {"classes": np.zeros((2, 6), int)},
    "data.dsprites.latent_values": lambda: {"index": np.arange(3)},
    "data.dsprites.render": lambda: {"latents": dsprites.latent_values(np.arange(2))},
    "data.dsprites.load": lambda: {"shapes": ("square",), "num_images": 2, "seed": 0},
    "data.environments.rotated": lambda: {
        "dataset": GREY,
        "angles": (0, 90),
        "seed": 0,
        "shares": (1, 2),
    },
    "data.environments.flip_probabilities": lambda: {"setting": "2"},
    "data.environments.grouped": lambda: {"dataset": GREY, "groups": {"a": ("a", "b")}},
    "data.environments.binned": lambda: {"dataset": TWO, "num_classes": 2},
    "data.environments.colored": lambda: {"dataset": GREY, **_CUES, **_DIVIDED, "binarise": True},
    "data.environments.patched": lambda: {"dataset": TWO, **_CUES, **_DIVIDED, "patch_size": 2},
    "data.environments.paint": lambda: {"x": environments.Colored(IMAGES, CUE), "num_colors": 2},
    "data.environments.cover": lambda: {"x": environments.Patched(IMAGES, CUE), "patch_size": 2},
    "data.environments.check_grey": lambda: {"dataset": GREY},
    "data.environments.check_cue": lambda: {
        "name": "cue",
        "cue": CUE,
        "num_values": 2,
        "image": IMAGES,
    },
    "data.environments.test_rows": lambda: {"dataset": GREY, "test_fraction": 0.2, "rng": RNG},
    "data.federation.examples": lambda: {"x": GREY.x, "y": GREY.y},
    "data.federation.examples_on_host": lambda: {"x": GREY.x, "y": GREY.y},
    "data.stored.of_arrays": lambda: {"x": GREY.x, "y": GREY.y},
    "data.federation.compact": lambda: {"federation": FEDERATION, "who": np.array([1])},
    "data.federation.of_parts": lambda: {"data": EXAMPLES_OF, "parts": [np.arange(3)]},
    "data.federation.parts_of": lambda: {"federation": FEDERATION},
    "data.federation.partitioner": lambda: {"name": "iid", "dataset": GREY, "num_clients": 2},
    "data.federation.split": lambda: {
        "dataset": GREY,
        "data": EXAMPLES_OF,
        "partition": _deal,
        "held_out": None,
        "seed": 0,
        "validation": 0.1,
        "test_fraction": 0.2,
        "first_row": 0,
        "imbalance": 1.0,
    },
    "data.federation.by_class": lambda: {"federation": FEDERATION, "num_classes": 3},
    "data.federation.test_shards": lambda: {"split": split(), "num_classes": 3, "seed": 1},
    "data.federation.pooled": lambda: {"federation": FEDERATION},
    "data.federation.stack": lambda: {"splits": [split()]},
    "data.partitions.iid": lambda: {"num_examples": 12, "num_clients": 2, "rng": RNG},
    "data.partitions.by_domain": lambda: {"domain": GREY.domain, "num_clients": 2, "rng": RNG},
    "data.partitions.mixed": lambda: {
        "domain": GREY.domain,
        "num_clients": 2,
        "mixing": 0.5,
        "rng": RNG,
    },
    "data.partitions.by_user": lambda: {"user": GREY.domain, "num_clients": 2, "rng": RNG},
    "data.partitions.dirichlet": lambda: {
        "labels": LABELS,
        "num_clients": 2,
        "alpha": 10.0,
        "rng": RNG,
        "min_size": 1,
        "max_tries": 100,
    },
    "data.partitions.quantity": lambda: {
        "num_examples": 12,
        "num_clients": 2,
        "alpha": 10.0,
        "rng": RNG,
        "min_size": 1,
        "max_tries": 100,
    },
    "data.partitions.shards": lambda: {
        "labels": LABELS,
        "num_clients": 2,
        "shards_per_client": 2,
        "rng": RNG,
    },
    "data.partitions.long_tail": lambda: {
        "labels": LABELS,
        "num_classes": 3,
        "imbalance": 2.0,
        "rng": RNG,
    },
    "data.partitions.shards_like": lambda: {
        "labels": LABELS,
        "counts": np.ones((2, 3), int),
        "rng": RNG,
    },
    "data.partitions.class_counts": lambda: {
        "labels": LABELS,
        "parts": [np.arange(3)],
        "num_classes": 3,
    },
    "data.simpson.ramp": lambda: {"steps": 3, "ends": simpson.ENDS},
    "data.simpson.simpson": lambda: {
        "dataset": GREY,
        "darker": "a",
        "lighter": "b",
        "colors": simpson.ramp(3),
        "shading": "paradox",
        "share": 0.5,
        "test_fraction": 0.3,
        "seed": 0,
    },
    "data.simpson.shade": lambda: {"x": simpson.Shaded(IMAGES, CUE), "colors": simpson.ramp(3)},
    "data.simpson.check_ramp": lambda: {"colors": simpson.ramp(3)},
    "data.sources.load": lambda: {"name": "digits", "image_size": None},
    "data.sources.may_be_prepared": lambda: {"name": "mnist"},
    "data.stains.rule": lambda: {"y": LABELS, "colors": 3, "shift": 1},
    "data.stains.combinations": lambda: {
        "dataset": GREY,
        "stain": "both",
        "colors": 2,
        "seed": 0,
    },
    "data.stains.stained": lambda: {
        "dataset": GREY,
        "stain": "both",
        "colors": 2,
        "agreements": (0.9, 0.8),
        "test_agreement": 0.9,
        "test_rule": "reversed",
        "label_noise": 0.1,
        "domain_size": 2,
        "test_fraction": 0.3,
        "seed": 0,
    },
    "data.stains.tint": lambda: {"x": stains.Stained(IMAGES, CUE, CUE)},
    "data.moments.moments": lambda: {"x": VECTORS},
    "data.moments.joined": lambda: {"parts": [moments.moments(VECTORS)]},
    "data.tables.table": lambda: {"path": table_file(), "roles": tables.Roles()},
    "data.text.tokenize": lambda: {"text": "a b"},
    "data.text.vocabulary": lambda: {"texts": [["a", "b"]], "size": 3},
    "data.text.encode": lambda: {"texts": [["a"]], "words": ("", "?", "a"), "length": 2},
    "data.text.sentiment140": lambda: {
        "path": tweets(),
        "vocabulary_size": 5,
        "length": 2,
    },
    "data.wrong_labels.replaced": lambda: {
        "labels": LABELS,
        "num_classes": 3,
        "share": 0.5,
        "rng": RNG,
    },
    "data.wrong_labels.at_clients": lambda: {
        "splits": [split()],
        "num_classes": 3,
        "share": 0.5,
        "part": 0.5,
        "seeds": [0],
    },
    "devices.axis.vmapped": lambda: {"lanes": 2},
    "devices.axis.chunked": lambda: {"size": 2, "lanes": 2},
    "devices.axis.sharded": lambda: {"name": "clients", "inner": devices.vmapped()},
    "devices.axis.owned": lambda: {"name": "clients", "inner": devices.vmapped()},
    "devices.axis.over": lambda: {"mesh": jax.make_mesh((1,), ("clients",)), "fn": jnp.sin},
    **dict.fromkeys(
        (
            *("devices.ownership.clients_per_device", "devices.ownership.lane_size"),
            "devices.ownership.lanes_per_device",
        ),
        lambda: {"num_clients": 4, "num_devices": 2, "lanes": 3},
    ),
    "devices.placement.shape_of_mesh": lambda: {
        **{"num_runs": 3, "num_slots": 4, "num_devices": 2},
        **{"most": 2, "multiple": 1},
    },
    "diagnostics.agreement": lambda: {
        "model": MODEL,
        "variables": variables(),
        "federation": FEDERATION,
        "loss": objectives.cross_entropy,
        "axis": devices.chunked(1),
        "batch_size": 4,
    },
    "evaluation.evaluate": lambda: {
        "algorithm": ALGORITHM,
        "state": state(),
        "federation": FEDERATION,
        "axis": devices.chunked(1),
        "seen": True,
        "batch_size": 4,
        "loss": objectives.cross_entropy,
        "score": objectives.accuracy,
    },
    "fine_tuning.fine_tuned": lambda: {
        "algorithm": ALGORITHM,
        "state": state(),
        "federation": FEDERATION,
        "model": MODEL,
        "work": WORK,
        "key": KEY,
        "client_chunk": 1,
    },
    "freezing.names": lambda: {"params": variables().params},
    "freezing.check": lambda: {"params": variables().params, "patterns": ("head",)},
    "freezing.is_frozen": lambda: {"params": variables().params, "patterns": ("head",)},
    "freezing.train_only": lambda: {
        "make": lambda model: fedavg.fedavg(model, WORK),
        "model": MODEL,
        "patterns": ("head",),
    },
    "evaluation.mean": lambda: {"scores": SCORES},
    "evaluation.balanced": lambda: {"scores": SCORES},
    "evaluation.by_group": lambda: {
        "scores": SCORES,
        "group": np.array([0, 1]),
        "num_groups": 2,
    },
    "local.fold": lambda: {
        "shard": federations.shard_of(FEDERATION, 0),
        "fn": lambda batch: batch.mask.sum(),
        "batch_size": 4,
    },
    "local.fold_sample": lambda: {
        "shard": federations.shard_of(FEDERATION, 0),
        "key": KEY,
        "fn": lambda batch: batch.mask.sum(),
        "batch_size": 4,
    },
    "local.seeing_local": lambda: {"work": WORK},
    "local.epochs": lambda: {**_WORK, "batch_size": 2, "num_epochs": 1, "num_batches": 2},
    "local.steps": lambda: {**_WORK, "batch_size": 2, "num_steps": 1},
    "local.full_batch": lambda: {**_WORK, "capacity": 2, "num_steps": 1},
    "missing.reuse": lambda: {"algorithm": ALGORITHM},
    "missing.with_rule": lambda: {"algorithm": ALGORITHM, "rule": "reuse"},
    "models.alexnet.alexnet": lambda: {**_IMAGE_MODEL, "widths": (2,) * 7, "dropout": 0.1},
    "models.blocks.scaled": lambda: {"model": MODEL},
    "models.nnx_modules.from_nnx": lambda: {
        "module": nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        "cut": 0,
    },
    "models.blocks.check_images": lambda: {"x": IMAGES},
    "models.blocks.from_blocks": lambda: {
        "blocks": [models.GroupNorm(), models.GroupNorm()],
        "cut": 1,
    },
    "models.blocks.from_flax": lambda: {
        "module": models.BatchNorm(),
        "takes": ("mask", "train"),
        "cut": 0,
    },
    "models.blocks.from_function": lambda: {"init": lambda key, x: (), "apply": lambda p, x: x},
    "models.blocks.apply": lambda: {
        "model": MODEL,
        "variables": variables(),
        "x": IMAGES,
        "mask": np.ones(2, bool),
        "train": True,
        "key": KEY,
    },
    "models.blocks.predict": lambda: {"model": MODEL, "variables": variables(), "x": IMAGES},
    "models.cnn.cnn": lambda: {**_IMAGE_MODEL, "widths": (8, 16)},
    "models.cnn.leaf_cnn": lambda: {**_IMAGE_MODEL, "widths": (2, 2, 2)},
    "models.lenet.lenet": lambda: {**_IMAGE_MODEL, "widths": (2,) * 5},
    "models.lowerings.lowering": lambda: {"conv": "lax"},
    "models.lowerings.max_pool": lambda: {
        "x": jnp.zeros((1, 4, 4, 1)),
        "size": 2,
        "stride": 2,
        "padding": 0,
    },
    "models.lstm.word_weights": lambda: {"x": np.array([[1, 2]]), "vocabulary": 3},
    "models.lstm.lstm": lambda: {
        "num_classes": 2,
        "vocabulary": 3,
        "embedding": 2,
        "widths": (2,),
        "cut": 1,
    },
    "models.mlp.mlp": lambda: {
        "num_classes": 2,
        "widths": (2,),
        "cut": 1,
        "activation": "relu",
        "norm": "none",
    },
    "models.resnet.resnet18": lambda: {
        **_IMAGE_MODEL,
        "image_size": 32,
        "norm": "batch",
        "widths": (2,) * 4,
    },
    "models.mlp.widths_for": lambda: {"num_features": 3},
    "models.scaling.scaled": lambda: {"model": MODEL},
    "models.scaling.with_scaling": lambda: {
        "variables": models.scaled(MODEL).init(KEY, VECTORS),
        "scaling": models.Scaling(np.zeros(3), np.ones(3)),
    },
    "models.resnet.resnet50": lambda: {
        **_IMAGE_MODEL,
        "image_size": 32,
        "norm": "batch",
        "widths": (2,) * 4,
    },
    "models.saved.save": lambda: {"path": folder() / "a.safetensors", "tree": variables()},
    "models.saved.about": lambda: {"path": saved_file()},
    "models.saved.load": lambda: {"path": saved_file(), "like": variables()},
    "models.weights.load": lambda: {"path": saved_file(), "variables": variables()},
    "models.weights.report": lambda: {"path": saved_file(), "variables": variables()},
    "models.weights.pretrained": lambda: {"model": MODEL, "path": saved_file()},
    "models.wrappers.rendered": lambda: {"model": MODEL, "render": jnp.asarray},
    "models.wrappers.painted": lambda: {"model": MODEL, "render": jnp.asarray},
    "models.wrappers.normalised": lambda: {"model": MODEL, "mean": (0.5,), "std": (0.5,)},
    "models.wrappers.computed_in": lambda: {"model": MODEL, "dtype": "bfloat16"},
    "models.wrappers.augmented": lambda: {"model": MODEL, "augment": lambda x, key: x},
    "testing.report.check": lambda: {
        "factory": fedavg.fedavg,
        "hyperparameters": {"weighting": "size"},
        "model": MODEL,
        "learning_rate": 0.1,
        "data": None,
        "laws": ["the_factory_returns_an_algorithm"],
        "breaks": {},
        "tell": None,
    },
    "objectives.masked_mean": lambda: {"values": jnp.ones(2), "mask": jnp.ones(2, bool)},
    "objectives.cross_entropy": lambda: LOGITS,
    "objectives.accuracy": lambda: LOGITS,
    "objectives.binary_cross_entropy": lambda: {**LOGITS, "labels": jnp.ones((2, 3), bool)},
    "objectives.label_accuracy": lambda: {**LOGITS, "labels": jnp.ones((2, 3), bool)},
    "objectives.exact_match": lambda: {**LOGITS, "labels": jnp.ones((2, 3), bool)},
    "objectives.squared_error": lambda: VALUES,
    "objectives.absolute_error": lambda: VALUES,
    "objectives.smoothed_cross_entropy": lambda: {"label_smoothing": 0.1},
    "objectives.focal": lambda: {"gamma": 2.0},
    "objectives.huber": lambda: {"delta": 1.0},
    "objectives.soft_cross_entropy": lambda: {**LOGITS, "labels": jnp.ones((2, 3)) / 3},
    "permutation.draw": lambda: {"key": KEY},
    "platforms.products_at": lambda: {"precision": "high"},
    "platforms.traced_for": lambda: {"platform": "cpu"},
    "program.compiled.make": lambda: {
        "experiment": program.Experiment(MODEL, lambda hyper: ALGORITHM),
        "client_chunk": 1,
        "run_chunk": 1,
        "layout": None,
    },
    "program.host_inputs.grid": lambda: {"seeds": (0, 1), "penalty": (0.1, 0.2)},
    "program.host_inputs.inputs": lambda: {
        "runs": program.grid((0,), penalty=(0.1,)),
        "splits": {0: split()},
        "pooled": False,
        "watch_examples": 2,
        "warm_start": lambda sizes: 0,
        "num_classes": 3,
    },
    "program.host_inputs.groups": lambda: {"domain": np.array([0, 1])},
    "program.host_inputs.group_names": lambda: {"splits": [split()]},
    "program.host_inputs.schedule_key": lambda: {"seed": 0},
    "program.host_inputs.cohorts": lambda: {
        "schedule": lambda key: SCHEDULE,
        "inputs": program.inputs(program.grid((0,)), {0: split()}),
    },
    "rounds.init": lambda: {
        "algorithm": ALGORITHM,
        "variables": variables(),
        "federation": FEDERATION,
        "key": KEY,
        "history": 1,
        "axis": devices.vmapped(),
    },
    **{
        f"rounds.{name}": functools.partial(
            lambda argument, cohort: {
                "algorithm": ALGORITHM,
                "state": state(),
                argument: cohort(),
                "federation": FEDERATION,
                "axis": devices.chunked(1),
                "drop_nonfinite": False,
            },
            argument,
            cohort,
        )
        for name, argument, cohort in (
            ("step", "cohort", lambda: federations.cohort([0, 1])),
            ("run", "schedule", lambda: schedules.everyone(2, 1)),
        )
    },
    "schedules.everyone": lambda: {"num_clients": 3, "num_rounds": 2},
    "schedules.sampled": lambda: {"key": KEY, "num_clients": 3, "cohort": 2, "num_rounds": 2},
    "schedules.cohort_size": lambda: {"num_clients": 3, "rate": 0.5},
    "schedules.upload_probabilities": lambda: {
        "key": KEY,
        "num_clients": 3,
        "sparse": 0.5,
        "frequency": 0.5,
    },
    "schedules.dropout": lambda: {"schedule": SCHEDULE, "key": KEY, "probability": 0.5},
    "schedules.stale": lambda: {
        "schedule": SCHEDULE,
        "key": KEY,
        "probability": 0.5,
        "num_clients": 3,
        "longest": 2,
    },
    "schedules.diurnal": lambda: {
        "key": KEY,
        "num_clients": 3,
        "day": 4,
        "least": 0.1,
        "most": 0.5,
    },
    "schedules.trace": lambda: {"recorded": np.ones((2, 3), bool)},
    "schedules.report_seconds": lambda: {
        "schedule": SCHEDULE,
        "key": KEY,
        "typical": 2.0,
        "spread": 1.0,
    },
    "schedules.first_reports": lambda: {
        "schedule": SCHEDULE,
        "seconds": np.ones((4, 3)),
        "count": 2,
    },
    "schedules.delayed": lambda: {"schedule": SCHEDULE, "delay": 1},
    "schedules.randomly_delayed": lambda: {
        "schedule": SCHEDULE,
        "key": KEY,
        "probability": 0.5,
        "longest": 2,
    },
    "schedules.every": lambda: {"schedule": SCHEDULE, "period": 2},
    "schedules.slow": lambda: {"schedule": SCHEDULE, "rounds_per_update": 2},
    "schedules.first_all": lambda: {"schedule": SCHEDULE, "num_clients": 3},
    "servers.init": lambda: {"optimizer": SGD, "variables": variables()},
    "servers.upload_of": lambda: {"trained": variables(), "received": variables()},
    "servers.delta_of": lambda: {
        "server": servers.init(SGD, variables()),
        "mean": variables(),
        "weight": 1.0,
    },
    "servers.update": lambda: {
        "optimizer": SGD,
        "server": servers.init(SGD, variables()),
        "mean_delta": variables(),
    },
    "stopping.init": lambda: {"num_thresholds": 2, "scores": jnp.ones(3)},
    "stopping.update": lambda: {
        "stops": stopping.init(2, ()),
        "accuracy": jnp.float32(0.5),
        "thresholds": jnp.array([0.4, 0.6]),
        "num_rounds": jnp.int32(3),
        "warm_start": 1,
        "measure": lambda needed: (),
        "above": False,
    },
    "stopping.all_met": lambda: {"stops": stopping.init(2, ())},
    "wrapping.lift": lambda: {"exchange": ALGORITHM.exchanges[0]},
    "wrapping.around": lambda: {
        "algorithm": ALGORITHM,
        "init_server": lambda setup: (),
        "exchanges": ALGORITHM.exchanges,
    },
}


def _defaults(name: str) -> dict[str, Any]:
    """Return the default arguments of a public function."""
    signature = inspect.signature(FUNCTIONS[name])
    return {
        parameter: one.default
        for parameter, one in signature.parameters.items()
        if one.default is not inspect.Parameter.empty
    }


# Wrong for most arguments; where one of them is right, the call works.
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, np.nan, np.inf, 99, "no", "", b"no", object(), lambda *_: None),
    *([], [-1], [0.5, np.nan], ["no"], [[1], [1, 2]], {}, {"no": 1}, ()),
    *(np.zeros(0), np.zeros((2, 3, 4)), np.array([0.5, 1.5]), np.array([np.nan, 1])),
    *(np.array(["no"]), np.array([True, False]), np.array([-1, 99]), jnp.zeros((7,))),
    *(np.array([None]), jax.random.split(KEY, 3), SGD, MODEL),
)


def outcome(name: str, argument: str, wrong: Any) -> str:
    """Return what is wrong with what a call does, or nothing."""
    arguments = dict(EXAMPLES[name]())
    if callable(wrong) and callable(arguments[argument]):
        return ""  # its signature shows when it is called, perhaps in a compiled program
    if argument == "num_images" and wrong is None:
        return ""  # all images of a shape, which take long
    arguments[argument] = wrong
    function = FUNCTIONS[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            function(**arguments)
    except (ValueError, TypeError) as error:
        message = str(error)
        names = isinstance(error, UsageError) or any(each in message for each in arguments)
        if "\n" in message or not names:
            return f"{type(error).__name__}: {message}"
    except ImportError:  # an extra that is not installed
        return ""
    except Exception as error:  # which the caller asserts not to be
        return f"{type(error).__name__}: {error}"
    return ""


def test_every_public_function_has_an_example_or_a_reason() -> None:
    assert not set(EXAMPLES) & set(EXEMPT)
    assert set(FUNCTIONS) == set(EXAMPLES) | set(EXEMPT)
    for name, example in EXAMPLES.items():
        parameters = inspect.signature(FUNCTIONS[name]).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            assert set(example()) <= set(parameters), name


@pytest.mark.parametrize("name", sorted(EXAMPLES))
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_wrong_argument_is_one_line_that_names_it(name: str, data: st.DataObject) -> None:
    argument = data.draw(st.sampled_from(sorted(EXAMPLES[name]())))
    wrong = data.draw(st.sampled_from(WRONG))
    assert outcome(name, argument, wrong) == ""


def _odd_records() -> Iterator[tuple[str, str, Any, str]]:
    """Yield (function, argument, record with a wrong field, message)."""
    work, shard = WORK._replace(run="x"), federations.shard_of(FEDERATION, 0)
    twice = np.array([5, 7, 5, 7], np.int32)
    yield "algorithms.fedavg.fedavg", "model", MODEL._replace(decode=()), "model.decode: .*function"
    yield "algorithms.fedavg.fedavg", "work", work, "work.run='x': must be a function"
    exchanges = ALGORITHM._replace(exchanges=["no"])
    yield "missing.reuse", "algorithm", exchanges, "algorithm.exchanges: .*tuple"
    loose = variables()._replace(params=tuple(variables().params))
    yield "models.blocks.predict", "variables", loose, "variables.params: .*must be a Halves"
    yield "local.fold", "shard", shard._replace(start=np.zeros(0, int)), "shard.start: .*integer"
    for name, changes, message in (
        ("rounds.run", {"start": np.array([0.5, 5.5])}, "start=float64 .*: must be int32"),
        ("data.federation.pooled", {"size": twice}, "start=.*: must be .C., and so must size"),
        ("communication.traffic", {"size": np.ones(2)}, "size=float64 .*: must be int32"),
    ):
        yield name, "federation", FEDERATION._replace(**changes), message
    late = SCHEDULE._replace(who=SCHEDULE.who * 1.0)
    yield "schedules.stale", "schedule", late, "schedule.who=float32 .*: must be integers"
    short = SCORES._replace(loss=np.zeros(1))
    yield "evaluation.by_group", "scores", short, "scores: .*must be equal"
    exchanged = state()._replace(broadcast_history=((), ()))
    yield "rounds.step", "state", exchanged, "is of an algorithm with 2 exchanges, must have 1"
    yield "stopping.update", "stops", stopping.init(2, jnp.ones(3)), "stops.scores: has shapes"
    negative = SCORES._replace(size=np.array([3, -1]))
    yield "evaluation.mean", "scores", negative, "scores.size=.*: must be at least 0"
    nobody = evaluation.Scores(*np.zeros((2, 0)), np.zeros(0, int))
    yield "evaluation.mean", "scores", nobody, "scores: are of no client"
    yield "rounds.step", "cohort", federations.cohort([]), "schedule: has no slots"
    words = (
        r"^cohort: who \(4, 3\), present \(4, 3\) and .*must all be \[S\]; rounds.run takes a sch"
    )
    yield "rounds.step", "cohort", SCHEDULE, words
    uneven = federations.cohort([0, 1])._replace(delay=np.zeros(1, int))
    yield "rounds.step", "cohort", uneven, r"cohort: who \(2,\), present \(2,\) and delay \(1,\)"
    unordered = GREY._replace(classes={*GREY.classes})
    yield "data.dataset.check_dataset", "dataset", unordered, "dataset.classes=.*different names"


def test_a_record_with_a_wrong_field_is_one_line() -> None:
    for name, argument, wrong, message in _odd_records():
        with pytest.raises(UsageError, match=message) as caught:
            FUNCTIONS[name](**{**EXAMPLES[name](), argument: wrong})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "argument", "wrong", "message"),
    [
        ("schedules.everyone", "num_clients", 2**40, "num_rounds=2: needs .* GB"),
        ("schedules.sampled", "num_rounds", 2**70, "must be an integer below 2"),
        ("schedules.every", "period", 2**40, "period=.*: must fit into 32 bits"),
        ("stopping.init", "num_thresholds", 2**50, "num_thresholds=.*: needs .* GB"),
        ("evaluation.by_group", "num_groups", 2**50, "num_groups=.*: needs .* GB"),
        ("rounds.init", "history", 2**50, "history=.*: needs .* GB"),
        ("data.federation.examples", "x", np.zeros((12, 2), complex), "must be .* real numbers"),
        ("data.federation.examples", "y", np.arange(12) + 2**40, r"y\[0\]=.*: must be in"),
        ("data.federation.examples", "x", [[1.0]] * 12, "x: holds a value of type float, must be"),
        ("data.federation.examples", "y", [0] * 12, "y: holds a value of type int, must be an arr"),
        ("data.federation.of_parts", "parts", [[0], [3, -1]], r"^parts\[1\]\[1\]=-1: must be in 0"),
        (
            "data.federation.of_parts",
            "parts",
            [[0, 12], [3]],
            r"^parts\[0\]\[1\]=12: must .* 0\.\.11",
        ),
        ("objectives.soft_cross_entropy", "labels", jnp.ones((2, 3)), "labels=.*: must be prob"),
        ("models.saved.named", "tree", {"a/b": KEY, "a": {"b": KEY}}, "two leaves of the name a/b"),
        ("data.text.encode", "words", ("", "?", "a", "a"), "words: must all differ"),
    ],
)
def test_what_is_too_large_or_ambiguous_is_refused(
    name: str, argument: str, wrong: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        FUNCTIONS[name](**{**EXAMPLES.get(name, dict)(), argument: wrong})


def test_numpy_arrays_give_the_result_of_jax_arrays() -> None:
    arguments = EXAMPLES["rounds.step"]()
    expected = rounds.step(**arguments)
    names = ("state", "cohort", "federation")
    keys = arguments["state"].key
    plain = jax.tree.map(np.asarray, {n: arguments[n] for n in names[1:]})
    plain["state"] = jax.tree.map(np.asarray, arguments["state"]._replace(key=()))._replace(
        key=keys
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        *(
            (state._replace(key=()), reports)
            for state, reports in (expected, rounds.step(**{**arguments, **plain}))
        ),
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: afl.ascend(jnp.ones(2), jnp.ones(3), 0.1), r"losses"),
        (
            lambda: cafe.logits(jnp.ones((2, 3)), jnp.ones((4, 2)), scale=1.0),
            r"^features=.*\[B, D\]",
        ),
        (
            lambda: cafe.calibrate(
                jnp.ones((4, 2)), jnp.ones(2), jnp.ones(2), alpha=0.1, beta=0.1, gamma=-1.0
            ),
            "^gamma=-1.0: must be",
        ),
        (lambda: fedcfa.split_factors(jnp.ones(3), 1), r"^scores=.* must be \[B, F\]"),
        (
            lambda: fedcfa.counterfactual_labels(jnp.ones((2, 3)), jnp.ones((2, 3)), 3, 2),
            "^top_k=3: must be",
        ),
        (
            lambda: fedcfa.counterfactual_labels(jnp.ones((2, 3)), jnp.ones((2, 3)), 0, 0),
            "^num_factors=0: must be",
        ),
        (
            lambda: fedcfa.counterfactual_labels(jnp.arange(3), jnp.ones((3, 3)), 1, 2),
            "^average: has shapes",
        ),
        (
            lambda: fedcfa.counterfactual_labels([[1.0]], jnp.ones((1, 1)), 1, 2),
            "^labels: is of type list",
        ),
        (lambda: fedproto.distances([[1.0]], jnp.zeros(1, jnp.int32), KNOWN), "^features: is of"),
        (
            lambda: fedcfa.counterfactual_labels(jnp.arange(3), jnp.arange(3), 1, 2),
            r"^labels=.* must be \[B, K\]",
        ),
        (
            lambda: fedproto.distances(jnp.ones((2, 4)), jnp.zeros((2, 1), jnp.int32), KNOWN),
            r"^y=.* must be \[2\], a label for each row",
        ),
        (
            lambda: fedproto.distances(jnp.ones((2, 1)), jnp.zeros(2, jnp.int32), KNOWN),
            r"^known=.* must have means \[K, 1\]",
        ),
        (
            lambda: fedproto.distances(jnp.ones(2), jnp.zeros(2, jnp.int32), KNOWN),
            r"^features=.* must be \[B, D\]",
        ),
        (
            lambda: fedprox.proximal_gradient(*[jnp.ones(2)] * 3, -0.1),
            "^proximal=-0.1: must be",
        ),
        (
            lambda: feddyn.dynamic_gradient(*[jnp.ones(2)] * 4, -1.0),
            "^alpha=-1.0: must be",
        ),
        (
            lambda: fedmix.mixed_loss(
                lambda x, y: x.sum(),
                jnp.ones((2, 3), jnp.int32),
                jnp.ones((2, 4)),
                jnp.ones(3, jnp.int32),
                jnp.ones(4),
                ratio=0.1,
            ),
            "^x=int32 .* floating point to mix",
        ),
        (
            lambda: moon.contrastive(*[jnp.ones((2, 3))] * 3, temperature=0.0),
            "^temperature=0.0: must be above 0",
        ),
    ],
)
def test_kernels_refuse_what_does_not_fit(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


# A kernel, and its valid arguments by name.
KERNELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "response_logits": (
        fl_games.response_logits,
        {
            "own": jnp.ones((2, 3)),
            "opponents": jnp.ones((4, 2, 3)),
            "memory": jnp.ones((4, 5, 2, 3)),
            "memory_size": jnp.ones(4, int),
            "memory_mix": "literal",
            "plays": np.ones(4, bool),
        },
    ),
    "scaled_update": (
        qfedavg.scaled_update,
        {"delta": jnp.ones(2), "loss": 0.5, "q": 1.0, "step_size": 0.1},
    ),
    "adjusted": (
        feddg_ga.adjusted,
        {
            "weights": jnp.ones(3) / 3,
            "gaps": np.arange(3.0),
            "attends": np.ones(3, bool),
            "step": 0.1,
        },
    ),
    "prototypes": (
        fedproto.prototypes,
        {
            "features": jnp.ones((5, 4), jnp.bfloat16),
            "y": np.zeros(5, int),
            "mask": np.ones(5, bool),
            "num_classes": 2,
        },
    ),
    "chunk_means": (
        averages.chunk_means,
        {
            "x": {"a": jnp.ones((5, 2)), "b": jnp.ones((5, 2, 2))},
            "y": jnp.ones((5, 3)),
            "mask": np.ones(5, bool),
            "key": KEY,
            "chunk": 2,
        },
    ),
    "split_means": (
        averages.split_means,
        {
            "x": jnp.ones((5, 2)),
            "y": jnp.ones((5, 3)),
            "mask": jnp.ones(5, bool),
            "key": jax.random.PRNGKey(0),
            "rows": 2,
        },
    ),
    "columns": (averages.columns, {"y": np.arange(3), "num_columns": 3}),
    "factor_scores": (
        fedcfa.factor_scores,
        {"decode_true_logit": lambda factors: factors.sum((1, 2)), "factors": jnp.ones((2, 4, 3))},
    ),
    "split_factors": (fedcfa.split_factors, {"scores": np.ones((2, 3)), "top_k": 1}),
    "replaced": (
        fedcfa.replaced,
        {
            "factors": jnp.ones((2, 4, 3)),
            "average": jnp.ones((2, 4, 3)),
            "which": np.ones((2, 3), bool),
        },
    ),
    "factor_decorrelation": (
        fedcfa.factor_decorrelation,
        {"factors": jnp.ones((4, 3), jnp.bfloat16), "mask": np.ones(4, bool)},
    ),
    "half_masks": (fedipg.half_masks, {"mask": jnp.ones(3, bool)}),
    "mask": (fedgma.mask, {"mean_sign": np.ones(3), "agreement": 0.5}),
    "factor": (vrex.factor, {"risk": jnp.ones(3), "mean_risk": 0.5, "beta": 1.0}),
    "ascend": (
        afl.ascend,
        {"mixture": jnp.ones(2) / 2, "losses": jnp.array([0.0, 1.0]), "step_size": 0.1},
    ),
    "unit": (cafe.unit, {"vectors": jnp.ones((2, 3))}),
    "leading_direction": (cafe.leading_direction, {"matrix": jnp.ones((2, 3))}),
    "orthogonal": (cafe.orthogonal, {"direction": jnp.ones((2, 3)), "to": jnp.ones(3)}),
    "rows_over_norms": (cafe.rows_over_norms, {"classifier": jnp.ones((2, 3)), "gamma": 0.1}),
    "without": (
        cafe.without,
        {
            "rows": jnp.ones((2, 3)),
            "global_direction": jnp.ones(3),
            "local_direction": np.ones((2, 3)),
            "alpha": 0.1,
            "beta": 0.2,
        },
    ),
    "logits": (
        cafe.logits,
        {"features": jnp.ones((5, 3)), "calibrated": jnp.ones((2, 3)), "scale": 1.0},
    ),
    "squared_norm": (fedsr.squared_norm, {"mean": VECTORS, "deviation": VECTORS + 1}),
    "divergence": (
        fedsr.divergence,
        {
            "mean": VECTORS,
            "deviation": VECTORS + 1,
            "to_mean": VECTORS,
            "to_deviation": VECTORS + 1,
        },
    ),
    "largest_curvature": (
        exit_strategy.largest_curvature,
        {"risk": lambda params: (params["a"] ** 2).sum(), "params": {"a": jnp.ones(2)}, "key": KEY},
    ),
    "contribution": (
        exit_strategy.contribution,
        {
            "global_grad": jnp.ones(3),
            "client_grads": jnp.ones((2, 3)),
            "weights": jnp.ones(2) / 2,
            "step_size": 0.1,
            "smoothness": 1.0,
        },
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_valid_arguments_of_kernels_are_accepted_also_where_traced(name: str) -> None:
    kernel, arguments = KERNELS[name]
    plain = {k for k, each in arguments.items() if callable(each) or isinstance(each, str | int)}
    traced = {k: each for k, each in arguments.items() if k not in plain}
    rest = {k: arguments[k] for k in plain}
    expected = jax.tree.map(jnp.shape, kernel(**arguments))
    found = jax.jit(lambda traced: kernel(**traced, **rest))(traced)
    assert jax.tree.map(jnp.shape, found) == expected


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (name, argument)
        for name, (_, arguments) in KERNELS.items()
        for argument, value in arguments.items()
        if getattr(value, "ndim", 0) and argument not in ("key", "memory_size")
        if (name, argument) not in (("scaled_update", "delta"), ("contribution", "global_grad"))
        if (name, argument) != ("contribution", "client_grads")  # which are trees, too
    ],
)
def test_kernels_refuse_lists(name: str, argument: str) -> None:
    kernel, arguments = KERNELS[name]
    nested = np.asarray(arguments[argument]).tolist()
    with pytest.raises(UsageError) as error:
        kernel(**{**arguments, argument: nested})
    found = "x=1.0" if (name, argument) == ("split_means", "x") else f"{argument}: is of type list,"
    assert str(error.value).startswith(found)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "response_logits",
            {"opponents": jnp.ones((1, 2, 3))},
            "opponents=float32 (1, 2, 3): must be [4, B, K] beside memory=float32 (4, 5, 2, 3)",
        ),
        (
            "response_logits",
            {"memory": jnp.ones((1, 5, 2, 3))},
            "opponents=float32 (4, 2, 3): must be [1, B, K] beside memory=float32 (1, 5, 2, 3)",
        ),
        (
            "response_logits",
            {"memory_size": jnp.ones(1, int)},
            "memory_size=int32 (1,): must be [] or [4], for each opponent",
        ),
        ("response_logits", {"plays": jnp.ones(1, bool)}, "plays=bool (1,): must be bool [4]"),
        ("response_logits", {"plays": jnp.ones(4, int)}, "plays=int32 (4,): must be bool [4]"),
        ("scaled_update", {"loss": jnp.ones(2)}, "loss=float32 (2,): must be a scalar"),
        ("scaled_update", {"loss": [0.5]}, "loss: is of type list, must be an array"),
        ("adjusted", {"gaps": jnp.ones(1)}, "gaps: has shapes (1,), must have those of weights"),
        ("adjusted", {"attends": jnp.ones((), bool)}, "attends: has shapes (), must have those"),
        ("adjusted", {"attends": np.ones(3, int)}, "attends=int64 (3,): must be bool [C]"),
        ("adjusted", {"weights": jnp.ones((3, 1))}, "weights=float32 (3, 1): must be [C]"),
        ("adjusted", {"step": -0.1}, "step=-0.1: must be a finite number, at least 0"),
        ("prototypes", {"features": jnp.ones((5, 1, 4))}, "features=float32 (5, 1, 4): must be [N"),
        ("prototypes", {"y": jnp.zeros(1, int)}, "y=int32 (1,): must be [5], as there are feat"),
        ("prototypes", {"mask": jnp.ones(5, int)}, "mask=int32 (5,): must be bool [5]"),
        ("prototypes", {"num_classes": 0}, "num_classes=0: must be an integer of at least 1"),
        ("chunk_means", {"mask": np.array([2, 0, 2, 0, 0])}, "mask=int64 (5,): must be bool [5]"),
        ("chunk_means", {"mask": np.ones(4, bool)}, "mask=bool (4,): must be bool [5]"),
        (
            "chunk_means",
            {"x": {"a": jnp.ones((1, 2))}},
            "x=float32 (1, 2): must be [5, ...], as y=float32 (5, 3) is",
        ),
        ("chunk_means", {"key": 0}, "key=0: must be one random key"),
        ("split_means", {"mask": jnp.ones(5)}, "mask=float32 (5,): must be bool [5]"),
        ("split_means", {"x": jnp.ones((4, 2))}, "x=float32 (4, 2): must be [5, ...], as y="),
        ("columns", {"y": jnp.float32(1)}, "y=1.0: must be [B] or [B, K]"),
        ("factor_scores", {"factors": jnp.ones(2)}, "factors=float32 (2,): must be [B, ..., F] in"),
        ("factor_scores", {"factors": jnp.ones((2, 3), int)}, "factors=int32 (2, 3): must be [B, "),
        ("factor_scores", {"decode_true_logit": 1}, "decode_true_logit=1: must be a function"),
        ("replaced", {"which": np.ones(3, bool)}, "which=bool (3,): must be bool [2, 3]"),
        ("replaced", {"which": np.ones((2, 3))}, "which=float64 (2, 3): must be bool [2, 3]"),
        ("replaced", {"average": jnp.ones((2, 3))}, "average: has shapes (2, 3), must have those"),
        ("replaced", {"factors": jnp.ones(3)}, "factors=float32 (3,): must be [B, ..., F]"),
        ("factor_decorrelation", {"mask": jnp.ones(4, int)}, "mask=int32 (4,): must be bool [4]"),
        ("factor_decorrelation", {"factors": jnp.ones(4)}, "factors=float32 (4,): must be [B, F]"),
        ("half_masks", {"mask": jnp.ones(3, int)}, "mask=int32 (3,): must be bool [B]"),
        ("half_masks", {"mask": jnp.ones((3, 1), bool)}, "mask=bool (3, 1): must be bool [B]"),
        ("mask", {"mean_sign": None}, "mean_sign=None: must be an array"),
        ("factor", {"mean_risk": jnp.ones(3)}, "mean_risk=float32 (3,): must be a scalar"),
        ("factor", {"mean_risk": [0.5]}, "mean_risk: is of type list, must be an array"),
        ("ascend", {"mixture": jnp.ones((2, 2))}, "mixture=float32 (2, 2): must be [C]"),
        ("unit", {"vectors": jnp.ones((2, 0))}, "vectors=float32 (2, 0): must be [..., D], D at l"),
        ("leading_direction", {"matrix": jnp.ones((0, 3))}, "matrix=float32 (0, 3): must be [K, D"),
        ("orthogonal", {"to": jnp.ones(1)}, "to=float32 (1,): must be [..., 3], as direction is"),
        ("orthogonal", {"direction": jnp.float32(1)}, "direction=1.0: must be [..., D]"),
        ("rows_over_norms", {"classifier": jnp.ones(3)}, "classifier=float32 (3,): must be [K, D]"),
        ("without", {"rows": jnp.ones(3)}, "rows=float32 (3,): must be [K, D]"),
        (
            "without",
            {"global_direction": jnp.ones((2, 1))},
            "global_direction=float32 (2, 1): must be [3] or [2, 3]",
        ),
        ("without", {"local_direction": jnp.ones(2)}, "local_direction=float32 (2,): must be [3]"),
        ("squared_norm", {"deviation": jnp.ones(3)}, "deviation: has shapes (3,), must have those"),
        ("divergence", {"to_mean": jnp.ones((1, 3))}, "to_mean: has shapes (1, 3), must have thos"),
        ("divergence", {"mean": jnp.float32(1)}, "mean=1.0: must be [B, ...]"),
        ("largest_curvature", {"key": 0}, "key=0: must be one random key"),
        (
            "largest_curvature",
            {"params": {"a": jnp.ones(2, int)}},
            "params: holds int32 at ['a'], must hold floating point",
        ),
        ("largest_curvature", {"params": 1}, "params: holds int, must hold floating point"),
        (
            "largest_curvature",
            {"risk": lambda params: params["a"]},
            "risk: returns shapes (2,), must return a scalar",
        ),
        ("largest_curvature", {"risk": None}, "risk=None: must be a function params -> a scalar"),
        (
            "contribution",
            {"client_grads": jnp.ones((0, 3)), "weights": jnp.ones(0)},
            "weights=float32 (0,): must be of at least one client",
        ),
    ],
)
def test_kernels_refuse_arrays_that_would_broadcast_or_fail(
    name: str, changes: dict[str, Any], message: str
) -> None:
    kernel, arguments = KERNELS[name]
    with pytest.raises(UsageError) as error:
        kernel(**{**arguments, **changes})
    assert str(error.value).startswith(message)


def _gradient(*at: Any) -> Any:
    return averaging.gradient(MODEL)(*at)


def _local_training(**changes: Any) -> Any:
    arguments = {
        "grad_fn": _gradient,
        "local": WORK.init(variables()),
        "shard": federations.shard_of(FEDERATION, 0),
        "key": KEY,
        **changes,
    }
    return WORK.run(*arguments.values())


def _stepping(**changes: Any) -> Any:
    return lambda *at: _gradient(*at)._replace(**changes)


def _round(**changes: Any) -> Any:
    """A round of FedAvg with other hooks, or with what its one exchange has."""
    arguments: dict[str, Any] = {"gradient_from": lambda visit: _gradient, **changes}
    client = arguments.pop("client", None)
    algorithm = averaging.averaging(MODEL, WORK, **arguments, **_OVER)
    if client:
        algorithm = algorithm._replace(exchanges=(algorithm.exchanges[0]._replace(client=client),))
    state = rounds.init(algorithm, variables(), FEDERATION, KEY)
    cohort = federations.cohort([0, 1])
    return rounds.step(algorithm, state, cohort, FEDERATION, axis=devices.vmapped())


NOTHING = averaging.NOTHING


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: WORK.init(variables().params),
            "variables: is of type Halves, must be a Variables",
        ),
        (
            lambda: _local_training(local=variables()),
            "local: is of type Variables, must be a Local",
        ),
        (
            lambda: _local_training(shard=FEDERATION),
            "shard: is of type Federation, must be a Shard",
        ),
        (lambda: _local_training(key=0), "key=0: must be one random key"),
        (
            lambda: _local_training(local=WORK.init(variables())._replace(variables=())),
            "local.variables: is of type tuple, must be a Variables",
        ),
        (
            lambda: _local_training(grad_fn=lambda variables, batch: None),
            "grad_fn: must take variables and batch and key (too many",
        ),
        (
            lambda: _local_training(grad_fn=_stepping(metrics={"loss": "low"})),
            "the metrics of a Step: holds a value of type str, must hold arrays",
        ),
        (
            lambda: _local_training(grad_fn=_stepping(average=("low",))),
            "the average of a Step: holds a value of type str, must hold arrays",
        ),
        (
            lambda: local.seeing_local(WORK)(*[None] * 4),
            "grad_fn=None: must be a function (local, batch, key) -> Step",
        ),
        (
            lambda: _round(gradient_from=lambda visit: None),
            "grad_fn=None: must be a function (variables, batch, key) -> Step",
        ),
        (
            lambda: _round(gradient_from=lambda visit: lambda variables: None),
            "grad_fn: must take variables and batch and key (too many",
        ),
        (
            lambda: _round(start=lambda visit: visit.message.variables),
            "local: is of type Variables, must be a Local",
        ),
        (
            lambda: _round(shared=lambda variables: variables.params),
            "the result of shared: is of type Halves, must be a Variables",
        ),
        (
            lambda: _round(side=NOTHING._replace(init=lambda setup: "no")),
            "the result of init_server: holds a value of type str at .side, must hold arrays",
        ),
        (
            lambda: _round(side=NOTHING._replace(send=lambda state: {"a": "no"})),
            "the result of side.send: holds a value of type str, must hold arrays",
        ),
        (
            lambda: _round(remember=lambda visit, trained: "no"),
            "the result of exchanges[0].client: holds a value of type str at .own, must hold ar",
        ),
        (
            lambda: _round(client=lambda visit: Reply((), visit.message.variables, {"loss": "no"})),
            "the result of exchanges[0].client: holds a value of type str at .metrics['loss']",
        ),
    ],
)
def test_results_of_hooks_are_told(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert str(error.value).startswith(message)


def test_a_result_of_local_training_is_told() -> None:
    algorithm = averaging.averaging_of(MODEL, lambda visit: visit.own, **_OVER)
    state = rounds.init(algorithm, variables(), FEDERATION, KEY)
    with pytest.raises(UsageError, match=r"^the result of train: is of type tuple, must be a Tra"):
        rounds.step(algorithm, state, federations.cohort([0]), FEDERATION, axis=devices.vmapped())


def test_whole_numbers_and_floats_may_be_metrics() -> None:
    trained = _local_training(grad_fn=_stepping(metrics={"one": 1, "half": 0.5}))
    assert trained.metrics == {"one": 1, "half": 0.5}
