"""The rows of a study and their flags, as JSON, by the code that PYTHONPATH names.

PYTHONPATH=. python tools/rows.py paper cafe --study=methods --data=digits
"""

import importlib
import json
import sys
from collections.abc import Sequence

from absl import flags

from fedjax_inv_experiments.papers import study


def of(words: Sequence[str]) -> tuple[study.Paper, study.Options, list[study.Row]]:
    """The paper, the flags and the rows of a command for one data set, such as "map --data=digits".

    Raises UsageError for wrong flags.
    """
    is_map = words[0] == "map"
    name = "shift_map.table" if is_map else f"papers.{words[1]}"
    paper: study.Paper = importlib.import_module(f"fedjax_inv_experiments.{name}").PAPER
    values = flags.FlagValues()
    binary = study.binary(paper, None)
    binary.define(values)
    options = binary.read(["", *words[1 if is_map else 2 :]], values)
    (data,) = options.data
    return paper, options, paper.select(paper.studies[options.study], data, options)


if __name__ == "__main__":
    print(json.dumps({row.label: row.flags for row in of(sys.argv[1:])[2]}))
