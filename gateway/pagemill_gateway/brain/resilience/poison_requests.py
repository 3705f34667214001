"""Poison-request detection: which requests may bring down engines, how that is tested, and when it is proven.

Engines end for many reasons, and most requests that were there are not the cause. What the end of an engine says of a
request:

- The engine was ended from outside, and its server reports that (`killed`): nothing.
- Its connections just ended (`lost`; a pod was killed, its node failed, or its server died of its own work): little.
  Only the second loss in a row, without a token in between, leads to a probe.
- Its own work failed, and its server reports that (`crashed`): one of the requests there is the cause. All are probed.

A poison request brings down its engine whenever it is computed, before its next token. So a token clears a request, and
what happened before is forgotten. A probe lasts until the first token at the next engine. The first probe is `shared`:
no other probe runs on that engine, and other requests may come and go, since an engine that crashed with many requests
leaves many to probe, and none of them shall wait long. The next ones are `alone`: the request goes where no request
waits for a first token, and none may follow; the relay pauses longer before each of them, so that a cause that ends
engines by chance is over or has shown itself.

A request is blamed when an engine ended under its probe, no other request there was without a token, and

- the probe was `alone`; or the engine crashed, and no other gateway had a request there; and
- engines of the deployment do not end without it as well: none did, in the same way, from shortly before its first one
  on (`brain.resilience.incidents`). Those that end under the probe of another request are explained by that one.

So a request that crashes engines costs two or three of them, one that ends the whole pod four, while no others end; if
others do, it is retried until `admission.attempts` ends it without blame. One that gets tokens between its crashes is
never blamed, and is bounded there too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pagemill_gateway.brain.endpoints.record import EndpointRecord
from pagemill_gateway.brain.interface import EngineFailure, EngineFailureKind, Probe
from pagemill_gateway.brain.resilience.incidents import Incidents
from pagemill_protocol.errors import request_crashed_engine

TOLERATED_LOSSES = 2
"""Engines in a row that are lost, before that counts as more than chance."""
HOLD_S = 1.0
"""An engine takes no new requests this long before a probe `alone`; extended while the request waits."""
ALONE_S = 15.0
"""No other request starts there for this long; an answer that comes as a whole at its end may take minutes."""
Outcome = Literal["cleared", "ended", "blamed", "left"]
OUTCOMES: tuple[Outcome, ...] = ("cleared", "ended", "blamed", "left")
"""`ended`: its engine ended, which may have been chance. `left`: its client left, or the engine refused it."""


class _RunningProbe(NamedTuple):
    deployment: str
    endpoint_id: str
    closed_until: float


class PoisonDetection:
    def __init__(self) -> None:
        self._incidents = Incidents()
        self._probes: dict[int, _RunningProbe] = {}
        """By decision."""
        self._held: dict[str, float] = {}
        """Endpoints that take no new requests before a probe `alone`, and until when."""
        self.outcomes: Counter[tuple[str, Outcome]] = Counter()
        """Of probes, by deployment, since the start."""

    def keep(self, deployments: set[str]) -> None:
        for key in [key for key in self.outcomes if key[0] not in deployments]:
            del self.outcomes[key]

    def next_probe(self, deployment: str, failures: Sequence[EngineFailure]) -> Probe:
        """How a request with these failures is tried next. Raises `PagemillError` 500 when it is blamed."""
        if failures and self._blames(deployment, failures):
            self.outcomes[deployment, "blamed"] += 1
            raise request_crashed_engine()
        recent = [failure for failure in _since_last_token(failures) if self._incidents.had(failure)]
        relevant = [failure for failure in recent if failure.kind != "killed"]
        if any(failure.probe != "none" and not failure.progressed for failure in relevant):
            return "alone"
        suspicious = len(relevant) >= TOLERATED_LOSSES or any(failure.kind == "crashed" for failure in relevant)
        return "shared" if suspicious else "none"

    # Which endpoints a probe may use.

    def allowed(self, records: list[EndpointRecord], probe: Probe, now: float) -> list[EndpointRecord]:
        """Those of `records` that may get a request with this probe now."""
        if probe == "none":
            return self._open(records, now)
        busy = {each.endpoint_id for each in self._probes.values()}
        free = [record for record in records if record.endpoint.id not in busy]
        # An endpoint that is gone already, unnoticed so far, would prove nothing.
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
        """Its first token is here. Whether it was a probe, for whose end other requests may wait."""
        return self._close(decision, "cleared")

    def released(self, decision: int) -> None:
        """It left its engine, for whatever reason."""
        self._close(decision, "left")

    def engine_failed(self, decision: int, record: EndpointRecord, kind: EngineFailureKind, now: float) -> None:
        """The engine of `decision` is reported to have ended; call it before any request there is released."""
        self._note(record, kind, now)
        self._close(decision, "ended")

    def stream_lost(self, record: EndpointRecord, now: float) -> None:
        """The endpoint's own stream broke off."""
        self._note(record, None, now)

    def _note(self, record: EndpointRecord, kind: EngineFailureKind | None, now: float) -> None:
        self._incidents.note(record, kind, frozenset(self._probes), now)

    def _blames(self, deployment: str, failures: Sequence[EngineFailure]) -> bool:
        last = failures[-1]
        if last.kind == "killed" or last.probe == "none" or last.progressed:
            return False
        proven = last.probe == "alone" or (last.kind == "crashed" and not self._incidents.was_shared(last))
        return proven and self._incidents.was_only_one(last) and not self._incidents.is_chance(deployment, failures)

    def _num_before(self, record: EndpointRecord) -> tuple[bool, int]:
        """Requests that must get a token before a probe `alone`; an endpoint that is held already comes first."""
        return record.endpoint.id not in self._held, record.dispatches.num_uncomputed

    def _open(self, records: list[EndpointRecord], now: float) -> list[EndpointRecord]:
        """Endpoints that no probe has to itself, or is about to have."""
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
    """Failures before a token are forgotten. A crash after a token may still be caused by the request's next token."""
    for place in reversed(range(len(failures))):
        if failures[place].progressed:
            return failures[place:] if failures[place].kind == "crashed" else failures[place + 1 :]
    return failures
