"""Data sets on the host, environments, partitions, and the federations built from them."""
