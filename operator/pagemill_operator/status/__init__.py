"""Turns observations into conditions, for every backend."""
