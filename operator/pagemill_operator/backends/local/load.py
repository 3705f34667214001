"""The load of everything that runs on this machine, summed from the reports of the gateway and the engines."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

TIMEOUT = aiohttp.ClientTimeout(total=2.0)
GENERATED = re.compile(r"^vllm:generation_tokens(?:_total)?(?:\{[^}]*\})? ([0-9.eE+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class MachineLoad:
    """The load at one instant."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of all blocks that running requests hold."""
    num_generated: float = 0.0
    """Tokens generated since the engines started."""
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
    return _sum(_loads(status), generated)


def _sum(loads: list[dict[str, Any]], num_generated: float) -> MachineLoad:
    total = sum(load.get("num_blocks_total", 0) for load in loads)
    active = sum(load.get("num_blocks_active", 0) for load in loads)
    return MachineLoad(
        num_running=sum(load.get("num_requests_running", 0) for load in loads),
        num_waiting=sum(load.get("num_requests_waiting", 0) for load in loads),
        kv_cache_usage=active / total if total else 0.0,
        num_generated=num_generated,
        at_s=time.monotonic(),
    )


def _loads(status: bytes) -> list[dict[str, Any]]:
    """Return the `load` of every endpoint in the gateway's `GET /status`."""
    try:
        models = json.loads(status)["models"]
    except (ValueError, KeyError, TypeError):
        return []
    return [endpoint["load"] for model in models for endpoint in model["endpoints"] if endpoint.get("load")]


async def _get(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> bytes:
    try:
        async with session.get(url, headers=headers, timeout=TIMEOUT) as response:
            return await response.read() if response.status == 200 else b""
    except (aiohttp.ClientError, TimeoutError, OSError):
        return b""
