"""Asks a process on this machine whether it lives, whether it is ready, and if not, why."""

from __future__ import annotations

import json
from dataclasses import dataclass

import aiohttp

TIMEOUT = aiohttp.ClientTimeout(total=2.0)
MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class Answer:
    ready: bool
    words: str
    """Why not, for people: phase and detail."""
    phase: str = ""
    """Where it stands, by its own word."""


async def ask_readyz(session: aiohttp.ClientSession, control_url: str) -> Answer | None:
    """`None` while nothing answers."""
    try:
        async with session.get(f"{control_url}/readyz", timeout=TIMEOUT) as response:
            body = await response.content.read(MAX_BYTES)
            return Answer(response.status == 200, describe(body), phase_of(body))
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


async def ask_alive(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether a liveness question is answered with 200, and soon."""
    try:
        async with session.get(url, timeout=TIMEOUT) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def phase_of(body: bytes) -> str:
    try:
        return str(json.loads(body).get("phase", ""))
    except (ValueError, AttributeError):
        return ""


def describe(body: bytes) -> str:
    """`{"phase": "loading", "detail": "weights 40 %"}` -> `loading weights 40 %`."""
    try:
        answer = json.loads(body)
        phase, detail = str(answer.get("phase", "")), str(answer.get("detail", ""))
    except (ValueError, AttributeError):
        return "not ready"
    if detail.startswith(phase):
        phase = ""
    return f"{phase} {detail}".strip()[:300] or "not ready"
