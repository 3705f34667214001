"""Mixtures of experts: each token's row passes its chosen experts; their outputs are weighted and summed.

Rows are sorted by expert, so that a step reads the weights of every expert that has rows once, and of no other.
"""
