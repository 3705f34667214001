"""Limits that several gateways share through Redis, and their fallback while Redis is unavailable."""
