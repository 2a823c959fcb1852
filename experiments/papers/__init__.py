"""Papers whose tables can be run: python -m experiments.papers.NAME."""

LISTED = ("cafe", "fedcfa", "fedipg", "fl_games")
