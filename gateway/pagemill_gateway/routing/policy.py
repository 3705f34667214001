"""The seam of routing: what a policy sees and what it returns.

A policy is a pure choice among candidates that the brain already found usable (not terminating, not draining, not
ejected, not tried before). It keeps no state between calls: everything it may weigh is in the arguments, so a decision
can be repeated from its record. It does not account for its choice; `pagemill_gateway.brain` does, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Candidate(NamedTuple):
    """One usable endpoint as seen at the instant of the decision."""

    endpoint_id: str
    in_flight: int
    """Requests of this gateway that are on the endpoint now, decisions of this instant included."""
    external: int
    """Requests on the endpoint that come from elsewhere, by its last report; 0 when the report is stale."""
    last_chosen: int
    """Number of the decision that chose it last; 0: never. Splits ties fairly."""


class RequestView(NamedTuple):
    """What a policy may know of the request to place."""

    num_prompt_tokens: int = 0


class Policy(Protocol):
    name: str

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> Candidate:
        """The candidate to send `request` to. `candidates` is never empty."""
        ...
