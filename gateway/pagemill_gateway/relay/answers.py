"""The answer to one client request: a single engine request, or several prompts whose answers are merged.

The answer to a single prompt is forwarded unparsed. Several prompts are independent engine requests, each with its own
endpoint and retries. In a stream their events interleave, and one usage event and `[DONE]` end them all; otherwise
their bodies are merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pagemill_api.dialects.registry import dialect_of
from pagemill_gateway.limits.allowance import Allowance
from pagemill_gateway.relay.keep_alive import Write
from pagemill_gateway.relay.preparation import PreparedRequest
from pagemill_gateway.relay.relay import Relay
from pagemill_gateway.relay.sinks import BodySink, Direct, PartWriter, Sink, StreamSink
from pagemill_gateway.request_record import RequestRecord
from pagemill_protocol.json_pieces import pieces_of
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_routing.brain.interface import RoutingRequest

MAX_CONCURRENT_PROMPTS = 64
"""Limit for the running prompts of one client request; others wait."""


Allowances = Sequence[Allowance | None]
"""The allowance of each prompt; `None` if the caller has no token limits."""
Ended = Callable[[], Awaitable[None]]
"""Called when the answer is complete, before the client gets its end."""


async def stream(
    relay: Relay,
    prepared: PreparedRequest,
    write: Write,
    record: RequestRecord,
    allowances: Allowances,
    ended: Ended,
    direct: Direct | None = None,
    client: PartWriter | None = None,
) -> None:
    """Write the answer as events. `direct` and `client` are the same client, for plain streams and large events.

    Raises like `Relay.run`.
    """
    requests = prepared.requests
    dialect = dialect_of(requests[0].dialect)
    if len(requests) == 1:
        sink = StreamSink(write, dialect.transport, direct=direct, client=client, passes=True)
        await _run_all(relay, prepared, [sink], record, allowances)
        await ended()
        await sink.finish()
        return
    turn = asyncio.Lock()

    async def write_in_turn(data: bytes) -> None:
        async with turn:
            await write(data)

    sinks = [StreamSink(write_in_turn, dialect.transport, closes=False, client=client) for _ in requests]
    await _run_all(relay, prepared, sinks, record, allowances)
    await ended()
    await write(dialect.merged_end(requests[0], record.usage))


async def collect(
    relay: Relay,
    prepared: PreparedRequest,
    record: RequestRecord,
    allowances: Allowances,
    ended: Ended,
    client: PartWriter | None = None,
) -> bytes | None:
    """Return the whole answer as one JSON body, or `None` if `client` has got it in parts. Raises `PagemillError`."""
    requests = prepared.requests
    sinks = [BodySink(client, passes=len(requests) == 1) for _ in requests]
    try:
        await _run_all(relay, prepared, sinks, record, allowances)
    except BaseException:
        for sink in sinks:  # the error's traceback would keep their bodies
            sink.clear()
        raise
    await ended()
    if len(sinks) == 1:
        await sinks[0].finish()
        return sinks[0].body
    bodies = [sink.body or b"" for sink in sinks]
    if client is not None:
        client.hold(sum(map(len, bodies)))  # the merged body beside the parts
    merge = dialect_of(requests[0].dialect).merge_bodies
    return await asyncio.to_thread(lambda: b"".join(pieces_of(merge(bodies))))


async def _run_all(
    relay: Relay, prepared: PreparedRequest, sinks: Sequence[Sink], record: RequestRecord, allowances: Allowances
) -> None:
    """Run all requests. After the first error, abort the others and raise it."""
    jobs = list(zip(prepared.requests, prepared.routing_requests, sinks, allowances, strict=True))
    if len(jobs) == 1:
        request, routing_request, sink, allowance = jobs[0]
        record.add_usage(await relay.run(prepared.target, request, routing_request, sink, record, allowance))
        return
    places = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

    async def run_one(
        request: GenerateRequest, routing_request: RoutingRequest, sink: Sink, allowance: Allowance | None
    ) -> Usage:
        async with places:
            return await relay.run(prepared.target, request, routing_request, sink, record, allowance)

    tasks: list[asyncio.Task[Usage]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(run_one(*job)) for job in jobs]
    except BaseExceptionGroup as errors:
        # The error's traceback has this frame: without these, only the garbage collector would free the requests.
        tasks.clear()
        jobs.clear()
        # The group contains the first failure and the exceptions of the cancelled others.
        raise errors.exceptions[0] from None
    for task in tasks:
        record.add_usage(task.result())
