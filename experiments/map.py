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

from .flags import command
from .shift_map import table
from .studies import study

BINARY = study.binary(table.PAPER, __doc__)


if __name__ == "__main__":
    command.main(BINARY)
