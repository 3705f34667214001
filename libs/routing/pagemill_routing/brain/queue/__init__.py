"""Queues of requests that wait for capacity on an engine, or for an engine at all."""
