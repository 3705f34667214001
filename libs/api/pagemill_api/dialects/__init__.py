"""Dialects: the HTTP APIs that clients use, one file each, plus one line in `registry`.

A dialect parses a body, prepares engine requests, and renders chunks, bodies, errors and the end of a stream. Engine,
gateway and relay use dialects through this interface only.
"""
