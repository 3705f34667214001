"""Least requests: chooses the endpoint with the fewest requests, including those of other gateways.

Ties go to the endpoint that was chosen longest ago.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_routing.policies.policy import Candidate, RequestView, RoutingDecision, RoutingPolicy, least_busy


class LeastRequest(RoutingPolicy):
    name = "LeastRequest"

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> RoutingDecision:
        rows = [(float(each.num_requests),) for each in candidates]
        return RoutingDecision(least_busy(candidates), "fewest requests", ("requests",), rows)
