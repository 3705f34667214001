"""The gateway on a cluster's objects: followed without polling, kept through outages, known again after a restart.

The API server is a small real HTTP server with lists, watches, bookmarks and history that it may forget.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pagemill_gateway.config import GatewayConfig, KeysSecret, KubernetesConfig, SettingsError
from pagemill_gateway.core import Gateway
from pagemill_gateway.discovery.kubernetes.credentials import CredentialsError, from_kubeconfig, in_cluster
from pagemill_protocol.engine_token import GATEWAY_CONTROL, derive_token

DEPLOYMENTS = "/apis/pagemill.dev/v1alpha1/llmdeployments"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
SECRETS = "/api/v1/namespaces/pagemill/secrets"
KINDS = (DEPLOYMENTS, SLICES, SECRETS)


class ApiServer:
    """Three kinds of objects with one history."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self.num_lists = 0
        self.num_watches = 0
        self.queries: list[dict[str, str]] = []
        self.status = 200
        self.tokens: list[str | None] = []
        self.url = ""
        self._version = 100
        self._oldest = 100
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._news = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        app = web.Application()
        for kind in KINDS:
            app.router.add_get(kind, self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        for connection in list(runner.server.connections):  # type: ignore[union-attr]
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def apply(self, kind: str, name: str, **content: Any) -> None:
        event = "MODIFIED" if name in self.objects[kind] else "ADDED"
        raw = json.loads(json.dumps(content))
        raw["metadata"] = {"name": name, "namespace": "ns", "generation": 1, **raw.get("metadata", {})}
        await self._record(kind, event, name, raw)

    async def delete(self, kind: str, name: str) -> None:
        await self._record(kind, "DELETED", name, self.objects[kind][name])

    async def forget_history(self) -> None:
        """What has happened until now cannot be watched any more, and watches under way end with that."""
        async with self._news:
            self._version += 10
            self._oldest = self._version
            self._events.clear()
            self._news.notify_all()

    async def _record(self, kind: str, event: str, name: str, raw: dict[str, Any]) -> None:
        async with self._news:
            self._version += 1
            raw["metadata"]["resourceVersion"] = str(self._version)
            if event == "DELETED":
                del self.objects[kind][name]
            else:
                self.objects[kind][name] = raw
            self._events.append((self._version, kind, {"type": event, "object": raw}))
            self._news.notify_all()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        self.tokens.append(request.headers.get("Authorization"))
        if self.status != 200:
            return web.json_response({"kind": "Status", "message": "you shall not"}, status=self.status)
        if "watch" in request.query:
            return await self._watch(request)
        self.num_lists += 1
        items = list(self.objects[request.path].values())
        start = int(request.query.get("continue", 0))
        page = items[start : start + 2]
        more = {"continue": str(start + 2)} if start + 2 < len(items) else {}
        return web.json_response({"metadata": {"resourceVersion": str(self._version), **more}, "items": page})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.num_watches += 1
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            if seen < self._oldest:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                return response
            for version, kind, event in [each for each in self._events if each[0] > seen]:
                if kind == request.path:
                    line = json.dumps(event).encode() + b"\n"
                    await response.write(line[:20])  # lines come in pieces
                    await response.write(line[20:])
                seen = version
            async with self._news:
                await self._news.wait()


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    await server.start()
    yield server
    await server.stop()


def secret_data(**keys: bytes) -> dict[str, str]:
    return {name: base64.b64encode(key).decode() for name, key in keys.items()}


async def give_keys(api: ApiServer, current: bytes = b"c" * 32) -> None:
    data = secret_data(current=current, next=b"n" * 32, previous=b"p" * 32)
    await api.apply(SECRETS, "pagemill-keys", data=data, metadata={"namespace": "pagemill"})


async def give_model(api: ApiServer, name: str, **spec: Any) -> None:
    await api.apply(DEPLOYMENTS, name, spec={"model": {"source": "hf://a/b"}, **spec}, status={})


async def give_slice(api: ApiServer, name: str, *engines: Any, terminating: bool = False) -> None:
    endpoints = [
        {
            "addresses": ["127.0.0.1"],
            "conditions": {"ready": not terminating, "terminating": terminating},
            "targetRef": {"kind": "Pod", "uid": engine.name},
        }
        for engine in engines
    ]
    # Every fake engine has one port of its own, and a slice one pair of ports.
    (port,) = {engine.port for engine in engines} or {1}
    ports = [{"name": "data", "port": port}, {"name": "control", "port": port}]
    labels = {"pagemill.dev/deployment": name}
    slice_name = f"{name}-{'-'.join(engine.name for engine in engines)}"
    await api.apply(
        SLICES, slice_name, metadata={"labels": labels}, endpoints=endpoints, ports=ports, addressType="IPv4"
    )


class Started:
    def __init__(self, stack: contextlib.AsyncExitStack, api: ApiServer, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._api = api

    async def gateway(self, **settings: Any) -> Gateway:
        kubeconfig = self._folder / "kubeconfig"
        kubeconfig.write_text(
            json.dumps(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                    "clusters": [{"name": "k", "cluster": {"server": self._api.url}}],
                    "users": [{"name": "u", "user": {"token": "sa-token"}}],
                }
            )
        )
        config = KubernetesConfig(
            kubeconfig=str(kubeconfig),
            last_known_file=str(self._folder / "catalog.json"),
            keys_secret=KeysSecret(namespace="pagemill"),
            backoff_base_s=0.02,
            backoff_max_s=0.05,
            **settings,
        )
        gateway = Gateway(
            GatewayConfig(
                discovery="kubernetes", kubernetes=config, outage_wait_s=0.0, handover_timeout_s=0.0
            ).checked()
        )
        self._stack.push_async_callback(gateway.close)
        return gateway


@pytest.fixture
async def start(api: ApiServer, tmp_path: Path) -> AsyncIterator[Started]:
    async with contextlib.AsyncExitStack() as stack:
        yield Started(stack, api, tmp_path)


def models(gateway: Gateway) -> list[str]:
    return gateway.brain.registry.names()


async def test_models_and_pods_come_and_go_without_polling(api, start, engines, fake) -> None:
    await give_keys(api, current=fake.KEY)
    for name in "abcde":
        await give_model(api, name)
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)
    assert models(gateway) == ["a", "b", "c", "d", "e"]
    num_questions = len(api.queries)
    await give_slice(api, "a", engines[0])
    await fake.until(lambda: engines[0].name in gateway.brain.registry.endpoints)
    await give_slice(api, "a", engines[0], terminating=True)
    await fake.until(lambda: gateway.brain.registry.endpoints[engines[0].name].leaving)
    await api.delete(DEPLOYMENTS, "a")
    await fake.until(lambda: models(gateway) == ["b", "c", "d", "e"])
    assert engines[0].name not in gateway.brain.registry.endpoints
    assert len(api.queries) == num_questions
    assert set(api.tokens) == {"Bearer sa-token"}
    selectors = {query.get("labelSelector") or query.get("fieldSelector") for query in api.queries}
    assert selectors == {None, "app.kubernetes.io/name=pagemill-engine", "metadata.name=pagemill-keys"}


async def test_it_is_ready_once_everything_was_listed_and_the_keys_are_there(api, start, fake) -> None:
    await give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: "Secret pagemill/pagemill-keys" in gateway.detail)
    assert not gateway.ready
    assert gateway.control_tokens() == (), "without keys nobody gets in, not even from this machine"
    await give_keys(api)
    await fake.until(lambda: gateway.ready)
    assert gateway.detail == ""


async def test_an_empty_cluster_is_a_catalogue_too(api, start, fake) -> None:
    await give_keys(api)
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)
    assert models(gateway) == []


async def test_an_outage_of_the_api_server_changes_nothing_and_its_return_is_noticed(api, start, fake) -> None:
    await give_keys(api)
    await give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)
    await api.stop()
    await fake.until(lambda: gateway.detail != "")
    assert gateway.ready
    assert models(gateway) == ["a"]
    await give_model(api, "b")
    await api.delete(DEPLOYMENTS, "a")
    await api.start()
    await fake.until(lambda: models(gateway) == ["b"])
    await fake.until(lambda: gateway.detail == "")


async def test_a_gateway_that_starts_during_an_outage_serves_what_was_known(api, start, fake, tmp_path) -> None:
    await give_keys(api)
    await give_model(api, "a")
    first = await start.gateway()
    await fake.until(lambda: (tmp_path / "catalog.json").exists())
    assert stat.S_IMODE((tmp_path / "catalog.json").stat().st_mode) == 0o600
    await api.stop()
    await first.close()
    second = await start.gateway()
    assert second.ready
    assert models(second) == ["a"]
    assert second.control_tokens() == first.control_tokens()
    assert derive_token(b"c" * 32, *GATEWAY_CONTROL) in (second.control_tokens() or ())
    (model,) = (deployment.model for deployment in second.brain.registry.deployments.values())
    assert model.engine_token == derive_token(b"c" * 32, "ns", "a")
    await give_model(api, "b")
    await api.start()
    await fake.until(lambda: models(second) == ["a", "b"])


@pytest.mark.parametrize("content", [b"", b"{", b'{"catalog": {"models": [{"deployment": "d", "name": ""}]}}', b"\xff"])
async def test_a_damaged_file_of_the_last_catalogue_is_as_good_as_none(api, start, fake, tmp_path, content) -> None:
    (tmp_path / "catalog.json").write_bytes(content)
    await give_keys(api)
    await give_model(api, "a")
    gateway = await start.gateway()
    assert not gateway.ready
    await fake.until(lambda: models(gateway) == ["a"])


async def test_a_file_that_cannot_be_written_costs_nothing_but_the_restart(api, start, fake, tmp_path) -> None:
    (tmp_path / "catalog.json").mkdir()
    await give_keys(api)
    await give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: models(gateway) == ["a"])
    await give_model(api, "b")
    await fake.until(lambda: models(gateway) == ["a", "b"])


async def test_a_watch_that_is_too_old_lists_again(api, start, fake) -> None:
    await give_keys(api)
    await give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready and api.num_watches == 3)
    num_lists = api.num_lists
    await give_model(api, "b")
    await api.delete(DEPLOYMENTS, "a")
    await api.forget_history()
    await fake.until(lambda: models(gateway) == ["b"])
    await fake.until(lambda: api.num_lists >= num_lists + 3)
    await give_model(api, "c")
    await fake.until(lambda: models(gateway) == ["b", "c"])


async def test_keys_that_turn_reach_engines_and_the_control_port(api, start, fake) -> None:
    await give_keys(api)
    await give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)
    await give_keys(api, current=b"z" * 32)
    new = derive_token(b"z" * 32, "ns", "a")
    await fake.until(lambda: gateway.brain.registry.deployments["ns/a"].model.engine_token == new)
    assert derive_token(b"z" * 32, *GATEWAY_CONTROL) in (gateway.control_tokens() or ())
    tokens = gateway.control_tokens()
    await api.apply(SECRETS, "pagemill-keys", data=secret_data(current=b"short"), metadata={"namespace": "pagemill"})
    await fake.until(lambda: "cannot be used" in gateway.detail)
    await api.delete(SECRETS, "pagemill-keys")
    await fake.until(lambda: "does not exist" in gateway.detail)
    assert gateway.control_tokens() == tokens
    assert gateway.ready


async def test_status_that_does_not_matter_makes_no_new_catalogue(api, start, fake) -> None:
    await give_keys(api)
    await give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)
    deployment = gateway.brain.registry.deployments["ns/a"]
    for number in range(5):
        spec = {"model": {"source": "hf://a/b"}}
        await api.apply(DEPLOYMENTS, "a", spec=spec, status={"load": {"requestsRunning": number}})
    await give_model(api, "b")
    await fake.until(lambda: models(gateway) == ["a", "b"])
    assert gateway.brain.registry.deployments["ns/a"].model == deployment.model


async def test_an_object_that_cannot_be_read_does_not_hide_the_others(api, start, fake) -> None:
    await give_keys(api)
    await give_model(api, "a")
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)
    await api.apply(DEPLOYMENTS, "a", spec={"model": {"aliases": "not a list"}})
    await give_model(api, "b")
    await fake.until(lambda: models(gateway) == ["a", "b"])


async def test_what_the_server_forbids_is_told(api, start, fake) -> None:
    api.status = 403
    gateway = await start.gateway()
    await fake.until(lambda: "403: you shall not" in gateway.detail)
    assert not gateway.ready


async def test_namespaces_are_watched_one_by_one(api, start, fake) -> None:
    gateway = await start.gateway(namespaces=["one", "two"])
    await fake.until(lambda: "404" in gateway.detail)
    paths = {watch._path for watch in gateway.discovery._watches()}
    assert {"/apis/pagemill.dev/v1alpha1/namespaces/one/llmdeployments", SECRETS} < paths
    assert len(paths) == 5


async def test_a_request_goes_all_the_way_to_a_pod_found_in_a_slice(api, start, engines, fake) -> None:
    await give_keys(api, current=fake.KEY)
    await give_model(api, fake.MODEL)
    await give_slice(api, fake.MODEL, engines[0])
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready and gateway.brain.registry.endpoints[engines[0].name].usable)
    assert gateway.brain.resolve(fake.MODEL).deployment == f"ns/{fake.MODEL}"


async def test_it_is_ready_only_when_it_knows_the_engines_that_are(api, start, engines, fake) -> None:
    engines[0].max_model_len = 0
    await give_keys(api, current=fake.KEY)
    await give_model(api, fake.MODEL)
    await give_slice(api, fake.MODEL, engines[0])
    release = engines[0].hold_state()
    gateway = await start.gateway()
    await fake.until(lambda: gateway.discovery.known)
    assert not gateway.ready
    assert gateway.detail == "connecting to the engines"
    release.set()
    await fake.until(lambda: gateway.ready)
    await give_slice(api, fake.MODEL, engines[1])
    await fake.until(lambda: engines[1].name in gateway.brain.registry.endpoints)
    assert gateway.ready, "what comes later does not undo it"


async def test_an_engine_that_cannot_be_reached_does_not_hold_the_gateway_up(api, start, engines, fake) -> None:
    await engines[0].kill()
    await give_keys(api, current=fake.KEY)
    await give_model(api, fake.MODEL)
    await give_slice(api, fake.MODEL, engines[0])
    gateway = await start.gateway()
    await fake.until(lambda: gateway.ready)


# -- credentials -------------------------------------------------------------------------------------------------------


def test_a_service_account_token_is_read_again_for_each_request(tmp_path: Path) -> None:
    ca = Path(aiohttp.__file__)  # any file that is no certificate
    (tmp_path / "token").write_text("one\n")
    with pytest.raises(CredentialsError, match="certificate"):
        in_cluster("https://10.0.0.1", _folder_with(tmp_path, ca.read_text()))
    kubeconfig = tmp_path / "config"
    users = [{"name": "u", "user": {"tokenFile": "token"}}]
    kubeconfig.write_text(json.dumps(_kubeconfig(users)))
    credentials = from_kubeconfig(kubeconfig)
    assert credentials.headers() == {"Authorization": "Bearer one"}
    (tmp_path / "token").write_text("two\n")
    assert credentials.headers() == {"Authorization": "Bearer two"}


@pytest.mark.parametrize("content", ["", "[]", "{}", "a: [", '{"current-context": "x", "contexts": []}'])
def test_a_kubeconfig_that_makes_no_sense_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(CredentialsError, match="config"):
        from_kubeconfig(tmp_path / "config")


async def test_without_credentials_the_gateway_does_not_start(tmp_path: Path) -> None:
    config = KubernetesConfig(kubeconfig=str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="none"):
        Gateway(GatewayConfig(discovery="kubernetes", kubernetes=config))


def _kubeconfig(users: list[Any]) -> dict[str, Any]:
    return {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": users,
    }


def _folder_with(folder: Path, ca: str) -> Path:
    (folder / "ca.crt").write_text(ca)
    return folder
