"""Observations to conditions, shared by every backend."""
