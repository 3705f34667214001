"""A closed loop of clients for an OpenAI-compatible completions endpoint: prompts as token ids, answers streamed.

Requests name one model, or each its own: adapters have names as models have.

Every request opens a connection of its own, for all servers alike, because one of them closes its sockets after a
stream. The client shares the machine's cores with the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp

from peers.wire import Jobs

REQUEST_TIMEOUT_S = 600.0


class Answer(NamedTuple):
    """Times of one request in seconds."""

    ttft_s: float
    e2e_s: float
    gaps_s: list[float]
    num_tokens: int

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / max(1, self.num_tokens - 1)


class LoadError(Exception):
    """A server refused, broke off, or answered with another length than requested."""


def send(url: str, model: str, jobs: Jobs, clients: int) -> tuple[float, list[Answer]]:
    """Send all jobs in order, `clients` at a time; return the wall time in seconds and the answers."""
    return send_each(url, [(model, *job) for job in jobs], clients)


def send_each(url: str, requests: Sequence[tuple[str, list[int], int]], clients: int) -> tuple[float, list[Answer]]:
    """Send requests of model, prompt and number of tokens as `send` does."""
    return asyncio.run(_send(url, requests, clients))


async def _send(url: str, requests: Sequence[tuple[str, list[int], int]], clients: int) -> tuple[float, list[Answer]]:
    answers: list[Answer] = []
    waiting = iter(requests)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def client() -> None:
            for model, prompt, num_tokens in waiting:  # shared: each client takes the next one
                answers.append(await _one(session, url, model, prompt, num_tokens))

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(clients, len(requests))):
                group.create_task(client())
        return time.perf_counter() - start, answers


async def _one(session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], num_tokens: int) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    arrivals: list[float] = []
    generated = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise LoadError(f"HTTP {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            event = parse_event(line)
            if event is None:
                continue
            if any(choice.get("text") or choice.get("finish_reason") for choice in event.get("choices", [])):
                arrivals.append(time.perf_counter())
            generated = (event.get("usage") or {}).get("completion_tokens") or generated
    if not arrivals or generated != num_tokens:
        raise LoadError(f"{generated} tokens in {len(arrivals)} events where {num_tokens} tokens were asked for")
    gaps = [late - early for early, late in itertools.pairwise(arrivals)]
    return Answer(arrivals[0] - start, arrivals[-1] - start, gaps, generated)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the JSON of a `data:` line; None for other lines and for the end mark."""
    if not line.startswith(b"data:"):
        return None
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return None
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise LoadError(str(event["error"])[:200])
    return event
