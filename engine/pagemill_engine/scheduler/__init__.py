"""Decides how many tokens of which request each step computes. No torch."""
