"""The HTTP layer that engine and gateway share: limits, error bodies, request ids, bearer tokens.

`request_middleware` is the ASGI middleware and re-exports the rest; `connection` bounds what happens before ASGI,
inside uvicorn; `guard` decides who may use control routes.
"""
