"""Follows the load stream of one gateway, from the request to its end. `store` keeps the reports."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp

from pagemill_protocol.frames import LOAD_CONTENT_TYPE, FrameError, LoadDecoder
from pagemill_protocol.report.load import LoadFrame
from pagemill_protocol.versions import UnsupportedProtocol, check_peer, protocol_headers

SILENCE_TIMEOUT_S = 8.0
"""Seconds without data after which the stream counts as broken: gateways send a frame every 2 s."""
CONNECT_TIMEOUT_S = 5.0
STREAM_FAULTS = (aiohttp.ClientError, OSError, TimeoutError, FrameError, UnsupportedProtocol)


async def follow_load(
    session: aiohttp.ClientSession, control_url: str, token: str, on_frame: Callable[[LoadFrame], None]
) -> None:
    """Follow the stream until it ends. Raise one of `STREAM_FAULTS` for anything but an orderly end."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {token}", **protocol_headers()}
    url = f"{control_url}/internal/load"
    async with session.get(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
        if response.status != 200:
            raise FrameError(f"the answer is {response.status}")
        if response.content_type != LOAD_CONTENT_TYPE:
            raise FrameError(f"the answer is {response.content_type}, not {LOAD_CONTENT_TYPE}: another version")
        check_peer("The gateway", response.headers)
        decoder = LoadDecoder()
        while data := await response.content.readany():
            for frame in decoder.feed(data):
                on_frame(frame)
        decoder.close()
