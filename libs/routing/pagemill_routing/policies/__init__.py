"""Routing policies: pure functions that choose an endpoint from candidates. Imports neither torch nor aiohttp."""
