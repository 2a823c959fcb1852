"""From flags to an assembled experiment: configuration, grid, data."""
