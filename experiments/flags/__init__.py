"""Flags, the command lines of binaries, and the names that flags take."""
