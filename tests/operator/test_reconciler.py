"""One reconcile: the reported version, waiting, and the state of deleted objects."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from engine_reports import used

from pagemill_kube.errors import ApiError
from pagemill_operator.backends.kubernetes.backend import KubernetesCluster
from pagemill_operator.backends.kubernetes.snapshot import RenderContext
from pagemill_operator.controller.leading.reconcile import SETTLE_LONGEST_S, Reconciler
from pagemill_operator.controller.reporting.events import EventRecorder
from pagemill_operator.controller.reporting.metrics import OperatorMetrics
from pagemill_operator.controller.watching.cache import ObjectCache
from pagemill_protocol.report.state import EngineLoad

Manifest = dict[str, Any]
KEY = "default/chat"


class World:
    """An API server that accepts everything, and a clock that the test controls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.version = 100
        self.cache = ObjectCache("system", {"app": "gateway"})
        self.statuses: list[Manifest] = []
        self.before_apply: Callable[[Manifest], None] = lambda manifest: None
        self.status_error: ApiError | None = None
        self.load: EngineLoad | None = None
        client: Any = self
        metrics = OperatorMetrics()
        self.cluster = KubernetesCluster(client, self.cache, self._context, load=lambda key: self.load)
        self.reconciler = Reconciler(
            self.cache,
            self.cluster,
            client,
            EventRecorder(client, "a"),
            metrics,
            url="http://gateway",
            clock=lambda: self.now,
            now=lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now),
        )
        self.put()

    def _context(self, owner: Any, loader_done: bool) -> RenderContext:
        return RenderContext("system", "engine:1", tokens=("one",))

    def put(self, *, generation: int = 1, replicas: int = 1, uid: str = "uid-1", **metadata: Any) -> None:
        metadata |= {"name": "chat", "namespace": "default", "uid": uid, "generation": generation}
        metadata |= {"creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": self._next()}
        spec = {"model": {"source": "hf://org/model"}, "replicas": replicas}
        self.cache.put("LLMDeployment", {"metadata": metadata, "spec": spec})

    def _next(self) -> str:
        self.version += 1
        return str(self.version)

    async def find(self, kind: Any, namespace: str, name: str) -> None:
        return None

    async def create(self, kind: Any, manifest: Manifest) -> Manifest:
        return manifest

    async def apply(self, kind: Any, manifest: Manifest, *, force: bool) -> Manifest:
        self.before_apply(manifest)
        identity = {"uid": manifest["metadata"]["name"], "resourceVersion": self._next()}
        return {**manifest, "metadata": {**manifest["metadata"], **identity}}

    async def patch_status(self, kind: Any, namespace: str, name: str, patch: Manifest) -> Manifest:
        if self.status_error:
            raise self.status_error
        owner = self.cache.owner(KEY)
        assert owner is not None
        assert patch["metadata"]["resourceVersion"] == owner["metadata"]["resourceVersion"]
        status = {**owner.get("status", {}), **patch["status"]}
        self.statuses.append(status)
        return {**owner, "metadata": {**owner["metadata"], "resourceVersion": self._next()}, "status": status}

    async def settle(self) -> None:
        while (again_s := await self.reconciler.reconcile(KEY)) is not None:
            self.now += again_s


@pytest.fixture
def world() -> World:
    return World()


async def test_an_edit_between_the_writes_and_the_status_starts_the_reconcile_again(world: World) -> None:
    await world.settle()
    world.put(generation=2, replicas=2)
    world.before_apply = lambda manifest: world.put(generation=3, replicas=3)
    world.cluster.has_apply_errors = lambda key: True  # type: ignore[method-assign]
    assert await world.reconciler.reconcile(KEY) == 0.0
    assert [status["observedGeneration"] for status in world.statuses] == [1]


async def test_children_that_are_written_repeatedly_do_not_block_the_status(world: World) -> None:
    tokens = iter(range(1000))
    world._context = lambda owner, loader_done: RenderContext(  # type: ignore[method-assign]
        "system", "engine:1", tokens=(str(next(tokens)),)
    )
    world.cluster._make_context = world._context
    while not world.statuses:
        await world.reconciler.reconcile(KEY)
        world.now += 0.5
    assert world.now <= SETTLE_LONGEST_S + 1


async def test_a_load_that_changes_too_soon_is_shown_later(world: World) -> None:
    world.load = used(0.1, 1, 0)
    await world.settle()
    world.now += 10
    world.load = used(0.9, 5, 0)
    assert await world.reconciler.reconcile(KEY) == pytest.approx(30.0 - 10.0, abs=3.0)
    await world.settle()
    assert world.statuses[-1]["load"]["kvCacheUsagePercent"] == 90


async def test_the_state_of_an_object_that_still_exists_is_kept(world: World) -> None:
    await world.reconciler.reconcile(KEY)
    world.now += 5
    world.status_error = ApiError(404, "NotFound", "chat")
    with pytest.raises(KeyError):
        await world.reconciler.reconcile(KEY)
    assert not await world.reconciler.forget(KEY)
    world.cache.remove("LLMDeployment", "default", "chat")
    assert await world.reconciler.forget(KEY)
