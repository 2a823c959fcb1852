"""Papers whose tables can be run: python -m experiments.papers.NAME."""

LISTED = ("fl_games",)
