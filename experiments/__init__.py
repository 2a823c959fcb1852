"""Experiments: absl binaries, the flags that they share, and what turns flags into runs."""
