"""A small API server in this process and operators that use it, with real watches, requests and timeouts.

It supports what the operator uses: discovery, lists with label selectors, watches that resume, server-side apply, merge
patches, the status subresource, and preconditions. It runs no controllers: a test acts as the cluster with
`api.change`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from waiting import WAIT_LIMIT_S, eventually

from pagemill_kube.credentials import Credentials
from pagemill_kube.kinds import Kind
from pagemill_operator.backends.kubernetes.kinds import BY_NAME, POD_MONITOR
from pagemill_operator.config import OperatorConfig
from pagemill_operator.controller.operator import Operator

Manifest = dict[str, Any]
NAMESPACE = "pagemill-system"
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>status))?"
)


@dataclass
class Write:
    verb: str
    kind: str
    namespace: str
    name: str
    manager: str = ""


@dataclass
class Collection:
    objects: dict[tuple[str, str], Manifest] = field(default_factory=dict)
    log: list[tuple[int, str, Manifest]] = field(default_factory=list)
    """The history as (version, type, object)."""
    news: asyncio.Event = field(default_factory=asyncio.Event)


class FakeApi:
    def __init__(self) -> None:
        self.kinds: list[Kind] = [kind for kind in BY_NAME.values() if kind != POD_MONITOR]
        self.collections = {kind.name: Collection() for kind in BY_NAME.values()}
        self.version = 1
        self.writes: list[Write] = []
        """All writes except those to the Lease."""
        self.lists: list[str] = []
        self.report_invalid: Callable[[Write], tuple[int, str, str] | None] = lambda write: None
        """Returns (status, reason, message) for a write that is refused."""
        self.before_write: Callable[[Write], Awaitable[None]] | None = None
        self.is_down = False
        self._uids = itertools.count(1)
        self._watches: set[asyncio.Task[Any]] = set()
        self.url = ""

    # Actions of a test

    def change(self, kind: str, manifest: Manifest) -> Manifest:
        """Write an object as another client."""
        return self._store(kind, copy.deepcopy(manifest))

    def remove(self, kind: str, namespace: str, name: str, *, tell: bool = True) -> None:
        """Remove an object without reporting it, as if no watch were open."""
        gone = self.collections[kind].objects.pop((namespace, name))
        self.version += 1
        if tell:
            self._log(kind, "DELETED", gone)

    def get(self, kind: str, name: str, namespace: str = "default") -> Manifest | None:
        return self.collections[kind].objects.get((namespace, name))

    def compact(self) -> None:
        """Drop the history: watches end, and those that resume get a 410."""
        for collection in self.collections.values():
            collection.log.clear()
        self.version += 1000
        self.hang_up()

    def hang_up(self) -> None:
        for task in list(self._watches):
            task.cancel()

    async def until(self, condition: Callable[[], Any]) -> None:
        await eventually(condition, progress=lambda: (self.version, len(self.writes)))

    def names(self, *verbs: str) -> list[str]:
        return [f"{write.kind}/{write.name}" for write in self.writes if not verbs or write.verb in verbs]

    # Requests of the operator

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.is_down:
            assert request.transport
            request.transport.abort()
            raise ConnectionResetError
        if (found := self._discovery(request.path)) is not None:
            return web.json_response(found)
        match = PATH.fullmatch(request.path)
        kind = self._kind(match) if match else None
        if match is None or kind is None:
            return self._error(404, "NotFound", request.path)
        namespace, name = match["namespace"] or "", match["name"] or ""
        if request.method == "GET" and not name:
            watch = request.query.get("watch")
            return await self._watch(request, kind, namespace) if watch else self._list(request, kind, namespace)
        if request.method == "GET":
            known = self.collections[kind.name].objects.get((namespace, name))
            return web.json_response(known) if known else self._error(404, "NotFound", name)
        return await self._write(request, kind, namespace, name, match["subresource"] or "")

    def _discovery(self, path: str) -> Manifest | None:
        if path == "/api":
            return {"versions": ["v1"]}
        versions = {(kind.group, kind.version) for kind in self.kinds if kind.group}
        if path == "/apis":
            groups = [
                {"name": group, "versions": [{"version": version}], "preferredVersion": {"version": version}}
                for group, version in sorted(versions)
            ]
            return {"groups": groups}
        for group, version in [("", "v1"), *versions]:
            if path == (f"/apis/{group}/{version}" if group else f"/api/{version}"):
                return {"resources": [self._resource(kind) for kind in self._served(group)]}
        return None

    def _served(self, group: str) -> list[Kind]:
        extra = [Kind("Namespace", "", "v1", "namespaces")] if not group else []
        return [kind for kind in self.kinds if kind.group == group] + extra

    def _resource(self, kind: Kind) -> Manifest:
        return {
            "name": kind.plural,
            "singularName": kind.name.lower(),
            "namespaced": kind.name != "Namespace",
            "kind": kind.name,
            "verbs": VERBS,
        }

    def _kind(self, match: re.Match[str]) -> Kind | None:
        wanted = (match["group"] or "", match["plural"])
        return next((kind for kind in self.kinds if (kind.group, kind.plural) == wanted), None)

    def _list(self, request: web.Request, kind: Kind, namespace: str) -> web.Response:
        self.lists.append(kind.name)
        items = [
            copy.deepcopy(item)
            for at, item in self.collections[kind.name].objects.items()
            if self._matches(item, at[0], namespace, request.query.get("labelSelector", ""))
        ]
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response({"kind": f"{kind.name}List", "items": items, "metadata": metadata})

    async def _watch(self, request: web.Request, kind: Kind, namespace: str) -> web.StreamResponse:
        collection, since = self.collections[kind.name], int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            if since < self.version - 900:
                await self._line(response, "ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
                return response
            selector = request.query.get("labelSelector", "")
            while True:
                collection.news.clear()
                for version, type_, item in [entry for entry in collection.log if entry[0] > since]:
                    since = version
                    if self._matches(item, item["metadata"]["namespace"], namespace, selector):
                        await self._line(response, type_, item)
                await collection.news.wait()
        except (asyncio.CancelledError, ConnectionResetError):
            return response
        finally:
            self._watches.discard(task)

    async def _line(self, response: web.StreamResponse, type_: str, item: Manifest) -> None:
        await response.write(json.dumps({"type": type_, "object": item}).encode() + b"\n")

    def _matches(self, item: Manifest, in_namespace: str, namespace: str, selector: str) -> bool:
        labels = item["metadata"].get("labels", {})
        if namespace and namespace != in_namespace:
            return False
        if match := re.fullmatch(r"(\S+) in \((.*)\)", selector):
            return labels.get(match[1]) in match[2].split(",")
        wanted = [part.split("=", 1) for part in selector.split(",") if part]
        return all(labels.get(key) == value for key, value in wanted)

    async def _write(
        self, request: web.Request, kind: Kind, namespace: str, name: str, subresource: str
    ) -> web.Response:
        body = json.loads(await request.text() or "{}")
        name = name or body["metadata"]["name"]
        is_apply = request.content_type == "application/apply-patch+yaml"
        verb = "apply" if is_apply else "status" if subresource else request.method.lower()
        write = Write(verb, kind.name, namespace, name, request.query.get("fieldManager", ""))
        if kind.name != "Lease":
            if self.before_write:
                await self.before_write(write)
            self.writes.append(write)
            if refused := self.report_invalid(write):
                return self._error(*refused)
        known = self.collections[kind.name].objects.get((namespace, name))
        expected = body.get("metadata", {}).get("resourceVersion")
        if known and expected and expected != known["metadata"]["resourceVersion"]:
            return self._error(409, "Conflict", "the object has been modified")
        if request.method == "DELETE":
            return self._delete(kind, known, body)
        if request.method == "POST" and known:
            return self._error(409, "AlreadyExists", name)
        if known is None and request.method in ("PUT", "PATCH") and not is_apply:
            return self._error(404, "NotFound", name)
        if is_apply and known and request.query.get("force") != "true" and self._is_foreign(known):
            return self._error(409, "Conflict", "another manager")
        body.pop("status", None) if not subresource else None
        changed = merged(known or {}, body) if request.method == "PATCH" else {**body, "status": body.get("status", {})}
        changed["metadata"] = {**(known or {}).get("metadata", {}), **changed.get("metadata", {}), "name": name}
        changed["metadata"].setdefault("namespace", namespace)
        return web.json_response(self._store(kind.name, changed), status=200 if known else 201)

    def _is_foreign(self, known: Manifest) -> bool:
        return known["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") != "pagemill-operator"

    def _delete(self, kind: Kind, known: Manifest | None, body: Manifest) -> web.Response:
        if known is None:
            return self._error(404, "NotFound", "gone")
        assert body["preconditions"]["uid"] == known["metadata"]["uid"]
        self.remove(kind.name, known["metadata"]["namespace"], known["metadata"]["name"])
        return web.json_response(known)

    def _store(self, kind: str, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        at = (metadata["namespace"], metadata["name"])
        known = self.collections[kind].objects.get(at)
        if known and _content(known) == _content(manifest):
            return known
        self.version += 1
        metadata.setdefault("uid", f"uid-{next(self._uids)}")
        metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        metadata["resourceVersion"] = str(self.version)
        is_edit = known is None or known.get("spec") != manifest.get("spec")
        metadata["generation"] = (known or manifest)["metadata"].get("generation", 0) + int(is_edit)
        manifest = {"apiVersion": BY_NAME[kind].api_version, "kind": kind, **manifest}
        self.collections[kind].objects[at] = manifest
        self._log(kind, "MODIFIED" if known else "ADDED", manifest)
        return manifest

    def _log(self, kind: str, type_: str, manifest: Manifest) -> None:
        collection = self.collections[kind]
        collection.log.append((self.version, type_, copy.deepcopy(manifest)))
        collection.news.set()

    def _error(self, status: int, reason: str, message: str) -> web.Response:
        body = {"kind": "Status", "status": "Failure", "code": status, "reason": reason, "message": message}
        return web.json_response(body, status=status)


def _content(manifest: Manifest) -> Manifest:
    metadata = {k: v for k, v in manifest["metadata"].items() if k not in ("resourceVersion", "generation", "uid")}
    return {**{k: v for k, v in manifest.items() if k not in ("kind", "apiVersion")}, "metadata": metadata}


def merged(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


async def no_token() -> str:
    return ""


class Running:
    """One operator in this process."""

    def __init__(self, api: FakeApi, identity: str, **changes: Any) -> None:
        self.lost = asyncio.Event()
        settings = {
            "namespace": NAMESPACE,
            "engine_image": "pagemill/engine:1",
            "host": "127.0.0.1",
            "metrics_port": 0,
            # Longer than this process waits for a processor on a busy machine.
            "lease_duration_s": 6.0,
            "renew_deadline_s": 4.0,
            "retry_period_s": 0.2,
            **changes,
        }
        credentials = Credentials(api.url, None, no_token)
        self.operator = Operator(OperatorConfig(**settings), credentials, identity, on_lost=self.lost.set)
        self.task = asyncio.create_task(self.operator.run())

    async def url(self) -> str:
        await eventually(lambda: bool(self.operator.port))
        return f"http://127.0.0.1:{self.operator.port}"

    async def ask(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(await self.url() + path) as response:
            return response.status, await response.text()

    async def leads(self) -> None:
        await eventually(lambda: self.operator.leadership.remaining_s() > 0)

    async def settled(self) -> None:
        """Whether the work queue is empty, nothing runs, and no reconcile is scheduled for later."""
        await asyncio.sleep(0)
        await eventually(lambda: not len(self.operator.queue) and not self.operator.queue.longest_running_s())

    async def stop(self) -> None:
        self.operator.stop()
        await asyncio.wait_for(asyncio.gather(self.task, return_exceptions=True), WAIT_LIMIT_S)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    api = FakeApi()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield api
    api.hang_up()
    await runner.cleanup()


@pytest.fixture
async def run_operator(api: FakeApi) -> AsyncIterator[Callable[..., Running]]:
    """Return a function that starts an operator; all operators are stopped at the end."""
    running: list[Running] = []

    def start(identity: str = "a", **changes: Any) -> Running:
        running.append(Running(api, identity, **changes))
        return running[-1]

    yield start
    with contextlib.suppress(TimeoutError):
        await asyncio.gather(*(each.stop() for each in running))
