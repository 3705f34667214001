"""The parts of `pagemill top`: a live table of engines' metrics, from this machine or a cluster."""
