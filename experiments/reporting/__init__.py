"""Finished runs, their tables and their figures."""
