"""The load: streamed completions at given times over kept connections, in a process of its own that gets JSON lines.

Requests do not wait for answers. An answer's times count from the moment its request is handed to the HTTP client; how
late that was is reported too. `site` chooses the requests and the server.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
from peers.http_load import LoadError, parse_event

from truth.compare import Latencies

ANSWER_TIMEOUT_S = 300.0


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    at_s: float
    """Seconds after the first request."""
    prompt: list[int]
    num_tokens: int


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    model: str
    key: str
    requests: str
    """JSON file: a list of requests by time."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    lag_ms: float
    """Milliseconds by which the request was sent too late."""
    ttft_ms: float
    tpot_ms: float | None
    """Milliseconds per output token; None: the answer has one token."""
    end_s: float
    """Seconds since the job's beginning."""


def latencies(answers: Sequence[Answer]) -> Latencies:
    return Latencies([each.ttft_ms for each in answers], [each.tpot_ms for each in answers if each.tpot_ms is not None])


async def play(session: aiohttp.ClientSession, job: Job, requests: list[Request]) -> list[Answer]:
    bodies = [_body(job, each) for each in requests]
    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_one(session, job, request, body, begun_s))
            for request, body in zip(requests, bodies, strict=True)
        ]
    return [task.result() for task in tasks]


def _body(job: Job, request: Request) -> bytes:
    body = {
        "model": job.model,
        "prompt": request.prompt,
        "max_tokens": request.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def _one(session: aiohttp.ClientSession, job: Job, request: Request, body: bytes, begun_s: float) -> Answer:
    headers = {"Authorization": f"Bearer {job.key}", "Content-Type": "application/json"}
    due_s = begun_s + request.at_s
    await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    sent_s = time.perf_counter()
    first_s = last_s = 0.0
    generated = 0
    async with session.post(f"{job.url}/v1/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise LoadError(f"HTTP {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            event = parse_event(line)
            if event is None:
                continue
            if event["choices"]:
                last_s = time.perf_counter()
                first_s = first_s or last_s
            generated = (event.get("usage") or {}).get("completion_tokens") or generated
    if generated != request.num_tokens:
        raise LoadError(f"{generated} tokens where {request.num_tokens} were asked for")
    gaps = request.num_tokens - 1
    return Answer(
        lag_ms=(sent_s - due_s) * 1000,
        ttft_ms=(first_s - sent_s) * 1000,
        tpot_ms=(last_s - first_s) * 1000 / gaps if gaps else None,
        end_s=last_s - begun_s,
    )


async def _serve() -> None:
    """Read one line of JSON and write one until stdin ends."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=ANSWER_TIMEOUT_S)
    decoder = msgspec.json.Decoder(Job)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        gc.freeze()
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await _report(session, decoder.decode(line))), flush=True)


async def _report(session: aiohttp.ClientSession, job: Job) -> dict[str, Any]:
    try:
        requests = await asyncio.to_thread(Path(job.requests).read_bytes)
        answers = await play(session, job, msgspec.json.decode(requests, type=list[Request]))
    except* (LoadError, aiohttp.ClientError, TimeoutError) as group:
        failed = _first(group)
    else:
        return {"answers": msgspec.to_builtins(answers)}
    return {"failed": f"{type(failed).__name__}: {failed}"}


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    uvloop.run(_serve())
