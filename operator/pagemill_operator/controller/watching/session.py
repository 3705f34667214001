"""The HTTP session that kopf watches with: it uses the credentials of `pagemill_kube` and reports what arrives.

kopf reports neither bookmarks nor complete listings to its handlers; both are read here from the connection and
reported to `watches`. Lists lose their managedFields before kopf queues them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from pagemill_kube.credentials import Credentials
from pagemill_operator.backends.kubernetes.kinds import WATCHED_KINDS
from pagemill_operator.controller.watching.watches import StreamId, Watches

_COLLECTION = re.compile(r"/(?:api|apis/(?P<group>[^/]+))/[^/]+(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)")
_KINDS = {(kind.group, kind.plural): kind.name for kind in WATCHED_KINDS}


def watch_session(
    credentials: Credentials, watches: Watches, on_response: Callable[[str, str], None]
) -> aiohttp.ClientSession:
    """Return a session for `kopf.AiohttpSession`. `on_response` is called with code and method."""

    async def observe(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        request.headers.update(await credentials.headers())
        at = stream_of(request.url.path)
        try:
            response = await handler(request)
        except (aiohttp.ClientError, OSError, TimeoutError):
            on_response("error", request.method)
            if at:
                watches.tried(at)
            raise
        on_response(str(response.status), request.method)
        if at and response.status >= 400:
            watches.tried(at)
            _raise_for_transient(response)
        return response

    class Observed(aiohttp.ClientResponse):
        """A response that reports to `watches` what it reads."""

        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            at = stream_of(self.url.path)
            if at and self.status == 200 and self.url.query.get("watch"):
                watches.watch_begins(at)
                watches.received(at)
                self.content = _Noted(self.content, lambda: watches.received(at))  # type: ignore[assignment]
            return self

        async def json(self, **options: Any) -> Any:
            answer = await super().json(**options)
            at = stream_of(self.url.path)
            if at and self.status == 200 and isinstance(answer, dict) and "items" in answer:
                items = answer["items"] or []
                for item in items:
                    item["metadata"].pop("managedFields", None)
                identities = [(item["metadata"]["namespace"], item["metadata"]["name"]) for item in items]
                watches.page(at, identities, is_first="continue" not in self.url.query)
            return answer

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=credentials.tls if credentials.tls is not None else True),
        middlewares=(observe,),
        response_class=Observed,
        # A line of a watch may be as long as the largest object.
        read_bufsize=2**20,
        proxy=credentials.proxy,
    )


def _raise_for_transient(response: aiohttp.ClientResponse) -> None:
    """Turn answers for which kopf would exit into connection errors, after which it tries again."""
    if response.status == 404:
        response.release()
        raise aiohttp.ClientConnectionError(f"{response.url.path} is not served (yet, or any more)")
    if response.status == 410:
        response.release()
        # The pages of the listing took too long, so it starts again.
        raise aiohttp.ClientPayloadError(f"{response.url.path}: the listing has expired")


def stream_of(path: str) -> StreamId | None:
    """Return the watch that a request for a collection belongs to, or None."""
    match = _COLLECTION.fullmatch(path)
    if match is None:
        return None
    kind = _KINDS.get((match["group"] or "", match["plural"]))
    return StreamId(kind, match["namespace"] or "") if kind else None


class _Noted:
    """A body that calls `received` when something arrives."""

    def __init__(self, body: aiohttp.StreamReader, received: Callable[[], None]) -> None:
        self._body = body
        self._received = received

    async def iter_chunked(self, num_bytes: int) -> AsyncIterator[bytes]:
        async for chunk in self._body.iter_chunked(num_bytes):
            self._received()
            yield chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)
