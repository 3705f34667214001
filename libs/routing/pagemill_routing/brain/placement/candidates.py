"""Builds the routing policy's candidates from endpoint records, and caches them in the records.

Most endpoints look the same to consecutive requests, so a decision builds few candidates. When a record changes,
`brain.placement.placement` clears `EndpointRecord.seen` and notifies the deployment's `KeptCandidates`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from pagemill_routing.brain.endpoints.adapters import Adapters, AdapterUses
from pagemill_routing.brain.endpoints.pod_reports import with_own_counts
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.policies.policy import Candidate, CandidateList, RoutingPolicy

PLAIN, STALE = 0, -1
"""Keys of cached candidates without a session: fresh report and no cached tokens, or stale report."""
MAX_KEPT = 64
"""Limit for the cached candidates of an endpoint, one for each number of cached tokens."""


def candidate_of(
    policy: RoutingPolicy, record: EndpointRecord, now: float, num_cached_tokens: int = 0, session: bool = False
) -> Candidate:
    """Return the endpoint as a candidate for a deployment that uses this policy."""
    believed = record.reports.fresh(now)
    key = PLAIN + 2 * num_cached_tokens + session if believed else STALE - session
    candidate = record.seen.get(key)
    if candidate is None:
        if len(record.seen) >= MAX_KEPT:
            record.seen.clear()
        candidate = _believed(record, num_cached_tokens, session) if believed else _stale(record, session)
        msgspec.structs.force_setattr(candidate, "derived", policy.derive(candidate))
        record.seen[key] = candidate
    return candidate


class KeptCandidates:
    """The candidates of a deployment with many endpoints and its policy's table of them, without cached tokens.

    Only candidates that changed are rebuilt: by a report, a decision, the end of a request, or a report's expiry.
    """

    def __init__(self, policy: RoutingPolicy, records: Sequence[EndpointRecord]) -> None:
        self.policy = policy
        self.records = records
        self._places = {record: place for place, record in enumerate(records)}
        self._candidates = [_stale(record, session=False) for record in records]
        self._table = policy.table(len(records))
        self._changed: set[EndpointRecord] = set()
        self._fresh_until = -math.inf
        """The earliest time at which a report becomes stale."""

    def changed(self, record: EndpointRecord) -> None:
        self._changed.add(record)

    def current(self, now: float) -> CandidateList:
        is_checked = now <= self._fresh_until
        changed = self._changed if is_checked else self.records
        if not is_checked:
            self._fresh_until = math.inf
        for record in changed:
            place = self._places.get(record)
            if place is None:
                continue
            candidate = candidate_of(self.policy, record, now)
            if candidate is not self._candidates[place]:
                self._candidates[place] = candidate
                self._table.update(place, candidate)
            if candidate.believed:
                self._fresh_until = min(self._fresh_until, record.reports.fresh_until)
        self._changed.clear()
        return CandidateList(self._candidates, self._table)


def with_adapter(
    candidates: Sequence[Candidate], records: Sequence[EndpointRecord], digest: str, now: float, uses: AdapterUses
) -> list[Candidate]:
    """Return the candidates with the times that a request for the adapter waits for its load, and with what it costs
    that the load drops another adapter: loading that one again, unless another candidate has it."""
    waits_ms = [
        record.adapters.wait_ms(digest, now, believed=each.believed)
        for record, each in zip(records, candidates, strict=True)
    ]
    drops_ms = [0.0] * len(records)
    if len(records) > 1 and any(waits_ms):
        num_places = sum(record.adapters.num_kept for record in records)
        copies = Counter(each for record in records for each in record.adapters.resident)
        drops_ms = [_drop_ms(record.adapters, digest, uses, copies, num_places) for record in records]
    return [
        msgspec.structs.replace(each, adapter_ms=wait_ms, eviction_ms=drop_ms) if wait_ms or drop_ms else each
        for each, wait_ms, drop_ms in zip(candidates, waits_ms, drops_ms, strict=True)
    ]


def _drop_ms(adapters: Adapters, digest: str, uses: AdapterUses, copies: Mapping[str, int], num_places: int) -> float:
    dropped = adapters.dropped_for(digest)
    if dropped is None or copies[dropped] > 1:
        return 0.0
    return adapters.load_ms * uses.again(dropped, num_places)


def _believed(record: EndpointRecord, num_cached_tokens: int, session: bool) -> Candidate:
    dispatches = record.dispatches
    return Candidate(
        record.endpoint.id,
        record.in_flight,
        record.reports.external,
        record.last_chosen,
        record.pod_report,
        True,
        num_cached_tokens,
        dispatches.num_unreported,
        dispatches.num_unreported_tokens,
        session,
    )


def _stale(record: EndpointRecord, session: bool) -> Candidate:
    dispatches, report = record.dispatches, record.pod_report
    if report is not None:
        report = with_own_counts(report, record.in_flight - dispatches.num_uncomputed)
    return Candidate(
        record.endpoint.id,
        record.in_flight,
        0,
        record.last_chosen,
        report,
        num_unreported=dispatches.num_uncomputed,
        num_unreported_tokens=dispatches.num_uncomputed_tokens,
        session=session,
    )
