"""Requests to the API server as plain JSON, on the official client's connection and credentials.

Writes are fenced: each one asks right before it is sent how long the process still leads, and may not take longer.
Neighbours: `controller.lease` gives the time; `controller.session` lends the same credentials to kopf's watches.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration

from pagemill_operator.backends.kubernetes.kinds import Kind
from pagemill_operator.backends.kubernetes.snapshot import FIELD_MANAGER, Manifest

REQUEST_TIMEOUT_S = 10.0
APPLY = "application/apply-patch+yaml"
MALFORMED = ("failed to create typed patch object", "failed to convert new object")
MERGE_PATCH = "application/merge-patch+json"


class ApiError(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def is_passing(self) -> bool:
        """It lies with the server or the moment, not with the request."""
        return self.status in (408, 409, 429) or (self.status >= 500 and not self.is_malformed)

    @property
    def is_malformed(self) -> bool:
        """Server-side apply answers 500 to a manifest with a field of the wrong type or name."""
        return self.status == 422 or self.message.startswith(MALFORMED)


class Unreachable(Exception):
    """No answer came, or none in time. The write may still have happened."""


class NotLeading(Exception):
    """This process may not write (any more)."""


class Client:
    def __init__(
        self,
        configuration: Configuration,
        *,
        remaining_s: Callable[[], float] = lambda: float("inf"),
        on_response: Callable[[str, str], None] = lambda code, method: None,
    ) -> None:
        """`remaining_s`: seconds for which writing is allowed; `on_response` is called with code and method."""
        self._api = ApiClient(configuration)
        self._host = configuration.host.rstrip("/")
        self._configuration = configuration
        self._remaining_s = remaining_s
        self._on_response = on_response

    async def close(self) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

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
        """Server-side apply; returns the object as it stands. Without `force`, what others wrote differently is 409."""
        metadata = manifest["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": FIELD_MANAGER, "force": str(force).lower()}
        return await self.write("PATCH", path, query=query, body=manifest, content_type=APPLY)

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        """Merge into the status subresource; `None` removes a field. A resource version in it is a precondition."""
        return await self._merge(kind.path(namespace, name, "status"), patch)

    async def create(self, kind: Kind, manifest: Manifest) -> Manifest:
        path = kind.path(manifest["metadata"]["namespace"])
        return await self.write("POST", path, query={"fieldManager": FIELD_MANAGER}, body=manifest)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        return await self._merge(kind.path(namespace, name), patch)

    async def _merge(self, path: str, patch: Mapping[str, Any]) -> Manifest:
        query = {"fieldManager": FIELD_MANAGER}
        return await self.write("PATCH", path, query=query, body=dict(patch), content_type=MERGE_PATCH)

    async def delete(self, kind: Kind, manifest: Manifest) -> None:
        """Exactly this object, by its uid; its own children go with it. One that is gone already is fine."""
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
        """A request that only the leader may send. Raises `NotLeading`."""
        remaining_s = self._remaining_s()
        if remaining_s <= 0:
            raise NotLeading
        timeout_s = min(REQUEST_TIMEOUT_S, remaining_s)
        return await self.request(
            method, path, query=query, body=body, content_type=content_type, timeout_s=timeout_s, fenced=True
        )

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
        """Raises `ApiError`, `Unreachable` and, where `fenced`, `NotLeading`."""
        return _decoded(
            await self._send(
                method, path, query=query, body=body, content_type=content_type, timeout_s=timeout_s, fenced=fenced
            )
        )

    async def read(self, path: str) -> bytes:
        """The answer to GET as it is, such as a pod's own behind the API server's proxy."""
        return await self._send("GET", path, accept="*/*")

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
        url = f"{self._host}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            # Not the session's own timeout, which is rounded up to whole seconds.
            async with asyncio.timeout(timeout_s):
                headers = {"Content-Type": content_type, "Accept": accept, **await self._authorization()}
                # Reading credentials may have taken its time.
                if fenced and self._remaining_s() <= 0:
                    raise NotLeading
                response = await self._api.call_api(method, url, headers, body, None, aiohttp.ClientTimeout())
                data: bytes = await response.read()  # type: ignore[no-untyped-call]
        except TimeoutError:
            self._on_response("timeout", method)
            raise Unreachable(f"{method} {path}: no answer in {timeout_s:.1f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            self._on_response("error", method)
            raise Unreachable(f"{method} {path}: {error}") from None
        self._on_response(str(response.status), method)
        if response.status >= 400:
            raise _api_error(response.status, data)
        return data

    async def _authorization(self) -> dict[str, str]:
        return await authorization(self._configuration)


async def authorization(configuration: Configuration) -> dict[str, str]:
    """The header that proves who we are; tokens of service accounts and commands are renewed on the way."""
    settings = await configuration.auth_settings()
    token = settings.get("BearerToken", {}).get("value")
    return {"Authorization": str(token)} if token else {}


def _decoded(data: bytes) -> Manifest:
    decoded: Manifest = json.loads(data) if data else {}
    return decoded


def _api_error(status: int, data: bytes) -> ApiError:
    try:
        answer = json.loads(data)
        return ApiError(status, str(answer.get("reason") or "Unknown"), str(answer.get("message") or ""))
    except (ValueError, AttributeError):
        return ApiError(status, "Unknown", data[:200].decode("utf-8", "replace"))
