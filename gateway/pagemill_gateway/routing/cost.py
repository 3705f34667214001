"""The default policy: the pod where the request costs the fewest milliseconds.

Cost is the expected time to the first token, the harm to running requests (`routing.expected`), and what leaving the
session's pod counts: a constant, so that a session stays exactly as long as it loses less than that by staying. Costs
that are equal for all anybody can predict are split by the number of requests, so that many at once, or many gateways,
do not all run to the same pod.

A pod whose state is not believed any more is weighed with our own counts in the place of its load and no cached prefix;
one that has never told how fast it is, as fast as the median of the others. Where none has, the fewest requests win.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_gateway.routing.expected import expected
from pagemill_gateway.routing.pace import DEFAULT_STEP_TOKENS, Pace, pace_of
from pagemill_gateway.routing.policy import Candidate, PodReport, RequestView, Ruling, least_busy
from pagemill_protocol.step_time import StepTimeModel

NEAR_SHARE = 0.02
NEAR_MS = 0.5
"""Costs within this share of the smallest, or this much above it, count as equal."""
COLUMNS = ("step_ms", "wait_ms", "prefill_ms", "harm_ms", "ttft_ms", "affinity_ms", "cost_ms")


class Cost:
    name = "Cost"

    def __init__(self, session_ms: float = 50.0) -> None:
        """`session_ms`: most predicted milliseconds that a session gives for staying on its pod."""
        self._session_ms = session_ms

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> Ruling:
        known = _known(candidates)
        if known is None:
            return Ruling(least_busy(candidates), "no engine has told how fast it is: fewest requests")
        has_session = any(each.session for each in candidates)
        rows = []
        for candidate, (report, pace) in zip(candidates, known, strict=True):
            terms = expected(request, candidate, report, pace)
            affinity_ms = self._session_ms if has_session and not candidate.session else 0.0
            rows.append((*terms, affinity_ms, terms.ttft_ms + terms.harm_ms + affinity_ms))
        best = min(row[-1] for row in rows)
        limit = best + max(NEAR_MS, best * NEAR_SHARE)
        near = [each for each, row in zip(candidates, rows, strict=True) if row[-1] <= limit]
        near = [each for each in near if each.session] or near
        why = "smallest cost" if len(near) == 1 else f"{len(near)} costs nearly equal: fewest requests"
        return Ruling(least_busy(near), why, COLUMNS, rows)


def _known(candidates: Sequence[Candidate]) -> list[tuple[PodReport, Pace]] | None:
    """What each has told; a speed that is missing is the median of the others. `None`: not enough was told."""
    reports = [each.report for each in candidates if each.report is not None]
    paces = [report.pace for report in reports if report.pace is not None]
    if len(reports) < len(candidates) or not paces:
        return None
    if len(paces) == len(reports):
        return list(zip(reports, paces, strict=True))
    usual = sorted(paces, key=lambda pace: pace.model.predict_ms(DEFAULT_STEP_TOKENS))[len(paces) // 2].model
    return [(report, report.pace or _as_fast_as(usual, report)) for report in reports]


def _as_fast_as(model: StepTimeModel, report: PodReport) -> Pace:
    return pace_of(model, report.max_step_tokens, report.num_running, report.num_tokens_running)
