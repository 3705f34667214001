"""Traces of requests, exported once a request is complete: by a gateway, and by an engine that clients call
directly."""
