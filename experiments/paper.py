"""The tables and figures of a paper: each row is a grid, with the paper's numbers beside ours.

fedjax-inv paper cafe --data=digits

Papers: cafe, fedcfa, fedipg, fl_games, and four without a paper: first_look, methods under three
kinds of shift; selection, methods by rules of selection; frozen, methods on the features of a
frozen network; and private_robust, robust rules and privacy where few clients hold a domain. The
files of experiments/studies/ name their studies; those in TOML are as of `compare`. Each row has
its own folder of runs, and finished runs stay there, so a study can be interrupted. The flags of
train replace those of all rows; of a TOML file not a row's own.
"""

import functools

from absl import app, flags

from . import command_line, start

for _name in (*command_line.OF_TRAINING, "study", "rows", "data"):
    flags.declare_key_flag(_name)
PAPERS = (
    "cafe",
    "fedcfa",
    "fedipg",
    "first_look",
    "fl_games",
    "frozen",
    "private_robust",
    "selection",
)


@start.binary
def main(argv: list[str]) -> str:
    """Runs a study of the paper that the first word names, and returns its table."""
    from .errors import check_known
    from .studies import study

    name = argv[0].replace("-", "_") if argv else ""
    check_known("paper", name, PAPERS)
    paper = study.paper(name)
    return study.run_all(paper, study.options(paper))


if __name__ == "__main__":
    app.run(main, flags_parser=functools.partial(command_line.parse, words=1))
