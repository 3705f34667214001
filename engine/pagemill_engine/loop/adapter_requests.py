"""Requests for adapters on their way into the scheduler: each enters once its adapter is loaded and has a slot.

At most `max_loras` adapters have a slot at once. A request without a slot waits until the requests of another adapter
have ended, and those for adapters that came after it wait behind it, so that no adapter is overtaken for ever. Requests
for the model alone wait for nothing here.
"""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path

import msgspec

from pagemill_engine.adapters.store import AdapterStore, LoadedAdapter
from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.loop.grammar_requests import GrammarRequests
from pagemill_engine.loop.refusals import aborts, refusals
from pagemill_engine.scheduler.admission import adapter_not_served, already_served
from pagemill_engine.scheduler.scheduler import Scheduler
from pagemill_models.adapters.errors import AdapterError
from pagemill_protocol.errors import PagemillError, invalid_field
from pagemill_protocol.report.adapters import AdapterSlots
from pagemill_protocol.request.generate import GenerateRequest

POLL_S = 0.005
"""Time that an engine without other work waits for an adapter before it reads messages again."""


class AdapterRequests:
    def __init__(self, store: AdapterStore, scheduler: Scheduler, grammar_requests: GrammarRequests) -> None:
        """Requests whose adapter has a slot enter `grammar_requests`, by which they reach the scheduler."""
        self.store = store
        self._scheduler, self._grammar_requests = scheduler, grammar_requests
        self._waiting: dict[str, GenerateRequest] = {}
        self._users: dict[str, set[str]] = {}
        """Requests that entered, by the digests of their adapters: those with a slot."""
        self._ends: list[TokensOut] = []
        store.keep_while(self._users.__contains__)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._ends)

    def load(self, folder: Path, *, pinned: bool = False) -> LoadedAdapter:
        """Read an adapter now, and know it from then on. Raises `AdapterError`."""
        adapter = self.store.read(folder).result()
        self.store.add(folder, adapter, pinned=pinned)
        return adapter

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

    def raise_allowance(self, request_id: str, allowance: int) -> None:
        """Let each sequence of a waiting request generate up to `allowance` tokens."""
        request = self._waiting.get(request_id)
        if request is not None and request.token_allowance is not None and request.token_allowance < allowance:
            self._waiting[request_id] = msgspec.structs.replace(request, token_allowance=allowance)

    def advance(self, *, may_wait: bool = False) -> None:
        """Let the requests enter whose adapter is loaded and has, or gets, a slot.

        `may_wait`: whether to wait up to `POLL_S` for a load.
        """
        if not self._waiting:
            return
        if may_wait:
            wait(self.store.futures, POLL_S)
        self._drop_ended()
        for request_id, request in list(self._waiting.items()):
            digest = request.adapter_digest
            try:
                if not self.store.knows(digest) and digest not in self._users:
                    raise not_known()
                if digest not in self._users and not self.store.fetch(digest):
                    continue
                if digest not in self._users and len(self._users) >= self.store.limits.max_loras:
                    return
                del self._waiting[request_id]
                self._users.setdefault(digest, set()).add(request_id)
                self._grammar_requests.add(request)
            except AdapterError as error:
                self._refuse(request, refused(error))
            except PagemillError as error:
                self._refuse(request, error)

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
            num_slots=store.limits.max_loras, resident=store.loaded, loading=store.loading, load_ms=store.load_ms
        )

    def counts(self) -> tuple[list[str], list[str]]:
        """Return the digests of adapters with running requests, and of those with waiting ones."""
        self._drop_ended()
        return sorted(self._users), sorted({request.adapter_digest for request in self._waiting.values()})

    def _refuse(self, request: GenerateRequest, error: PagemillError) -> None:
        self._waiting.pop(request.request_id, None)
        self._ends += refusals(request, error)

    def _drop_ended(self) -> None:
        for digest, users in list(self._users.items()):
            users.intersection_update([name for name in users if self._is_served(name)])
            if not users:
                del self._users[digest]
                self.store.release(digest)


def refused(error: AdapterError, param: str = "model") -> PagemillError:
    return invalid_field(param, f"The adapter cannot be served: {error.message}", code="adapter_refused")


def not_known() -> PagemillError:
    return adapter_not_served(
        "This engine does not have the adapter, or it was removed. Load it first, or ask for the model itself."
    )
