"""`KubernetesCluster`: carries plans out as objects in a cluster, and reads back from the caches what became of them.

Only what differs is written. Whatever one object meets stays with its deployment: it is told in the observation, and
the others go on. Neighbours: `render` and `observe` decide, `differences` compares, `client` writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from pagemill_operator.backends.base import Cluster
from pagemill_operator.backends.kubernetes.client import ApiError, Client, Unreachable
from pagemill_operator.backends.kubernetes.differences import (
    rolled_out,
    to_apply,
    to_delete,
    used_config_maps,
    with_digest,
)
from pagemill_operator.backends.kubernetes.kinds import BY_NAME, Kind
from pagemill_operator.backends.kubernetes.observe import observe
from pagemill_operator.backends.kubernetes.render import loader_name, render_children
from pagemill_operator.backends.kubernetes.snapshot import (
    FIELD_MANAGER,
    MANAGED_BY_LABEL,
    ApplyError,
    Load,
    Manifest,
    Owner,
    RenderContext,
    Snapshot,
)
from pagemill_operator.plan.types import Plan, Problem
from pagemill_operator.status.observation import Observation

logger = logging.getLogger("pagemill.operator.kubernetes")


class KnownCluster(Protocol):
    """What the caches hold."""

    def owner(self, key: str) -> Manifest | None: ...
    def children(self, key: str) -> dict[tuple[str, str], Manifest]: ...
    def pods(self, key: str) -> tuple[Manifest, ...]: ...
    def gateways(self) -> list[Manifest]: ...
    def num_gateways_ready(self) -> int: ...
    def conflict(self, key: str) -> Problem | None: ...
    def put(self, kind: str, manifest: Manifest) -> set[str]: ...
    def remove(self, kind: str, namespace: str, name: str, uid: str | None = None) -> set[str]: ...


MAX_RENDERED = 64

MakeContext = Callable[[Plan, bool], RenderContext]
"""The installation's settings for a plan; the flag says that its model is loaded."""


class KubernetesCluster(Cluster):
    def __init__(
        self,
        client: Client,
        known: KnownCluster,
        make_context: MakeContext,
        *,
        load: Callable[[str], Load | None] = lambda key: None,
        on_write: Callable[[str, str], None] = lambda kind, verb: None,
    ) -> None:
        """`load`: what gateways report of a key; `on_write` is told kind and verb."""
        self._client = client
        self._known = known
        self._make_context = make_context
        self._load = load
        self._on_write = on_write
        self._plans: dict[str, Plan | None] = {}
        self._invalid: dict[str, tuple[Problem, ...]] = {}
        self._apply_errors: dict[str, tuple[ApplyError, ...]] = {}
        self._rendered: OrderedDict[str, tuple[tuple[Plan, Owner, RenderContext], list[Manifest]]] = OrderedDict()
        """What was rendered lately and from what: the news of one deployment come in bursts."""

    async def apply(self, plans: Sequence[Plan]) -> None:
        """Write what differs. Raises `ApiError` and `Unreachable` for what passes: try again; all else is observed."""
        for plan in plans:
            await self.carry_out(plan)

    async def carry_out(self, plan: Plan) -> bool:
        """`apply` for one; tells whether anything was written."""
        self._plans[plan.key], self._invalid[plan.key] = plan, ()
        if plan.problems or self._known.conflict(plan.key):
            # What runs already goes on as it is; a mistake in an edit ends no service.
            self._apply_errors.pop(plan.key, None)
            return False
        return await self._apply(plan)

    def refuse(self, key: str, problems: Sequence[Problem]) -> None:
        """The spec of `key` cannot be read; what runs already goes on as it is."""
        self._plans[key], self._invalid[key] = None, tuple(problems)
        self._apply_errors.pop(key, None)

    async def forget(self, keys: Collection[str]) -> None:
        """The cluster itself takes children away with their owner."""
        for key in keys:
            for book in (self._plans, self._invalid, self._apply_errors):
                book.pop(key, None)

    def has_apply_errors(self, key: str) -> bool:
        return bool(self._apply_errors.get(key))

    def snapshot(self, key: str) -> Snapshot:
        owner = self._known.owner(key)
        if owner is None or key not in self._plans:
            raise KeyError(key)
        return Snapshot(
            owner=owner,
            children=self._known.children(key),
            pods=self._known.pods(key),
            num_gateways=len(self._known.gateways()),
            num_gateways_ready=self._known.num_gateways_ready(),
            conflict=self._known.conflict(key),
            invalid=self._invalid[key],
            apply_errors=self._apply_errors.get(key, ()),
            load=self._load(key),
        )

    def observe(self, key: str) -> Observation:
        return observe(self.snapshot(key), self._plans[key])

    async def _apply(self, plan: Plan) -> bool:
        owner = self._known.owner(plan.key)
        if owner is None:
            raise KeyError(plan.key)
        live = self._known.children(plan.key)
        wanted = self._render(plan, owner, live)
        writes = _Writes(self._client, self._known, owner, self._on_write)
        await writes.delete(strangers(live.values(), owner["metadata"]["uid"]))
        changes = list(to_apply(wanted, live))
        # What limits pods and what they need first, the pods last.
        await writes.apply([manifest for manifest in changes if manifest["kind"] != "Deployment"], live)
        if not writes.passing_error:
            await writes.apply([manifest for manifest in changes if manifest["kind"] == "Deployment"], live)
        self._apply_errors[plan.key] = tuple(writes.errors)
        if writes.passing_error:
            raise writes.passing_error
        if not writes.errors:
            await writes.delete(self._unwanted(plan.key, wanted))
        return writes.has_written

    def _render(self, plan: Plan, owner: Manifest, live: Mapping[tuple[str, str], Manifest]) -> list[Manifest]:
        loader = loader_name(plan)
        loader_done = loader is not None and _has_succeeded(live.get(("Job", loader)))
        metadata = owner["metadata"]
        asked = (plan, Owner(metadata["namespace"], metadata["name"], metadata["uid"]))
        context = self._make_context(plan, loader_done)
        known = self._rendered.get(plan.key)
        if known is not None and known[0] == (*asked, context):
            return known[1]
        manifests = [with_digest(manifest) for manifest in render_children(*asked, context)]
        self._rendered[plan.key] = ((*asked, context), manifests)
        self._rendered.move_to_end(plan.key)
        while len(self._rendered) > MAX_RENDERED:
            self._rendered.popitem(last=False)
        return manifests

    def _unwanted(self, key: str, wanted: list[Manifest]) -> list[Manifest]:
        live, pods = self._known.children(key), self._known.pods(key)
        deployments = [child for (kind, _), child in live.items() if kind == "Deployment"]
        if not all(rolled_out(deployment) for deployment in deployments):
            live = {at: child for at, child in live.items() if at[0] != "ConfigMap"}
        return list(to_delete(wanted, live, used_config_maps(pods, deployments)))


class _Taken(Exception):
    """Somebody else's object has the name."""


class _Writes:
    """The writes of one turn, and what they met."""

    def __init__(
        self, client: Client, known: KnownCluster, owner: Manifest, on_write: Callable[[str, str], None]
    ) -> None:
        self._client = client
        self._known = known
        self._owner = owner
        self._on_write = on_write
        self.errors: list[ApplyError] = []
        self.passing_error: ApiError | Unreachable | None = None
        self.has_written = False

    async def apply(self, manifests: Iterable[Manifest], live: Mapping[tuple[str, str], Manifest]) -> None:
        await asyncio.gather(*(self._apply(manifest, live) for manifest in manifests))

    async def delete(self, manifests: Iterable[Manifest]) -> None:
        for manifest in manifests:
            kind = BY_NAME[manifest["kind"]]
            self._on_write(kind.name, "delete")
            self.has_written = True
            await self._client.delete(kind, manifest)
            metadata = manifest["metadata"]
            self._known.remove(kind.name, metadata["namespace"], metadata["name"], metadata["uid"])

    async def _apply(self, manifest: Manifest, live: Mapping[tuple[str, str], Manifest]) -> None:
        kind, name = BY_NAME[manifest["kind"]], manifest["metadata"]["name"]
        try:
            self._on_write(kind.name, "apply")
            self.has_written = True
            self._known.put(kind.name, await self._applied(kind, manifest, is_known=(kind.name, name) in live))
        except ApiError as error:
            if error.is_passing:
                self.passing_error = error
            else:
                self.errors.append(ApplyError(kind.name, name, error.status, error.reason, error.message))
        except Unreachable as error:
            self.passing_error = error
        except _Taken:
            message = (
                f"a {kind.name} named {name} exists and is not ours; "
                "delete or rename it, or give the LLMDeployment another name"
            )
            self.errors.append(ApplyError(kind.name, name, 409, "AlreadyExists", message))

    async def _applied(self, kind: Kind, manifest: Manifest, *, is_known: bool) -> Manifest:
        """The object as it stands now. One that we do not know may be somebody else's: it is not taken over."""
        try:
            return await self._client.apply(kind, manifest, force=is_known)
        except ApiError as error:
            if error.status != 409 or is_known:
                raise
        metadata = manifest["metadata"]
        found = await self._client.find(kind, metadata["namespace"], metadata["name"])
        if found and found["metadata"].get("labels", {}).get(MANAGED_BY_LABEL) != FIELD_MANAGER:
            raise _Taken
        return await self._client.apply(kind, manifest, force=True)


def strangers(children: Iterable[Manifest], uid: str) -> list[Manifest]:
    """Children of an earlier deployment of the same name, which the cluster has not taken away yet."""
    return [
        child
        for child in children
        if not child["metadata"].get("deletionTimestamp")
        and any(each.get("controller") and each["uid"] != uid for each in child["metadata"].get("ownerReferences", []))
    ]


def _has_succeeded(job: Manifest | None) -> bool:
    conditions = (job or {}).get("status", {}).get("conditions", [])
    return any(condition["type"] == "Complete" and condition["status"] == "True" for condition in conditions)
