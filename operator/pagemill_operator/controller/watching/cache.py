"""The cached state of the cluster: slimmed objects by owner, filled by watches and by the answers to own writes.

Each change returns the deployments that it concerns. An own write concerns none, because its answer is cached before
the watch reports it. Model names that several deployments claim are conflicts. No request is made here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pagemill_crds import GROUP
from pagemill_operator.backends.kubernetes.kinds import AUTOSCALER, LLM_DEPLOYMENT
from pagemill_operator.backends.kubernetes.slim import slim
from pagemill_operator.backends.kubernetes.snapshot import OWNER_LABEL, Manifest
from pagemill_operator.plan.adapters import ClaimedAdapters, listed_claims, mounted_claim, resource_claim
from pagemill_operator.plan.planner import name_conflicts
from pagemill_operator.plan.types import Problem

_OWN_KINDS = frozenset({"LLMDeployment", "LoRAAdapter"})
Identity = tuple[str, str]
"""(namespace, name)"""


@dataclass(frozen=True)
class Claim:
    """The model names of one deployment, read from the raw object, which may be impossible to plan."""

    key: str
    names: tuple[str, ...]
    weight: int | None
    created: str
    """Creation time, RFC 3339 in UTC; sorts by age."""


def claim_of(key: str, owner: Manifest) -> Claim:
    spec = owner.get("spec", {})
    model = spec.get("model", {})
    name = model.get("name") or owner["metadata"]["name"]
    weight = spec.get("routing", {}).get("weight")
    return Claim(key, (name, *model.get("aliases", [])), weight, owner["metadata"].get("creationTimestamp", ""))


class ClaimedNames:
    """The model names that deployments claim, and the conflicts among them."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}
        self._conflicts: dict[str, Problem] = {}

    def conflict(self, key: str) -> Problem | None:
        return self._conflicts.get(key)

    def claim(self, claim: Claim) -> set[str]:
        """Store a claim; return the keys whose conflicts it has changed."""
        if self._claims.get(claim.key) == claim:
            return set()
        self._claims[claim.key] = claim
        return self._recompute()

    def drop(self, key: str) -> set[str]:
        return self._recompute() if self._claims.pop(key, None) else set()

    def _recompute(self) -> set[str]:
        oldest_first = sorted(self._claims.values(), key=lambda claim: (claim.created, *claim.key.split("/")))
        before, self._conflicts = self._conflicts, name_conflicts(oldest_first)
        return {key for key in before.keys() | self._conflicts.keys() if before.get(key) != self._conflicts.get(key)}


class ObjectCache:
    def __init__(
        self, namespace: str, gateway_selector: Mapping[str, str], watch_namespaces: Collection[str] = ()
    ) -> None:
        """Create an empty cache.

        `namespace` is the release's, where gateway pods are. `watch_namespaces` limits the LLMDeployments; empty means
        all.
        """
        self._namespace = namespace
        self._gateway_selector = dict(gateway_selector)
        self._watch_namespaces = frozenset(watch_namespaces)
        self._objects: dict[str, dict[Identity, Manifest]] = {}
        """Kind -> identity -> object."""
        self._by_owner: dict[str, dict[tuple[str, str], Manifest]] = {}
        """Owner's key -> (kind, name) -> child or pod."""
        self._gateways: dict[str, Manifest] = {}
        """Name -> gateway pod."""
        self.names = ClaimedNames()
        self.adapters = ClaimedAdapters()

    # Reads

    def keys(self) -> list[str]:
        """Return the keys of all deployments that are served."""
        return [f"{namespace}/{name}" for namespace, name in self._objects.get("LLMDeployment", {})]

    def owner(self, key: str) -> Manifest | None:
        namespace, _, name = key.partition("/")
        return self._objects.get("LLMDeployment", {}).get((namespace, name))

    def children(self, key: str) -> dict[tuple[str, str], Manifest]:
        """Return the children without pods, by (kind, name)."""
        return {at: child for at, child in self._by_owner.get(key, {}).items() if at[0] not in ("Pod", AUTOSCALER.name)}

    def autoscalers(self, key: str) -> tuple[str, ...]:
        """Return the names of the HorizontalPodAutoscalers that scale the deployment."""
        return tuple(sorted(name for kind, name in self._by_owner.get(key, {}) if kind == AUTOSCALER.name))

    def of_kind(self, kind: str) -> list[Manifest]:
        return [*self._objects.get(kind, {}).values()]

    def pods(self, key: str) -> tuple[Manifest, ...]:
        """Return the pods, oldest first."""
        pods = [child for (kind, _), child in self._by_owner.get(key, {}).items() if kind == "Pod"]
        return tuple(sorted(pods, key=_age))

    def gateways(self) -> list[Manifest]:
        """Return the gateway pods that are not being deleted."""
        return [pod for pod in self._gateways.values() if not _is_ending(pod)]

    def num_gateways_ready(self) -> int:
        return sum(is_ready(pod) for pod in self._gateways.values())

    def conflict(self, key: str) -> Problem | None:
        return self.names.conflict(key)

    def count(self, kind: str) -> int:
        return len(self._objects.get(kind, {}))

    # Changes

    def put(self, kind: str, manifest: Manifest) -> set[str]:
        """Store an object; return the owners that it concerns. An object older than the stored one is ignored."""
        metadata = manifest["metadata"]
        identity = (metadata["namespace"], metadata["name"])
        if kind in _OWN_KINDS and self._watch_namespaces and identity[0] not in self._watch_namespaces:
            return set()
        known = self._objects.setdefault(kind, {}).get(identity)
        if known is not None and not _is_newer(manifest, known):
            return set()
        slimmed = slim(kind, manifest)
        self._objects[kind][identity] = slimmed
        if kind == "LLMDeployment":
            return self._owner_changed(known, slimmed)
        if kind == "LoRAAdapter":
            claims = () if _is_ending(slimmed) else (resource_claim(slimmed),)
            return self.adapters.claim(kind, owner_key(slimmed), claims)
        return self._child_changed(kind, known, slimmed)

    def remove(self, kind: str, namespace: str, name: str, uid: str | None = None) -> set[str]:
        """Remove an object; return the owners that it concerns. With `uid`, remove it only if that is its uid."""
        known = self._objects.get(kind, {}).get((namespace, name))
        if known is None or (uid is not None and known["metadata"].get("uid") != uid):
            return set()
        del self._objects[kind][(namespace, name)]
        if kind == "LLMDeployment":
            key = f"{namespace}/{name}"
            return {key} | self._drop_claims(key)
        if kind == "LoRAAdapter":
            return self.adapters.claim(kind, owner_key(known), ())
        return self._unlink(kind, known) | self._gateway_changed(known, gone=True)

    def listed(self, kind: str, namespace: str, identities: Collection[Identity]) -> set[str]:
        """Remove the objects of `namespace` (empty: all) that a new, complete listing does not contain; return their
        owners.
        """
        known = [at for at in self._objects.get(kind, {}) if not namespace or at[0] == namespace]
        changed: set[str] = set()
        for gone in set(known).difference(identities):
            changed |= self.remove(kind, *gone)
        return changed

    # Internals

    def _owner_changed(self, known: Manifest | None, owner: Manifest) -> set[str]:
        key = owner_key(owner)
        if _is_ending(owner):
            return {key} | self._drop_claims(key)
        claim = claim_of(key, owner)
        self.adapters.mount(key, mounted_claim(owner.get("spec", {})))
        conflicts = self.names.claim(claim) | self.adapters.name_models(key, claim.names)
        conflicts |= self.adapters.claim("LLMDeployment", key, listed_claims(key, owner))
        same = known is not None and _wanted(known) == _wanted(owner)
        return conflicts if same else {key} | conflicts

    def _drop_claims(self, key: str) -> set[str]:
        self.adapters.mount(key, None)
        dropped = self.names.drop(key) | self.adapters.name_models(key, ())
        return dropped | self.adapters.claim("LLMDeployment", key, ())

    def _child_changed(self, kind: str, known: Manifest | None, child: Manifest) -> set[str]:
        before = self._unlink(kind, known) if known is not None else set()
        key = child_owner_key(child)
        if key:
            self._by_owner.setdefault(key, {})[(kind, child["metadata"]["name"])] = child
        if known is not None and _content(known) == _content(child):
            return set()
        return before | ({key} if key else set()) | self._gateway_changed(child)

    def _unlink(self, kind: str, child: Manifest) -> set[str]:
        key = child_owner_key(child)
        if not key:
            return set()
        siblings = self._by_owner.get(key, {})
        siblings.pop((kind, child["metadata"]["name"]), None)
        if not siblings:
            self._by_owner.pop(key, None)
        return {key}

    def _gateway_changed(self, pod: Manifest, *, gone: bool = False) -> set[str]:
        """Update a gateway pod; return all deployments if the first gateway became ready or the last one stopped being
        so.
        """
        if not self._is_gateway(pod):
            return set()
        had_one = self.num_gateways_ready() > 0
        self._gateways.pop(pod["metadata"]["name"], None)
        if not gone:
            self._gateways[pod["metadata"]["name"]] = pod
        return set(self.keys()) if had_one != (self.num_gateways_ready() > 0) else set()

    def _is_gateway(self, pod: Manifest) -> bool:
        labels = pod["metadata"].get("labels", {})
        in_release = pod["kind"] == "Pod" and pod["metadata"]["namespace"] == self._namespace
        return bool(in_release and self._gateway_selector.items() <= labels.items())


def owner_key(owner: Manifest) -> str:
    return f"{owner['metadata']['namespace']}/{owner['metadata']['name']}"


def child_owner_key(child: Manifest) -> str | None:
    """Return the key of the deployment that an object is made for, or that an autoscaler of any maker scales."""
    name = child["metadata"].get("labels", {}).get(OWNER_LABEL)
    if child["kind"] == AUTOSCALER.name:
        target = child["spec"]["scaleTargetRef"]
        is_ours = target["kind"] == LLM_DEPLOYMENT.name and target.get("apiVersion", "").startswith(f"{GROUP}/")
        name = target["name"] if is_ours else None
    return f"{child['metadata']['namespace']}/{name}" if name else None


def is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready and not _is_ending(pod)


def _is_ending(manifest: Manifest) -> bool:
    return bool(manifest["metadata"].get("deletionTimestamp"))


def _is_newer(manifest: Manifest, known: Manifest) -> bool:
    """Whether the object is a later version, or a later object of the same name: versions compare as numbers."""
    return int(manifest["metadata"]["resourceVersion"]) > int(known["metadata"]["resourceVersion"])


def _wanted(owner: Manifest) -> tuple[object, ...]:
    """Return what a reconcile depends on: not the status, which the operator writes."""
    metadata = owner["metadata"]
    return metadata.get("uid"), metadata.get("generation"), metadata.get("deletionTimestamp"), owner.get("spec")


def _content(manifest: Manifest) -> Manifest:
    """Return the object without its resourceVersion, which changes by itself."""
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "resourceVersion"}
    return {**manifest, "metadata": metadata}


def _age(pod: Manifest) -> tuple[str, str]:
    return pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]
