"""Gathers rows of a matrix: token embeddings, and the hidden states of the tokens that sample."""
