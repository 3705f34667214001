"""Reads the frames that a gateway sends on `/internal/load`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
from waiting import WAIT_LIMIT_S

from pagemill_protocol.frames import LoadDecoder
from pagemill_protocol.report.load import LoadFrame


async def load_frames(response: aiohttp.ClientResponse) -> AsyncIterator[LoadFrame]:
    """Yield frames until the stream ends; fail if it sends nothing for a long time."""
    decoder = LoadDecoder()
    while data := await asyncio.wait_for(response.content.readany(), WAIT_LIMIT_S):
        for frame in decoder.feed(data):
            yield frame
