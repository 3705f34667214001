"""How engines ended: who was there, and whether that points at a request or at chance. Pure bookkeeping.

An engine's end is one incident, however many requests tell of it, and whoever tells first. What it says of a request is
`brain.resilience.poison_requests`' to know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pagemill_gateway.brain.endpoints.record import EndpointRecord
from pagemill_gateway.brain.interface import EngineFailure, EngineFailureKind

MAX_INCIDENTS = 256
SAME_INCIDENT_S = 30.0
"""All that belong to one end have noticed it within this time, or when the engine has connected anew."""
CHANCE_WINDOW_S = 10.0
"""What brings down several engines at once need not begin with the one that a request was at."""


class Incident(NamedTuple):
    at: float
    deployment: str
    endpoint_id: str
    kind: EngineFailureKind
    present: frozenset[int]
    """Decisions of this gateway's requests that were there."""
    unstarted: frozenset[int]
    """Those of them that had no token yet."""
    had_probe: bool
    """A suspect was among them that had none."""
    num_elsewhere: int
    """Requests that were not ours, by its latest report."""


class Incidents:
    def __init__(self) -> None:
        self._incidents: deque[Incident] = deque(maxlen=MAX_INCIDENTS)

    def note(self, record: EndpointRecord, kind: EngineFailureKind | None, probes: frozenset[int], now: float) -> None:
        """The endpoint's engine ended; `probes` are the decisions of all suspects. `None`: nobody knows how."""
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
        """Whether the request was there when the engine ended; else it came too late, or nobody knows any more."""
        return self._of(failure.decision) is not None

    def was_only_one(self, failure: EngineFailure) -> bool:
        """Of this gateway's requests there no other one waited for its first token."""
        incident = self._of(failure.decision)
        return incident is not None and incident.unstarted == {failure.decision}

    def was_shared(self, failure: EngineFailure) -> bool:
        """Other gateways had requests there as well."""
        incident = self._of(failure.decision)
        return incident is not None and incident.num_elsewhere > 0

    def is_chance(self, deployment: str, failures: Sequence[EngineFailure]) -> bool:
        """Whether engines of the deployment end in the same way without the request that saw these ends.

        From shortly before the first of them. An end that the trial of another suspect explains does not count. What
        cannot be told any more may have been chance.
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
