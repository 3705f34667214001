"""The time to the first token by simulated steps: of the chosen endpoint, and to choose among nearly equal ones.

The policy `Cost` compares all endpoints by a formula that counts tokens (`routing.cost_terms`). Where that leaves
several within its accuracy, a few of them are simulated step by step (`brain.endpoints.ttft_estimator`), and the
smallest cost of those wins. `brain.placement.placement` calls this.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_gateway.brain.endpoints.dispatches import Dispatch
from pagemill_gateway.brain.endpoints.record import EndpointRecord
from pagemill_gateway.routing.policy import Candidate, RequestView, RoutingDecision, busyness

EQUAL_MS = 0.5
"""Simulated costs within this much of the smallest count as equal: the fewest requests decide."""


def dispatch_of(num_prompt_tokens: int, num_sequences: int, candidate: Candidate) -> Dispatch:
    """The request as it would be sent there."""
    num_uncached = max(1, num_prompt_tokens - candidate.num_cached_tokens)
    return Dispatch(num_uncached, num_sequences, num_prompt_tokens - num_uncached)


def shortest(
    decision: RoutingDecision,
    request: RequestView,
    candidates: Sequence[Candidate],
    records: Sequence[EndpointRecord],
    num_sequences: int,
    now: float,
) -> RoutingDecision:
    """`decision`, or the same with a nearly equal candidate that has the first token earlier."""
    if len(decision.shortlist) < 2:
        return decision
    costs: list[tuple[float, Candidate]] = []
    for place in decision.shortlist:
        candidate = candidates[place]
        dispatch = dispatch_of(request.num_prompt_tokens, num_sequences, candidate)
        ttft_ms = records[place].ttft_estimator.estimate_ms(dispatch, now, candidate.adapter_ms)
        if ttft_ms is None or not candidate.believed:
            return decision
        terms = dict(zip(decision.columns, decision.rows[place], strict=True))
        costs.append((terms["cost_ms"] - terms["ttft_ms"] + terms["wait_ms"] + ttft_ms, candidate))
    best_ms = min(cost_ms for cost_ms, _ in costs)
    chosen = min((each for cost_ms, each in costs if cost_ms <= best_ms + EQUAL_MS), key=busyness)
    if chosen is decision.chosen:
        return decision
    return decision._replace(chosen=chosen, why=f"earliest first token of {len(costs)} with nearly equal costs")


def predict_ttft_ms(
    decision: RoutingDecision, index: int, record: EndpointRecord, number: int, dispatch: Dispatch, now: float
) -> float | None:
    """Of the chosen endpoint, where the policy predicts it; from now on the request is part of the simulation there."""
    if "ttft_ms" not in decision.columns:
        return None
    chosen, ttft_ms = decision.chosen, None
    if chosen.believed:
        ttft_ms = record.ttft_estimator.ttft_ms(number, dispatch, now, held_ms=chosen.adapter_ms)
    row = decision.rows[index]
    if ttft_ms is None:
        return row[decision.columns.index("ttft_ms")]
    return ttft_ms + row[decision.columns.index("wait_ms")]
