"""Papers whose tables can be run: python -m experiments.papers.NAME."""

LISTED = ("fedcfa", "fedipg", "fl_games")
