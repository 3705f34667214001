"""Generates the load: streamed chats at given times over kept connections, in a process that reads jobs as JSON lines.

Arrivals are Poisson and do not wait for answers. Times count from the moment when a request was written; its delay is
reported too, so that a run with which this process could not keep up is dropped. An answer counts if its status is 200
and it contained every token and the end mark.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import httptools
import msgspec
import uvloop

NONCE = b"00000000"
"""Placeholder in each body for the request's number, so that no two prompts have the same beginning."""
MAX_CAUSE_CHARS = 160


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ports: list[int]
    """Ports to which requests are sent in turn."""
    path: str
    headers: dict[str, str]
    bodies: str
    """JSON file with a list of bodies."""
    rate: float
    """Requests per second."""
    seconds: float = 0.0
    """Seconds during which requests arrive."""
    num_requests: int = 0
    """Number of requests, instead of `seconds`."""
    num_tokens: int
    """Tokens that each answer must have."""
    first: int = 0
    """Number of the first request."""
    hold_s: float
    """Seconds that an answer takes without queueing."""
    patience_s: float
    """Seconds to wait for open answers after the last request, in addition to `hold_s`."""


class Connection(asyncio.Protocol):
    """One kept connection; at most one request at a time."""

    def __init__(self, load: Load, port: int) -> None:
        self._load = load
        self._port = port
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._body = bytearray()
        self._busy = False
        self._sent_s = self._first_s = self._now_s = 0.0
        self._keeps = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body.clear()
        self._busy, self._first_s = True, 0.0
        self._sent_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._load.forget(self._port, self)
        self._fail("the connection was closed before the end")

    def on_body(self, body: bytes) -> None:
        if not self._first_s:
            self._first_s = self._now_s
        self._body += body

    def on_message_complete(self) -> None:
        if not self._busy:
            return
        self._busy = False
        status, body = self._parser.get_status_code(), bytes(self._body)
        if status != 200:
            self._load.failed(f"HTTP {status}: {body.decode(errors='replace')}")
        elif body.count(b"data: {") < self._load.job.num_tokens or b"data: [DONE]" not in body:
            self._load.failed(f"incomplete: {body[-80:].decode(errors='replace')}")
        else:
            self._load.done(self._first_s - self._sent_s, self._now_s - self._sent_s)
        if self._parser.should_keep_alive():
            self._load.free(self._port, self)
        else:
            self._transport.close()

    def abandon(self) -> None:
        """End the job; later data is ignored."""
        self._busy = False
        self._transport.abort()

    def _fail(self, cause: str) -> None:
        if self._busy:
            self._busy = False
            self._load.failed(cause)
        self._transport.close()


class Load:
    """One job at a time; connections stay open between jobs to the same ports."""

    def __init__(self) -> None:
        self.job: Job
        self._idle: dict[int, list[Connection]] = {}
        self._open: set[Connection] = set()
        """All open connections, including idle ones."""
        self._loop = asyncio.get_running_loop()
        self._bodies: dict[str, list[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, job: Job) -> dict[str, Any]:
        self.job = job
        self._reset()
        requests = self._requests()
        start_s, draw = time.perf_counter(), random.Random(job.first)
        due_s, number = 0.0, 0
        while (number < job.num_requests) if job.num_requests else (due_s < job.seconds):
            wait_s = due_s - (time.perf_counter() - start_s)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._lags_s.append(time.perf_counter() - start_s - due_s)
            self._send(job.ports[number % len(job.ports)], requests(job.first + number))
            number += 1
            due_s += draw.expovariate(job.rate)
        sent_s = time.perf_counter() - start_s
        try:
            async with asyncio.timeout(job.hold_s + job.patience_s):
                while self._num_open:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            self._causes["no end in time"] += self._num_open
            for connection in list(self._open):
                connection.abandon()
            self._idle.clear()
        return self._report(number, sent_s, time.perf_counter() - start_s)

    def done(self, ttft_s: float, e2e_s: float) -> None:
        self._ttfts_s.append(ttft_s)
        self._e2es_s.append(e2e_s)
        self._close_one()

    def failed(self, cause: str) -> None:
        self._causes[cause[:MAX_CAUSE_CHARS]] += 1
        self._close_one()

    def free(self, port: int, connection: Connection) -> None:
        self._idle.setdefault(port, []).append(connection)

    def forget(self, port: int, connection: Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(port, [])
        if connection in idle:
            idle.remove(connection)

    def _reset(self) -> None:
        self._ttfts_s: list[float] = []
        self._e2es_s: list[float] = []
        self._lags_s: list[float] = []
        self._causes: Counter[str] = Counter()
        self._num_open = 0
        self._most_open = 0
        self._ended = asyncio.Event()

    def _requests(self) -> Any:
        """Return a function from a request's number to its bytes."""
        job = self.job
        if job.bodies not in self._bodies:
            self._bodies[job.bodies] = [each.encode() for each in json.loads(Path(job.bodies).read_text())]
        lines = [f"POST {job.path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
        head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in job.headers.items())]).encode()
        whole = [b"%b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(each), each) for each in self._bodies[job.bodies]]
        return lambda number: whole[number % len(whole)].replace(NONCE, b"%08d" % (number % 10**8), 1)

    def _send(self, port: int, request: bytes) -> None:
        self._num_open += 1
        self._most_open = max(self._most_open, self._num_open)
        idle = self._idle.get(port)
        if idle:
            idle.pop().send(request)
            return
        task = self._loop.create_task(self._send_anew(port, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_anew(self, port: int, request: bytes) -> None:
        try:
            _, connection = await self._loop.create_connection(lambda: Connection(self, port), "127.0.0.1", port)
        except OSError as error:
            self.failed(f"cannot connect: {error.strerror}")
            return
        self._open.add(connection)
        connection.send(request)

    def _close_one(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._ended.set()

    def _report(self, num_sent: int, sent_s: float, whole_s: float) -> dict[str, Any]:
        return {
            "num_sent": num_sent,
            "num_done": len(self._ttfts_s),
            "causes": dict(self._causes.most_common(5)),
            "sent_s": sent_s,
            "whole_s": whole_s,
            "most_open": self._most_open,
            "ttft_ms": _percentiles(self._ttfts_s),
            "e2e_ms": _percentiles(self._e2es_s),
            "lag_ms": _percentiles(self._lags_s),
        }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    ranks = {f"p{percent}": ordered[max(0, -(-len(ordered) * percent // 100) - 1)] for percent in (50, 90, 99, 100)}
    return {name: round(value * 1000, 3) for name, value in ranks.items()}


async def serve() -> None:
    """Read one job per line of JSON and write one line of results, until stdin ends."""
    load = Load()
    gc.freeze()
    decoder = msgspec.json.Decoder(Job)
    while line := await asyncio.to_thread(sys.stdin.readline):
        report = await load.run(decoder.decode(line))
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    uvloop.run(serve())
