"""Least requests: the endpoint with the fewest requests wins, ties go to the one that waited longest for its turn.

What KubeAI calls LeastLoad and Envoy least request, except that requests from elsewhere count as far as engines report
them; those two count what went through this gateway only.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_gateway.routing.policy import Candidate, RequestView, Ruling, least_busy


class LeastRequest:
    name = "LeastRequest"

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> Ruling:
        rows = [(float(each.num_requests),) for each in candidates]
        return Ruling(least_busy(candidates), "fewest requests", ("requests",), rows)
