"""Ways to make domains from a data set: a file for each family, and the list of their names."""

from ...parts.environments import rotated, simpson, spurious, stained
from ...parts.environments.kind import Kind

LISTED: dict[str, Kind] = {
    "rotated": rotated.ROTATED,
    "colored": spurious.COLORED,
    "patched": spurious.PATCHED,
    "combinations": stained.COMBINATIONS,
    "stained": stained.STAINED,
    "simpson": simpson.SIMPSON,
    "none": Kind("the data's own domains", (), lambda data, source, chosen: data),
}
