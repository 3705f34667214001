"""Reconciles one `LLMDeployment`: plans it, writes what differs, observes, and writes the status.

It is level-based: only the present and the wanted state matter, not what happened. An unchanged object costs no
request. `backends.kubernetes.backend` writes children and observes; `status` explains; `workers` calls this and
handles its exceptions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from pagemill_crds.models import LLMDeployment
from pagemill_kube.client import Client
from pagemill_kube.errors import ApiError, Unreachable
from pagemill_operator.backends.kubernetes.backend import KubernetesCluster
from pagemill_operator.backends.kubernetes.kinds import LLM_DEPLOYMENT
from pagemill_operator.backends.kubernetes.observe import status_body, status_wait_s
from pagemill_operator.backends.kubernetes.snapshot import Manifest
from pagemill_operator.controller.reporting.cold_starts import ColdStarts
from pagemill_operator.controller.reporting.events import EventRecorder
from pagemill_operator.controller.reporting.metrics import OperatorMetrics
from pagemill_operator.controller.reporting.status_writing import merge_patch, ready_after_s, shortest_wait_s, wait_s
from pagemill_operator.controller.watching.cache import ObjectCache
from pagemill_operator.controller.watching.load_progress import LoaderProgress
from pagemill_operator.plan.planner import make_plan
from pagemill_operator.plan.types import Plan, Problem
from pagemill_operator.status.conditions import events_between

SETTLE_S = 1.0
"""Seconds between a write of children and the status, so that the status already shows their first changes."""
SETTLE_LONGEST_S = 3.0
"""Longest such delay in seconds while children keep being written."""


MAX_PROBLEMS = 8
"""Most problems of an invalid spec that a condition lists."""


class Reconciler:
    def __init__(
        self,
        cache: ObjectCache,
        cluster: KubernetesCluster,
        client: Client,
        recorder: EventRecorder,
        metrics: OperatorMetrics,
        *,
        url: str,
        scaled: Callable[[Plan], Plan] = lambda plan: plan,
        starts: ColdStarts | None = None,
        progress: LoaderProgress | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Create the reconciler.

        `scaled` returns the plan with the autoscaler's number of replicas, `starts` measures pods' starts, and
        `progress`
        reads loaders' progress.
        """
        self._cache = cache
        self._cluster = cluster
        self._client = client
        self._recorder = recorder
        self._metrics = metrics
        self._url = url
        self._scaled = scaled
        self._starts = starts
        self._progress = progress
        self._clock = clock
        self._now = now
        self._applied_at: dict[str, float] = {}
        """Key -> when children were last written."""
        self._unshown_since: dict[str, float] = {}
        """Key -> time of the earliest write of children that the status does not show yet."""
        self._written_at: dict[str, float] = {}
        """Key -> when the status was last written."""
        self._plans: dict[str, tuple[tuple[str, int], Plan | None, Sequence[Problem]]] = {}
        """Key -> (uid and generation, the plan or the problems of that generation)."""

    async def reconcile(self, key: str) -> float | None:
        """Reconcile; return the seconds until the next reconcile is due, or None if only a change makes it due.

        Raise `ApiError` or `Unreachable` if it must be retried, and `KeyError` if the object is gone or being deleted.
        """
        owner = self._cache.owner(key)
        if owner is None or owner["metadata"].get("deletionTimestamp"):
            raise KeyError(key)
        try:
            has_written = await self._apply_plan(key, owner)
        except (ApiError, Unreachable):
            if self._cluster.has_apply_errors(key):
                await self._write_status_and_events(key)
            raise
        if has_written:
            self._applied_at[key] = self._clock()
            self._unshown_since.setdefault(key, self._clock())
        settling_s = self._settling_s(key)
        if settling_s > 0 and not self._cluster.has_apply_errors(key):
            return settling_s
        self._unshown_since.pop(key, None)
        if self._progress:
            await self._progress.look(key, self._cluster.snapshot(key).pods)
        written_again_s = await self._write_status_and_events(key)
        return shortest_wait_s(written_again_s, self._cluster.observe(key).requeue_after_s)

    def has_permanent_errors(self, key: str) -> bool:
        """Whether there is an error that only a change in the cluster repairs, such as an exceeded quota."""
        return self._cluster.has_apply_errors(key)

    async def forget(self, key: str) -> bool:
        """Forget an object that is gone; return whether it is. An object that is being deleted still changes."""
        if self._cache.owner(key) is not None:
            return False
        await self._cluster.forget([key])
        self._metrics.forget_deployment(key)
        if self._starts:
            self._starts.forget(key)
        if self._progress:
            self._progress.forget(key)
        for each in (self._applied_at, self._unshown_since, self._written_at, self._plans):
            each.pop(key, None)
        return True

    async def _apply_plan(self, key: str, owner: Manifest) -> bool:
        plan, problems = self._read(key, owner)
        if plan is None:
            return await self._cluster.report_invalid(key, problems)
        # Before the number of replicas is decided, which begins with what the cluster has.
        await self._cluster.read_groups(plan)
        plan = replace(plan, adapters=self._cache.adapters.wanted(key) if plan.serves_adapters else ())
        return await self._cluster.apply_plan(self._scaled(plan))

    def _settling_s(self, key: str) -> float:
        now = self._clock()
        settled_at = self._applied_at.get(key, -1e9) + SETTLE_S
        return min(settled_at, self._unshown_since.get(key, now) + SETTLE_LONGEST_S) - now

    def _read(self, key: str, owner: Manifest) -> tuple[Plan | None, Sequence[Problem]]:
        version, known = _version(owner), self._plans.get(key)
        if known is None or known[0] != version:
            known = self._plans[key] = (version, *read_plan(owner))
        return known[1], known[2]

    async def _write_status_and_events(self, key: str) -> float | None:
        """Write the status and the events if they are due; return the seconds until there may be more to write."""
        snapshot, now = self._cluster.snapshot(key), self._now()
        text = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        if self._plans[key][0] != _version(snapshot.owner):
            # The spec was edited meanwhile: an older generation was carried out.
            return 0.0
        old: dict[str, Any] = snapshot.owner.get("status") or {}
        start = self._starts.measure(key, snapshot.pods) if self._starts else None
        observation = replace(self._cluster.observe(key), last_start=start)
        self._metrics.observed(observation)
        new = status_body(snapshot, observation, self._url, text)
        if new == old:
            return status_wait_s(snapshot, text)
        pause_s = wait_s(old, new, self._clock() - self._written_at.get(key, -1e9))
        if pause_s > 0:
            return pause_s
        await self._write_status(key, snapshot.owner, merge_patch(old, new))
        self._written_at[key] = self._clock()
        await self._record_events(snapshot.owner, old, new, now)
        return status_wait_s(snapshot, text) if new.get("load") == old.get("load") else None

    async def _record_events(self, owner: Manifest, old: dict[str, Any], new: dict[str, Any], now: datetime) -> None:
        for event in events_between(old, new):
            self._metrics.wrote("Event", "create")
            await self._recorder.record(owner, event.type, event.reason, event.message)
        seconds = ready_after_s(old, new, owner["metadata"]["creationTimestamp"], now)
        if seconds is not None:
            self._metrics.became_ready(seconds)

    async def _write_status(self, key: str, owner: Manifest, status: dict[str, Any]) -> None:
        namespace, _, name = key.partition("/")
        # Neither a later version nor a new object of the same name may get this status. A uid as precondition would not
        # work:
        # the status subresource takes all metadata from the stored object.
        patch = {"metadata": {"resourceVersion": owner["metadata"]["resourceVersion"]}, "status": status}
        self._metrics.wrote(LLM_DEPLOYMENT.name, "status")
        try:
            written = await self._client.patch_status(LLM_DEPLOYMENT, namespace, name, patch)
        except ApiError as error:
            if error.status == 404:
                raise KeyError(key) from None
            raise
        # Own writes wake no key: the cache has them before the watch reports them.
        self._cache.put(LLM_DEPLOYMENT.name, written)


def _version(owner: Manifest) -> tuple[str, int]:
    return owner["metadata"]["uid"], owner["metadata"].get("generation", 0)


def read_plan(owner: Manifest) -> tuple[Plan | None, Sequence[Problem]]:
    """Return (plan, no problems) or (None, problems): the CRD's schema accepts specs that the models refuse."""
    document = {
        "apiVersion": LLM_DEPLOYMENT.api_version,
        "kind": LLM_DEPLOYMENT.name,
        "metadata": owner["metadata"],
        "spec": owner.get("spec", {}),
    }
    try:
        return make_plan(LLMDeployment.model_validate(document), "kubernetes"), ()
    except ValidationError as error:
        return None, [_problem(detail) for detail in error.errors()[:MAX_PROBLEMS]]
    except ValueError as error:
        return None, [Problem("spec", "", f"cannot be planned: {error}")]


def _problem(detail: object) -> Problem:
    assert isinstance(detail, dict)
    field = ".".join(str(part) for part in detail["loc"])
    return Problem(field, str(detail.get("input", ""))[:80], str(detail["msg"]))
