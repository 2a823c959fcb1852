"""How many clients to train at once, by which convolution: every fixed choice, and auto's.

python -m benchmarks.client_axis --workloads=a,b,c

The choices take turns, so that a machine whose speed drifts is fair to all; medians count.
"""

import jax
from absl import app, flags

from benchmarks import workloads
from experiments.flags.flag import check_known
from fedjax_inv import models

FLAGS = flags.FLAGS


def choices(workload: workloads.Workload) -> list[workloads.Choice]:
    """Every fixed choice of --chunks and --convs that differs from the others."""
    chunks = sorted({0 if size >= workload.cohort else size for size in map(int, FLAGS.chunks)})
    convs = ["auto"] if workload.network == "mlp" else FLAGS.convs
    return [workloads.Choice(chunk, conv) for conv in convs for chunk in chunks]


def main(argv: list[str]) -> None:
    del argv
    rows = []
    for name in FLAGS.workloads:
        check_known("workloads", name, workloads.WORKLOADS)
        workload = workloads.WORKLOADS[name]
        data = workloads.noise(workload)
        chosen = workloads.auto(workload, data)
        engines = {
            choice.label: workloads.Engine(workload, choice, data) for choice in choices(workload)
        }
        engines[f"auto ({chosen.label})"] = workloads.Engine(workload, chosen, data)
        seconds = workloads.in_turns(engines, 1, FLAGS.rounds, workload.client_steps)
        fastest = min(map(workloads.median, seconds.values()))
        of_setting = [
            {"workload": name, "clients at once/conv": label}
            | workloads.figures(times, workload.client_steps)
            | {"over fastest": workloads.median(times) / fastest}
            for label, times in seconds.items()
        ]
        workloads.show(f"({name}) {workload.title}, {jax.devices()[0].device_kind}", of_setting)
        rows += of_setting
        workloads.save(FLAGS.json, rows)


if __name__ == "__main__":
    flags.DEFINE_list("workloads", list(workloads.WORKLOADS), "Workloads of workloads.py.")
    flags.DEFINE_list("chunks", ["1", "5", "0"], "Clients at once; 0: all.")
    flags.DEFINE_multi_enum(
        "convs",
        ["im2col", "canonical", "auto"],
        models.LOWERINGS,
        "Convolution lowerings; repeatable. lax is slow on a CPU.",
    )
    flags.DEFINE_integer("rounds", 5, "Timed rounds of each.", lower_bound=1)
    flags.DEFINE_string("json", "", "File for the figures.")
    app.run(main)
