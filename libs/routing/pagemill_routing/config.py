"""The settings of routing, with the meaning, the unit and the default of every field.

`pagemill_gateway.config` adds those of a gateway, reads them from a file and checks them.
"""

from __future__ import annotations

import msgspec

from pagemill_protocol.resource.served import QueueLimits


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_attempts: int = 3
    """Number of engines that may fail a request. Those that refuse it, that end or that do not listen do not count."""
    stall_timeout_s: float = 6.0
    """An engine whose server reports that a step takes longer than this, and longer than four times its prediction,
    counts as failed: other engines continue its answers."""
    freeze_timeout_s: float = 4.0
    """An engine whose server reports no heartbeats of the engine process for this long counts as failed; they come
    every second, regardless of the duration of steps."""

    queue: QueueLimits = QueueLimits(max_requests=1000, max_bytes=256 * 1024 * 1024, timeout_s=60.0)
    """Limits for the requests of a deployment that wait for capacity, unless its `routing.queue` sets others."""
    outage_wait_s: float = 30.0
    """How long requests for a deployment that lost its last engine wait for another one, or twice the usual time of an
    engine's restart if that is longer and the queue's timeout allows it; then they get status 503. Requests also wait
    for the first report of engines that are new to the gateway, for example after its restart. 0: they do not wait.
    """
    handover_timeout_s: float = 4.0
    """How long a draining engine stays in use while no other engine of its deployment can take over."""

    routing_policy: str = "Cost"
    """
    Routing policy of deployments whose `policies.policy` is `Auto`. `Cost` chooses the endpoint where the request costs
    the fewest milliseconds. The others are for comparison: `LeastRequest`, `RoundRobin`, `PowerOfTwo`, `PrefixHash`
    (KubeAI's) and `Weighted322` (llm-d's). Packages can add more.
    """
    routing_session_ms: float = 50.0
    """Maximum predicted cost of keeping a session (`routing.sessionHeader`) on its endpoint, in milliseconds."""
    remembered_prefix_chunks: int = 65536
    """Number of prefix chunks of prompts whose hashes are cached; each takes about 0.5 KB."""
    decision_log_size: int = 256
    """Number of latest routing decisions that `/debug/decisions` can show."""

    state_stale_after_s: float = 3.0
    """A report is stale after this time without a state frame (engines send one a second). Its load is then ignored,
    and the gateway uses its own counts."""
    ejection_base_s: float = 0.5
    ejection_max_s: float = 10.0
    """First and longest ejection of an endpoint that failed; it doubles with each failed probe."""
    max_ejected_share: float = 0.3
    """Maximum share of a deployment's endpoints with fresh reports (but at least one) that may be ejected."""
    retry_share: float = 0.2
    """
    Maximum number of retries that may fail again, as a share of the requests of the last 10 s; 10 are always allowed.
    Continuations of answers of a lost engine, and retries after a refusal, do not count.
    """
