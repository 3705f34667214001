"""Why an engine that reports no state is not ready: its own words from `/readyz`, for people and error messages."""

from __future__ import annotations

import aiohttp
import msgspec

from pagemill_gateway.bounded import TooLarge, read_bounded

READYZ_TIMEOUT_S = 1.0
READYZ_MAX_BYTES = 64 * 1024


class _Readyz(msgspec.Struct):
    phase: str = ""
    detail: str = ""


async def fetch_phase(session: aiohttp.ClientSession, control_url: str, otherwise: str) -> tuple[str, str]:
    """`(phase, detail)`, such as `("loading", "weights 40 %")`; `("unreachable", otherwise)` when nobody answers."""
    timeout = aiohttp.ClientTimeout(total=READYZ_TIMEOUT_S)
    try:
        async with session.get(f"{control_url}/readyz", timeout=timeout, allow_redirects=False) as response:
            answer = msgspec.json.decode(await read_bounded(response, READYZ_MAX_BYTES), type=_Readyz)
    except (aiohttp.ClientError, TimeoutError, OSError, TooLarge, msgspec.DecodeError, UnicodeDecodeError):
        return "unreachable", otherwise
    return answer.phase[:100] or "not ready", answer.detail[:300] or otherwise
