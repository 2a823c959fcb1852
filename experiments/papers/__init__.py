"""The papers whose tables can be computed: fedjax-inv paper NAME."""

from ..experiment.command_line import PAPERS as LISTED

__all__ = ["LISTED"]
