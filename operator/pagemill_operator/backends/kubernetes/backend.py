"""`KubernetesCluster`: carries plans out as objects in a cluster, and observes the result in the caches.

It writes only what differs. An error of one object stays with its deployment: it appears in the observation, and the
other deployments go on. `render` and `observe` decide, `differences` compares, `writes` writes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from pagemill_crds.status import AdapterReplicas, AdapterSummary
from pagemill_kube.client import Client
from pagemill_operator.backends.base import Cluster
from pagemill_operator.backends.kubernetes.deletion_cost import costs_to_write, renewing_notes
from pagemill_operator.backends.kubernetes.differences import (
    WORKLOADS,
    Answers,
    rolled_out,
    to_apply,
    to_delete,
    used_config_maps,
    with_digest,
)
from pagemill_operator.backends.kubernetes.in_place import rollout_of
from pagemill_operator.backends.kubernetes.kinds import BY_NAME, LEADER_WORKER_SET
from pagemill_operator.backends.kubernetes.model_volume import is_loaded, orphaned_jobs, outdated_jobs
from pagemill_operator.backends.kubernetes.observe import observe
from pagemill_operator.backends.kubernetes.observe.groups import slow_ranks
from pagemill_operator.backends.kubernetes.ownership import (
    MAKERS,
    Children,
    component_of,
    is_ending,
    is_ready,
    namesake_children,
    own_children,
    own_pods,
)
from pagemill_operator.backends.kubernetes.render import render_children, render_tokens
from pagemill_operator.backends.kubernetes.render.names import (
    ENGINE,
    WORKER,
    adapters_name,
    awake_note,
    engine_name,
    group_name,
    pod_template,
    template_of,
    workload_at,
)
from pagemill_operator.backends.kubernetes.snapshot import (
    DIGEST_ANNOTATION,
    ApplyError,
    Manifest,
    Owner,
    RenderContext,
    Snapshot,
)
from pagemill_operator.backends.kubernetes.writes import KnownChildren, OnWrite, Writes
from pagemill_operator.plan.adapters import ClaimedAdapters, serving_replicas
from pagemill_operator.plan.types import Plan, Problem
from pagemill_operator.status.observation import Observation, ScalingState
from pagemill_protocol.report.load import EngineReport
from pagemill_protocol.report.state import EngineLoad

logger = logging.getLogger("pagemill.operator.kubernetes")


class KnownCluster(KnownChildren, Protocol):
    """The cached objects that the backend reads."""

    def owner(self, key: str) -> Manifest | None: ...
    def children(self, key: str) -> dict[tuple[str, str], Manifest]: ...
    def pods(self, key: str) -> tuple[Manifest, ...]: ...
    def gateways(self) -> list[Manifest]: ...
    def num_gateways_ready(self) -> int: ...
    def conflict(self, key: str) -> Problem | None: ...
    def autoscalers(self, key: str) -> tuple[str, ...]: ...
    @property
    def adapters(self) -> ClaimedAdapters: ...


MAX_RENDERED = 64

TRIES = 3
"""Failed turns in a row after which a temporary error is reported as a fault of the deployment."""
POD_MAKERS = MAKERS
NEEDED_BY_PODS = frozenset({"NetworkPolicy", "Secret", "ConfigMap"})
"""Kinds that pods depend on: no pod is started without its network policy or its settings."""

MakeContext = Callable[[Owner, bool], RenderContext]
"""Returns the installation's settings for a deployment; the flag says whether its model is loaded."""


class KubernetesCluster(Cluster):
    def __init__(
        self,
        client: Client,
        known: KnownCluster,
        make_context: MakeContext,
        *,
        load: Callable[[str], EngineLoad | None] = lambda key: None,
        scaling: Callable[[str], ScalingState | None] = lambda key: None,
        held: Callable[[str], Mapping[str, EngineReport]] = lambda key: {},
        asleep: Callable[[str], frozenset[str]] = lambda key: frozenset(),
        unused_settings: Callable[[str], frozenset[str] | None] = lambda key: frozenset(),
        routing_policies: Callable[[str], tuple[str, ...]] = lambda key: (),
        progress: Callable[[str], str] = lambda key: "",
        on_write: OnWrite = lambda kind, verb: None,
    ) -> None:
        """Create the backend.

        `load`, `held`, `asleep` and `unused_settings` return what gateways report: the load of a key, the load of each
        of its pods by uid, the uids of its pods that sleep, and its settings without effect; `routing_policies` those
        of gateways that lack the key's own. `scaling` returns the autoscaler's state, `progress` the loader's
        progress. `on_write` is called with the kind and the verb of each write.
        """
        self._client = client
        self._known = known
        self._make_context = make_context
        self._load = load
        self._scaling = scaling
        self._held = held
        self._asleep = asleep
        self._unused_settings = unused_settings
        self._routing_policies = routing_policies
        self._progress = progress
        self._on_write = on_write
        self._plans: dict[str, Plan | None] = {}
        self._invalid: dict[str, tuple[Problem, ...]] = {}
        self._apply_errors: dict[str, tuple[ApplyError, ...]] = {}
        self._failures: dict[str, int] = {}
        """Key -> failed turns in a row that may succeed later."""
        self._answers: defaultdict[str, Answers] = defaultdict(Answers)
        self._rendered: OrderedDict[str, tuple[tuple[Plan, Owner, RenderContext], list[Manifest]]] = OrderedDict()
        """The manifests rendered last by key, with their inputs: events of one deployment come in bursts."""

    async def read_groups(self, plan: Plan) -> None:
        """Put the plan's LeaderWorkerSet into the cache, as it is now: no watch does. Raise like `apply_plan`."""
        at, known = (plan.namespace, group_name(plan.name)), self._known.children(plan.key)
        in_cache = (LEADER_WORKER_SET.name, at[1]) in known
        has_pods = any(component_of(pod) == WORKER for pod in self._known.pods(plan.key))
        if not (plan.pods_per_replica > 1 or in_cache or has_pods):
            return
        found = await self._client.find(LEADER_WORKER_SET, *at)
        if found is not None:
            self._known.put(LEADER_WORKER_SET.name, found)
        elif in_cache:
            self._known.remove(LEADER_WORKER_SET.name, *at)

    async def apply_plan(self, plan: Plan) -> bool:
        """Write what differs from the plan; return whether anything was written.

        Raise `ApiError` or `Unreachable` for temporary errors, so that the caller tries again; other errors appear in
        the observation.
        """
        self._plans[plan.key], self._invalid[plan.key] = plan, ()
        is_refused = plan.problems or self._known.conflict(plan.key)
        return await self._turn(plan.key, None if is_refused else plan)

    async def report_invalid(self, key: str, problems: Sequence[Problem]) -> bool:
        """Do what `apply_plan` does for a spec that cannot be read; return whether anything was written."""
        self._plans[key], self._invalid[key] = None, tuple(problems)
        return await self._turn(key, None)

    async def forget(self, keys: Collection[str]) -> None:
        """Drop the state of these deployments; the cluster itself garbage-collects their children."""
        for key in keys:
            for each in (self._plans, self._invalid, self._apply_errors, self._failures, self._answers, self._rendered):
                each.pop(key, None)

    def has_apply_errors(self, key: str) -> bool:
        return bool(self._apply_errors.get(key))

    def snapshot(self, key: str) -> Snapshot:
        owner = self._known.owner(key)
        if owner is None or key not in self._plans:
            raise KeyError(key)
        children = own_children(self._known.children(key), owner)
        return Snapshot(
            owner=owner,
            children=children,
            pods=own_pods(self._known.pods(key), owner, children),
            num_gateways=len(self._known.gateways()),
            num_gateways_ready=self._known.num_gateways_ready(),
            conflict=self._known.conflict(key),
            invalid=self._invalid[key],
            apply_errors=self._apply_errors.get(key, ()),
            load=self._load(key),
            asleep=self._asleep(key),
            progress=self._progress(key),
            autoscalers=self._known.autoscalers(key),
            adapters=tuple(self.adapter_summaries(key)),
        )

    def adapter_summaries(self, key: str) -> Iterator[AdapterSummary]:
        """Yield the adapters that the deployment and LoRAAdapters claim, with the replicas that serve them."""
        reports = {uid: report.adapters for uid, report in self._held(key).items() if report.adapters}
        pods = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in self._known.pods(key)}
        names = set[str]()
        # Of two claims on a name, the summary has the one that is served.
        for claim, refusal in sorted(self._known.adapters.of(key), key=lambda each: each[1] is not None):
            if claim.wanted.name in names:
                continue
            names.add(claim.wanted.name)
            asked = self._known.adapters.asked(claim)
            replicas = serving_replicas(asked, reports, pods) if refusal is None else AdapterReplicas()
            why = {} if refusal is None else {"reason": refusal.reason, "message": refusal.message}
            wanted = {"name": claim.wanted.name, "source": claim.wanted.source, "pinned": claim.wanted.pinned}
            yield AdapterSummary.model_validate({**replicas.model_dump(), **wanted, **why})

    def observe(self, key: str) -> Observation:
        seen = observe(self.snapshot(key), self._plans[key], datetime.now(UTC))
        unused, policies = self._unused_settings(key), self._routing_policies(key)
        warnings = (*seen.warnings, *slow_ranks(self._known.pods(key), self._held(key)))
        return replace(
            seen, scaling=self._scaling(key), unused_settings=unused, routing_policies=policies, warnings=warnings
        )

    def plan(self, key: str) -> Plan | None:
        """Return the plan that was carried out last, or None if the spec cannot be read."""
        return self._plans.get(key)

    async def _turn(self, key: str, plan: Plan | None) -> bool:
        """Bring the children in line with `plan`. Without a plan, running children stay as they are."""
        owner = self._known.owner(key)
        if owner is None:
            raise KeyError(key)
        writes = Writes(self._client, self._known, owner, self._answers[key], self._on_write)
        live = own_children(self._known.children(key), owner)
        in_the_way = namesake_children(self._known.children(key), owner)
        wanted = self._render(plan, owner, live) if plan else self._kept(owner, live)
        await writes.delete(child for child in in_the_way.values() if not is_ending(child))
        if not any(_at(manifest) in in_the_way for manifest in wanted):
            if plan:
                await self._rank(plan, writes, live)
            await self._write(key, writes, wanted, live)
            if plan:
                await self._adjust(plan, writes, wanted, live)
            if plan and not writes.has_failed(BY_NAME):
                await writes.delete(self._unwanted(owner, wanted))
        self._note(key, writes)
        return writes.has_written

    async def _rank(self, plan: Plan, writes: Writes, live: Children) -> None:
        """Mark the pods to remove first, just before replicas are removed."""
        # The groups with the highest numbers go; there is nothing to choose.
        deployment = live.get(("Deployment", engine_name(plan.name))) if plan.pods_per_replica == 1 else None
        if deployment is None or plan.all_replicas >= deployment["spec"].get("replicas", 1):
            return
        template = template_of(deployment["spec"]["template"])
        pods = self._known.pods(plan.key)
        held, asleep = self._held(plan.key), self._asleep(plan.key)
        await writes.annotate(costs_to_write(pods, held, plan.all_replicas, template, asleep))

    async def _write(self, key: str, writes: Writes, wanted: list[Manifest], live: Children) -> None:
        """Apply network policies, settings and the like first, and then the objects that create pods."""
        changes = list(to_apply(wanted, live, self._answers[key]))
        await writes.apply([manifest for manifest in changes if manifest["kind"] not in POD_MAKERS], live)
        if not writes.has_failed(NEEDED_BY_PODS):
            adapters = ("ConfigMap", adapters_name(key.partition("/")[2]))
            for changed in changes:
                if _at(changed) == adapters and adapters in live:
                    await writes.annotate(
                        renewing_notes(self._known.pods(key), changed["metadata"]["annotations"][DIGEST_ANNOTATION])
                    )
            await writes.apply([manifest for manifest in changes if manifest["kind"] in POD_MAKERS], live)

    async def _adjust(self, plan: Plan, writes: Writes, wanted: list[Manifest], live: Children) -> None:
        """Make the changes that an apply cannot: replace Jobs, scale workloads that are not rendered, and remove one
        of the other kind once replicas of this kind serve.
        """
        other = [child for at, child in live.items() if at[0] in WORKLOADS and at != workload_at(plan)]
        if other and self._serves(plan, live):
            await writes.delete(child for child in other if not is_ending(child))
        outdated = list(outdated_jobs(plan, wanted, live))
        await writes.delete(outdated)
        await writes.adopt(orphaned_jobs(wanted, live, outdated))
        # While the model of a new spec is loaded, the Deployment of the earlier spec is not rendered but is still
        # scaled.
        rendered = {_at(manifest) for manifest in wanted}
        for at, child in live.items():
            if at == workload_at(plan) and at not in rendered and child["spec"].get("replicas", 1) != plan.all_replicas:
                await writes.scale(child, plan.all_replicas, awake_note(plan))

    def _serves(self, plan: Plan, live: Children) -> bool:
        """Whether a replica that the plan's own workload makes is ready, or none is wanted."""
        workload = live.get(workload_at(plan))
        if workload is None:
            return False
        newest = template_of(pod_template(workload))
        engines = [pod for pod in self._known.pods(plan.key) if component_of(pod) == ENGINE]
        return not plan.replicas or any(template_of(pod) == newest and is_ready(pod) for pod in engines)

    def _note(self, key: str, writes: Writes) -> None:
        """Record the errors of the turn. Raise a temporary one."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1 if writes.transient_error else 0
        lasting = writes.transient_errors if failures >= TRIES else []
        self._apply_errors[key] = (*writes.errors, *lasting)
        if writes.transient_error:
            raise writes.transient_error

    def _kept(self, owner: Manifest, live: Children) -> list[Manifest]:
        """Return the manifests that are maintained without a plan: the token Secret, as tokens rotate whatever the spec
        says.
        """
        of = _owner(owner)
        tokens = render_tokens(of, self._make_context(of, False).tokens)
        return [with_digest(tokens)] if _at(tokens) in live else []

    def _render(self, plan: Plan, owner: Manifest, live: Children) -> list[Manifest]:
        of = _owner(owner)
        pods = self._known.pods(plan.key)
        rollout = rollout_of(plan, owner, live, pods, datetime.now(UTC))
        context = replace(self._make_context(of, is_loaded(plan, live, pods)), in_place=rollout.in_place)
        asked = (plan, of, context)
        known = self._rendered.get(plan.key)
        if known is not None and known[0] == asked:
            return known[1]
        manifests = [with_digest(manifest) for manifest in render_children(*asked)]
        self._rendered[plan.key] = (asked, manifests)
        self._rendered.move_to_end(plan.key)
        while len(self._rendered) > MAX_RENDERED:
            self._rendered.popitem(last=False)
        return manifests

    def _unwanted(self, owner: Manifest, wanted: list[Manifest]) -> list[Manifest]:
        key = f"{owner['metadata']['namespace']}/{owner['metadata']['name']}"
        live, pods = own_children(self._known.children(key), owner), self._known.pods(key)
        workloads = [child for (kind, _), child in live.items() if kind in WORKLOADS]
        if not all(rolled_out(workload, pods) for workload in workloads):
            live = {at: child for at, child in live.items() if at[0] != "ConfigMap"}
        return list(to_delete(wanted, live, used_config_maps(pods, workloads)))


def _owner(owner: Manifest) -> Owner:
    metadata = owner["metadata"]
    return Owner(metadata["namespace"], metadata["name"], metadata["uid"])


def _at(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]
