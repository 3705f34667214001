"""Poison-request detection: which requests may bring down engines, how they are probed, and when they are blamed.

Engines end for many reasons, and most of their requests are not the cause. The end of an engine is evidence against its
requests, depending on its kind:

- `killed` (the server reports that the engine was ended from outside): no evidence.
- `lost` (the connections ended, because a pod was killed, its node failed, or its server died): little evidence. Only
  the second loss in a row, without a token in between, leads to a probe.
- `stalled` (the engine fell silent in the middle of its work, on the request's stream and on that of its state, or
  completes no step): evidence like a crash, but a frozen node looks the same. All without a token are probed; the
  others continue at once, because probes run one after another.
- `crashed` (the server reports that the engine's own work failed): one of its requests is the cause. All are probed.

A poison request brings down its engine whenever it is computed, before its next token. So a token clears a request, and
earlier failures are forgotten. A probe lasts until the first token at the next engine. The first probe is `shared`: no
other probe runs on that engine, but other requests do, because an engine that crashed with many requests leaves many to
probe, and none of them should wait long. Later probes are `alone`: the request is sent to an engine where no request
waits for its first token, and no other request is sent there. The relay pauses longer before each of them, so that
other causes are over or have shown themselves.

A request is blamed when an engine ended under its probe, no other request there was without a token, and

- the probe was `alone`; or the engine crashed or fell silent, and no other gateway had a request there; and
- no engine of the deployment ended in the same way without the request, from shortly before its first failure on
  (`brain.resilience.incidents`). Engines that end under the probe of another request do not count.

So a request that crashes engines or makes them silent does so to two or three of them, and one that ends the whole pod
to four, if no others end. If others do, it is retried until `admission.attempts` ends it without blame. A request that
gets tokens between its crashes is never blamed; `admission.attempts` limits it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pagemill_protocol.errors import request_crashed_engine
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.interface import EngineFailure, EngineFailureKind, Probe
from pagemill_routing.brain.resilience.incidents import Incidents

TOLERATED_LOSSES = 2
"""The number of losses in a row that leads to a probe."""
SUSPICIOUS: frozenset[EngineFailureKind] = frozenset({"crashed", "stalled"})
"""The failures whose probe may be shared with other requests, and is evidence all the same."""
HOLD_S = 1.0
"""How long an engine takes no new requests before a probe `alone`; extended while the request waits."""
ALONE_S = 15.0
"""How long no other request starts during a probe `alone`; it is limited, because a first token may take minutes."""
Outcome = Literal["cleared", "ended", "blamed", "left"]
OUTCOMES: tuple[Outcome, ...] = ("cleared", "ended", "blamed", "left")
"""`ended`: the probe's engine ended, perhaps by chance. `left`: the client disconnected, or the engine refused it."""


class _RunningProbe(NamedTuple):
    deployment: str
    endpoint_id: str
    closed_until: float


class PoisonDetection:
    def __init__(self) -> None:
        self._incidents = Incidents()
        self._probes: dict[int, _RunningProbe] = {}
        """The running probes by decision."""
        self._held: dict[str, float] = {}
        """The endpoints that take no new requests before a probe `alone`, and the times until which they do not."""
        self.outcomes: Counter[tuple[str, Outcome]] = Counter()
        """The outcomes of probes by deployment, since the start."""

    def keep(self, deployments: set[str]) -> None:
        for key in [key for key in self.outcomes if key[0] not in deployments]:
            del self.outcomes[key]

    def next_probe(self, deployment: str, failures: Sequence[EngineFailure]) -> Probe:
        """Return how a request with these failures is probed next. Raises `PagemillError` 500 if it is blamed."""
        if failures and self._blames(deployment, failures):
            self.outcomes[deployment, "blamed"] += 1
            raise request_crashed_engine()
        recent = [failure for failure in _since_last_token(failures) if self._incidents.involved(failure)]
        relevant = [failure for failure in recent if failure.kind != "killed"]
        if any(failure.probe != "none" and not failure.progressed for failure in relevant):
            return "alone"
        suspicious = len(relevant) >= TOLERATED_LOSSES or any(
            failure.kind == "crashed" or (failure.kind == "stalled" and not failure.progressed) for failure in relevant
        )
        return "shared" if suspicious else "none"

    # Which endpoints a probe may use.

    def allowed(self, records: list[EndpointRecord], probe: Probe, now: float) -> list[EndpointRecord]:
        """Return the records that may get a request with this probe now."""
        if probe == "none":
            return self._open(records, now)
        busy = {each.endpoint_id for each in self._probes.values()}
        free = [record for record in records if record.endpoint.id not in busy]
        # The loss of an endpoint that is gone already would be no evidence, so fresh reports are preferred.
        free = [record for record in free if record.reports.fresh(now)] or free
        if probe == "shared":
            return self._open(free, now)
        quiet = [record for record in free if not record.dispatches.num_uncomputed]
        if free and not quiet:
            self._held[min(free, key=self._num_before).endpoint.id] = now + HOLD_S
        return quiet

    def probe_started(self, decision: int, record: EndpointRecord, probe: Probe, now: float) -> None:
        if probe != "none":
            closed_until = now + ALONE_S if probe == "alone" else now
            self._probes[decision] = _RunningProbe(record.deployment, record.endpoint.id, closed_until)
            self._held.pop(record.endpoint.id, None)

    def cleared(self, decision: int) -> bool:
        """Note the first token of a decision. Return whether it was a probe, so that other requests may now start."""
        return self._close(decision, "cleared")

    def released(self, decision: int) -> None:
        """Note that a decision's request left its engine, for any reason."""
        self._close(decision, "left")

    def engine_failed(self, decision: int, record: EndpointRecord, kind: EngineFailureKind, now: float) -> None:
        """Note the end of a decision's engine. It must be called before requests of the engine are released."""
        self._note(record, kind, now)
        self._close(decision, "ended")

    def stream_lost(self, record: EndpointRecord, now: float) -> None:
        """Note that the endpoint's state stream ended."""
        self._note(record, None, now)

    def _note(self, record: EndpointRecord, kind: EngineFailureKind | None, now: float) -> None:
        self._incidents.note(record, kind, frozenset(self._probes), now)

    def _blames(self, deployment: str, failures: Sequence[EngineFailure]) -> bool:
        last = failures[-1]
        if last.kind == "killed" or last.probe == "none" or last.progressed:
            return False
        proven = last.probe == "alone" or (last.kind in SUSPICIOUS and not self._incidents.was_shared(last))
        return proven and self._incidents.was_alone(last) and not self._incidents.is_coincidence(deployment, failures)

    def _num_before(self, record: EndpointRecord) -> tuple[bool, int]:
        """Return the sort key of endpoints for a probe `alone`: held ones first, then by requests without a token."""
        return record.endpoint.id not in self._held, record.dispatches.num_uncomputed

    def _open(self, records: list[EndpointRecord], now: float) -> list[EndpointRecord]:
        """Return the records that no probe `alone` uses or waits for."""
        if not self._probes and not self._held:
            return records
        self._held = {endpoint_id: until for endpoint_id, until in self._held.items() if until > now}
        closed = {each.endpoint_id for each in self._probes.values() if each.closed_until > now} | self._held.keys()
        return [record for record in records if record.endpoint.id not in closed]

    def _close(self, decision: int, outcome: Outcome) -> bool:
        place = self._probes.pop(decision, None)
        if place is None:
            return False
        self.outcomes[place.deployment, outcome] += 1
        return True


def _since_last_token(failures: Sequence[EngineFailure]) -> Sequence[EngineFailure]:
    """Return the failures since the last token. A crash or silence after a token counts: the next token may be its
    cause."""
    for place in reversed(range(len(failures))):
        if failures[place].progressed:
            return failures[place:] if failures[place].kind in SUSPICIOUS else failures[place + 1 :]
    return failures
