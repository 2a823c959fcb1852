"""Studies: the tables and figures of papers, and the map."""
