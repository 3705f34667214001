"""The registry of endpoints and deployments: records, lookup by name, and the change to a new catalogue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagemill_protocol.catalog import Catalog, Endpoint
from pagemill_protocol.report.state import StateFrame
from pagemill_routing.brain.endpoints.deployment import DeploymentRecord
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.endpoints.reports import EndpointReports
from pagemill_routing.brain.interface import ServedName


class Registry:
    def __init__(self, *, stale_after_s: float, generated_token: Callable[[str], str] = lambda control_url: "") -> None:
        """`generated_token` returns the token that the engine at a control URL generated; empty if unknown."""
        self._stale_after_s = stale_after_s
        self._generated_token = generated_token
        self.deployments: dict[str, DeploymentRecord] = {}
        self.endpoints: dict[str, EndpointRecord] = {}
        self._by_name: dict[str, list[DeploymentRecord]] = {}
        self._reported_names: dict[str, list[str]] = {}
        """Deployment -> the names that only its engines' reports lead to it."""

    def apply(self, catalog: Catalog, now: float) -> None:
        """Apply a catalogue. The records of endpoints that stay keep their counts and reports."""
        known, known_deployments, names_before = self.endpoints, self.deployments, self._reported_names
        self._reported_names = {}
        self.deployments, self.endpoints, self._by_name = {}, {}, {}
        for model in catalog.models:
            deployment = DeploymentRecord(model)
            before = known_deployments.get(deployment.key)
            if before is not None:
                deployment.last_served_at, deployment.output_tokens = before.last_served_at, before.output_tokens
                deployment.starts, deployment.bundle_digest = before.starts, before.bundle_digest
            has_policy = before is not None and before.model.routing_policy == model.routing_policy
            self.deployments[deployment.key] = deployment
            for endpoint in model.endpoints:
                if endpoint.probed_ready and not _was_probed_ready(known.get(endpoint.id)):
                    deployment.last_served_at = now
                record = self._record(known.get(endpoint.id), endpoint, deployment.key)
                if not has_policy:
                    record.seen.clear()  # another policy's
                self.endpoints[endpoint.id] = record
                deployment.records.append(record)
            for name in dict.fromkeys(model.names):
                self._by_name.setdefault(name, []).append(deployment)
        self._name_adapters()
        for key, names in names_before.items():
            if (kept := self.deployments.get(key)) is not None:
                self.take_names(kept, names)

    def _name_adapters(self) -> None:
        """Let the names of adapters lead to their deployments: none that a model has, and none that an earlier
        deployment of the catalogue has, unless both share their models' names.
        """
        models = frozenset(self._by_name)
        for deployment in self.deployments.values():
            for name in deployment.model.adapters:
                named = self._by_name.setdefault(name, [])
                if name not in models and all(set(each.model.names) & set(deployment.model.names) for each in named):
                    named.append(deployment)

    def take_names(self, deployment: DeploymentRecord, names: list[str]) -> None:
        """Let the names that an engine of the deployment reports lead to it, where the catalogue says so."""
        if not deployment.model.takes_names:
            return
        for name in self._reported_names.pop(deployment.key, []):
            del self._by_name[name]
        self._reported_names[deployment.key] = new = [name for name in names if name not in self._by_name]
        for name in new:
            self._by_name[name] = [deployment]

    def reported(self, record: EndpointRecord, frame: StateFrame, now: float, *, adapters_changed: bool) -> None:
        """Note what a report of the endpoint, which its record has accepted, says about its deployment."""
        deployment = self.deployments[record.deployment]
        deployment.bundle_digest = frame.digests.tokenizer_bundle or deployment.bundle_digest
        if frame.snapshot:
            deployment.starts.engine_reported(frame.start_s)
        if frame.snapshot or adapters_changed:
            adapters = {name: None for each in deployment.records for name in each.adapters.by_name}
            self.take_names(deployment, [*frame.models, *adapters])
        if frame.max_model_len > 0 and not (record.draining or frame.sleeping):  # as `record.serving`, for each frame
            deployment.last_served_at = now
            deployment.starts.served(now)

    def changed(self, record: EndpointRecord) -> None:
        """Call `DeploymentRecord.changed` of the record's deployment."""
        deployment = self.deployments.get(record.deployment)
        if deployment is not None:
            deployment.changed()

    @property
    def bundle_digests(self) -> set[str]:
        """The digests of the tokenizers in use, including those of deployments that have no endpoints now."""
        digests = {record.bundle_digest for record in self.endpoints.values()}
        return digests | {deployment.bundle_digest for deployment in self.deployments.values()}

    def named(self, name: str) -> list[DeploymentRecord]:
        return self._by_name.get(name, [])

    def names(self) -> list[str]:
        return list(self._by_name)

    def served(self, name: str) -> ServedName:
        """Return the entry of a name; with several deployments, its limits are those that all of them meet."""
        deployments = self.named(name)
        records = [record for deployment in deployments for record in deployment.usable()]
        max_model_len = min((record.max_model_len for record in records), default=None)
        pools = any(record.pools for record in records)
        first = deployments[0]
        if not first.is_adapter(name):
            return ServedName(name, first.model.name, max_model_len, pools=pools)
        source = next((each.source for each in first.adapter_statuses(name)), "")
        return ServedName(name, first.model.name, max_model_len, is_adapter=True, source=source, pools=pools)

    def token_of(self, record: EndpointRecord) -> str:
        """Return the bearer token for the endpoint's `/internal/*`. A catalogue or a restarted engine may change it."""
        deployment = self.deployments.get(record.deployment)
        if deployment is None:
            return ""
        if deployment.model.engine_token:
            return deployment.model.engine_token
        if record.generated_token is None or not record.reports.connected:
            record.generated_token = self._generated_token(record.endpoint.control_url)
        return record.generated_token

    def _record(self, known: EndpointRecord | None, endpoint: Endpoint, deployment: str) -> EndpointRecord:
        # The same id at another address is another engine, so its state starts anew.
        if known is None or known.endpoint.data_url != endpoint.data_url or known.deployment != deployment:
            return EndpointRecord(endpoint, deployment, EndpointReports(self._stale_after_s))
        known.endpoint = endpoint
        return known


def _was_probed_ready(record: EndpointRecord | None) -> bool:
    return record is not None and record.endpoint.probed_ready


class ChangeNotifier:
    """Wakes waiting tasks after every change of the brain's state; each checks its own condition."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def publish(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition` is true, checking it after every change. Return whether it is true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._next()
        except TimeoutError:
            return condition()
        return True

    async def _next(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)
