"""The LoRA adapters that one pod has or will have, and how long a request for one would wait there for its load.

The pod's frames report the resident adapters. Loads are simulated one after the other, with the duration that the pod
reports. A decision that needs a load makes the adapter expected at the pod, until the request fails, the pod reports
again, or `EXPIRY_S` after the first token. Which adapter a load would drop follows from the order that the pod reports;
`AdapterUses` says how soon requests for that one are to be expected.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from pagemill_protocol.report.adapters import AdapterSlots, AdapterStatus
from pagemill_routing.brain.endpoints.dispatches import EXPIRY_S

MAX_USES = 4096
"""Adapters of a deployment whose last requests are remembered."""


class Adapters:
    def __init__(self) -> None:
        self._reported = AdapterSlots()
        self.by_name: dict[str, AdapterStatus] = {}
        """What the pod reports of each adapter; another object after each change."""
        self._digests = frozenset[str]()
        self._pinned = frozenset[str]()
        self._order: list[str] = []
        """The loaded adapters in the order in which the pod would drop them."""
        self._loads: list[str] = []
        """The digests of running, waiting and expected loads, in this order."""
        self._began_s = 0.0
        """The start of the first load."""
        self._decisions: dict[int, str] = {}
        """The adapters that our decisions expect to be loaded."""
        self._expiring: deque[tuple[float, int]] = deque()

    def digest(self, name: str) -> str:
        """Return the digest that requests for the adapter get at the pod; empty if it knows none."""
        status = self.by_name.get(name)
        return status.digest if status is not None else ""

    def knows(self, digest: str) -> bool:
        return digest in self._digests

    def update(self, slots: AdapterSlots, now: float, *, new_engine: bool) -> None:
        """Apply the adapters of a frame. `new_engine`: the engine may have been replaced."""
        if not (slots.num_slots or slots.known or self._reported.num_slots or self.by_name):
            return
        if slots.known != self._reported.known:
            self.by_name = {each.name: each for each in reversed(slots.known)}
            self._digests = frozenset(each.digest for each in slots.known if each.digest)
            self._pinned = frozenset(each.digest for each in slots.known if each.pinned)
        self._reported = slots
        self._order = sorted(slots.resident, key=self._pinned.__contains__)
        if new_engine:
            self._decisions.clear()
        expected = set(self._decisions.values()).difference(slots.resident)
        self._load([*slots.loading, *(each for each in self._loads if each in expected)], now)

    def wait_ms(self, digest: str, now: float, *, believed: bool) -> float:
        """Return the time until a request that is sent now has its adapter. `believed`: the pod's report is fresh."""
        self._expire(now)
        if believed and digest in self._reported.resident:
            return 0.0
        load_ms, loads = self._reported.load_ms, self._loads
        if not loads:
            return load_ms
        first_ms = max(0.0, load_ms - (now - self._began_s) * 1000)
        return first_ms + load_ms * (loads.index(digest) if digest in loads else len(loads))

    @property
    def num_kept(self) -> int:
        return self._reported.num_kept

    @property
    def load_ms(self) -> float:
        return self._reported.load_ms

    @property
    def resident(self) -> list[str]:
        return self._reported.resident

    def dropped_for(self, digest: str) -> str | None:
        """Return the adapter that the pod would drop to load this one; None if it has room, or reports too little."""
        reported = self._reported
        if not reported.num_kept or digest in reported.resident or digest in self._loads:
            return None
        excess = len(reported.resident) + len(self._loads) + 1 - reported.num_kept
        return self._order[excess - 1] if 0 < excess <= len(self._order) else None

    def expect(self, decision: int, digest: str, now: float) -> None:
        """Note a request for the adapter that is sent to the pod."""
        if digest not in self._reported.resident:
            self._decisions[decision] = digest
            self._load([*self._loads, digest], now)

    def computed(self, decision: int, now: float) -> None:
        """Let the decision's expectation expire, because its first token has arrived and the pod will report soon."""
        if decision in self._decisions:
            self._expiring.append((now + EXPIRY_S, decision))

    def drop(self, decision: int, now: float) -> None:
        digest = self._decisions.pop(decision, None)
        if digest is not None and digest not in self._reported.loading and digest not in self._decisions.values():
            self._load([each for each in self._loads if each != digest], now)

    def _load(self, loads: list[str], now: float) -> None:
        loads = list(dict.fromkeys(loads))
        if loads[:1] != self._loads[:1]:
            self._began_s = now
        self._loads = loads

    def _expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            self.drop(self._expiring.popleft()[1], now)


class AdapterUses:
    """When each adapter of a deployment was asked for last, counted in requests for adapters."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._latest: OrderedDict[str, int] = OrderedDict()

    def asked(self, digest: str) -> None:
        self._num_requests += 1
        self._latest[digest] = self._num_requests
        self._latest.move_to_end(digest)
        if len(self._latest) > MAX_USES:
            self._latest.popitem(last=False)

    def again(self, digest: str, num_places: int) -> float:
        """Return how likely it is that a request for the adapter comes before it would be dropped anyway.

        An adapter that was asked for `age` requests ago is taken to be asked for once in so many, and one that no
        request asks for to stay loaded for as many requests as there are places.
        """
        at = self._latest.get(digest)
        return 0.0 if at is None else min(1.0, num_places / (self._num_requests - at + 1))
