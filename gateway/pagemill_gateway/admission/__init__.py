"""Bounds on what the gateway and its engines take, and on the tries of one request. No torch, no aiohttp."""
