"""From values to an experiment: data, network, method, and the cells that they make."""
