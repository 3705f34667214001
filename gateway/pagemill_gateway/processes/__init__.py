"""The processes of a gateway with several workers: how they are started, set up and ended."""
