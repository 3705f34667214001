"""Read a peer's whole body up to a limit."""

from __future__ import annotations

from typing import Protocol


class TooLarge(Exception):
    """The peer sent more than the limit."""


class _Content(Protocol):
    async def readany(self) -> bytes: ...


class ClientResponseBody(Protocol):
    """The part of an `aiohttp.ClientResponse` that is needed here."""

    @property
    def content(self) -> _Content: ...


async def read_bounded(response: ClientResponseBody, limit_bytes: int) -> bytes:
    """Return the whole body. Raises `TooLarge`, or `aiohttp.ClientError` when the connection breaks."""
    chunks: list[bytes] = []
    size = 0
    while data := await response.content.readany():
        size += len(data)
        if size > limit_bytes:
            raise TooLarge(f"more than {limit_bytes} bytes")
        chunks.append(data)
    return b"".join(chunks)
