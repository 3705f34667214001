"""`GET /` and `HEAD /`, by which clients such as Ollama's command line find out whether a server is there. No key is
needed, and the answer names nothing but the program.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

HOME_PATH = "/"


async def home(request: Request) -> Response:
    return PlainTextResponse("Pagemill is running\n")
