"""A worker's end of the connection to the control process, with the interfaces of the brain, the store and the port.

When the control process dies, answers in progress continue, and requests that need a decision wait for its replacement.
The new control process learns the load from the engines' reports. It ignores the decisions of the old one, whose
numbers it does not reuse. The worker sends its reserved limits to it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pagemill_gateway.ipc import messages
from pagemill_gateway.ipc.connection import IpcConnection, IpcConnectionLost
from pagemill_gateway.limits import store
from pagemill_gateway.ports import GatewayStatus, LocalWorkerPort, PlotPoint, WhatIf
from pagemill_protocol.errors import PagemillError, unavailable
from pagemill_routing.brain.interface import (
    DEFAULT_TICKET,
    Assignment,
    CompletedRequest,
    FailureKind,
    Liveness,
    QueueTicket,
    RequestOutcome,
    RetryContext,
    RoutingRequest,
    ServedName,
    Target,
)

CONNECT_INTERVAL_S = 0.05
REPLACEMENT_TIMEOUT_S = 30.0
"""How long a call waits for a control process."""
REPLACED_MESSAGE = "the control process is being replaced"

MEASURES_INTERVAL_S = 1.0
"""Interval of sending measurements; a worker that dies loses only those since the last one."""
MAX_ASKED = 2
"""The number of control processes that one call is sent to."""

_Connection = IpcConnection[messages.ToWorker]
Value = TypeVar("Value")
_to_worker = msgspec.msgpack.Decoder(messages.ToWorker)
_names = msgspec.msgpack.Decoder(list[ServedName])
_target = msgspec.msgpack.Decoder(Target)
_choice = msgspec.msgpack.Decoder(Assignment)
_liveness: msgspec.msgpack.Decoder[Liveness] = msgspec.msgpack.Decoder(Liveness)
_int = msgspec.msgpack.Decoder(int)
_seconds: msgspec.msgpack.Decoder[float | None] = msgspec.msgpack.Decoder(float | None)
_answer = msgspec.msgpack.Decoder(store.ReservationAnswer)
_use = msgspec.msgpack.Decoder(store.UseReport)
_samples = msgspec.msgpack.Decoder(list[PlotPoint])
_status = msgspec.msgpack.Decoder(GatewayStatus)
_bytes = msgspec.msgpack.Decoder(bytes)
_any_bytes: msgspec.msgpack.Decoder[bytes | None] = msgspec.msgpack.Decoder(bytes | None)
_nothing = msgspec.msgpack.Decoder(None)
_bool = msgspec.msgpack.Decoder(bool)
_encoder = msgspec.msgpack.Encoder()


class ControlProcessClient:
    """The client. Create it inside a running event loop, `start` it with the worker, and `close` it at the end."""

    def __init__(self, path: Path) -> None:
        """`path` is the control process's Unix socket."""
        self._path = path
        self._connection: _Connection | None = None
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._worker: LocalWorkerPort | None = None
        self._num_published = -1
        """The worker's number of measurements when they were last sent to this control process."""
        self._reserved: dict[str, store.ReservationRequest] = {}
        self._status = GatewayStatus(False, False, REPLACED_MESSAGE, 0)
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
        if self._connection is not None:
            await self._connection.close()

    # Methods of `pagemill_routing.brain.interface.Brain`.

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
        return await self._ask(messages.Choose(target, tried, ask, ticket, retry), _choice, undo=_withdraw)

    async def idle_capacity(self, model: str, max_load: float) -> int:
        return await self._ask(messages.GetIdleCapacity(model, max_load), _int)

    def accepted(self, assignment: Assignment) -> None:
        self._notify(messages.Accepted(assignment.decision))

    def started(self, assignment: Assignment, ttft_ms: float | None = None) -> None:
        self._notify(messages.Started(assignment.decision, ttft_ms))

    def freed(self, assignment: Assignment) -> None:
        self._notify(messages.Freed(assignment.decision))

    async def liveness(self, endpoint_id: str) -> Liveness:
        """Return the engine's liveness; `working` while the control process is away, so that answers continue."""
        if self._connection is not None:
            with suppress(IpcConnectionLost):
                return await self._connection.ask(messages.GetLiveness(endpoint_id), _liveness)
        return "working"

    async def expected_s(self, model: str, ticket: QueueTicket) -> float | None:
        """Return the expected wait in seconds; None while the control process is away."""
        if self._connection is not None:
            with suppress(IpcConnectionLost):
                return await self._connection.ask(messages.Expected(model, ticket), _seconds)
        return None

    def finished(self, assignment: Assignment, served: CompletedRequest | None = None) -> None:
        self._notify(messages.Finished(assignment.decision, served))

    def failed(self, assignment: Assignment, kind: FailureKind) -> None:
        self._notify(messages.Failed(assignment.decision, kind))

    def withdrawn(self, assignment: Assignment) -> None:
        self._notify(messages.Withdrawn(assignment.decision))

    def record_outcome(self, outcome: RequestOutcome) -> None:
        self._notify(messages.RecordOutcome(outcome))

    # Methods of `limits.store.Store`.

    async def reserve(self, ask: store.ReservationRequest) -> store.ReservationAnswer:
        try:
            answer = await self._ask(messages.Reserve(ask), _answer)
        except asyncio.CancelledError:
            self._notify(messages.Settle(ask.lease, 0))
            raise
        if answer.refused is None:
            self._reserved[ask.lease] = ask._replace(tokens=answer.granted)
        return answer

    async def extend(self, more: store.ExtensionRequest) -> int:
        granted = await self._ask(messages.Extend(more), _int)
        ask = self._reserved.get(more.lease)
        if ask is not None:
            rest = max(0, ask.tokens - max(0, more.used - ask.used))
            self._reserved[more.lease] = ask._replace(tokens=rest + granted, used=max(ask.used, more.used))
        return granted

    async def use(self, accounts: Sequence[str]) -> store.UseReport:
        return await self._ask(messages.GetUse([*accounts]), _use)

    def settle(self, lease: str, tokens: int) -> None:
        self._reserved.pop(lease, None)
        self._notify(messages.Settle(lease, tokens))

    def undo(self, lease: str) -> None:
        self._reserved.pop(lease, None)
        self._notify(messages.Undo(lease))

    async def settled(self) -> None:
        """Return when the control process has counted; its replacement gets only what is still reserved."""
        if self._connection is not None:
            with suppress(IpcConnectionLost):
                await self._connection.ask(messages.GetSettled(), _nothing)

    def adopt(self, ask: store.ReservationRequest) -> None:
        self._reserved[ask.lease] = ask
        self._notify(messages.Adopt([ask]))

    # Methods of `ports.ControlProcessPort`.

    async def status(self) -> GatewayStatus:
        """Return the status; while the control process is away, the last one, because probes must not wait."""
        if self._connection is not None:
            with suppress(IpcConnectionLost):
                self._status = await self._connection.ask(messages.GetStatus(), _status)
                return self._status
        return self._status._replace(detail=REPLACED_MESSAGE)

    async def fleet(self) -> bytes:
        return await self._ask(messages.GetFleet(), _bytes)

    async def samples(self, after: int) -> list[PlotPoint]:
        return await self._ask(messages.GetSamples(after), _samples)

    async def decisions(self, limit: int) -> bytes:
        return await self._ask(messages.GetDecisions(limit), _bytes)

    async def scaling(self, limit: int) -> bytes:
        return await self._ask(messages.GetScaling(limit), _bytes)

    async def what_if(self, question: WhatIf) -> bytes:
        return await self._ask(messages.AskWhatIf(question), _bytes)

    async def bundle(self, digest: str) -> bytes:
        return await self._ask(messages.GetBundle(digest), _bytes)

    async def keep_response(self, account: str, response_id: str, value: bytes) -> None:
        await self._ask(messages.KeepResponse(account, response_id, value), _nothing)

    async def kept_response(self, account: str, response_id: str) -> bytes | None:
        return await self._ask(messages.GetResponse(account, response_id), _any_bytes)

    async def forget_response(self, account: str, response_id: str) -> bool:
        return await self._ask(messages.ForgetResponse(account, response_id), _bool)

    # The connection.

    async def _ask(
        self,
        question: object,
        decoder: msgspec.msgpack.Decoder[Value],
        undo: Callable[[_Connection, Value], None] | None = None,
    ) -> Value:
        """Call the control process; if it dies, call its replacement, but no third one: the call may be the cause."""
        for _ in range(MAX_ASKED):
            connection = await self._any_connection()
            with suppress(IpcConnectionLost):
                return await connection.ask(question, decoder, partial(undo, connection) if undo is not None else None)
        raise _undecided()

    async def _any_connection(self) -> _Connection:
        try:
            async with asyncio.timeout(REPLACEMENT_TIMEOUT_S):
                while self._connection is None:
                    await self._connected.wait()
        except TimeoutError:
            raise _undecided() from None
        return self._connection

    def _notify(self, note: messages.WorkerNote) -> None:
        if self._connection is not None:
            self._connection.notify(note)

    async def _publish_measurements(self, worker: LocalWorkerPort) -> None:
        """Send new measurements once a second."""
        while True:
            await asyncio.sleep(MEASURES_INTERVAL_S)
            if self._connection is not None and worker.num_measured != self._num_published:
                self._num_published = worker.num_measured
                self._notify(messages.PublishMeasurements(msgspec.Raw(_encoder.encode(worker.measures()))))

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._lost.clear()
            with suppress(OSError):
                await loop.create_unix_connection(self._new_connection, str(self._path))
                await self._lost.wait()
            await asyncio.sleep(CONNECT_INTERVAL_S)

    def _new_connection(self) -> _Connection:
        connection: _Connection = IpcConnection(
            _to_worker, on_question=self._answer, on_note=lambda note: self._note(connection, note), on_lost=self._end
        )
        return connection

    def _begin(self, connection: _Connection) -> None:
        """Use the connection from the first message on; before that the control process may be a dying one."""
        self._connection = connection
        self._num_published = -1
        connection.notify(messages.Adopt(list(self._reserved.values())))
        self._connected.set()

    def _end(self) -> None:
        self._connection = None
        self._connected.clear()
        self._lost.set()

    async def _answer(self, question: Any) -> object:
        assert self._worker is not None
        match question:
            case messages.Measure():
                return await self._worker.measure()
        raise ValueError(f"a worker does not answer {type(question).__name__}")

    def _note(self, connection: _Connection, note: messages.ControlNote) -> None:
        assert self._worker is not None
        if self._connection is None:
            self._begin(connection)
        match note:
            case messages.KeepBundles(digests, templates, whole):
                self._worker.keep_bundles(digests, templates, whole=whole)
            case messages.ReplaceSharedKeys(callers):
                self._worker.replace_shared_keys(callers)
            case messages.RefuseContents(contents):
                self._worker.refuse_contents(contents)


def _withdraw(connection: _Connection, assignment: Assignment) -> None:
    """Return an assignment whose caller was cancelled."""
    connection.notify(messages.Withdrawn(assignment.decision))


def _undecided() -> PagemillError:
    return unavailable("The gateway cannot decide now where requests go. Try again.", retry_after_s=5)
