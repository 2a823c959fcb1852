"""Which flags have no effect beside others, so that nobody sets one in vain."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from experiments.experiment.groups import FLAGS, Config, Network, Participation, Server
from experiments.flags import names as registry
from experiments.flags.flag import flags_of
from experiments.parts import environments, optimizers
from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources


def idle(config: Config, values: Mapping[str, Any], given: Collection[str] = ()) -> dict[str, str]:
    """The flags of `values` that have no effect in this configuration, and why.

    Those at their default do not count, unless they are `given` and mean more than "off".
    """
    return {
        name: reason
        for name, reason in without_effect(config).items()
        if name in values
        and (values[name] != FLAGS[name].default or (name in given and _is_on(values[name])))
    }


def _is_on(value: Any) -> bool:
    return value not in (0, "", "0", "none", ()) or value is False


def check_data_dir(data_dir: str, *datasets: str) -> None:
    """Raises UsageError where --data_dir was set and none of the data sets is looked for there."""
    if data_dir and not any(map(sources.may_be_prepared, datasets)):
        raise UsageError(f"--data_dir={data_dir}: {_not_of_tfds(datasets[0])}")


def _not_of_tfds(dataset: str) -> str:
    return f"has no effect with --dataset={dataset}, which is not of TFDS"


class _Rule(NamedTuple):
    """Flags that have no effect."""

    flags: tuple[str, ...]
    reason: str


# What a network that takes the weights of a file has an argument for.
_ARGUMENT = {"weights": "image_size"}


def without_effect(config: Config) -> dict[str, str]:
    """The flags that have no effect, and why."""
    method, clients, model, run = config.method, config.clients, config.model, config.run
    environment = config.environment
    others = [kind.records for kind in environments.LISTED.values()]
    idle_records = {r for records in others for r in records} - set(environment.kind.records)
    of_environments = [field.name for record in idle_records for field in flags_of(record)]
    with_it = f"has no effect with --environment={environment.name}"
    rules = [_Rule(tuple(of_environments), with_it)]
    if not sources.may_be_prepared(config.data.dataset):
        rules.append(_Rule(("data_dir",), _not_of_tfds(config.data.dataset)))
    if not environment.is_drawn:
        rules.append(_Rule(("data_seed",), with_it))
    text = f"has no effect with --partition={config.partition.partition}"
    if config.partition.partition not in ("dirichlet", "quantity"):
        rules.append(_Rule(("alpha", "min_size"), text))
    if config.partition.partition != "shards":
        rules.append(_Rule(("classes_per_client",), text))
    names = ",".join(method.algorithm)
    if all(registry.facts(name).pooled for name in method.algorithm):
        text = f"has no effect with --algorithm={names}, which trains on all examples at once"
        rules.append(_Rule(tuple(field.name for field in flags_of(Participation)), text))
    taking_part = config.participation
    if taking_part.cohort:
        rules.append(
            _Rule(("sampling_rate",), f"has no effect beside --cohort={taking_part.cohort}")
        )
    if taking_part.frequency == 1:
        rules.append(_Rule(("sparse",), "has no effect without --frequency below 1"))
        if not taking_part.lossy and not taking_part.dropout:
            text = "has no effect without --frequency below 1 or --lossy or --dropout"
            rules.append(_Rule(("late",), text))
    if taking_part.late == "drop" and ":" not in taking_part.delay:
        text = "has no effect with --late=drop, unless with --delay=geometric:p"
        rules.append(_Rule(("longest_delay",), text))
    if clients.local_steps:
        text = f"has no effect beside --local_steps={clients.local_steps}"
        rules.append(_Rule(("local_epochs",), text))
    server = config.server
    for flag, name, fields in (
        ("optimizer", clients.optimizer, ("momentum",)),
        ("server_optimizer", server.server_optimizer, ("server_momentum", "server_epsilon")),
    ):
        own = optimizers.fields(flag, name).values()
        text = f"has no effect with --{flag}={name}"
        rules.append(_Rule(tuple({*fields} - {*own}), text))
    for flag, kind, prefix in (
        ("schedule", clients.schedule, ""),
        ("server_schedule", server.server_schedule, "server_"),
    ):
        text = f"has no effect with --{flag}={kind}"
        if kind != "exponential":
            rules.append(_Rule((f"{prefix}decay",), text))
        if kind != "cosine":
            rules.append(_Rule((f"{prefix}final_rate",), text))
    if not config.schedules_end:
        text = "has no effect without --schedule=cosine or --server_schedule=cosine"
        rules.append(_Rule(("schedule_rounds",), text))
    if server.server_optimizer == "rprop":
        text = "has no effect with --server_optimizer=rprop, whose rate is that of its first step"
        rules.append(_Rule(("server_schedule", "server_warmup_rounds"), text))
    if not any(
        registry.takes(registry.factory(name), "server_optimizer") for name in method.algorithm
    ):
        text = f"has no effect with --algorithm={names}, which has no such server"
        rules.append(_Rule(tuple(f.name for f in flags_of(Server)), text))
    network = registry.network(model.model)
    for field in flags_of(Network):
        is_for_all = field.name in ("model", "init_from", "augment", "dtype")
        is_taken = registry.takes(network, _ARGUMENT.get(field.name, field.name))
        if not is_for_all and not is_taken:
            rules.append(_Rule((field.name,), f"--model={model.model} has no {field.name}"))
    if not config.watching.stop_below:
        rules.append(_Rule(("warm_start",), "has no effect without --stop_below"))
    if not config.watching.thresholds:
        text = "has no effect without --stop_below or --stop_above"
        rules.append(_Rule(("after_stop",), text))
    if run.num_processes == 1 and run.devices == 1:
        rules.append(_Rule(("hold",), "has no effect without --devices or --num_processes above 1"))
    if run.num_processes == 1:
        text = "has no effect without --num_processes above 1"
        rules.append(_Rule(("coordinator_address",), text))
    return {name: rule.reason for rule in rules for name in rule.flags}
