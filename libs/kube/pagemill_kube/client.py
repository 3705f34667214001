"""Requests to the API server as plain JSON: single objects, server-side apply, complete lists and watches.

Writes are fenced: right before each write, the client asks how long the process still leads, and limits the request to
that time. Neighbours: `list_watch` keeps one kind up to date; the operator's `controller.leading.lease` provides the
remaining time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import aiohttp
import msgspec

from pagemill_kube.credentials import Credentials
from pagemill_kube.errors import ApiError, CredentialsError, Gone, NotLeading, Unreachable
from pagemill_kube.kinds import Kind
from pagemill_protocol.peer_body import TooLarge, read_bounded

Manifest = dict[str, Any]

REQUEST_TIMEOUT_S = 10.0
LIST_TIMEOUT_S = 30.0
"""Timeout of each page of a list."""
CONNECT_TIMEOUT_S = 5.0
NO_LIMITS = aiohttp.ClientTimeout(total=None)
PAGE_SIZE = 500
MAX_ANSWER_BYTES = 256 * 1024 * 1024
MAX_EVENT_BYTES = 16 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
APPLY = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"


class ListPage(NamedTuple):
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


class Client:
    def __init__(
        self,
        credentials: Credentials,
        *,
        field_manager: str = "pagemill",
        remaining_s: Callable[[], float] = lambda: float("inf"),
        on_response: Callable[[str, str], None] = lambda code, method: None,
    ) -> None:
        """Make a client inside a running event loop.

        `remaining_s`: returns the seconds for which writing is allowed; `on_response` is called with code and method.
        """
        self._credentials = credentials
        self._field_manager = field_manager
        self._remaining_s = remaining_s
        self._on_response = on_response
        # Every watch keeps a connection open.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False)

    async def close(self) -> None:
        await self._session.close()

    @property
    def is_ipv6(self) -> bool:
        """Whether the API server has an address of IPv6, as pods see it where IPv6 is the cluster's first family."""
        return ":" in (urlsplit(self._credentials.base_url).hostname or "")

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Manifest:
        return await self.request("GET", path, query=query)

    async def find(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        try:
            return await self.get(kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def apply(self, kind: Kind, manifest: Manifest, *, force: bool) -> Manifest:
        """Apply a manifest on the server. Returns the resulting object.

        Without `force`, a conflict with another field manager raises `ApiError` 409.
        """
        metadata = manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": self._field_manager, "force": str(force).lower()}
        return await self.write("PATCH", path, query=query, body=manifest, content_type=APPLY)

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        """Merge a patch into the status subresource; `None` removes a field. A resource version in it is a
        precondition."""
        return await self._merge(kind.path(namespace, name, "status"), patch)

    async def create(self, kind: Kind, manifest: Manifest) -> Manifest:
        path = kind.path(manifest["metadata"]["namespace"])
        return await self.write("POST", path, query={"fieldManager": self._field_manager}, body=manifest)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        return await self._merge(kind.path(namespace, name), patch)

    async def _merge(self, path: str, patch: Mapping[str, Any]) -> Manifest:
        query = {"fieldManager": self._field_manager}
        return await self.write("PATCH", path, query=query, body=dict(patch), content_type=MERGE_PATCH)

    async def delete(self, kind: Kind, manifest: Manifest) -> None:
        """Delete exactly this object, by its uid, with its children. A missing object is no error."""
        metadata = manifest["metadata"]
        body = {"propagationPolicy": "Background", "preconditions": {"uid": metadata["uid"]}}
        try:
            await self.write("DELETE", kind.path(metadata["namespace"], metadata["name"]), body=body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def write(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Manifest:
        """Send a request that only the leader may send. Raises `NotLeading`."""
        remaining_s = self._remaining_s()
        if remaining_s <= 0:
            raise NotLeading
        timeout_s = min(REQUEST_TIMEOUT_S, remaining_s)
        return await self.request(
            method, path, query=query, body=body, content_type=content_type, timeout_s=timeout_s, fenced=True
        )

    async def list(self, path: str, selector: Mapping[str, str]) -> ListPage:
        """Return all objects. Raises `Gone`, `ApiError` or `Unreachable`."""
        items: list[msgspec.Raw] = []
        token = ""
        while True:
            query = {**selector, "limit": str(PAGE_SIZE), **({"continue": token} if token else {})}
            page = msgspec.json.decode(await self._send("GET", path, query=query, timeout_s=LIST_TIMEOUT_S), type=_List)
            items += page.items or []
            token = page.metadata.continue_
            if not token:
                return ListPage(items, page.metadata.resource_version)

    async def watch(
        self,
        path: str,
        selector: Mapping[str, str],
        resource_version: str,
        *,
        timeout_s: int,
        idle_timeout_s: float,
        on_open: Callable[[], None],
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield changes since `resource_version`, until the server ends the watch regularly after `timeout_s`.

        `on_open` is called when the server has accepted the watch; the first change may come much later. Raises `Gone`,
        `ApiError` or `Unreachable`.
        """
        query = {
            **selector,
            "watch": "1",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(timeout_s),
        }
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=idle_timeout_s)
        try:
            async with self._open("GET", path, query=query, limits=limits) as response:
                on_open()
                async for line in _lines(response):
                    yield _decode_event(line)
        except (aiohttp.ClientError, OSError, TooLarge, CredentialsError) as error:
            raise Unreachable(f"watch of {path}: {str(error) or type(error).__name__}") from error

    async def read(
        self, path: str, *, query: Mapping[str, str] | None = None, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> bytes:
        """Return the unparsed answer to a GET, such as a log, or an answer of a pod through the API server's proxy."""
        return await self._send("GET", path, query=query, accept="*/*", timeout_s=timeout_s)

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout_s: float = REQUEST_TIMEOUT_S,
        fenced: bool = False,
    ) -> Manifest:
        """Send a request and return its answer. Raises `ApiError`, `Unreachable` and, if `fenced`, `NotLeading`."""
        return _decoded(
            await self._send(
                method, path, query=query, body=body, content_type=content_type, timeout_s=timeout_s, fenced=fenced
            )
        )

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        timeout_s: float = REQUEST_TIMEOUT_S,
        fenced: bool = False,
    ) -> bytes:
        headers = {"Content-Type": content_type, "Accept": accept}
        try:
            # Not the session's own timeout, which is rounded up to whole seconds.
            async with (
                asyncio.timeout(timeout_s),
                self._open(method, path, query=query, body=body, headers=headers, fenced=fenced) as response,
            ):
                return await read_bounded(response, MAX_ANSWER_BYTES)
        except TimeoutError:
            self._on_response("timeout", method)
            raise Unreachable(f"{method} {path}: no answer in {timeout_s:.1f} s") from None
        except (aiohttp.ClientError, OSError, TooLarge, CredentialsError) as error:
            self._on_response("error", method)
            raise Unreachable(f"{method} {path}: {str(error) or type(error).__name__}") from None

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        limits: aiohttp.ClientTimeout = NO_LIMITS,
        fenced: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response if its status is not an error."""
        credentials = self._credentials
        all_headers = {"Accept": "application/json", **(headers or {}), **await credentials.headers()}
        # Reading credentials may have taken time.
        if fenced and self._remaining_s() <= 0:
            raise NotLeading
        async with self._session.request(
            method,
            f"{credentials.base_url}{path}" + (f"?{urlencode(query)}" if query else ""),
            data=None if body is None else json.dumps(body).encode(),
            headers=all_headers,
            ssl=credentials.tls if credentials.tls is not None else True,
            proxy=credentials.proxy,
            timeout=limits,
            allow_redirects=False,
        ) as response:
            self._on_response(str(response.status), method)
            if response.status >= 300:
                raise _error(response.status, await read_bounded(response, MAX_ERROR_BYTES))
            yield response


def _decoded(data: bytes) -> Manifest:
    decoded: Manifest = json.loads(data) if data else {}
    return decoded


def _error(code: int, data: bytes) -> ApiError:
    try:
        status = msgspec.json.decode(data, type=_Status)
    except (msgspec.DecodeError, UnicodeDecodeError):
        status = _Status(message=data[:200].decode("utf-8", "replace"))
    return _api_error(code, status)


def _api_error(code: int, status: _Status) -> ApiError:
    """Return the error. 410 means that the history is no longer available.

    A resource version from the future means that the server lost history, such as after a restore of etcd.
    """
    kind = Gone if code == 410 or "resource version" in status.message.lower() else ApiError
    return kind(code, status.reason or "Unknown", status.message)


def _decode_event(line: bytes) -> WatchEvent:
    event = msgspec.json.decode(line, type=_Event)
    if event.type == "ERROR":
        status = msgspec.json.decode(event.object, type=_Status)
        raise _api_error(status.code, status)
    return WatchEvent(event.type, event.object)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield lines, which may be longer than the library's own line reader allows."""
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
