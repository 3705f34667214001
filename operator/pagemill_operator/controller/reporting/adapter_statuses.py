"""Writes the status of each LoRAAdapter: whether its deployment's engines are asked to serve it, and which of them do.

The engines' settings are written with those of the LLMDeployment (`leading.reconcile`); nothing is decided here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from pagemill_crds.adapters import LoRAAdapterStatus
from pagemill_crds.status import AdapterReplicas
from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError, NotLeading, Unreachable
from pagemill_operator.backends.kubernetes.kinds import LLM_DEPLOYMENT, LORA_ADAPTER
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.controller.reporting.status_writing import merge_patch
from pagemill_operator.controller.watching.cache import ObjectCache
from pagemill_operator.plan.adapters import (
    MAX_MESSAGE_CHARS,
    AdapterClaim,
    AdapterRefusal,
    resource_claim,
    serves_adapters,
    serving_replicas,
)
from pagemill_operator.status.conditions import Finding, merge_conditions
from pagemill_protocol.report.load import EngineReport

logger = logging.getLogger("pagemill.operator")

INTERVAL_S = 1.0
"""Shortest time between two looks at all adapters."""
RETRY_S = 5.0


class AdapterStatuses:
    def __init__(
        self,
        client: Client,
        cache: ObjectCache,
        held: Callable[[str], Mapping[str, EngineReport]],
        *,
        on_write: Callable[[str, str], None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`held` returns the reports of a deployment's engines, by pod's uid. `on_write` is called with kind and verb
        of each write.
        """
        self._client = client
        self._cache = cache
        self._held = held
        self._on_write = on_write
        self._now = now
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Look at all adapters again, because an object or a report has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Write until cancelled, or until this process may not write any more."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.write_all()
            except (ApiError, Unreachable, NotLeading) as error:
                logger.warning("statuses of LoRAAdapters: %s", str(error) or type(error).__name__)
                self._changed.set()
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(INTERVAL_S)

    async def write_all(self) -> None:
        """Write the statuses that differ. Raise `ApiError` or `Unreachable`."""
        for adapter in self._cache.of_kind(LORA_ADAPTER.name):
            if not adapter["metadata"].get("deletionTimestamp"):
                await self._write(adapter)

    async def _write(self, adapter: Manifest) -> None:
        metadata, old = adapter["metadata"], adapter.get("status") or {}
        new = self._status(adapter, old)
        if new == old:
            return
        patch = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": merge_patch(old, new)}
        self._on_write(LORA_ADAPTER.name, "status")
        try:
            written = await self._client.patch_status(LORA_ADAPTER, metadata["namespace"], metadata["name"], patch)
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or changed: the watch reports it
                raise
            return
        self._cache.put(LORA_ADAPTER.name, written)

    def _status(self, adapter: Manifest, old: Mapping[str, Any]) -> dict[str, Any]:
        claim, generation = resource_claim(adapter), adapter["metadata"].get("generation", 0)
        refusal = self._refusal(claim)
        replicas, num_pods, is_named = AdapterReplicas(), 0, False
        if refusal is None:
            is_named = self._is_named(claim)
            pods = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in self._cache.pods(claim.deployment)}
            reports = {uid: report.adapters for uid, report in self._held(claim.deployment).items()}
            replicas = serving_replicas(self._cache.adapters.asked(claim), reports, pods)
            num_pods = len(reports.keys() & pods.keys())
        try:
            before = LoRAAdapterStatus.model_validate(old).conditions
        except ValueError:
            before = []
        conditions = merge_conditions(
            before,
            adapter_findings(refusal, replicas, num_pods, is_named=is_named),
            generation,
            self._now().strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
        status = LoRAAdapterStatus.model_validate(
            {
                **replicas.model_dump(mode="json"),
                "observedGeneration": generation,
                "name": claim.wanted.name,
                "conditions": [each.model_dump(mode="json") for each in conditions],
            }
        )
        return status.model_dump(mode="json", exclude_none=True)

    def _is_named(self, claim: AdapterClaim) -> bool:
        """Whether the status of the LLMDeployment, where gateways learn the names of adapters, has this one."""
        owner = self._cache.owner(claim.deployment) or {}
        listed = (owner.get("status") or {}).get("adapters", [])
        return any(each.get("name") == claim.wanted.name and not each.get("reason") for each in listed)

    def _refusal(self, claim: AdapterClaim) -> AdapterRefusal | None:
        owner = self._cache.owner(claim.deployment)
        if owner is None:
            message = f"there is no {LLM_DEPLOYMENT.name} {claim.deployment}; create it, or correct spec.deployment"
            return AdapterRefusal("DeploymentNotFound", message)
        if not serves_adapters(owner.get("spec", {})):
            message = (
                f"the engines of {claim.deployment} have no places for adapters; set its spec.engine.lora, which "
                "replaces its replicas once"
            )
            return AdapterRefusal("AdaptersNotEnabled", message)
        return self._cache.adapters.refusal(claim)


def adapter_findings(
    refusal: AdapterRefusal | None, replicas: AdapterReplicas, num_pods: int, *, is_named: bool = True
) -> list[Finding]:
    """Return the conditions of a LoRAAdapter. `num_pods`: the replicas whose engines report. `is_named`: whether
    gateways can know the name."""
    if refusal is not None:
        return [Finding(type_, "False", refusal.reason, refusal.message) for type_ in ("Accepted", "Ready")]
    accepted = Finding("Accepted", "True", "Accepted", "the engines are asked to serve it")
    loaded = f"{replicas.loaded_replicas} of {num_pods} replicas serve it"
    if replicas.refused:
        first = replicas.refused[0]
        message = f"{loaded}; {first.pod}: {first.message}"[:MAX_MESSAGE_CHARS]
        return [accepted, Finding("Ready", "False", first.reason, message)]
    if not num_pods:
        return [accepted, Finding("Ready", "False", "NoReplicas", "no replica reports to a gateway")]
    if replicas.loaded_replicas < num_pods:
        return [accepted, Finding("Ready", "False", "Loading", loaded)]
    if not is_named:
        message = f"{loaded}; the status of the LLMDeployment, which gateways read, does not name it yet"
        return [accepted, Finding("Ready", "False", "Loading", message)]
    return [accepted, Finding("Ready", "True", "Loaded", loaded)]
