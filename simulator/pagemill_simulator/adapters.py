"""The adapters of one simulated pod: a few slots, sequential loads, and requests that wait for their adapter.

Simpler than an engine: a load takes a fixed time and stops no request; the least
recently used idle adapter is evicted; if none is idle, the least recently used one gets no further request until it is.
Requests that wait for no adapter are handled by the engine's own scheduler (`pod`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pagemill_protocol.report.adapters import AdapterSlots, AdapterStatus
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_simulator.events import Events


class AdapterSettings(NamedTuple):
    num_slots: int
    load_s: float
    reports_load_ms: bool = True
    """If False, a gateway cannot weigh loads, as before engines reported them."""
    names: tuple[str, ...] = ()
    """The adapters that the pod knows; the digest of each is its name."""


class AdapterBay:
    def __init__(
        self,
        settings: AdapterSettings,
        events: Events,
        *,
        start: Callable[[GenerateRequest], None],
        changed: Callable[[], None],
    ) -> None:
        """`start` is called with a request once its adapter is loaded."""
        self._settings = settings
        self._known = [AdapterStatus(name=each, source=each, state="known", digest=each) for each in settings.names]
        self._events = events
        self._start = start
        self._changed = changed
        self._running: dict[str, str] = {}
        """The adapter of each running request."""
        self._resident: dict[str, int] = {}
        """Number of running requests by adapter, least recently used first."""
        self._closing: str | None = None
        """The resident adapter that will be evicted and gets no more requests."""
        self._held: dict[str, list[GenerateRequest]] = {}
        """Waiting requests by adapter, in the order of the loads."""
        self._is_loading = False
        self.num_loads = 0

    @property
    def held(self) -> list[GenerateRequest]:
        return [request for requests in self._held.values() for request in requests]

    def slots(self) -> AdapterSlots:
        settings = self._settings
        return AdapterSlots(
            num_slots=settings.num_slots,
            resident=[each for each in self._resident if each != self._closing],
            num_kept=settings.num_slots,
            loading=list(self._held),
            load_ms=settings.load_s * 1000 if settings.reports_load_ms else 0.0,
            known=self._known,
        )

    def enter(self, request: GenerateRequest) -> None:
        digest = request.adapter_digest
        if digest in self._resident and digest != self._closing:
            self._run(request)
            return
        self._held.setdefault(digest, []).append(request)
        self._load_next()
        self._changed()

    def ended(self, request_id: str) -> None:
        digest = self._running.pop(request_id, None)
        if digest is not None:
            self._resident[digest] -= 1
            self._load_next()

    def _run(self, request: GenerateRequest) -> None:
        digest = request.adapter_digest
        self._running[request.request_id] = digest
        self._resident[digest] = self._resident.pop(digest, 0) + 1
        self._start(request)

    def _load_next(self) -> None:
        if self._is_loading or not self._held:
            return
        if len(self._resident) == self._settings.num_slots and not self._make_room():
            return
        self._is_loading = True
        self.num_loads += 1
        self._events.after(self._settings.load_s, partial(self._loaded, next(iter(self._held))))
        self._changed()

    def _make_room(self) -> bool:
        idle = next((digest for digest, num_running in self._resident.items() if not num_running), None)
        if idle is None:
            self._closing = self._closing or next(iter(self._resident))
            return False
        del self._resident[idle]
        reopened, self._closing = self._closing, None
        if reopened is not None and reopened != idle:
            for request in self._held.pop(reopened, []):
                self._run(request)
        return True

    def _loaded(self, digest: str) -> None:
        self._is_loading = False
        self._resident[digest] = 0
        for request in self._held.pop(digest):
            self._run(request)
        self._load_next()
        self._changed()
