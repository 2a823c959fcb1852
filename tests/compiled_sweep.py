"""python tests/compiled_sweep.py cpu|v5e-8: what a sweep of 64 runs compiles to for eight devices.

It prints the number of loops in the program of the rounds, whether one of them is the rounds', and
the names of the collectives of this program and of the one that evaluates. The devices need not be
there.
"""

import sys

from benchmarks import accelerators, hlo  # isort: skip  # before JAX starts

import jax
from jax.experimental import topologies
from jax.sharding import AxisType

from fedjax_inv import platforms, program
from fedjax_inv.devices import CLIENTS, RUNS, Layout, shape_of_mesh
from fedjax_inv_experiments.experiment import assemble, config

_DEVICES = 8


def texts(target: str) -> list[str]:
    """The compiled texts of two rounds and of their evaluation."""
    is_here = target == "cpu"
    count = _DEVICES if is_here else 1
    jax.config.update("jax_num_cpu_devices", count)
    flags = config.of(
        seeds=tuple(range(8)),
        learning_rate=tuple(0.01 * one for one in range(1, 9)),
        devices=str(count),
        environment="none",
        clients=2,
        batch_size=16,
        widths=(4,),
        eval_every=2,
    )
    assembled = assemble.assemble(flags)
    (cell,) = assembled.cells
    layout = assembled.layout(cell)
    if not is_here:
        shape = shape_of_mesh(len(cell.runs), 2, _DEVICES)
        described = accelerators.TARGETS[target].describe()
        mesh = topologies.make_mesh(described, shape, (RUNS, CLIENTS))
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * 2)
        layout = Layout(mesh, num_runs=len(cell.runs))
    assert (len(cell.runs), layout.run_devices, layout.client_devices) == (64, _DEVICES, 1)
    with platforms.traced_for("cpu" if is_here else accelerators.TARGETS[target].platform):
        ready = assembled.prepare(cell)
        data, inputs = layout.place(assembled.data, ready.inputs, accelerators.shapes)
        compiled = program.make(ready.experiment, client_chunk=1, run_chunk=0, layout=layout)
        training = jax.eval_shape(compiled.init, data, inputs)
        cohorts = assemble.cohorts(flags, ready.inputs, flags.watching.eval_every)
        on = ("cpu",) if is_here else ("tpu",)
        return [
            traced.lower(lowering_platforms=on).compile().as_text() or ""
            for traced in (
                compiled.rounds.trace(data, inputs, training, cohorts),
                compiled.evaluate.trace(data, inputs, training),
            )
        ]


def main() -> None:
    """Prints what the texts say."""
    rounds, evaluation = map(hlo.Program, texts(sys.argv[1]))
    print(len(rounds.loops()), rounds.named("rounds") is not None)
    print(*(one.name for read in (rounds, evaluation) for one in hlo.collectives(read)))


if __name__ == "__main__":
    main()
