"""The control process's end of the connection to one worker: answers its calls, and tracks its decisions and limits.

When a worker dies, its calls are cancelled, its decisions end without a failure of an engine, and its reservations are
settled with the tokens that it has reported as used.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from pagemill_gateway.control_process import ControlProcess
from pagemill_gateway.ipc import messages
from pagemill_gateway.ipc.connection import IpcConnection, IpcConnectionLost
from pagemill_gateway.limits.store import ExtensionRequest, ReservationAnswer, ReservationRequest
from pagemill_gateway.ports import WorkerMeasurements
from pagemill_routing.brain.interface import Assignment
from pagemill_servers.keys.caller import Caller

logger = logging.getLogger("pagemill.gateway.ipc")

MEASURE_TIMEOUT_S = 1.0
_to_brain = msgspec.msgpack.Decoder(messages.ToControlProcess)
_measures = msgspec.msgpack.Decoder(WorkerMeasurements)


class WorkerConnection:
    def __init__(self, control: ControlProcess) -> None:
        """Create the protocol of a connection that is being made."""
        self._control = control
        self._brain = control.brain
        self._store = control.sharing.store
        self._held: dict[int, Assignment] = {}
        """The worker's decisions in progress, by number."""
        self._leases: dict[str, int] = {}
        """The worker's reservations, with the tokens reported as used."""
        self._last: WorkerMeasurements | msgspec.Raw = WorkerMeasurements({}, 0)
        """The worker's latest measurements; raw if they came as a notification and are not decoded yet."""
        self.connection: IpcConnection[messages.ToControlProcess] = IpcConnection(
            _to_brain,
            on_question=self._answer,
            on_note=self._note,
            on_lost=self._lost,
            on_made=lambda: control.attach(self),
        )

    # Calls of the control process.

    async def measure(self) -> WorkerMeasurements:
        try:
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                self._last = measures = await self.connection.ask(messages.Measure(), _measures)
                return measures
        except TimeoutError:
            logger.warning("a worker does not answer")
        except IpcConnectionLost:
            return WorkerMeasurements({}, 0)  # `_lost` has passed its counts to the control process
        return self._latest()

    def keep_bundles(self, digests: frozenset[str], templates: frozenset[str], *, whole: bool) -> None:
        self.connection.notify(messages.KeepBundles(digests, templates, whole))

    def replace_shared_keys(self, callers: list[Caller]) -> None:
        self.connection.notify(messages.ReplaceSharedKeys(callers))

    def refuse_contents(self, contents: frozenset[bytes]) -> None:
        self.connection.notify(messages.RefuseContents(contents))

    # Messages of the worker.

    async def _answer(self, question: messages.WorkerQuestion) -> object:
        match question:
            case messages.Choose(target, tried, ask, ticket, retry):
                assignment = await self._brain.choose(target, tried, ask, ticket=ticket, retry=retry)
                self._held[assignment.decision] = assignment
                return assignment
            case messages.Find(model, ticket):
                return await self._brain.find(model, ticket)
            case messages.Reserve(ask):
                return await self._reserve(ask)
            case messages.Extend(more):
                return await self._extend(more)
            case messages.GetSettled():
                await self._store.settled()
                return None
            case messages.LookUp(model):
                return await self._brain.look_up(model)
            case messages.GetNames():
                return await self._brain.names()
            case messages.GetLiveness(endpoint_id):
                return await self._brain.liveness(endpoint_id)
            case messages.Expected(model, ticket):
                return await self._brain.expected_s(model, ticket)
            case messages.GetIdleCapacity(model, max_load):
                return await self._brain.idle_capacity(model, max_load)
            case messages.GetStatus():
                return await self._control.status()
            case messages.GetFleet():
                return await self._control.fleet()
            case messages.GetSamples(after):
                return await self._control.samples(after)
            case messages.GetDecisions(limit):
                return await self._control.decisions(limit)
            case messages.GetScaling(limit):
                return await self._control.scaling(limit)
            case messages.AskWhatIf(what_if):
                return await self._control.what_if(what_if)
            case messages.GetUse(accounts):
                return await self._store.use(accounts)
            case messages.GetBundle(digest):
                return await self._control.bundle(digest)
            case messages.KeepResponse(account, response_id, value):
                await self._control.keep_response(account, response_id, value)
                return None
            case messages.GetResponse(account, response_id):
                return await self._control.kept_response(account, response_id)
            case messages.ForgetResponse(account, response_id):
                return await self._control.forget_response(account, response_id)

    def _note(self, note: messages.WorkerNote) -> None:
        match note:
            case messages.Accepted(decision) if decision in self._held:
                self._brain.accepted(self._held[decision])
            case messages.Started(decision, ttft_ms) if decision in self._held:
                self._brain.started(self._held[decision], ttft_ms)
            case messages.Freed(decision) if decision in self._held:
                self._brain.freed(self._held[decision])
            case messages.Finished(decision, served) if decision in self._held:
                self._brain.finished(self._held.pop(decision), served)
            case messages.Failed(decision, kind) if decision in self._held:
                self._brain.failed(self._held.pop(decision), kind)
            case messages.Withdrawn(decision) if decision in self._held:
                self._brain.withdrawn(self._held.pop(decision))
            case messages.RecordOutcome(outcome):
                self._brain.record_outcome(outcome)
            case messages.PublishMeasurements(measures):
                self._last = measures.copy()
            case messages.Settle(lease, tokens):
                self._leases.pop(lease, None)
                self._store.settle(lease, tokens)
            case messages.Undo(lease):
                self._leases.pop(lease, None)
                self._store.undo(lease)
            case messages.Adopt(asks):
                for ask in asks:
                    self._leases[ask.lease] = 0
                    self._store.adopt(ask)
                self._control.recount.reported_by(self)

    async def _reserve(self, ask: ReservationRequest) -> ReservationAnswer:
        await self._control.recount.done()
        answer = await self._store.reserve(ask)
        if answer.refused is None:
            self._leases[ask.lease] = 0
        return answer

    async def _extend(self, more: ExtensionRequest) -> int:
        await self._control.recount.done()
        if more.lease in self._leases:
            self._leases[more.lease] = more.used
        return await self._store.extend(more)

    def _latest(self) -> WorkerMeasurements:
        if isinstance(self._last, msgspec.Raw):
            self._last = _measures.decode(self._last)
        return self._last

    def _lost(self) -> None:
        if self._held or self._leases:
            logger.warning("a worker is gone that served %d requests at engines", len(self._held))
        held, self._held = self._held, {}
        for assignment in held.values():
            self._brain.finished(assignment)
        for lease, tokens in self._leases.items():
            self._store.settle(lease, tokens)
        self._leases.clear()
        self._control.detach(self, self._latest())


@asynccontextmanager
async def serving_workers(control: ControlProcess, path: Path) -> AsyncIterator[None]:
    """Accept workers while the block runs. The permissions of the folder of `path` decide who may connect."""
    loop = asyncio.get_running_loop()
    workers: list[WorkerConnection] = []

    def new_connection() -> asyncio.BaseProtocol:
        workers[:] = [each for each in workers if not each.connection.lost]
        workers.append(worker := WorkerConnection(control))
        return worker.connection

    server = await loop.create_unix_server(new_connection, sock=_bound(path))
    try:
        yield
    finally:
        server.close()
        await asyncio.gather(*(each.connection.close() for each in workers if not each.connection.lost))


def _bound(path: Path) -> socket.socket:
    """Return a listening socket at the path, in place of one that an earlier process left."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    return listener
