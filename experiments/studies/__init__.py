"""Studies: the tables and figures of papers, `fedjax-inv paper NAME`."""
