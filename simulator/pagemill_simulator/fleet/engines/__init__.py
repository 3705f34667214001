"""Simulated engines: exact ones, which run the real scheduler, and fast ones."""
