"""LoRA adapters: who gets a name that several claim, and which replicas serve an adapter. Pure.

An LLMDeployment lists adapters, and each LoRAAdapter asks for one more. `controller.watching.cache` keeps the claims;
the backends write what is wanted into the file that engines watch (`pagemill_protocol.report.adapters`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pagemill_crds.status import AdapterReplicas
from pagemill_models.sources import SourceError, find_kind, in_full
from pagemill_operator.plan.pod_template import mounted_file
from pagemill_protocol.report.adapters import AdapterStatus, WantedAdapter

MAX_PODS = 32
"""Most pods of each kind that a status names."""
MAX_MESSAGE_CHARS = 1024
NAME_CONFLICT, UNSUPPORTED = "NameConflict", "UnsupportedSource"


@dataclass(frozen=True)
class AdapterClaim:
    """One adapter that a deployment lists, or a LoRAAdapter asks for."""

    deployment: str
    """namespace/name."""
    wanted: WantedAdapter
    created: str
    """When the LLMDeployment or the LoRAAdapter was created, RFC 3339 in UTC; sorts by age."""
    resource: str = ""
    """Name of the LoRAAdapter; empty: the LLMDeployment lists the adapter."""

    @property
    def origin(self) -> str:
        if not self.resource:
            return f"spec.model.adapters of {self.deployment}"
        return f"LoRAAdapter {self.deployment.partition('/')[0]}/{self.resource}"


@dataclass(frozen=True)
class AdapterRefusal:
    """Why the engines are not asked to serve an adapter."""

    reason: str
    """CamelCase."""
    message: str
    """The cause and the remedy."""


def listed_claims(key: str, owner: Mapping[str, Any]) -> tuple[AdapterClaim, ...]:
    """Return the claims of the list in a raw LLMDeployment, which may be impossible to plan."""
    listed = owner.get("spec", {}).get("model", {}).get("adapters", [])
    created = owner["metadata"].get("creationTimestamp", "")
    return tuple(AdapterClaim(key, _wanted(each, each["name"]), created) for each in listed)


def resource_claim(adapter: Mapping[str, Any]) -> AdapterClaim:
    """Return the claim of a raw LoRAAdapter."""
    metadata, spec = adapter["metadata"], adapter["spec"]
    wanted = _wanted(spec, spec.get("name") or metadata["name"])
    key = f"{metadata['namespace']}/{spec['deployment']}"
    return AdapterClaim(key, wanted, metadata.get("creationTimestamp", ""), metadata["name"])


def _wanted(spec: Mapping[str, Any], name: str) -> WantedAdapter:
    return WantedAdapter(name=name, source=spec["source"], pinned=spec.get("pinned", False))


def mounted_claim(spec: Mapping[str, Any]) -> str | None:
    """Return the PersistentVolumeClaim at `MODEL_PATH` in the engines of a raw spec of an LLMDeployment that names one
    as its model's source."""
    model = spec.get("model", {})
    scheme, _, rest = in_full(model.get("source", "").strip()).partition("://")
    return rest.partition("/")[0] if scheme == "pvc" and model.get("cache") is None else None


def serves_adapters(spec: Mapping[str, Any]) -> bool:
    """Whether the engines of a raw spec of an LLMDeployment have places for adapters."""
    return spec.get("engine", {}).get("lora") is not None or bool(spec.get("model", {}).get("adapters"))


class ClaimedAdapters:
    """The claims of all deployments and LoRAAdapters. The older of two claims gets a name; a model's name is taken.

    Deployments that share their models' names by weights (canaries) share the names of their adapters, too.
    """

    def __init__(self) -> None:
        self._by_origin: dict[tuple[str, str], tuple[AdapterClaim, ...]] = {}
        """(kind, namespace/name) -> claims."""
        self._by_name: dict[str, set[AdapterClaim]] = {}
        self._by_deployment: dict[str, set[AdapterClaim]] = {}
        self._mounted: dict[str, str] = {}
        """Deployment's key -> PersistentVolumeClaim of its model."""
        self._models: dict[str, frozenset[str]] = {}
        """Deployment's key -> names of its model."""
        self._of_models: dict[str, set[str]] = {}
        """Name of a model -> keys."""

    def claim(self, kind: str, key: str, claims: Sequence[AdapterClaim]) -> set[str]:
        """Store the claims of an object, in place of its earlier ones; return the deployments that may be concerned."""
        before, after = self._by_origin.pop((kind, key), ()), tuple(claims)
        if after:
            self._by_origin[kind, key] = after
        if before == after:
            return set()
        for each in before:
            self._by_name[each.wanted.name].discard(each)
            self._by_deployment[each.deployment].discard(each)
        for each in after:
            self._by_name.setdefault(each.wanted.name, set()).add(each)
            self._by_deployment.setdefault(each.deployment, set()).add(each)
        changed = {each.deployment for each in (*before, *after)}
        return changed | self._claimants(each.wanted.name for each in (*before, *after))

    def name_models(self, key: str, names: Iterable[str]) -> set[str]:
        """Store the names of a deployment's model (none: it is gone); return the deployments that may be concerned."""
        before, after = self._models.pop(key, frozenset()), frozenset(names)
        if after:
            self._models[key] = after
        for name in before - after:
            self._of_models[name].discard(key)
        for name in after - before:
            self._of_models.setdefault(name, set()).add(key)
        return self._claimants(before ^ after) if before != after else set()

    def mount(self, key: str, claim: str | None) -> None:
        """Store the PersistentVolumeClaim that the deployment's engines have mounted for their model."""
        self._mounted.pop(key, None)
        if claim is not None:
            self._mounted[key] = claim

    def asked(self, claim: AdapterClaim) -> WantedAdapter:
        """Return what the engines are asked to serve: a source on their claim by its path in the pods."""
        wanted = claim.wanted
        if not wanted.source.startswith("pvc://"):
            return wanted
        return msgspec.structs.replace(wanted, source=mounted_file(wanted.source))

    def of(self, key: str) -> list[tuple[AdapterClaim, AdapterRefusal | None]]:
        """Return the claims on a deployment by name, each with the cause if it is refused."""
        claims = sorted(self._by_deployment.get(key, ()), key=lambda each: (each.wanted.name, *_age(each)))
        return [(each, self.refusal(each)) for each in claims]

    def wanted(self, key: str) -> tuple[WantedAdapter, ...]:
        """Return the adapters that the deployment's engines are asked to serve."""
        return tuple(self.asked(each) for each, refusal in self.of(key) if refusal is None)

    def refusal(self, claim: AdapterClaim) -> AdapterRefusal | None:
        name = claim.wanted.name
        try:
            source = in_full(claim.wanted.source)
            find_kind(source).check(source, "source")
        except SourceError as error:
            return AdapterRefusal(UNSUPPORTED, error.message)
        mounted = self._mounted.get(claim.deployment)
        if source.startswith("pvc://") and source.split("/")[2] != mounted:
            message = (
                f"the engines of {claim.deployment} mount {f'the claim {mounted} only' if mounted else 'no claim'}: "
                "store the adapter beside a model that spec.model.source names by pvc://, or mount its claim with "
                "spec.template of the LLMDeployment and use file://"
            )
            return AdapterRefusal(UNSUPPORTED, message)
        if models := self._of_models.get(name):
            return AdapterRefusal(
                NAME_CONFLICT, f"{min(models)} serves a model of the name {name}; choose another name"
            )
        for other in sorted(self._by_name.get(name, ()), key=_age):
            if other == claim:
                return None
            if other.deployment == claim.deployment or not self._share_names(other.deployment, claim.deployment):
                message = f"{other.origin} has the name {name} already and is older; choose another name"
                return AdapterRefusal(NAME_CONFLICT, message)
        return None

    def _share_names(self, one: str, other: str) -> bool:
        return bool(self._models.get(one, frozenset()) & self._models.get(other, frozenset()))

    def _claimants(self, names: Iterable[str]) -> set[str]:
        return {claim.deployment for name in names for claim in self._by_name.get(name, ())}


def _age(claim: AdapterClaim) -> tuple[str, str, str, str]:
    return claim.created, claim.deployment, claim.resource, claim.wanted.source


def serving_replicas(
    wanted: WantedAdapter, reports: Mapping[str, Sequence[AdapterStatus]], pods: Mapping[str, str]
) -> AdapterReplicas:
    """Return which replicas serve an adapter. `reports`: what engines report, by pod's uid; `pods`: uid -> name."""
    loaded, loading, refused = list[str](), list[str](), list[dict[str, str]]()
    for pod, status in sorted(_statuses(wanted, reports, pods)):
        if status.state == "known":
            loaded.append(pod)
        elif status.state == "fetching":
            loading.append(pod)
        else:
            message = status.message[:MAX_MESSAGE_CHARS]
            refused.append({"pod": pod, "reason": status.reason or "Refused", "message": message})
    content = {
        "loadedReplicas": len(loaded),
        "loaded": loaded[:MAX_PODS],
        "loading": loading[:MAX_PODS],
        "refused": refused[:MAX_PODS],
    }
    return AdapterReplicas.model_validate(content)


def _statuses(
    wanted: WantedAdapter, reports: Mapping[str, Sequence[AdapterStatus]], pods: Mapping[str, str]
) -> Iterator[tuple[str, AdapterStatus]]:
    for uid, statuses in reports.items():
        for status in statuses:
            if uid in pods and (status.name, status.source) == (wanted.name, wanted.source):
                yield pods[uid], status
                break
