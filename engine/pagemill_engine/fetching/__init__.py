"""The model loader: copies a model from its source onto a volume before engines start. Does not import torch."""
