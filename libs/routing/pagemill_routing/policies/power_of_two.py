"""Power of two choices: draws two endpoints at random and chooses the one with fewer requests.

As in Ray Serve and AIBrix (Mitzenmacher, IEEE TPDS 2001). The load is nearly as even as with a comparison of all, and
independent routers do not all choose the same endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_routing.policies.policy import Candidate, RequestView, RoutingDecision, RoutingPolicy, least_busy


class PowerOfTwo(RoutingPolicy):
    name = "PowerOfTwo"

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> RoutingDecision:
        first, second = drawn_pair(request.draw, len(candidates))
        pair = [candidates[first], candidates[second]]
        rows = [(float(each.num_requests),) for each in candidates]
        why = f"fewer requests of the pair {pair[0].endpoint_id}, {pair[1].endpoint_id}"
        return RoutingDecision(least_busy(pair), why, ("requests",), rows)


def drawn_pair(draw: float, count: int) -> tuple[int, int]:
    """Return two different indices below `count`, all ordered pairs equally likely; (0, 0) if there is only one."""
    if count < 2:
        return 0, 0
    number = min(int(draw * count * (count - 1)), count * (count - 1) - 1)
    first, second = divmod(number, count - 1)
    return first, second + (second >= first)
