"""Limits shared by several gateways through Redis, and what each does while Redis is away."""
