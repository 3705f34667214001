"""Requests for adapters on their way into the scheduler: each enters once its adapter is loaded and has a slot.

At most `max_loras` adapters have a slot at once. A request without a slot waits until the requests of another adapter
have ended. Up to `MAX_OVERTAKING` later ones for adapters with a slot share their steps meanwhile; all others wait
behind it, so that no adapter is overtaken for ever. Adapters are loaded for as many waiting requests, in order of
arrival, as may be kept. Requests for the model alone wait for nothing here.
"""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagemill_engine.ipc.messages import AdapterRead, AdapterUse, LoadAdapter, TokensOut
from pagemill_engine.loop.grammar_requests import GrammarRequests
from pagemill_engine.loop.refusals import aborts, refusals
from pagemill_engine.scheduler.admission import adapter_not_served, already_served
from pagemill_engine.scheduler.scheduler import Scheduler
from pagemill_execution.adapters.store import AdapterStore, LoadedAdapter
from pagemill_models.adapters.errors import AdapterError, refused
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.adapters import AdapterSlots
from pagemill_protocol.report.state import EngineLoad
from pagemill_protocol.request.generate import GenerateRequest

logger = logging.getLogger(__name__)

POLL_S = 0.005
"""Time that an engine without other work waits for an adapter before it reads messages again."""

MAX_OVERTAKING = 8
"""Requests for adapters with a slot that may enter before one that waits for a slot. With more, adapters change less
often, but the one that waits may wait for as many answers, one after the other."""


class _Read(NamedTuple):
    """A folder that is being read because a server asked for it."""

    asked: LoadAdapter
    future: Future[LoadedAdapter]


class AdapterRequests:
    def __init__(self, store: AdapterStore, scheduler: Scheduler, grammar_requests: GrammarRequests) -> None:
        """Requests whose adapter has a slot enter `grammar_requests`, by which they reach the scheduler."""
        self.store = store
        self._scheduler, self._grammar_requests = scheduler, grammar_requests
        self._waiting: dict[str, GenerateRequest] = {}
        self._users: dict[str, set[str]] = {}
        """Requests that entered, by the digests of their adapters: those with a slot."""
        self._overtaken: tuple[str, int] = ("", 0)
        """The request that waits for a slot, and how many have overtaken it."""
        self._soon: set[str] = set()
        """Adapters of waiting requests that are loaded, or being loaded, for them."""
        self._ends: list[TokensOut] = []
        self._reads: list[_Read] = []
        self._answers: list[AdapterRead] = []
        self._reported: AdapterUse | None = None
        store.keep_while(lambda digest: digest in self._users or digest in self._soon)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._ends or self._reads)

    def load(self, folder: Path, *, pinned: bool = False) -> LoadedAdapter:
        """Read an adapter now, and know it from then on. Raises `AdapterError`."""
        self.store.pace.is_free = True
        self.store.pace.turn()
        adapter = self.store.read(folder).result()
        self.store.add(folder, adapter, pinned=pinned)
        return adapter

    def begin(self, asked: LoadAdapter) -> None:
        """Read an adapter beside the steps. `take_answers` says what became of it."""
        self._reads.append(_Read(asked, self.store.read(Path(asked.path))))

    def take_answers(self) -> list[AdapterRead]:
        answers, self._answers = self._answers, []
        return answers

    def add(self, request: GenerateRequest) -> None:
        """Queue a request for an adapter. Raises `PagemillError` if it cannot be served here."""
        if not self.store.knows(request.adapter_digest):
            raise not_known()
        num_waiting = sum(each.sampling.num_sequences for each in self._waiting.values())
        self._scheduler.check(request, num_waiting)
        if request.request_id in self._waiting:
            raise already_served(request.request_id)
        self._waiting[request.request_id] = request
        self.advance()

    def abort(self, request_id: str) -> None:
        """Abort a request that waits for its adapter; other ids are ignored."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self._ends += aborts(request)
            if all(each.adapter_digest != request.adapter_digest for each in self._waiting.values()):
                self.store.stop_loading(request.adapter_digest)

    def raise_allowance(self, request_id: str, allowance: int) -> None:
        """Let each sequence of a waiting request generate up to `allowance` tokens."""
        request = self._waiting.get(request_id)
        if request is not None and request.token_allowance is not None and request.token_allowance < allowance:
            self._waiting[request_id] = msgspec.structs.replace(request, token_allowance=allowance)

    def advance(self, *, may_wait: bool = False) -> None:
        """Let the requests enter whose adapter is loaded and has, or gets, a slot.

        `may_wait`: whether to wait up to `POLL_S` for a load.
        """
        self.store.pace.is_free = may_wait
        self.store.pace.turn()
        if may_wait and (self._waiting or self._reads):
            wait([*self.store.futures, *(each.future for each in self._reads)], POLL_S, FIRST_COMPLETED)
        if self._reads:
            self._finish_reads()
        if not self._waiting:
            return
        self._drop_ended()
        self._soon = self._needed_soon()
        blocked = ""
        for request_id, request in list(self._waiting.items()):
            digest = request.adapter_digest
            try:
                if not self.store.knows(digest) and digest not in self._users:
                    raise not_known()
                if digest not in self._users:
                    if blocked:
                        continue
                    if digest in self._soon and not self.store.fetch(digest):
                        continue
                    if digest not in self._soon or len(self._users) >= self.store.limits.max_loras:
                        blocked = request_id
                        continue
                elif blocked and not self._may_overtake(blocked):
                    return
                self._soon.discard(digest)
                self.store.touch(digest)
                del self._waiting[request_id]
                self._users.setdefault(digest, set()).add(request_id)
                self._grammar_requests.add(request)
            except AdapterError as error:
                self._refuse(request, refused(error.message))
            except PagemillError as error:
                self._refuse(request, error)

    def _may_overtake(self, blocked: str) -> bool:
        """Return whether one more request may enter before `blocked`, and count it."""
        name, count = self._overtaken
        count = count if name == blocked else 0
        self._overtaken = (blocked, count + 1)
        return count < MAX_OVERTAKING

    def take_ends(self) -> list[TokensOut]:
        """Return the outputs, since the last call, of requests that ended before they entered."""
        ends, self._ends = self._ends, []
        return ends

    def _is_served(self, name: str) -> bool:
        """Whether a request that entered has not ended."""
        return self._scheduler.is_serving(name) or self._grammar_requests.is_compiling(name)

    def slots(self) -> AdapterSlots:
        """Return the adapters of this engine for its reports."""
        store = self.store
        return AdapterSlots(
            num_slots=store.limits.max_loras,
            resident=store.loaded,
            num_kept=store.limits.max_cpu_loras,
            loading=store.loading,
            load_ms=store.load_ms,
        )

    def counts(self) -> tuple[list[str], list[str]]:
        """Return the digests of adapters with running requests, and of those with waiting ones."""
        self._drop_ended()
        return sorted(self._users), sorted({request.adapter_digest for request in self._waiting.values()})

    def take_use(self) -> AdapterUse | None:
        """Return the adapters of this engine, if that has changed since the last call."""
        running, waiting = self.counts()
        use = AdapterUse(
            slots=self.slots(),
            running=running,
            waiting=waiting,
            num_loads=self.store.num_loads,
            num_evictions=self.store.num_evictions,
        )
        if use == self._reported:
            return None
        self._reported = use
        return use

    def counted(self, load: EngineLoad) -> EngineLoad:
        """Return a load with the requests that wait for their adapters, which the scheduler does not know."""
        if not self._waiting:
            return load
        waiting = self._waiting.values()
        return msgspec.structs.replace(
            load,
            num_requests_waiting=load.num_requests_waiting + sum(each.sampling.num_sequences for each in waiting),
            num_tokens_waiting=load.num_tokens_waiting + sum(len(each.prompt_token_ids) for each in waiting),
        )

    def _needed_soon(self) -> set[str]:
        """Return the first adapters of waiting requests: as many as may be kept beside those in use."""
        soon: set[str] = set()
        for request in self._waiting.values():
            if len(self._users) + len(soon) >= self.store.limits.max_cpu_loras:
                break
            if request.adapter_digest not in self._users:
                soon.add(request.adapter_digest)
        return soon

    def _finish_reads(self) -> None:
        reads, self._reads = self._reads, []
        for each in reads:
            if not each.future.done():
                self._reads.append(each)
                continue
            number = each.asked.number
            try:
                adapter = each.future.result()
            except AdapterError as error:
                answer = AdapterRead(number=number, reason=error.reason, message=error.message)
            except Exception as error:
                logger.exception("the adapter in %s could not be read", each.asked.path)
                message = f"`{each.asked.path}` could not be read: {type(error).__name__}. See the engine's log."
                answer = AdapterRead(number=number, reason="AdapterUnreadable", message=message)
            else:
                self.store.add(Path(each.asked.path), adapter, pinned=each.asked.pinned)
                answer = AdapterRead(
                    number=number,
                    digest=adapter.digest,
                    message=adapter.warning or "",
                    num_bytes=adapter.num_bytes,
                    load_ms=adapter.load_ms,
                )
            self._answers.append(answer)

    def _refuse(self, request: GenerateRequest, error: PagemillError) -> None:
        self._waiting.pop(request.request_id, None)
        self._ends += refusals(request, error)

    def _drop_ended(self) -> None:
        for digest, users in list(self._users.items()):
            users.intersection_update([name for name in users if self._is_served(name)])
            if not users:
                del self._users[digest]
                self.store.release(digest)


def not_known() -> PagemillError:
    return adapter_not_served(
        "This engine does not have the adapter, or it was removed. Load it first, or ask for the model itself."
    )
