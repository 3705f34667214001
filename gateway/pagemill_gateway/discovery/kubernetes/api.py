"""Two requests to an API server: the whole list of a kind, and all changes from there on.

Plain HTTP over one session; `list_watch` decides which kinds to read and when to ask again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, NamedTuple
from urllib.parse import urlencode

import aiohttp
import msgspec

from pagemill_gateway.bounded import TooLarge, read_bounded
from pagemill_gateway.discovery.kubernetes.credentials import Credentials

PAGE_SIZE = 500
REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
MAX_LIST_BYTES = 256 * 1024 * 1024
MAX_EVENT_BYTES = 16 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024


class ApiFault(Exception):
    """The server's answer is an error, or not what was requested."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Gone(Exception):
    """The watch cannot continue from its resource version: list again."""


FAULTS = (ApiFault, aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, UnicodeDecodeError, TooLarge)
"""How a request can fail, besides `Gone` and `CredentialsError`."""


class Page(NamedTuple):
    items: list[msgspec.Raw]
    resource_version: str


class WatchEvent(NamedTuple):
    kind: str
    """ADDED, MODIFIED, DELETED or BOOKMARK."""
    object: msgspec.Raw


class _ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    code: int = 0


class ApiClient:
    def __init__(self, session: aiohttp.ClientSession, credentials: Credentials) -> None:
        self._session = session
        self._credentials = credentials

    async def list(self, path: str, selector: dict[str, str]) -> Page:
        """All objects. Raises `Gone`, `CredentialsError` or one of `FAULTS`."""
        items: list[msgspec.Raw] = []
        token = ""
        while True:
            page = await self._page(
                path, {**selector, "limit": str(PAGE_SIZE), **({"continue": token} if token else {})}
            )
            items += page.items or []
            token = page.metadata.continue_
            if not token:
                return Page(items, page.metadata.resource_version)

    async def watch(
        self,
        path: str,
        selector: dict[str, str],
        resource_version: str,
        *,
        timeout_s: int,
        idle_timeout_s: float,
        on_open: Callable[[], None],
    ) -> AsyncGenerator[WatchEvent, None]:
        """Changes since `resource_version`, until the server ends the watch regularly after `timeout_s`.

        `on_open` is called when the server has accepted the watch; the first change may come much later. Raises `Gone`,
        `CredentialsError` or one of `FAULTS`.
        """
        query = {
            **selector,
            "watch": "1",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(timeout_s),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=idle_timeout_s)
        async with self._get(path, query, timeout) as response:
            await _check(response)
            on_open()
            async for line in _lines(response):
                yield _decode_event(line)

    async def _page(self, path: str, query: dict[str, str]) -> _List:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        async with self._get(path, query, timeout) as response:
            await _check(response)
            return msgspec.json.decode(await read_bounded(response, MAX_LIST_BYTES), type=_List)

    def _get(self, path: str, query: dict[str, str], timeout: aiohttp.ClientTimeout) -> Any:
        return self._session.get(
            f"{self._credentials.base_url}{path}?{urlencode(query)}",
            headers={"Accept": "application/json", **self._credentials.headers()},
            ssl=self._credentials.tls if self._credentials.tls is not None else True,
            timeout=timeout,
            allow_redirects=False,
        )


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    raw = await read_bounded(response, MAX_ERROR_BYTES)
    try:
        status = msgspec.json.decode(raw, type=_Status)
    except (msgspec.DecodeError, UnicodeDecodeError):
        status = _Status(message=raw[:200].decode("utf-8", "replace"))
    _refuse(response.status, status)


def _decode_event(line: bytes) -> WatchEvent:
    event = msgspec.json.decode(line, type=_Event)
    if event.type == "ERROR":
        status = msgspec.json.decode(event.object, type=_Status)
        _refuse(status.code, status)
    return WatchEvent(event.type, event.object)


def _refuse(code: int, status: _Status) -> None:
    """410: the history is no longer kept. A version from the future: the server lost history (etcd was restored)."""
    if code == 410 or "resource version" in status.message.lower():
        raise Gone(status.message)
    raise ApiFault(code, status.message or status.reason or "no message")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Objects may be longer than what the library's own line reader takes."""
    parts: list[bytes] = []
    size = 0
    async for data in response.content.iter_any():
        *complete, rest = data.split(b"\n")
        for piece in complete:
            line = b"".join([*parts, piece])
            parts, size = [], 0
            if line.strip():
                yield line
        if rest:
            parts.append(rest)
            size += len(rest)
        if size > MAX_EVENT_BYTES:
            raise TooLarge(MAX_EVENT_BYTES)
