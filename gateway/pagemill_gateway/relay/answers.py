"""The answer to one client request: a single engine request, or several prompts fanned out and merged.

A chat or a completion of one prompt goes through unparsed. Several prompts are independent engine requests, each with
its own endpoint and retries; streamed, their events interleave and one usage event and `[DONE]` close them all; else
their bodies become one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pagemill_gateway.brain.interface import RoutingRequest
from pagemill_gateway.relay.preparation import Prepared
from pagemill_gateway.relay.relay import Relay
from pagemill_gateway.relay.sinks import BodySink, Sink, StreamSink, Write
from pagemill_gateway.request_record import RequestRecord
from pagemill_protocol.generate import GenerateRequest, Usage
from pagemill_protocol.openai import render

MAX_CONCURRENT_PROMPTS = 64
"""Of one client request; further ones wait until one has finished."""


async def stream(relay: Relay, prepared: Prepared, write: Write, record: RequestRecord) -> None:
    """Write the whole answer as SSE events. Raises as `Relay.run`."""
    requests = prepared.requests
    if len(requests) == 1:
        record.add_usage(
            await relay.run(prepared.target, requests[0], prepared.routing_requests[0], StreamSink(write), record)
        )
        return
    turn = asyncio.Lock()

    async def write_in_turn(data: bytes) -> None:
        async with turn:
            await write(data)

    sinks = [StreamSink(write_in_turn, closes=False) for _ in requests]
    await _run_all(relay, prepared, sinks, record)
    closing = render.SSE_DONE
    if requests[0].include_usage:
        head = render.head(requests[0])
        closing = render.sse(render.usage_chunk(head, requests[0].dialect, record.usage)) + closing
    await write(closing)


async def collect(relay: Relay, prepared: Prepared, record: RequestRecord) -> bytes:
    """The whole answer as one JSON body. Raises `PagemillError`."""
    sinks = [BodySink() for _ in prepared.requests]
    if len(sinks) == 1:
        record.add_usage(
            await relay.run(prepared.target, prepared.requests[0], prepared.routing_requests[0], sinks[0], record)
        )
        return sinks[0].body
    await _run_all(relay, prepared, sinks, record)
    return await asyncio.to_thread(render.merge_completion_bodies, [sink.body for sink in sinks])


async def _run_all(relay: Relay, prepared: Prepared, sinks: Sequence[Sink], record: RequestRecord) -> None:
    """All requests, or the first error; the others are aborted then."""
    places = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

    async def run_one(request: GenerateRequest, routing_request: RoutingRequest, sink: Sink) -> Usage:
        async with places:
            return await relay.run(prepared.target, request, routing_request, sink, record)

    try:
        async with asyncio.TaskGroup() as group:
            jobs = zip(prepared.requests, prepared.routing_requests, sinks, strict=True)
            tasks = [group.create_task(run_one(*job)) for job in jobs]
    except BaseExceptionGroup as errors:
        # The group holds the first failure, and what the others raised while they were cancelled.
        raise errors.exceptions[0] from None
    for task in tasks:
        record.add_usage(task.result())
