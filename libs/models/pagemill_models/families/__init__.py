"""Families of models, one file each, found by the architecture that a model's files name (`declaration.registry`)."""
