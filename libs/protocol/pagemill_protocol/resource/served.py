"""What a gateway serves of an LLMDeployment: the fields of its spec that gateways read, and who owns a model name.

A field that gateways read is added here and to its section of the resource. Gateways decode the objects of a cluster;
the operator converts the spec that it planned: both get the same `ServedModel`, which the catalogue extends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec

from pagemill_protocol.resource.quantities import duration_seconds, memory_bytes

DEFAULT_WEIGHT = 100
"""The weight of a deployment whose `spec.routing.weight` is not set."""


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of one deployment may wait in a gateway, and for how long."""

    max_requests: int
    max_bytes: int
    """Bytes of request bodies."""
    timeout_s: float


class ServedModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The names of a deployment's model, and how its requests are prepared and routed."""

    name: str
    """Name that clients send."""
    aliases: list[str] = []
    weight: int | None = None
    """Share of the requests for a name that several deployments claim; `None`: no name is shared."""
    prefix_scope: str = "tenant"
    """Which callers share cached prompts: `tenant`, `key`, or `deployment` (all)."""
    routing_policy: str = "Auto"
    """How requests are distributed over the endpoints. `Auto`, like any name the gateway does not know, means the
    default policy."""
    session_header: str = ""
    """Request header that names a session; empty: none."""
    chat_template: str | None = None
    """Overrides the bundle's template."""
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    """Names of parsers in `pagemill_api.answers.registry`; `auto`: the parser that fits the chat template."""
    queue: QueueLimits | None = None
    """`None`: the gateway's own limits apply."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def share(self) -> int:
        return DEFAULT_WEIGHT if self.weight is None else self.weight


class WatchedSection(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of a Kubernetes object: fields in snake case, keys in camel case; other keys are skipped, so that a change
    to them is none here. The defaults are those of the API."""


class WatchedModel(WatchedSection, frozen=True, kw_only=True):
    name: str | None = None
    aliases: list[str] = []
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


class WatchedPrefixCaching(WatchedSection, frozen=True, kw_only=True):
    scope: str = "tenant"


class WatchedEngine(WatchedSection, frozen=True, kw_only=True):
    prefix_caching: WatchedPrefixCaching = WatchedPrefixCaching()


class WatchedQueue(WatchedSection, frozen=True, kw_only=True):
    max_requests: int = 1000
    max_bytes: int | str = "256Mi"
    timeout: str = "60s"


class WatchedRouting(WatchedSection, frozen=True, kw_only=True):
    policy: str = "Auto"
    session_header: str | None = None
    weight: int | None = None
    queue: WatchedQueue | None = None


class WatchedAutoscaling(WatchedSection, frozen=True, kw_only=True):
    mode: str = "Active"


class WatchedSpec(WatchedSection, frozen=True, kw_only=True):
    model: WatchedModel = WatchedModel()
    engine: WatchedEngine = WatchedEngine()
    routing: WatchedRouting = WatchedRouting()
    autoscaling: WatchedAutoscaling | None = None


def served_model(deployment: str, spec: WatchedSpec) -> ServedModel:
    """Return what gateways serve of the LLMDeployment of this name."""
    return ServedModel(
        name=spec.model.name or deployment,
        aliases=spec.model.aliases,
        weight=spec.routing.weight,
        prefix_scope=spec.engine.prefix_caching.scope,
        routing_policy=spec.routing.policy,
        session_header=spec.routing.session_header or "",
        chat_template=spec.model.chat_template,
        tool_call_parser=spec.model.tool_call_parser,
        reasoning_parser=spec.model.reasoning_parser,
        queue=_queue_limits(spec.routing.queue),
    )


def _queue_limits(queue: WatchedQueue | None) -> QueueLimits | None:
    """Return the queue's limits; `None`, for the gateway's own, if they are missing or invalid."""
    if queue is None or queue.max_requests < 0:
        return None
    try:
        max_bytes, timeout_s = memory_bytes(queue.max_bytes), duration_seconds(queue.timeout)
    except ValueError:
        return None
    return QueueLimits(max_requests=queue.max_requests, max_bytes=max_bytes, timeout_s=timeout_s)


class Claimant(Protocol):
    """A deployment that claims model names, or the known part of one."""

    @property
    def key(self) -> str: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def weight(self) -> int | None: ...


AnyClaimant = TypeVar("AnyClaimant", bound=Claimant)


def name_owners(oldest_first: Iterable[AnyClaimant]) -> Iterator[tuple[AnyClaimant, tuple[str, str] | None]]:
    """Yield each claimant with `None` if it gets its names, otherwise with the first name that an older one holds alone
    and the key of that one.

    A name is shared (a canary) if all of its claimants have a weight. A claimant that loses one name gets none.
    """
    holders: dict[str, AnyClaimant] = {}
    for claimant in oldest_first:
        taken = _taken(claimant, holders)
        if taken is None:
            for name in claimant.names:
                holders.setdefault(name, claimant)
        yield claimant, taken


def _taken(claimant: AnyClaimant, holders: dict[str, AnyClaimant]) -> tuple[str, str] | None:
    for name in claimant.names:
        holder = holders.get(name, claimant)
        if holder.key != claimant.key and (holder.weight is None or claimant.weight is None):
            return name, holder.key
    return None
