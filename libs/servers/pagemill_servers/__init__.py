"""What every server process stands on: limits of connections and requests, TLS, keys, secrets, traces, logs.

`request_middleware` is the ASGI middleware and re-exports the rest; `connection` bounds what happens before ASGI,
inside uvicorn; `guard` decides who may use control routes.
"""
