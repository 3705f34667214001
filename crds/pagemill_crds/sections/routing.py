"""`spec.routing`: how the gateway spreads requests and holds back what does not fit yet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pagemill_crds.base import Section
from pagemill_crds.fields import Duration, Memory, Text


class Queue(Section):
    """Requests that wait in a gateway for room on a replica, or for a replica to be there; fair between API keys."""

    max_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 1000
    """
    Requests that may wait in each gateway; then the newest of the lowest priority is refused with 429. Up to 1000 that
    lost their replica midway wait besides, also where this is 0: they were let in before.
    """
    max_bytes: Memory = "256Mi"
    """Bytes of request bodies that may wait."""
    timeout: Duration = "60s"
    """
    Longest wait, all waits of one request together; then it gets 503. While no replica serves and one starts, requests
    wait for twice the usual duration of a start where that is longer.
    """


class RoutingSection(Section):
    """How the gateway spreads requests over replicas."""

    policy: Literal[
        "Auto", "LeastInFlight", "LeastRequest", "RoundRobin", "PowerOfTwo", "PrefixHash", "Weighted322"
    ] = "Auto"
    """
    `Auto` takes the replica that should answer soonest at the least harm to others. The rest are there to be compared
    with it: `LeastRequest` (also called `LeastInFlight`) takes the replica with the fewest requests, `RoundRobin` the
    one whose turn it is, `PowerOfTwo` the less busy of two drawn at random; `PrefixHash` is KubeAI's consistent
    hashing with bounded loads, `Weighted322` the default profile of llm-d.
    """
    weight: Annotated[int, Field(ge=0, le=1000)] | None = None
    """
    Share of the requests when several deployments serve one model name (canary). Without it a second deployment of
    the same name is refused with condition `NameConflict`.
    """
    session_header: (
        Annotated[str, Text(64, r"^[A-Za-z0-9-]+$", "must be a header name such as x-session-id")] | None
    ) = None
    """Request header whose value keeps a session on one replica while that costs little."""
    queue: Queue = Queue()
    """Requests that wait for a replica."""
