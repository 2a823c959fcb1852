"""Each group of flags with its checks, and the maker of the part that it describes."""
