"""Reads a peer's whole body up to a limit."""

from __future__ import annotations

import aiohttp


class TooLarge(Exception):
    """The peer sent more than the limit."""


async def read_bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The whole body. Raises `TooLarge`, or `aiohttp.ClientError` when the connection breaks."""
    chunks: list[bytes] = []
    size = 0
    while data := await response.content.readany():
        size += len(data)
        if size > limit_bytes:
            raise TooLarge(f"more than {limit_bytes} bytes")
        chunks.append(data)
    return b"".join(chunks)
