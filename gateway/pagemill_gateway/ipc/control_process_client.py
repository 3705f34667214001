"""A worker's end of the line to the head: the brain, the limits' store and the desk of `Head`, as if they were here.

When the head's process dies, answers under way go on, and what asks for a decision waits until another one has taken
its place, as it would wait for an engine. The new brain learns from the engines' own reports what they serve:
decisions of the old one, whose numbers it will never give, mean nothing to it. Limits that are reserved here are told
to it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pagemill_gateway.brain.interface import (
    DEFAULT_TICKET,
    Assignment,
    CompletedRequest,
    FailureKind,
    QueueTicket,
    RequestOutcome,
    RetryContext,
    RoutingRequest,
    ServedName,
    Target,
)
from pagemill_gateway.ipc import messages
from pagemill_gateway.ipc.connection import IpcConnection, IpcConnectionLost
from pagemill_gateway.limits import store
from pagemill_gateway.ports import GatewayStatus, LocalWorkerPort
from pagemill_protocol.errors import PagemillError, unavailable

CONNECT_INTERVAL_S = 0.05
AWAY_TIMEOUT_S = 30.0
"""A question waits this long for the head to be there (again)."""
AWAY = "the process that decides is being replaced"

MEASURES_INTERVAL_S = 1.0
"""What a worker has measured for longer is not lost with it."""
MAX_ASKED = 2
"""Heads that one question is put to."""

_Line = IpcConnection[messages.ToWorker]
Value = TypeVar("Value")
_to_worker = msgspec.msgpack.Decoder(messages.ToWorker)
_names = msgspec.msgpack.Decoder(list[ServedName])
_target = msgspec.msgpack.Decoder(Target)
_choice = msgspec.msgpack.Decoder(Assignment)
_bool = msgspec.msgpack.Decoder(bool)
_int = msgspec.msgpack.Decoder(int)
_seconds: msgspec.msgpack.Decoder[float | None] = msgspec.msgpack.Decoder(float | None)
_answer = msgspec.msgpack.Decoder(store.Answer)
_status = msgspec.msgpack.Decoder(GatewayStatus)
_bytes = msgspec.msgpack.Decoder(bytes)
_encoder = msgspec.msgpack.Encoder()


class ControlProcessClient:
    """Create inside a running event loop, `start` with the worker, `close` at its end."""

    def __init__(self, path: Path) -> None:
        """`path`: of the head's socket."""
        self._path = path
        self._line: _Line | None = None
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._worker: LocalWorkerPort | None = None
        self._num_published = -1
        """Of what the worker has measured, when this head was last told."""
        self._reserved: dict[str, store.Ask] = {}
        self._status = GatewayStatus(False, False, AWAY, 0)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, worker: LocalWorkerPort) -> None:
        self._worker = worker
        self._tasks = [
            asyncio.create_task(self._stay_connected()),
            asyncio.create_task(self._publish_measurements(worker)),
        ]

    async def wait_connected(self) -> None:
        await self._connected.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._line is not None:
            await self._line.close()

    # `brain.interface.Brain`.

    async def names(self) -> list[ServedName]:
        return await self._ask(messages.GetNames(), _names)

    async def look_up(self, model: str) -> Target:
        return await self._ask(messages.LookUp(model), _target)

    async def find(self, model: str, ticket: QueueTicket = DEFAULT_TICKET) -> Target:
        return await self._ask(messages.Find(model, ticket), _target)

    async def choose(
        self,
        target: Target,
        tried: frozenset[str],
        ask: RoutingRequest,
        *,
        ticket: QueueTicket = DEFAULT_TICKET,
        retry: RetryContext | None = None,
    ) -> Assignment:
        return await self._ask(messages.Choose(target, tried, ask, ticket, retry), _choice, undo=_give_back)

    def accepted(self, assignment: Assignment) -> None:
        self._notify(messages.Accepted(assignment.decision))

    def started(self, assignment: Assignment, ttft_ms: float | None = None) -> None:
        self._notify(messages.Started(assignment.decision, ttft_ms))

    async def alive(self, endpoint_id: str) -> bool:
        """While the head is away nobody can say, and no answer is to suffer of that."""
        if self._line is not None:
            with suppress(IpcConnectionLost):
                return await self._line.ask(messages.Alive(endpoint_id), _bool)
        return True

    async def expected_s(self, model: str, ticket: QueueTicket) -> float | None:
        """Nobody knows while the head is away."""
        if self._line is not None:
            with suppress(IpcConnectionLost):
                return await self._line.ask(messages.Expected(model, ticket), _seconds)
        return None

    def finished(self, assignment: Assignment, served: CompletedRequest | None = None) -> None:
        self._notify(messages.Finished(assignment.decision, served))

    def failed(self, assignment: Assignment, kind: FailureKind) -> None:
        self._notify(messages.Failed(assignment.decision, kind))

    def withdrawn(self, assignment: Assignment) -> None:
        self._notify(messages.Withdrawn(assignment.decision))

    def record_outcome(self, outcome: RequestOutcome) -> None:
        self._notify(messages.RecordOutcome(outcome))

    # `limits.store.Store`; `close` is this one's as well.

    async def reserve(self, ask: store.Ask) -> store.Answer:
        try:
            answer = await self._ask(messages.Reserve(ask), _answer)
        except asyncio.CancelledError:
            self._notify(messages.Settle(ask.lease, 0))
            raise
        if answer.refused is None:
            self._reserved[ask.lease] = ask._replace(tokens=answer.granted)
        return answer

    async def extend(self, more: store.More) -> int:
        granted = await self._ask(messages.Extend(more), _int)
        ask = self._reserved.get(more.lease)
        if ask is not None:
            rest = max(0, ask.tokens - max(0, more.used - ask.used))
            self._reserved[more.lease] = ask._replace(tokens=rest + granted, used=max(ask.used, more.used))
        return granted

    def settle(self, lease: str, tokens: int) -> None:
        self._reserved.pop(lease, None)
        self._notify(messages.Settle(lease, tokens))

    def adopt(self, ask: store.Ask) -> None:
        self._reserved[ask.lease] = ask
        self._notify(messages.Adopt([ask]))

    # `ports.HeadDesk`.

    async def status(self) -> GatewayStatus:
        """The latest one while the head is away: probes must neither wait nor fail for that."""
        if self._line is not None:
            with suppress(IpcConnectionLost):
                self._status = await self._line.ask(messages.GetStatus(), _status)
                return self._status
        return self._status._replace(detail=AWAY)

    async def bundle(self, digest: str) -> bytes:
        return await self._ask(messages.GetBundle(digest), _bytes)

    # The line.

    async def _ask(
        self,
        question: object,
        decoder: msgspec.msgpack.Decoder[Value],
        undo: Callable[[_Line, Value], None] | None = None,
    ) -> Value:
        """Asked anew when the head dies over it, but not for ever: the question may be the cause."""
        for _ in range(MAX_ASKED):
            line = await self._some_line()
            with suppress(IpcConnectionLost):
                return await line.ask(question, decoder, partial(undo, line) if undo is not None else None)
        raise _undecided()

    async def _some_line(self) -> _Line:
        try:
            async with asyncio.timeout(AWAY_TIMEOUT_S):
                while self._line is None:
                    await self._connected.wait()
        except TimeoutError:
            raise _undecided() from None
        return self._line

    def _notify(self, note: messages.WorkerNote) -> None:
        if self._line is not None:
            self._line.notify(note)

    async def _publish_measurements(self, worker: LocalWorkerPort) -> None:
        """Once a second, while anything is measured."""
        while True:
            await asyncio.sleep(MEASURES_INTERVAL_S)
            if self._line is not None and worker.num_measured != self._num_published:
                self._num_published = worker.num_measured
                self._notify(messages.PublishMeasurements(msgspec.Raw(_encoder.encode(worker.measures()))))

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._lost.clear()
            with suppress(OSError):
                await loop.create_unix_connection(self._new_line, str(self._path))
                await self._lost.wait()
            await asyncio.sleep(CONNECT_INTERVAL_S)

    def _new_line(self) -> _Line:
        line: _Line = IpcConnection(
            _to_worker, on_question=self._answer, on_note=lambda note: self._note(line, note), on_lost=self._end
        )
        return line

    def _begin(self, line: _Line) -> None:
        """The head has said its first word. Before that it may be one that is dying, whose socket still takes us."""
        self._line = line
        self._num_published = -1
        line.notify(messages.Adopt(list(self._reserved.values())))
        self._connected.set()

    def _end(self) -> None:
        self._line = None
        self._connected.clear()
        self._lost.set()

    async def _answer(self, question: Any) -> object:
        assert self._worker is not None
        match question:
            case messages.Measure(endpoint_ids):
                return await self._worker.measure(endpoint_ids)
        raise ValueError(f"nobody asks a worker {type(question).__name__}")

    def _note(self, line: _Line, note: messages.ControlNote) -> None:
        assert self._worker is not None
        if self._line is None:
            self._begin(line)
        match note:
            case messages.KeepBundles(digests, templates, whole):
                self._worker.keep_bundles(digests, templates, whole=whole)
            case messages.ReplaceSharedKeys(callers):
                self._worker.replace_shared_keys(callers)


def _give_back(line: _Line, assignment: Assignment) -> None:
    """Nobody waits for it any more."""
    line.notify(messages.Withdrawn(assignment.decision))


def _undecided() -> PagemillError:
    return unavailable("The gateway cannot decide now where requests go. Try again.", retry_after_s=5)
