"""The choice of how many devices share a model."""
