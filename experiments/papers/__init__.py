"""Papers whose tables can be run: python -m experiments.papers.NAME."""

LISTED = ("fedipg", "fl_games")
