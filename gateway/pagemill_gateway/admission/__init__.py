"""Limits on the requests that the gateway and its engines accept, and on the attempts of one request.

Imports neither torch nor aiohttp.
"""
