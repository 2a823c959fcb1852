"""Real data, environments, partitions and the federations built from them."""
