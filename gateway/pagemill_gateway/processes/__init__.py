"""The processes of a gateway with several workers: their start, setup, supervision and end."""
