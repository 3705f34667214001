"""The load of everything that runs on this machine, summed from the reports of the gateway and the engines."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

import aiohttp
import msgspec

from pagemill_protocol.report.state import EngineLoad, total_counts

TIMEOUT = aiohttp.ClientTimeout(total=2.0)
GENERATED = re.compile(r"^vllm:generation_tokens(?:_total)?(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)


class MachineLoad(NamedTuple):
    """The load at one instant."""

    engines: EngineLoad = EngineLoad()
    """The load of all engines."""
    num_generated: float = 0.0
    """Tokens generated since the engines started."""
    num_queued: int = 0
    """Requests that wait in the gateway until an engine has capacity."""
    ttft_ms: float | None = None
    """95th percentile of the clients' times to first token in the last minute; None: no stream has begun."""
    at_s: float = 0.0
    """Monotonic time of the measurement in seconds."""

    def tokens_per_s(self, before: MachineLoad) -> float:
        """Return the tokens generated per second between two instants; a restarted engine counts from 0 again."""
        elapsed_s = self.at_s - before.at_s
        return max(0.0, self.num_generated - before.num_generated) / elapsed_s if elapsed_s > 0 else 0.0


async def read_load(
    session: aiohttp.ClientSession, gateway_url: str, token: str, engine_urls: Iterable[str]
) -> MachineLoad:
    """Read the load from the control ports; a process that does not answer counts as idle.

    `token` is the token of the gateway's control port.
    """
    status, *texts = await asyncio.gather(
        _get(session, f"{gateway_url}/status", {"Authorization": f"Bearer {token}"}),
        *(_get(session, f"{url}/metrics", {}) for url in engine_urls),
    )
    generated = sum(float(number) for text in texts for number in GENERATED.findall(text.decode("utf-8", "replace")))
    return MachineLoad(EngineLoad(**total_counts(_loads(status))), generated, at_s=time.monotonic())


def _loads(status: bytes) -> list[EngineLoad]:
    """Return the `load` of every endpoint in the gateway's `GET /status`."""
    try:
        models = json.loads(status)["models"]
        loads = [endpoint["load"] for model in models for endpoint in model["endpoints"] if endpoint.get("load")]
        return msgspec.convert(loads, list[EngineLoad])
    except (ValueError, KeyError, TypeError):
        return []


async def _get(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> bytes:
    try:
        async with session.get(url, headers=headers, timeout=TIMEOUT) as response:
            return await response.read() if response.status == 200 else b""
    except (aiohttp.ClientError, TimeoutError, OSError):
        return b""
