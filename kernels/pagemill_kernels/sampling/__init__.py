"""Tokens from logits, for a whole batch: changes that requests ask for, filters, the seeded draw, log probabilities.

The draw is a specification (`randomness`, `arithmetic`, `filters`): whatever implements it draws the same tokens.
"""
