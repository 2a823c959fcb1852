"""Studies: the tables and figures of papers, `fedjax-inv paper NAME`."""

from ..experiment.command_line import PAPERS as LISTED

__all__ = ["LISTED"]
