"""Records how engines ended or fell silent and which requests they had, to tell a poison request from chance.

The end or silence of an engine is one incident, regardless of the number of requests that report it.
`brain.resilience.poison_requests` draws the conclusions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.interface import EngineFailure, EngineFailureKind

MAX_INCIDENTS = 256
SAME_INCIDENT_S = 30.0
"""The requests of an incident report it within this time, or before the engine reconnects."""
CHANCE_WINDOW_S = 10.0
"""Incidents this long before the first failure count as well: a common cause may end other engines first."""

SAME_WAY: dict[EngineFailureKind, tuple[EngineFailureKind, ...]] = {
    "crashed": ("crashed",),
    "stalled": ("stalled", "lost", "killed"),
    "lost": ("lost", "killed"),
    "killed": ("lost", "killed"),
}
"""The ends that may have the same cause. A node or a network that fails ends connections, or makes them silent."""


class Incident(NamedTuple):
    at: float
    deployment: str
    endpoint_id: str
    kind: EngineFailureKind
    present: frozenset[int]
    """The decisions of this gateway's requests at the engine."""
    unstarted: frozenset[int]
    """The decisions of those without a token."""
    had_probe: bool
    """Whether a probed request was among the unstarted ones."""
    num_elsewhere: int
    """The number of requests of other gateways, by the engine's latest report."""


class Incidents:
    def __init__(self) -> None:
        self._incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)

    def note(self, record: EndpointRecord, kind: EngineFailureKind | None, probes: frozenset[int], now: float) -> None:
        """Note the end of the endpoint's engine. `kind` is `None` if unknown; `probes` has the decisions of probes."""
        since = max(record.reports.connected_at, now - SAME_INCIDENT_S)
        for place, known in enumerate(self._incidents):
            if known.endpoint_id == record.endpoint.id and known.at >= since:
                if kind in ("crashed", "killed") or (kind == "stalled" and known.kind == "lost"):
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

    def involved(self, failure: EngineFailure) -> bool:
        """Whether the engine of a recorded incident had the request."""
        return self._of(failure.decision) is not None

    def was_alone(self, failure: EngineFailure) -> bool:
        """Whether no other request of this gateway waited for its first token at the engine."""
        incident = self._of(failure.decision)
        return incident is not None and incident.unstarted == {failure.decision}

    def was_shared(self, failure: EngineFailure) -> bool:
        """Whether the engine had requests of other gateways as well."""
        incident = self._of(failure.decision)
        return incident is not None and incident.num_elsewhere > 0

    def is_coincidence(self, deployment: str, failures: Sequence[EngineFailure]) -> bool:
        """Whether engines of the deployment end in the same way without the request of these failures.

        Incidents count from `CHANCE_WINDOW_S` before the first failure on, except those that a probe of another request
        explains. Return true if the incident of the first failure is no longer recorded.
        """
        first = self._of(failures[0].decision)
        if first is None:
            return True
        mine = {failure.decision for failure in failures}
        kinds = SAME_WAY[failures[-1].kind]
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
