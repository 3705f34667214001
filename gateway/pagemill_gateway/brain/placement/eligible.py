"""Finds the endpoints that may get a request: resolves a model name to a deployment, and filters its endpoints.

It neither waits nor changes any state. `brain.placement.placement` chooses the endpoint, and `brain.endpoints.record`
checks capacity.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

from pagemill_api.answers.registry import ParserSettings
from pagemill_gateway.brain.endpoints.deployment import DeploymentRecord
from pagemill_gateway.brain.endpoints.record import EndpointRecord
from pagemill_gateway.brain.endpoints.registry import Registry
from pagemill_gateway.brain.endpoints.reports import NO_SCHEME
from pagemill_gateway.brain.interface import NOT_READY, OTHER_WEIGHTS, HashScheme, Target
from pagemill_gateway.brain.placement.requests import PlacementRequest
from pagemill_gateway.brain.resilience.poison_requests import PoisonDetection
from pagemill_gateway.brain.resilience.recovery import Recovery
from pagemill_protocol.errors import PagemillError, model_not_found, unavailable

_Share = tuple[DeploymentRecord, list[EndpointRecord]]
"""A deployment and those of its endpoints that may get a request."""

LOADING_RETRY_AFTER_S = 5.0
"""`Retry-After` if the duration of an engine's start is unknown."""


class Eligible:
    def __init__(
        self,
        registry: Registry,
        recovery: Recovery,
        poison_detection: PoisonDetection,
        rng: random.Random,
        clock: Callable[[], float],
        *,
        keeps_terminating: bool,
    ) -> None:
        """`keeps_terminating`: whether terminating endpoints may be used while no other is available."""
        self._registry = registry
        self._recovery = recovery
        self._poison_detection = poison_detection
        self._rng = rng
        self._clock = clock
        self._keeps_terminating = keeps_terminating

    def resolve(self, model: str) -> Target:
        """Return the target for a model name.

        Raises `PagemillError` 404 for an unknown name, and 503 with the reason if no engine is ready.
        """
        deployments = self._registry.named(model)
        if not deployments:
            raise model_not_found(model, self._registry.names())
        shared = self._share(deployments)
        if shared is None:
            raise _nothing_ready(model, deployments, self._clock())
        deployment, usable = shared
        target = self._target(deployment, usable)
        if deployment.model.adapters and (adapter_digest := deployment.adapter_digest(model)):
            return target._replace(adapter_digest=adapter_digest)
        return target

    def settled(self, model: str) -> bool:
        """Whether waiting for an engine is over: a deployment serves the name, or none has it."""
        deployments = self._registry.named(model)
        return not deployments or self._share(deployments) is not None

    def endpoints(self, target: Target) -> tuple[DeploymentRecord | None, list[EndpointRecord]]:
        """Return the target's deployment and its endpoints with the target's tokenizer."""
        deployment = self._registry.deployments.get(target.deployment)
        if deployment is None:
            return None, []
        usable = deployment.usable_with(target.bundle_digest)
        if usable:
            return deployment, usable
        return deployment, [each for each in self._departing(deployment) if each.bundle_digest == target.bundle_digest]

    def pool(self, records: list[EndpointRecord], to_place: PlacementRequest, now: float) -> list[EndpointRecord]:
        """Return the records that may take the request or its continuation now.

        A probe waits for a healthy endpoint: on one that was tried or is ejected, its failure would be no evidence.
        Raises `PagemillError` if the request needs an adapter and none serves adapters, and with code `OTHER_WEIGHTS`
        if no engine has the weights that the answer was begun with.
        """
        if to_place.request.adapter_digest:
            records = [record for record in records if record.adapters.served]
            if not records:
                raise _no_adapters(to_place.target)
        if to_place.retry is not None and to_place.retry.weights_digest:
            digest = to_place.retry.weights_digest
            records = [record for record in records if record.weights_digest == digest]
            if not records:
                raise unavailable(
                    "No engine has the weights that the answer was begun with. Try again.",
                    retry_after_s=1,
                    code=OTHER_WEIGHTS,
                )
        return self._poison_detection.allowed(self._best(records, to_place.tried, now), to_place.probe, now)

    def _best(self, records: list[EndpointRecord], tried: frozenset[str], now: float) -> list[EndpointRecord]:
        """Return the healthy and untried endpoints; if there are none, the untried ones; if there are none, all."""
        out = self._recovery.out(records, now)
        if not out and not tried:
            return records
        untried = [record for record in records if record.endpoint.id not in tried]
        healthy = [record for record in untried if record.endpoint.id not in out]
        return healthy or untried or records

    def _target(self, deployment: DeploymentRecord, usable: list[EndpointRecord]) -> Target:
        digest = self._rng.choice(usable).bundle_digest
        if usable is not deployment.usable():
            return _target(deployment, usable, digest)
        target = deployment.targets.get(digest)
        if target is None:
            target = deployment.targets[digest] = _target(deployment, usable, digest)
        return target

    def _departing(self, deployment: DeploymentRecord) -> list[EndpointRecord]:
        departing = deployment.departing()
        return [each for each in departing if self._keeps_terminating or not each.endpoint.terminating]

    def _share(self, deployments: list[DeploymentRecord]) -> _Share | None:
        """Draw a deployment by weight, of those with usable endpoints, else of those with leaving ones."""
        wanted = [deployment for deployment in deployments if deployment.model.share > 0]
        ready = [(each, usable) for each in wanted if (usable := each.usable())]
        if not ready:
            ready = [(each, departing) for each in wanted if (departing := self._departing(each))]
        if len(ready) <= 1:
            return ready[0] if ready else None
        return self._rng.choices(ready, weights=[deployment.model.share for deployment, _ in ready])[0]


def _target(deployment: DeploymentRecord, usable: list[EndpointRecord], digest: str) -> Target:
    return Target(
        deployment=deployment.key,
        model=deployment.model.name,
        bundle_digest=digest,
        max_model_len=min(record.max_model_len for record in usable if record.bundle_digest == digest),
        chat_template=deployment.model.chat_template,
        parsers=ParserSettings(deployment.model.tool_call_parser, deployment.model.reasoning_parser),
        prefix_scope=deployment.model.prefix_scope,
        scheme=common_scheme(record.reports.scheme for record in usable),
        session_header=deployment.model.session_header.lower(),
    )


def _no_adapters(target: Target) -> PagemillError:
    return unavailable(
        f"No engine of {target.deployment} serves adapters now. Ask for its model `{target.model}`, or try again.",
        retry_after_s=LOADING_RETRY_AFTER_S,
        code="adapter_not_served",
    )


def _nothing_ready(model: str, deployments: list[DeploymentRecord], now: float) -> PagemillError:
    records = [record for deployment in deployments for record in deployment.records]
    if not records:
        reason = "it has no engine running"
    elif all(record.leaving for record in records):
        reason = "its engines are shutting down"
    elif all(deployment.model.share <= 0 for deployment in deployments):
        reason = "its routing weight is 0"
    else:
        states = Counter(_state(record) for record in records if not record.usable)
        reason = "; ".join(f"{count} engine(s) {state}" for state, count in states.most_common(3))
    lefts_s = [left_s for each in deployments if (left_s := each.starts.left_s(now)) is not None]
    return unavailable(
        f"The model `{model[:200]}` is not ready yet ({reason}). Try again later.",
        retry_after_s=min(lefts_s, default=LOADING_RETRY_AFTER_S),
        code=NOT_READY,
    )


def _state(record: EndpointRecord) -> str:
    """Return the state of an endpoint for clients. Why it cannot be reached has addresses: that is in the status."""
    if record.phase in ("unreachable", "ready"):  # `ready`: it says so, and its state stream has just ended
        return "unreachable"
    return f"{record.phase}: {record.detail}".rstrip(": ")


def common_scheme(schemes: Iterable[HashScheme]) -> HashScheme:
    """Return the most common scheme; with it, lookups find nothing on endpoints with another scheme, as in a rollout.

    Return `NO_SCHEME` if no engine has reported a scheme that gateways can compute.
    """
    counts = Counter(schemes)
    del counts[NO_SCHEME]
    return max(counts, key=counts.__getitem__) if counts else NO_SCHEME
