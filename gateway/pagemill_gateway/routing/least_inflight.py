"""Least in-flight: the endpoint with the fewest requests wins, ties go to the one that waited longest for its turn."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_gateway.routing.policy import Candidate, RequestView


class LeastInFlight:
    name = "least-in-flight"

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=_busyness)


def _busyness(candidate: Candidate) -> tuple[int, int]:
    return candidate.in_flight + candidate.external, candidate.last_chosen
