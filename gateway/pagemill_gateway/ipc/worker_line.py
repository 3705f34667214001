"""The head's end of the line to one worker: answers what it asks, and remembers what it holds.

A worker that dies holds nothing any more: what it waited for is given up, its decisions are released as no fault of any
engine, its limits are settled with the tokens that it has reported as used.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from pagemill_gateway.brain.interface import Choice
from pagemill_gateway.desks import Measures
from pagemill_gateway.head import Head
from pagemill_gateway.ipc import messages
from pagemill_gateway.ipc.line import Line, LineLost
from pagemill_gateway.limits.store import Answer, Ask, More
from pagemill_protocol.keys.caller import Caller

logger = logging.getLogger("pagemill.gateway.ipc")

MEASURE_TIMEOUT_S = 1.0
_to_brain = msgspec.msgpack.Decoder(messages.ToBrain)
_measures = msgspec.msgpack.Decoder(Measures)


class WorkerLine:
    def __init__(self, head: Head) -> None:
        """Of a connection that is being made."""
        self._head = head
        self._brain = head.brain
        self._store = head.sharing.store
        self._held: dict[int, Choice] = {}
        """Decisions under way."""
        self._leases: dict[str, int] = {}
        """Reservations, and the tokens that each has used as far as it was reported."""
        self._last: Measures | msgspec.Raw = Measures({}, 0)
        """What it measured, as it told last: asked for, or unasked and not read yet."""
        self.line: Line[messages.ToBrain] = Line(
            _to_brain,
            on_question=self._answer,
            on_note=self._note,
            on_lost=self._lost,
            on_made=lambda: head.attach(self),
        )

    # What the head asks and tells.

    async def measure(self, endpoint_ids: frozenset[str]) -> Measures:
        try:
            async with asyncio.timeout(MEASURE_TIMEOUT_S):
                self._last = measures = await self.line.ask(messages.Measure(endpoint_ids), _measures)
                return measures
        except TimeoutError:
            logger.warning("a worker does not answer")
        except LineLost:
            return Measures({}, 0)  # what it has counted is the head's by now
        return self._latest()

    def keep_bundles(self, digests: frozenset[str], templates: frozenset[str], *, whole: bool) -> None:
        self.line.tell(messages.KeepBundles(digests, templates, whole))

    def replace_shared_keys(self, callers: list[Caller]) -> None:
        self.line.tell(messages.SharedKeys(callers))

    # What the worker asks and tells.

    async def _answer(self, question: messages.WorkerQuestion) -> object:
        match question:
            case messages.Choose(target, tried, ask, claim, again):
                choice = await self._brain.choose(target, tried, ask, claim=claim, again=again)
                self._held[choice.decision] = choice
                return choice
            case messages.Find(model, claim):
                return await self._brain.find(model, claim)
            case messages.Reserve(ask):
                return await self._reserve(ask)
            case messages.Extend(more):
                return await self._extend(more)
            case messages.LookUp(model):
                return await self._brain.look_up(model)
            case messages.Names():
                return await self._brain.names()
            case messages.Alive(endpoint_id):
                return await self._brain.alive(endpoint_id)
            case messages.Expected(model, claim):
                return await self._brain.expected_s(model, claim)
            case messages.GetStanding():
                return await self._head.standing()
            case messages.GetBundle(digest):
                return await self._head.bundle(digest)

    def _note(self, note: messages.WorkerNote) -> None:
        match note:
            case messages.Accepted(decision) if decision in self._held:
                self._brain.accepted(self._held[decision])
            case messages.Started(decision, ttft_ms) if decision in self._held:
                self._brain.started(self._held[decision], ttft_ms)
            case messages.Finished(decision, served) if decision in self._held:
                self._brain.finished(self._held.pop(decision), served)
            case messages.Failed(decision, kind) if decision in self._held:
                self._brain.failed(self._held.pop(decision), kind)
            case messages.GivenBack(decision) if decision in self._held:
                self._brain.given_back(self._held.pop(decision))
            case messages.Experienced(experience):
                self._brain.experienced(experience)
            case messages.Measured(measures):
                self._last = measures.copy()
            case messages.Settle(lease, tokens):
                self._leases.pop(lease, None)
                self._store.settle(lease, tokens)
            case messages.Adopt(asks):
                for ask in asks:
                    self._leases[ask.lease] = 0
                    self._store.adopt(ask)
                self._head.recount.told_by(self)

    async def _reserve(self, ask: Ask) -> Answer:
        await self._head.recount.done()
        answer = await self._store.reserve(ask)
        if answer.refused is None:
            self._leases[ask.lease] = 0
        return answer

    async def _extend(self, more: More) -> int:
        await self._head.recount.done()
        if more.lease in self._leases:
            self._leases[more.lease] = more.used
        return await self._store.extend(more)

    def _latest(self) -> Measures:
        if isinstance(self._last, msgspec.Raw):
            self._last = _measures.decode(self._last)
        return self._last

    def _lost(self) -> None:
        if self._held or self._leases:
            logger.warning("a worker is gone that served %d requests at engines", len(self._held))
        held, self._held = self._held, {}
        for choice in held.values():
            self._brain.finished(choice)
        for lease, tokens in self._leases.items():
            self._store.settle(lease, tokens)
        self._leases.clear()
        self._head.detach(self, self._latest())
