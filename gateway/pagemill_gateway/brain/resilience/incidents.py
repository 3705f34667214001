"""Records how engines ended: which requests were there, and whether that points at a request or at chance.

The end of an engine is one incident, however many requests report it. What it says of a request is decided by
`brain.resilience.poison_requests`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pagemill_gateway.brain.endpoints.record import EndpointRecord
from pagemill_gateway.brain.interface import EngineFailure, EngineFailureKind

MAX_INCIDENTS = 256
SAME_INCIDENT_S = 30.0
"""All requests of one incident report it within this time, or before the engine has connected anew."""
CHANCE_WINDOW_S = 10.0
"""A cause that ends several engines at once need not begin with the engine that a request was at."""


class Incident(NamedTuple):
    at: float
    deployment: str
    endpoint_id: str
    kind: EngineFailureKind
    present: frozenset[int]
    """Decisions of this gateway's requests that were there."""
    unstarted: frozenset[int]
    """Those of them without a token so far."""
    had_probe: bool
    """A probed request was among the unstarted ones."""
    num_elsewhere: int
    """Requests that were not ours, by its latest report."""


class Incidents:
    def __init__(self) -> None:
        self._incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)

    def note(self, record: EndpointRecord, kind: EngineFailureKind | None, probes: frozenset[int], now: float) -> None:
        """The endpoint's engine ended; `probes` are the decisions of all probes. `None`: how it ended is unknown."""
        since = max(record.reports.connected_at, now - SAME_INCIDENT_S)
        for place, known in enumerate(self._incidents):
            if known.endpoint_id == record.endpoint.id and known.at >= since:
                if kind in ("crashed", "killed"):
                    self._incidents[place] = known._replace(kind=kind)
                return
        present, unstarted = record.dispatches.decisions, record.dispatches.uncomputed
        self._incidents.append(
            Incident(
                now,
                record.deployment,
                record.endpoint.id,
                kind or "lost",
                present,
                unstarted,
                bool(probes & unstarted),
                record.load_elsewhere(now),
            )
        )

    def had(self, failure: EngineFailure) -> bool:
        """Whether the request was there when the engine ended; else it came too late, or the incident is forgotten."""
        return self._of(failure.decision) is not None

    def was_only_one(self, failure: EngineFailure) -> bool:
        """No other request of this gateway waited for its first token there."""
        incident = self._of(failure.decision)
        return incident is not None and incident.unstarted == {failure.decision}

    def was_shared(self, failure: EngineFailure) -> bool:
        """Other gateways had requests there as well."""
        incident = self._of(failure.decision)
        return incident is not None and incident.num_elsewhere > 0

    def is_chance(self, deployment: str, failures: Sequence[EngineFailure]) -> bool:
        """Whether engines of the deployment end in the same way without the request of these failures.

        Incidents count from shortly before the first failure on. One that the probe of another request explains does
        not count. Where the first failure is forgotten, it may have been chance.
        """
        first = self._of(failures[0].decision)
        if first is None:
            return True
        mine = {failure.decision for failure in failures}
        kinds = ("crashed",) if failures[-1].kind == "crashed" else ("lost", "killed")
        return any(
            each.deployment == deployment
            and each.kind in kinds
            and each.at >= first.at - CHANCE_WINDOW_S
            and not each.had_probe
            and not each.present & mine
            for each in self._incidents
        )

    def _of(self, decision: int) -> Incident | None:
        return next((each for each in reversed(self._incidents) if decision in each.present), None)
