"""Round robin: chooses the endpoint that was chosen longest ago, regardless of its load."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_routing.policies.policy import Candidate, RequestView, RoutingDecision, RoutingPolicy


class RoundRobin(RoutingPolicy):
    name = "RoundRobin"

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> RoutingDecision:
        chosen = min(candidates, key=_turn)
        return RoutingDecision(
            chosen, "its turn", ("last_chosen",), [(float(each.last_chosen),) for each in candidates]
        )


def _turn(candidate: Candidate) -> tuple[int, str]:
    return candidate.last_chosen, candidate.endpoint_id
