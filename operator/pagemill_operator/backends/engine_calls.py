"""The two calls that a backend makes to an engine: sleep, and wake up. Both may be repeated.

Which engines are told what, `standby` decides.
"""

from __future__ import annotations

from typing import Literal

import aiohttp

Call = Literal["sleep", "wake_up"]
WAIT_S = {"sleep": 5.0, "wake_up": 30.0}
"""An engine whose requests still run will sleep when they are done: that is not waited for."""
MARGIN_S = 5.0
MAX_ANSWER_BYTES = 1000


async def call_engine(session: aiohttp.ClientSession, control_url: str, token: str, call: Call) -> str:
    """Why it did not do as told; empty: it did, or is about to."""
    wait_s = WAIT_S[call]
    timeout = aiohttp.ClientTimeout(total=wait_s + MARGIN_S)
    headers = {"Authorization": f"Bearer {token}"}
    url = f"{control_url}/{call}?wait_s={wait_s:g}"
    try:
        async with session.post(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
            answer = await response.content.read(MAX_ANSWER_BYTES)
            return "" if response.status < 300 else f"{response.status} {answer.decode(errors='replace')}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return f"{type(error).__name__}: {error}"
