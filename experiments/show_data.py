"""The data of an experiment: images of every domain, and the examples of each client.

fedjax-inv show-data --environment=stained --stain=both --clients=20 --out=data.png

It takes the flags of train, and shows the data of the first seed. It trains nothing. Of vectors,
such as those of a table, it draws histograms of targets and features, and prints the range of each
feature. Of texts it draws the counts of each client alone.
"""

from absl import app, flags

from . import command_line, start

_IMAGES = flags.DEFINE_integer(
    "images", 10, "Images of each domain, their labels in turn.", lower_bound=1, upper_bound=500
)
for _name in (*command_line.OF_TRAINING, "out"):
    flags.declare_key_flag(_name)


@start.binary
def main(argv: list[str]) -> str:
    """Draws the picture, and returns the table and the path of the picture."""
    del argv
    from .assembly import machine
    from .report import data_report

    chosen = command_line.chosen()
    machine.prepare(chosen.machine)
    return data_report.show(chosen, flags.FLAGS.out or "data.png", _IMAGES.value)


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse)
