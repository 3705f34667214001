"""Proposes tokens that may follow, which a step then verifies together."""
