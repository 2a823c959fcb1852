"""How many clients to train at once, by which convolution: every fixed choice, and auto's.

python -m experiments.benchmarks.client_axis --settings=a,b,c

The choices take turns, so that a machine whose speed drifts is fair to all; medians count.
"""

import jax
from absl import app, flags

from experiments import registry
from experiments.benchmarks import workloads
from fedjax_inv import models

FLAGS = flags.FLAGS


def choices(setting: workloads.Setting) -> list[workloads.Choice]:
    """Every fixed choice of --chunks and --convs that differs from the others."""
    chunks = sorted({0 if size >= setting.cohort else size for size in map(int, FLAGS.chunks)})
    convs = ["auto"] if setting.network == "mlp" else FLAGS.convs
    return [workloads.Choice(chunk, conv) for conv in convs for chunk in chunks]


def main(argv: list[str]) -> None:
    del argv
    rows = []
    for name in FLAGS.settings:
        registry.check_known("settings", name, workloads.SETTINGS)
        setting = workloads.SETTINGS[name]
        data = workloads.noise(setting)
        chosen = workloads.auto(setting, data)
        engines = {
            choice.label: workloads.Engine(setting, choice, data) for choice in choices(setting)
        }
        engines[f"auto ({chosen.label})"] = workloads.Engine(setting, chosen, data)
        seconds = workloads.in_turns(engines, 1, FLAGS.rounds, setting.client_steps)
        fastest = min(map(workloads.median, seconds.values()))
        of_setting = [
            {"setting": name, "clients at once/conv": label}
            | workloads.figures(times, setting.client_steps)
            | {"over fastest": workloads.median(times) / fastest}
            for label, times in seconds.items()
        ]
        workloads.show(f"({name}) {setting.title}, {jax.devices()[0].device_kind}", of_setting)
        rows += of_setting
        workloads.save(FLAGS.json, rows)


if __name__ == "__main__":
    flags.DEFINE_list("settings", list(workloads.SETTINGS), "Settings of workloads.py.")
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
