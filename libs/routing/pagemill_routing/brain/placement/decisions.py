"""The log of the latest routing decisions with all their inputs, for debugging.

Decisions are formatted when they are read. The log contains no text and no tokens of requests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from pagemill_routing.policies.policy import Candidate, RoutingDecision

MAX_SHOWN_CANDIDATES = 16


class DecisionRecord(msgspec.Struct, frozen=True, gc=False):
    number: int
    unix_s: float
    deployment: str
    policy: str
    num_prompt_tokens: int
    candidates: Sequence[Candidate]
    decision: RoutingDecision


class DecisionLog:
    def __init__(self, max_decisions: int) -> None:
        self._decisions: deque[DecisionRecord] = deque(maxlen=max_decisions)
        self._measured_ttft_ms: dict[int, float] = {}
        """Measured TTFTs by decision, including some of decisions that were dropped."""

    def note(
        self,
        number: int,
        deployment: str,
        policy: str,
        num_prompt_tokens: int,
        candidates: Sequence[Candidate],
        decision: RoutingDecision,
    ) -> None:
        if not self._decisions.maxlen:
            return
        self._decisions.append(
            DecisionRecord(number, time.time(), deployment, policy, num_prompt_tokens, candidates, decision)
        )

    def measured(self, number: int, ttft_ms: float) -> None:
        """Note the measured time to the first token of a stream."""
        if not self._decisions or number < self._decisions[0].number:
            return
        self._measured_ttft_ms[number] = ttft_ms
        if len(self._measured_ttft_ms) > 2 * len(self._decisions):
            first = self._decisions[0].number
            self._measured_ttft_ms = {each: ms for each, ms in self._measured_ttft_ms.items() if each >= first}

    def latest(self, limit: int) -> list[dict[str, Any]]:
        """Return the latest decisions, newest first."""
        chosen = list(self._decisions)[-limit:] if limit > 0 else []
        return [_describe(each, self._measured_ttft_ms.get(each.number)) for each in reversed(chosen)]


def _describe(record: DecisionRecord, measured_ttft_ms: float | None) -> dict[str, Any]:
    decision = record.decision
    rows = [_describe_candidate(record, index) for index in range(len(record.candidates))]
    rows.sort(key=lambda row: (not row["chosen"], -row["rank"]))
    for row in rows:
        del row["rank"]
    return {
        "decision": record.number,
        "unix_s": round(record.unix_s, 3),
        "deployment": record.deployment,
        "policy": record.policy,
        "prompt_tokens": record.num_prompt_tokens,
        "choice": decision.chosen.endpoint_id,
        "why": decision.why,
        "predicted_ttft_ms": _rounded(decision.predicted_ttft_ms),
        "measured_ttft_ms": _rounded(measured_ttft_ms),
        "num_candidates": len(rows),
        "candidates": rows[:MAX_SHOWN_CANDIDATES],
    }


def _describe_candidate(record: DecisionRecord, index: int) -> dict[str, Any]:
    candidate, decision = record.candidates[index], record.decision
    terms = dict(zip(decision.columns, decision.rows[index], strict=True)) if decision.rows else {}
    # The last column is what was compared: a cost, or a score if the largest wins.
    value = decision.rows[index][-1] if decision.rows else 0.0
    return {
        "endpoint": candidate.endpoint_id,
        "chosen": candidate is decision.chosen,
        "state": "reported" if candidate.believed else "own_counts",
        "in_flight": candidate.in_flight,
        "elsewhere": candidate.external,
        "cached_tokens": candidate.num_cached_tokens,
        "session": candidate.session,
        "terms": {name: round(term, 3) for name, term in terms.items()},
        "rank": value if decision.largest_wins else -value,
    }


def _rounded(ms: float | None) -> float | None:
    return round(ms, 3) if ms is not None else None
