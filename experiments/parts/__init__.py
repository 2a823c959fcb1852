"""Each group of flags, with its checks and the function that makes its part of an experiment."""
