"""Finds the endpoints that may get a request: resolves a model name to a deployment, and filters its endpoints.

It neither waits nor changes any state. `brain.placement.placement` chooses the endpoint, and `brain.endpoints.record`
checks capacity.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

from pagemill_protocol.errors import PagemillError, model_not_found, unavailable
from pagemill_protocol.report.adapters import AdapterStatus
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_routing.brain.endpoints.deployment import DeploymentRecord
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.endpoints.registry import Registry
from pagemill_routing.brain.endpoints.reports import NO_SCHEME
from pagemill_routing.brain.interface import NOT_READY, OTHER_WEIGHTS, HashScheme, Target
from pagemill_routing.brain.placement.requests import PlacementRequest
from pagemill_routing.brain.resilience.poison_requests import PoisonDetection
from pagemill_routing.brain.resilience.recovery import Recovery

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
        first = deployments[0]
        if model != first.model.name and first.is_adapter(model):  # without a call for most requests
            return self._adapter_target(model, deployments)
        shared = self._share(deployments)
        if shared is None:
            raise _nothing_ready(model, deployments, self._clock())
        return self._target(*shared)

    def settled(self, model: str) -> bool:
        """Whether waiting for an engine is over: a deployment serves the name, none has it, or all engines refuse the
        adapter.
        """
        deployments = self._registry.named(model)
        if not deployments or not deployments[0].is_adapter(model):
            return not deployments or self._share(deployments) is not None
        return self._share(deployments, model) is not None or bool(_refusals(model, deployments))

    def _adapter_target(self, name: str, deployments: list[DeploymentRecord]) -> Target:
        shared = self._share(deployments, name)
        if shared is None:
            if refusals := _refusals(name, deployments):
                raise _refused(name, refusals)
            if any(deployment.usable() for deployment in deployments):
                raise unavailable(
                    f"The adapter `{name[:200]}` is not loaded yet. Try again later.",
                    retry_after_s=LOADING_RETRY_AFTER_S,
                    code=NOT_READY,
                )
            raise _nothing_ready(name, deployments, self._clock())
        deployment, usable = shared
        adapter_digest = deployment.usable_with_adapter(name)[0]
        return self._target(deployment, usable)._replace(adapter_digest=adapter_digest)

    def endpoints(self, target: Target) -> tuple[DeploymentRecord | None, list[EndpointRecord]]:
        """Return the target's deployment and its endpoints with the target's tokenizer that know its adapter."""
        deployment = self._registry.deployments.get(target.deployment)
        if deployment is None:
            return None, []
        usable = deployment.usable_with(target.bundle_digest)
        if target.adapter_digest:
            usable = [each for each in usable if each.adapters.knows(target.adapter_digest)]
        if usable:
            return deployment, usable
        departing = [each for each in self._departing(deployment) if each.bundle_digest == target.bundle_digest]
        adapter = target.adapter_digest
        return deployment, [each for each in departing if not adapter or each.adapters.knows(adapter)]

    def pool(self, records: list[EndpointRecord], to_place: PlacementRequest, now: float) -> list[EndpointRecord]:
        """Return the records that may take the request or its continuation now.

        A probe waits for a healthy endpoint: on one that was tried or is ejected, its failure would be no evidence.
        Raises `PagemillError` with code `OTHER_WEIGHTS` if no engine has the weights that the answer was begun with.
        """
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

    def _share(self, deployments: list[DeploymentRecord], adapter: str = "") -> _Share | None:
        """Draw a deployment by weight, of those with usable endpoints that know the adapter, else of those with leaving
        ones.
        """
        wanted = [deployment for deployment in deployments if deployment.model.share > 0]
        if adapter:
            ready = [(each, usable) for each in wanted if (usable := each.usable_with_adapter(adapter)[1])]
        else:
            ready = [(each, usable) for each in wanted if (usable := each.usable())]
        if not ready and not adapter:
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


def _refusals(name: str, deployments: list[DeploymentRecord]) -> list[AdapterStatus]:
    """Return the reports on an adapter if every engine that may get requests has refused it; else none."""
    statuses = [status for deployment in deployments for status in deployment.adapter_statuses(name)]
    num_usable = sum(len(deployment.usable()) for deployment in deployments)
    is_refused = len(statuses) == num_usable and all(each.state == "refused" and not each.digest for each in statuses)
    return statuses if is_refused else []


def _refused(name: str, refusals: list[AdapterStatus]) -> PagemillError:
    reasons = ", ".join(sorted({each.reason for each in refusals}))
    return unavailable(
        f"The adapter `{name[:200]}` cannot be served: its engines refuse it ({reasons}). The status of its resource "
        "names the cause.",
        retry_after_s=LOADING_RETRY_AFTER_S,
        code="adapter_refused",
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
