"""Continuous batching: decides how many tokens of which request each step computes. Does not import torch."""
