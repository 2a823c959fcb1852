"""One algorithm per file; each file's factory has the file's name."""
