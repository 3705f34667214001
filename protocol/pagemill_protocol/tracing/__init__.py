"""Traces of requests, exported once a request is over: by a gateway, and by an engine that clients call directly."""
