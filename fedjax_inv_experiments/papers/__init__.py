"""The papers whose tables can be computed: python -m experiments.papers.NAME."""

from fedjax_inv_experiments.experiment.command_line import PAPERS as LISTED

__all__ = ["LISTED"]
