"""The routing policy protocol: what a policy gets and what it returns.

A policy is a pure choice among candidates that the brain already found usable (not terminating, not draining, not
ejected, not tried before). It keeps no state that a decision depends on: all inputs are in the arguments, random
numbers included, so a decision can be repeated from its record. It does not account for its choice;
`pagemill_gateway.brain` does, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from pagemill_gateway.routing.cost_terms import CostBasis
from pagemill_gateway.routing.report import PodReport


class Candidate(NamedTuple):
    """One usable endpoint as it was at the time of the decision."""

    endpoint_id: str
    in_flight: int
    """Requests of this gateway that are on the endpoint now, decisions of this instant included."""
    external: int
    """Requests on the endpoint that come from elsewhere, by its last report; 0 when the report is stale."""
    last_chosen: int
    """Number of the decision that chose it last; 0: never. It splits ties fairly."""
    report: PodReport | None = None
    """`None`: it has never reported. Where the report is stale, the load in it is replaced by our own counts."""
    believed: bool = False
    """Its report is fresh."""
    num_cached_tokens: int = 0
    """Leading prompt tokens that its prefix cache has, or will have when it gets to this request."""
    num_unreported: int = 0
    """Our requests that its report does not count yet."""
    num_unreported_tokens: int = 0
    """Uncached prompt tokens of those."""
    session: bool = False
    """The request's session was here last."""
    cost_basis: CostBasis | None = None
    """By the report and the requests that it does not count; `None` without a step-time model."""
    adapter_ms: float = 0.0
    """Until the request's adapter is loaded there; 0: it is loaded, or the request needs none."""

    @property
    def num_requests(self) -> int:
        return self.in_flight + self.external


class RequestView(NamedTuple):
    """What a policy may know of the request."""

    num_prompt_tokens: int = 0
    num_output_tokens: float = 128.0
    """Expected: the mean of the deployment's recent answers."""
    prompt_key: bytes = b""
    """Hash of the prompt's first characters, for policies that use it."""
    draw: float = 0.0
    """A random number from [0, 1), new for every decision."""
    is_for_adapter: bool = False


class RoutingDecision(NamedTuple):
    """A choice and its inputs: one row of terms per candidate, in order; the last column was compared.

    Rows may be computed when they are read: decisions are made often and shown rarely.
    """

    chosen: Candidate
    why: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[float]] = ()
    largest_wins: bool = False


class RoutingPolicy(Protocol):
    name: str

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> RoutingDecision:
        """The candidate to send `request` to. `candidates` is never empty."""
        ...


def least_busy(candidates: Sequence[Candidate]) -> Candidate:
    """The one with the fewest requests; ties go to the one that was chosen longest ago."""
    counts = [each.in_flight + each.external for each in candidates]  # a call for each of hundreds costs more
    fewest = min(counts)
    tied = [each for each, count in zip(candidates, counts, strict=True) if count == fewest]
    return tied[0] if len(tied) == 1 else min(tied, key=attrgetter("last_chosen"))
