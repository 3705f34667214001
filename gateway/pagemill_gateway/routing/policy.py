"""The protocol of routing policies, with their inputs and outputs.

A policy is a pure choice among candidates that the brain found usable (not terminating, draining, ejected or tried
before). All inputs are arguments, including random numbers, so that a decision can be repeated from its record. The
brain counts the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

import msgspec

from pagemill_gateway.routing.cost_terms import CostBasis
from pagemill_gateway.routing.report import PodReport


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A usable endpoint at the time of the decision."""

    endpoint_id: str
    in_flight: int
    """Requests of this gateway at the endpoint."""
    external: int
    """Requests from elsewhere at the endpoint, by its latest report; 0 if the report is stale."""
    last_chosen: int
    """The number of the decision that chose it last, to break ties fairly; 0 if never."""
    report: PodReport | None = None
    """The latest report, with our own counts as its load if it is stale; `None` if it has never reported."""
    believed: bool = False
    """Whether the report is fresh."""
    num_cached_tokens: int = 0
    """Leading prompt tokens that its prefix cache has, or will have when it computes the request."""
    num_unreported: int = 0
    """Our requests that its report does not count yet."""
    num_unreported_tokens: int = 0
    """Uncached prompt tokens of the requests that its report does not count."""
    session: bool = False
    """Whether the request's session was at this endpoint last."""
    cost_basis: CostBasis | None = None
    """The basis of its cost; `None` without a step-time model."""
    adapter_ms: float = 0.0
    """Time until the request's adapter is loaded; 0 if it is loaded or none is needed."""

    @property
    def num_requests(self) -> int:
        return self.in_flight + self.external


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """The properties of a request that a policy may use."""

    num_prompt_tokens: int = 0
    num_output_tokens: float = 128.0
    """The expected output tokens: the mean of the deployment's recent answers."""
    prompt_key: bytes = b""
    """The hash of the prompt's first characters."""
    draw: float = 0.0
    """A random number in [0, 1), new for every decision."""
    is_for_adapter: bool = False


class RoutingDecision(msgspec.Struct, frozen=True, gc=False):
    """A choice with the terms of all candidates, one row each in order; the last column was compared.

    Rows may be computed when they are read, because decisions are shown rarely.
    """

    chosen: Candidate
    why: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[float]] = ()
    largest_wins: bool = False
    predicted_ttft_ms: float | None = None
    """The TTFT that the policy predicts for the chosen candidate; `None` if it predicts none."""


class RoutingPolicy(Protocol):
    name: str

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> RoutingDecision:
        """Choose the candidate for the request. `candidates` is never empty."""
        ...


def least_busy(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the fewest requests; ties go to the one that was chosen longest ago."""
    counts = [each.in_flight + each.external for each in candidates]  # faster than the property `num_requests`
    fewest = min(counts)
    tied = [each for each, count in zip(candidates, counts, strict=True) if count == fewest]
    return tied[0] if len(tied) == 1 else min(tied, key=attrgetter("last_chosen"))
