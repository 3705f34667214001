"""Traffic for a simulated fleet: read from trace files, drawn by generators, or taken from a recording."""
