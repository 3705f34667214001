"""Dialects: the HTTP APIs that clients speak. One file each, plus one line in `registry`.

A dialect parses a body, prepares engine requests, and renders chunks, bodies, errors and the end of a stream. Engine,
gateway and relay know dialects by this interface only.
"""
