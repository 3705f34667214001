"""The base of routing policies, with their inputs and outputs.

A policy is a pure choice among candidates that the brain found usable (not terminating, draining, ejected or tried
before). All inputs are arguments, including random numbers, so that a decision can be repeated from its record. The
brain counts the choice.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from pagemill_routing.policies.report import PodReport


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
    adapter_ms: float = 0.0
    """Time until the request's adapter is loaded; 0 if it is loaded or none is needed."""
    eviction_ms: float = 0.0
    """Expected time to load the adapter again that is dropped for the request's."""
    derived: Any = None
    """What the deployment's policy has derived from the other fields (`RoutingPolicy.derive`)."""

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


class CandidateTable(Protocol):
    """A policy's own form of many candidates, which the brain keeps up to date."""

    def update(self, place: int, candidate: Candidate) -> None:
        """Replace the candidate at this place of the list."""
        ...


class CandidateList(list[Candidate]):
    """A list of candidates with the policy's table of them."""

    __slots__ = ("is_plain", "table")

    def __init__(self, candidates: Sequence[Candidate], table: CandidateTable) -> None:
        super().__init__(candidates)
        self.table = table
        self.is_plain = True
        """Whether no candidate has cached tokens or the session, so that all are as in the table."""


class RoutingPolicy(ABC):
    """A policy. Most have a name and `choose` alone."""

    name: str
    """The policy's name in `spec.routing.policy`."""
    least_for_table: int = sys.maxsize
    """The number of candidates from which on the policy wants a table of them."""

    @abstractmethod
    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> RoutingDecision:
        """Choose the candidate for the request. `candidates` is never empty."""

    def derive(self, candidate: Candidate) -> Any:
        """Return what `choose` needs of a candidate whatever the request is.

        It is called when an endpoint has changed, which is less often than a decision among all endpoints.
        """
        return None

    def table(self, num_candidates: int) -> CandidateTable:
        """Return an empty table, for a deployment with `least_for_table` endpoints or more."""
        raise NotImplementedError(f"{type(self).__name__} sets least_for_table, and has no table")


def least_busy(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the fewest requests; ties go to the one that was chosen longest ago."""
    counts = [each.in_flight + each.external for each in candidates]  # faster than the property `num_requests`
    fewest = min(counts)
    tied = [each for each, count in zip(candidates, counts, strict=True) if count == fewest]
    return tied[0] if len(tied) == 1 else min(tied, key=attrgetter("last_chosen"))
