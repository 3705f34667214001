"""Keeps the state of all engines and chooses the engine of each request. Contains no HTTP."""
