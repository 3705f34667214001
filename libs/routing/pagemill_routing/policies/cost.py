"""The default policy: chooses the pod where the request costs the fewest milliseconds.

The cost is the sum of the expected TTFT, the delay of running requests (`policies.cost_terms`), the time until the
request's adapter is loaded, the expected time to load the one again that is dropped for it, and a constant for leaving
the session's pod: a session stays while that costs less. Among costs that are equal within the accuracy of the
prediction, the fewest requests win, so that concurrent requests and gateways do not all choose the same pod.

For a pod with a stale report, the load is this gateway's own counts, and cached prefixes are ignored. For a pod without
a step-time model, the median model of the others is used. If no pod has one, the fewest requests win.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, overload

from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_routing.policies.cost_table import LEAST_PODS, CostTable
from pagemill_routing.policies.cost_terms import CostBasis, CostTerms, cost_basis_of, cost_terms
from pagemill_routing.policies.policy import (
    Candidate,
    CandidateList,
    RequestView,
    RoutingDecision,
    RoutingPolicy,
    least_busy,
)
from pagemill_routing.policies.report import PodReport
from pagemill_routing.policies.step_time_snapshot import DEFAULT_STEP_TOKENS, StepTimeSnapshot, take_snapshot

NEAR_SHARE = 0.02
NEAR_MS = 0.5
"""Costs within `NEAR_SHARE` of the smallest, or `NEAR_MS` above it, count as equal."""
COLUMNS = (
    "step_ms",
    "wait_ms",
    "prefill_ms",
    "harm_ms",
    "adapter_ms",
    "ttft_ms",
    "eviction_ms",
    "affinity_ms",
    "cost_ms",
)


class CostPolicy(RoutingPolicy):
    name = "Cost"
    least_for_table = LEAST_PODS

    def __init__(self, session_ms: float = 50.0) -> None:
        """`session_ms`: the maximum predicted cost of staying on the session's pod, in milliseconds."""
        self._session_ms = session_ms

    def derive(self, candidate: Candidate) -> CostBasis | None:
        """Return the basis of its cost; `None` without a step-time model."""
        report = candidate.report
        if report is None or report.step_time is None:
            return None
        return cost_basis_of(report, report.step_time, candidate.num_unreported, candidate.num_unreported_tokens)

    def table(self, num_candidates: int) -> CostTable:
        return CostTable(num_candidates)

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> RoutingDecision:
        bases, costs = _costs(request, candidates)
        if costs is None:
            return RoutingDecision(least_busy(candidates), "no engine has reported its step times: fewest requests")
        if request.is_for_adapter:
            costs = [cost + each.adapter_ms + each.eviction_ms for each, cost in zip(candidates, costs, strict=True)]
        is_plain = isinstance(candidates, CandidateList) and candidates.is_plain
        has_session = not is_plain and True in [each.session for each in candidates]
        affinity_ms = self._session_ms if has_session else 0.0
        if has_session:
            costs = [cost if each.session else cost + affinity_ms for each, cost in zip(candidates, costs, strict=True)]
        best = min(costs)
        limit = best + max(NEAR_MS, best * NEAR_SHARE)
        near = [each for each, cost in zip(candidates, costs, strict=True) if cost <= limit]
        if has_session:
            # A session stays only if its pod has the smallest cost, so that `session_ms` is an exact limit.
            stays = [each for each, cost in zip(candidates, costs, strict=True) if each.session and cost == best]
            near = stays or [each for each in near if not each.session]
        why = "smallest cost" if len(near) == 1 else f"{len(near)} costs nearly equal: fewest requests"
        chosen, rows = least_busy(near), _Rows(request, candidates, bases, affinity_ms)
        return RoutingDecision(chosen, why, COLUMNS, rows, predicted_ttft_ms=rows.ttft_ms(chosen))


class _Rows(Sequence[Sequence[float]]):
    """The cost terms of each candidate, computed when they are read, because few of the logged decisions are shown."""

    def __init__(
        self,
        request: RequestView,
        candidates: Sequence[Candidate],
        bases: Sequence[CostBasis] | None,
        affinity_ms: float,
    ) -> None:
        """`bases` replace those of the candidates, unless `None`."""
        self._request = request
        self._candidates = candidates
        self._bases = bases
        self._affinity_ms = affinity_ms

    def __len__(self) -> int:
        return len(self._candidates)

    @overload
    def __getitem__(self, index: int) -> Sequence[float]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[float]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[float] | Sequence[Sequence[float]]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        candidate = self._candidates[index]
        basis = candidate.derived if self._bases is None else self._bases[index]
        terms = CostTerms(*self._terms(candidate, basis))
        adapter_ms, affinity_ms = candidate.adapter_ms, 0.0 if candidate.session else self._affinity_ms
        cost_ms = terms.ttft_ms + terms.harm_ms + adapter_ms + candidate.eviction_ms + affinity_ms
        return (*terms, adapter_ms, terms.ttft_ms + adapter_ms, candidate.eviction_ms, affinity_ms, cost_ms)

    def ttft_ms(self, chosen: Candidate) -> float:
        """Return the expected TTFT of one of the candidates, without the other terms."""
        basis = chosen.derived if self._bases is None else self._bases[self._candidates.index(chosen)]
        step_ms, wait_ms, prefill_ms, _ = self._terms(chosen, basis)
        return step_ms + wait_ms + prefill_ms + chosen.adapter_ms

    def _terms(self, candidate: Candidate, basis: CostBasis | None) -> tuple[float, float, float, float]:
        assert basis is not None
        request, cached = self._request, [candidate.num_cached_tokens]
        return cost_terms([basis], cached, request.num_prompt_tokens, request.num_output_tokens)[0]


def _costs(
    request: RequestView, candidates: Sequence[Candidate]
) -> tuple[Sequence[CostBasis] | None, Sequence[float] | None]:
    """Return replaced bases, or `None`, and the costs without session and adapter, or `None` if unknown."""
    num_prompt_tokens, num_output_tokens = request.num_prompt_tokens, request.num_output_tokens
    if isinstance(candidates, CandidateList) and (table := cast(CostTable, candidates.table)).is_complete:
        cached = None if candidates.is_plain else [each.num_cached_tokens for each in candidates]
        return None, table.costs(num_prompt_tokens, num_output_tokens, cached)
    bases = _cost_bases(candidates)
    if bases is None:
        return None, None
    cached = [each.num_cached_tokens for each in candidates]
    terms = cost_terms(bases, cached, num_prompt_tokens, num_output_tokens)
    return bases, [step_ms + wait_ms + prefill_ms + harm_ms for step_ms, wait_ms, prefill_ms, harm_ms in terms]


def _cost_bases(candidates: Sequence[Candidate]) -> Sequence[CostBasis] | None:
    """Return each candidate's basis, with the median model for missing ones; `None` if a report or all models lack."""
    bases = [each.derived for each in candidates if each.derived is not None]
    if len(bases) == len(candidates):
        return bases
    reports = [each.report for each in candidates if each.report is not None]
    snapshots = [report.step_time for report in reports if report.step_time is not None]
    if len(reports) < len(candidates) or not snapshots:
        return None
    usual = sorted(snapshots, key=lambda snapshot: snapshot.model.predict_ms(DEFAULT_STEP_TOKENS))[
        len(snapshots) // 2
    ].model
    return [
        cost_basis_of(
            report, report.step_time or _with_model(usual, report), each.num_unreported, each.num_unreported_tokens
        )
        for each, report in zip(candidates, reports, strict=True)
    ]


def _with_model(model: StepTimeModel, report: PodReport) -> StepTimeSnapshot:
    load = report.load
    return take_snapshot(model, report.max_step_tokens, load.num_requests_running, load.num_tokens_running)
