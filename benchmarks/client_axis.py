"""Speed by the number of clients at once and the convolution: fixed choices, and the measured one.

python -m benchmarks.client_axis --workloads=a,b,c

The choices take turns, so that a machine whose speed drifts is fair to all; medians count.
"""

import dataclasses
from collections.abc import Iterator

import jax

from benchmarks import frame, workloads
from fedjax_inv import models
from fedjax_inv_experiments.flags import command
from fedjax_inv_experiments.flags.flag import at_least, flag


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of this benchmark."""

    workloads: tuple[str, ...] = workloads.workloads_flag()
    chunks: tuple[int, ...] = flag((1, 5, 0), "Clients at once; 0: all.", at_least(0))
    convs: tuple[str, ...] = flag(
        (),
        "Convolution lowerings; repeatable, default: im2col, canonical and auto. lax is slow on a "
        "CPU.",
        choices=models.LOWERINGS,
        kind=str,
        repeats=True,
    )
    rounds: int = flag(5, "Timed rounds of each.", at_least(1))
    json: str = flag("", "File for the figures.")


def choices(options: Options, workload: workloads.Workload) -> list[workloads.Choice]:
    """Every fixed choice of --chunks and --convs that differs from the others."""
    chunks = sorted({0 if size >= workload.cohort else size for size in options.chunks})
    convs = options.convs or ("im2col", "canonical", "auto")
    convs = ("auto",) if workload.network == "mlp" else convs
    return [workloads.Choice(chunk, conv) for conv in convs for chunk in chunks]


def tables(options: Options) -> Iterator[frame.Table]:
    for name in options.workloads:
        workload = workloads.WORKLOADS[name]
        data = workloads.noise(workload)
        chosen = workloads.auto(workload)
        engines = {
            choice.label: workloads.Engine(workload, choice, data)
            for choice in choices(options, workload)
        }
        engines[f"auto ({chosen.label})"] = workloads.Engine(workload, chosen, data)
        seconds = workloads.in_turns(engines, 1, options.rounds, workload.client_steps)
        fastest = min(map(frame.median, seconds.values()))
        of_setting = [
            {"workload": name, "clients at once/conv": label}
            | workloads.figures(times, workload.client_steps)
            | {"over fastest": frame.median(times) / fastest}
            for label, times in seconds.items()
        ]
        yield frame.Table(f"({name}) {workload.title}, {jax.devices()[0].device_kind}", of_setting)


BINARY = frame.binary(tables, Options, __doc__)

if __name__ == "__main__":
    command.main(BINARY)
