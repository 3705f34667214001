"""What a gateway reports on `/internal/load`, frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
from waiting import WAIT_LIMIT_S

from pagemill_protocol.frames import LoadDecoder
from pagemill_protocol.load import LoadFrame


async def load_frames(response: aiohttp.ClientResponse) -> AsyncIterator[LoadFrame]:
    """Until the stream ends; fails when it says nothing for long."""
    decoder = LoadDecoder()
    while data := await asyncio.wait_for(response.content.readany(), WAIT_LIMIT_S):
        for frame in decoder.feed(data):
            yield frame
