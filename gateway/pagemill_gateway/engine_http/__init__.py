"""Connections and requests of the gateway to engines over HTTP."""
