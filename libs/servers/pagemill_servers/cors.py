"""CORS: lets web pages of configured origins use a data port, by the Fetch standard's protocol.

Disabled without origins: then no page of another origin can read an answer. Keys are sent in headers, so credentials
that browsers add by themselves (cookies) are never allowed. Engine and gateway wrap their data apps in it, outside
`request_middleware`.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill_servers.auth import header

EVERY_ORIGIN = "*"
MAX_AGE_S = 600
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_,\- ]{0,1024}")
_EXPOSED = b"x-request-id, retry-after, openai-processing-ms"


class Cors:
    """ASGI middleware. `allowed_origins`: origins such as `https://app.example.com`, or `*` for all."""

    def __init__(self, app: ASGIApp, allowed_origins: Collection[str]) -> None:
        self._app = app
        self._allowed = {origin.lower().rstrip("/") for origin in allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = header(scope, b"origin") if scope["type"] == "http" else None
        if origin is None or not (EVERY_ORIGIN in self._allowed or origin.lower() in self._allowed):
            await self._app(scope, receive, send)
            return
        added = [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method") is not None:
            headers = [*added, *_permissions(scope)]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *added, (b"access-control-expose-headers", _EXPOSED)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_allowed)


def is_origin(text: str) -> bool:
    """Whether the text is `*`, or scheme and host without a path."""
    return text == EVERY_ORIGIN or re.fullmatch(r"https?://[^/\s?#@]+/?", text) is not None


def _permissions(scope: Scope) -> list[tuple[bytes, bytes]]:
    asked = header(scope, b"access-control-request-headers") or ""
    names = asked if _HEADER_NAMES.fullmatch(asked) else ""
    return [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", names.encode()),
        (b"access-control-max-age", b"%d" % MAX_AGE_S),
    ]
