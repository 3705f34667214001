"""Places requests on eligible endpoints.

It maintains the prefix index, the predictions, the sessions and the counts of each endpoint. For a request it gives the
policy the candidates, counts the choice at once, and records the decision. `brain.placement.eligible` finds the
eligible endpoints.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from pagemill_protocol.hashes import HASH_BYTES
from pagemill_protocol.report.cache_kinds import CacheKind
from pagemill_protocol.report.state import StateFrame
from pagemill_routing.brain.endpoints.deployment import DeploymentRecord
from pagemill_routing.brain.endpoints.dispatches import Dispatch
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.interface import RoutingRequest
from pagemill_routing.brain.placement.candidates import PLAIN, STALE, KeptCandidates, candidate_of, with_adapter
from pagemill_routing.brain.placement.decisions import DecisionLog
from pagemill_routing.brain.placement.predictions import Predictions
from pagemill_routing.brain.placement.prefix_index import PrefixIndex
from pagemill_routing.policies.policy import Candidate, CandidateList, RequestView, RoutingPolicy

Fits = Callable[[EndpointRecord, int], bool]
"""Whether an endpoint has capacity for a request with this many cached prompt tokens."""
MAX_SESSIONS = 65536


class PlacementResult(msgspec.Struct, frozen=True):
    number: int
    """The number of the decision."""
    record: EndpointRecord
    candidate: Candidate
    policy: str
    predicted_ttft_ms: float | None


class Placement:
    def __init__(self, rng: random.Random, max_decisions: int, num_decisions: int = 0) -> None:
        self._rng = rng
        self.num_decisions = num_decisions
        """The number of the latest decision."""
        self._sessions = Sessions()
        self.index = PrefixIndex()
        self._windowed: set[str] = set()
        """Endpoints whose models have windows: they can resume where their first blocks are gone."""
        self.predictions = Predictions()
        self.decisions = DecisionLog(max_decisions)
        self._kept: dict[str, KeptCandidates] = {}
        """The kept candidates of deployments with many endpoints."""

    def place(
        self,
        request: RoutingRequest,
        num_sequences: int,
        policy: RoutingPolicy,
        deployment: DeploymentRecord,
        records: Sequence[EndpointRecord],
        fits: Fits,
        now: float,
    ) -> PlacementResult | None:
        """Choose one of `records`, and count the decision there; None if no endpoint has capacity."""
        self.predictions.expire(now)
        candidates = self._candidates(request, policy, deployment, records, now)
        if request.adapter_digest:
            candidates = with_adapter(candidates, records, request.adapter_digest, now, deployment.adapter_uses)
        view = RequestView(
            request.num_prompt_tokens,
            deployment.output_tokens.mean,
            request.prompt_key,
            self._rng.random(),
            request.adapter_digest != "",
        )
        decision = policy.choose(view, candidates)
        index = _place_of(decision.chosen, candidates)
        if not fits(records[index], decision.chosen.num_cached_tokens):
            # All endpoints are checked only if the chosen one is full, which is rare.
            pairs = zip(records, candidates, strict=True)
            fitting = [(record, each) for record, each in pairs if fits(record, each.num_cached_tokens)]
            if not fitting:
                return None
            records, candidates = [record for record, _ in fitting], [each for _, each in fitting]
            decision = policy.choose(view, candidates)
            index = _place_of(decision.chosen, candidates)
        chosen = decision.chosen
        self.num_decisions = number = self.num_decisions + 1
        self._account(number, request, num_sequences, records[index], chosen)
        if request.adapter_digest:
            records[index].adapters.expect(number, request.adapter_digest, now)
            deployment.adapter_uses.asked(request.adapter_digest)
        if request.session:
            self._sessions.chosen(deployment.key, request.session, chosen.endpoint_id)
        self.decisions.note(number, deployment.key, policy.name, request.num_prompt_tokens, candidates, decision)
        return PlacementResult(number, records[index], chosen, policy.name, decision.predicted_ttft_ms)

    def changed(self, record: EndpointRecord) -> None:
        """Drop the cached candidates of a record that has changed."""
        record.seen.clear()
        kept = self._kept.get(record.deployment)
        if kept is not None:
            kept.changed(record)

    def keep(self, deployments: set[str]) -> None:
        """Drop the kept candidates of all other deployments."""
        self._kept = {key: kept for key, kept in self._kept.items() if key in deployments}

    def most_cached_tokens(self, request: RoutingRequest, records: Sequence[EndpointRecord], now: float) -> int:
        """Return the largest number of cached prompt tokens on an endpoint."""
        return max(self._cached_tokens(request, records, now).values(), default=0)

    def observe(self, record: EndpointRecord, frame: StateFrame) -> None:
        """Apply the prefixes of an accepted frame. The caller has called `changed`."""
        endpoint_id = record.endpoint.id
        if frame.snapshot:
            self.forget(endpoint_id)
            self.index.snapshot(endpoint_id, frame.prefixes_added)
            if not all(kind.keeps_all for kind in frame.kinds):
                self._windowed.add(endpoint_id)
        elif frame.prefixes_added or frame.prefixes_removed:
            self.index.remove(endpoint_id, frame.prefixes_removed)
            self.index.add(endpoint_id, frame.prefixes_added)
            bit = self.index.bit(endpoint_id)
            for chunks in (frame.prefixes_added, frame.prefixes_removed):
                plain = (chunk[:HASH_BYTES] for chunk in chunks) if endpoint_id in self._windowed else chunks
                self.predictions.reported(bit, plain)

    def forget(self, endpoint_id: str) -> None:
        """Forget the endpoint's cached prefixes."""
        self._windowed.discard(endpoint_id)
        self.predictions.forget(self.index.bit(endpoint_id))
        self.index.forget(endpoint_id)

    def computed(self, number: int, record: EndpointRecord, now: float, ttft_ms: float | None) -> None:
        """Note the first token of decision `number`."""
        record.dispatches.computed(number)
        self.changed(record)
        if ttft_ms is not None:
            self.decisions.measured(number, ttft_ms)
        self.predictions.computed(number, now)
        record.adapters.computed(number, now)

    def ended(self, number: int, record: EndpointRecord, now: float, *, failed: bool) -> None:
        is_computed = not failed and record.dispatches.is_computed(number)
        record.dispatches.ended(number)
        self.changed(record)
        if not is_computed:
            # The prompt was not computed completely, because the request failed or its client disconnected.
            self.predictions.drop(number)
            record.adapters.drop(number, now)
        else:
            self.predictions.computed(number, now)
            record.adapters.computed(number, now)

    def _candidates(
        self,
        request: RoutingRequest,
        policy: RoutingPolicy,
        deployment: DeploymentRecord,
        records: Sequence[EndpointRecord],
        now: float,
    ) -> Sequence[Candidate]:
        cached = self._cached_tokens(request, records, now)
        session = self._sessions.endpoint(deployment.key, request.session) if request.session else None
        kept = self._kept_of(policy, deployment, records) if len(records) >= policy.least_for_table else None
        # Inlined, because most requests use cached candidates and a call for each is slow.
        candidates: list[Candidate] = (
            kept.current(now)
            if kept is not None
            else [
                record.seen.get(PLAIN if now <= record.reports.fresh_until else STALE)
                or candidate_of(policy, record, now)
                for record in records
            ]
        )
        if cached or session is not None:
            for place, record in enumerate(records):
                endpoint_id = record.endpoint.id
                if endpoint_id in cached or endpoint_id == session:
                    num_cached = cached.get(endpoint_id, 0)
                    candidates[place] = candidate_of(policy, record, now, num_cached, endpoint_id == session)
            if isinstance(candidates, CandidateList):
                candidates.is_plain = False
        return candidates

    def _kept_of(
        self, policy: RoutingPolicy, deployment: DeploymentRecord, records: Sequence[EndpointRecord]
    ) -> KeptCandidates | None:
        kept = self._kept.get(deployment.key)
        if kept is not None and kept.records is records and kept.policy is policy:
            return kept
        if not deployment.keeps(records):
            return None
        kept = self._kept[deployment.key] = KeptCandidates(policy, records)
        return kept

    def _cached_tokens(self, request: RoutingRequest, records: Sequence[EndpointRecord], now: float) -> dict[str, int]:
        """Return the numbers of cached prompt tokens of the endpoints that have some and a fresh report."""
        # The last token is always computed, so the whole prompt is never found.
        num_findable = (request.num_prompt_tokens - 1) // request.prefix_chunk_tokens if request.prefix_chunks else 0
        if num_findable <= 0:
            return {}
        if not self._windowed and not self.index.knows(request.prefix_chunks[0], self.predictions.pods):
            return {}
        bits = {self.index.bit(record.endpoint.id): record for record in records if record.reports.fresh(now)}
        bits.pop(0, None)
        chunks, expected = request.prefix_chunks[:num_findable], self.predictions.pods
        of_kinds: dict[tuple[int, tuple[CacheKind, ...]], int] = {}
        if self._windowed:
            for bit, record in bits.items():
                if record.endpoint.id in self._windowed:
                    alike = record.reports.first_chunks, tuple(record.kinds)
                    of_kinds[alike] = of_kinds.get(alike, 0) | bit
        depths = self.index.depths(chunks, sum(bits) - sum(of_kinds.values()), expected)
        for (first, kinds), pods in of_kinds.items():
            depths |= self.index.depths_of_kinds(chunks, pods, expected, kinds, request.prefix_chunk_tokens, first)
        return {bits[bit].endpoint.id: depth * request.prefix_chunk_tokens for bit, depth in depths.items()}

    def _account(
        self, number: int, request: RoutingRequest, num_sequences: int, record: EndpointRecord, chosen: Candidate
    ) -> None:
        record.in_flight += 1
        record.last_chosen = number
        num_uncached = max(1, request.num_prompt_tokens - chosen.num_cached_tokens)
        record.dispatches.sent(number, Dispatch(num_uncached, num_sequences))
        self.changed(record)
        bit = self.index.bit(record.endpoint.id)
        if bit and request.prefix_chunks and record.reports.scheme.prefix_chunk_tokens == request.prefix_chunk_tokens:
            has = self.index.has
            self.predictions.expect(number, bit, [each for each in request.prefix_chunks if not has(each, bit)])


def _place_of(chosen: Candidate, candidates: Sequence[Candidate]) -> int:
    return next(place for place, each in enumerate(candidates) if each is chosen)


class Sessions:
    """The last endpoint of each session. The least recently used sessions are dropped."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._endpoints: dict[tuple[str, bytes], str] = {}

    def endpoint(self, deployment: str, session: bytes) -> str | None:
        return self._endpoints.get((deployment, session))

    def chosen(self, deployment: str, session: bytes, endpoint_id: str) -> None:
        self._endpoints.pop((deployment, session), None)
        self._endpoints[deployment, session] = endpoint_id
        if len(self._endpoints) > self._max_sessions:
            del self._endpoints[next(iter(self._endpoints))]
