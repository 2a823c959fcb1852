"""The map: which method helps against which kind of shift between clients.

fedjax-inv map --data=digits

Each cell is a method under a kind of shift, with one number for the severity of the shift. The
table shows its test accuracy, and the word better or worse where it differs from FedAvg; the figure
and map.csv show the difference. All methods have the same network, data, rounds and number of
settings.

Studies: map (all methods and kinds of shift), severity (accuracy by severity, for FedAvg and the
three best methods of the finished map). --columns=labels,noise selects kinds of shift, and
--rows=fedprox,scaffold methods, FedAvg beside them. --rows=all,package.module:factory adds an
algorithm of your own, and --grid=mu=0.01,0.1,1 three values of its hyperparameter; finished runs
stay, so that only its own runs start. --beside=OTHER/map.csv counts the cells that keep their word
with other --seeds.
"""

from typing import TYPE_CHECKING

from absl import app, flags

from . import command_line, start

if TYPE_CHECKING:
    from .studies import map_table

_COLUMNS = flags.DEFINE_list("columns", [], "Kinds of shift; all if none.")
_GRID = flags.DEFINE_string(
    "grid",
    "",
    "A hyperparameter of your own rows and its values, as mu=0.01,0.1,1. Such a row has three "
    "learning rates for each value; without --grid it has nine.",
)
_BESIDE = flags.DEFINE_string(
    "beside",
    "",
    "The map.csv of the same map with other --seeds; counts the cells that have the same word in "
    "both.",
)
for _name in (*command_line.OF_TRAINING, "study", "rows", "data"):
    flags.declare_key_flag(_name)


def own() -> "map_table.MapFlags":
    """The flags of the map alone."""
    from .studies import map_table

    return map_table.MapFlags(tuple(_COLUMNS.value), _GRID.value, _BESIDE.value)


@start.binary
def main(argv: list[str]) -> str:
    """Runs the map or a part of it, and returns its table."""
    del argv
    from .studies import map_table, study

    return study.run_all(map_table.MAP, study.options(map_table.MAP, own()))


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse)
