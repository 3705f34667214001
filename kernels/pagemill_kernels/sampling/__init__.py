"""Samples tokens from logits for a whole batch: requested changes, filters, the seeded draw, log probabilities.

The draw is a specification (`randomness`, `arithmetic`, `filters`): every implementation draws the same tokens.
"""
