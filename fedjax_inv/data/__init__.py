"""Data sets on the host, environments, partitions, and federations."""
