"""The papers whose tables can be computed: fedjax-inv paper NAME."""

from fedjax_inv_experiments.experiment.command_line import PAPERS as LISTED

__all__ = ["LISTED"]
