"""What a flag is, how a command line is read, and which names flags can take."""
