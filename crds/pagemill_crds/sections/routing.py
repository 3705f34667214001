"""`spec.routing`: how the gateway distributes requests, and which requests wait."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pagemill_crds.base import Section
from pagemill_crds.fields import Duration, Memory, Text


class Queue(Section):
    """Requests that wait in a gateway for capacity of a replica, or for a replica to start; scheduled fairly between
    API keys."""

    max_requests: Annotated[int, Field(ge=0, le=1_000_000)] = 1000
    """Maximum number of waiting requests per gateway. When it is exceeded, the newest request of the lowest priority is
    refused with status 429. Up to 1000 more requests that lost their replica while running may wait, even where this is
    0."""
    max_bytes: Memory = "256Mi"
    """Maximum size of the bodies of all waiting requests."""
    timeout: Duration = "60s"
    """Maximum time that a request waits, over all its waits together; it is then refused with status 503. While no
    replica serves and one starts, requests wait for twice the usual duration of a start if that is longer."""


class RoutingSection(Section):
    """How the gateway distributes requests over replicas."""

    policy: Annotated[str, Text(63, r"^[A-Za-z0-9][A-Za-z0-9._-]*$", "must be a name such as LeastRequest")] = "Auto"
    """Routing algorithm. `Auto` chooses the replica where the request is predicted to cost the least time, including
    the delay of other requests. The others are for comparison: `LeastRequest` chooses the replica with the
    fewest requests; `RoundRobin` takes turns; `PowerOfTwo` chooses the less busy of two random
    replicas; `PrefixHash` is KubeAI's consistent hashing with bounded loads; `Weighted322` is the default profile of
    llm-d. Packages can register others with the gateway; where a gateway has no policy of the name, its default
    decides, and the condition `FieldsSupported` names the policies that it has."""
    weight: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Share of the requests, relative to the other weights, when several LLMDeployments serve one model name (canary).
    Without it, a second LLMDeployment with the same name is refused with reason `NameConflict`."""
    session_header: (
        Annotated[str, Text(64, r"^[A-Za-z0-9-]+$", "must be a header name such as x-session-id")] | None
    ) = None
    """Request header whose value identifies a session. Requests of a session go to the same replica while that costs
    little. Policies other than `Auto` do not keep sessions."""
    queue: Queue = Queue()
    """Requests that wait in a gateway for a replica."""
