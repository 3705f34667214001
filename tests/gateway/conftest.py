"""Fixtures: small servers that speak the engines' real protocol, and gateways in front of them, all on loopback."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any
from unittest import mock

import aiohttp
import msgspec
import pytest
from aiohttp import web
from byte_bundle import byte_bundle
from engine_behaviours import Behaviour, Refused, breaks_off, hangs, refuses, says, sends
from fake_link import FakeLink
from gateway_layouts import LAYOUTS
from generating import answer_frames, generates
from http_reply import Reply
from kept_templates import KeptTemplates
from killable_server import cut_off, serve
from real_cluster import real, simulated, start_cluster  # noqa: F401 - fixtures
from waiting import eventually

from pagemill_gateway.batches import job as batch_job
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.processes.server import Gateway, listening
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.engine_token import derive_token
from pagemill_protocol.frames import STATE_CONTENT_TYPE, encode_state
from pagemill_protocol.link import LINK_PATH
from pagemill_protocol.report.adapters import AdapterSlots
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame, StepTimeParams
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.versions import protocol_headers
from pagemill_servers.process.listening import bind, url_of

MODEL = "tiny"
KEY = b"k" * 32
TOKEN = derive_token(KEY, "ns", MODEL)
CONTROL_TOKEN = "t0ken"
CONTROL = {"Authorization": f"Bearer {CONTROL_TOKEN}", **protocol_headers()}
"""The headers that a gateway in a cluster sends to the engines of a deployment with the model's name."""
MAX_MODEL_LEN = 4096
HEARTBEAT_S = 1.0
installed = cache(entry_points)
"""What packages register, which each gateway would read from the metadata of them all in 10 ms."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

BUNDLE = byte_bundle(CHAT_TEMPLATE)


class FakeEngine:
    """Data and control routes on one port; answers with each of `behaviours` in turn, then with `behaviour`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[GenerateRequest] = []
        self.request_ids: list[str] = []
        """The ids of clients' requests."""
        self.num_aborted = 0
        self.refuses_link: Callable[[], web.Response] | None = None
        """Makes the answer to requests for links, if they are refused."""
        self.num_links = 0
        """The number of links opened so far."""
        self.num_state_streams = self.num_drained = self.num_unauthorized = 0
        self.token = TOKEN
        """The token that acknowledgements of drains must carry."""
        self.gateways: list[str | None] = []
        """The gateways that opened state streams and acknowledged drains."""
        self.load = EngineLoad()
        self.max_model_len = MAX_MODEL_LEN
        self.max_num_seqs = 0
        self.step_time = StepTimeParams()
        self.pools = False
        self.num_inside = 0
        """The number of requests being answered."""
        self.most_inside = 0
        self.weights_digest = "weights"
        self.headers: dict[str, str] = {}
        """The headers of its state streams."""
        self.silent_s = 0.0
        self.frozen_s = 0.0
        self.adapters = AdapterSlots()
        self.draining = False
        self.readyz: tuple[int, dict[str, str]] = (200, {"phase": "ready", "detail": ""})
        self._may_report = asyncio.Event()
        self._may_report.set()
        self.allowances: dict[str, int] = {}
        """The allowances of the requests being answered, by request id."""
        self.num_raises = 0
        self.deaf = False
        """Whether the engine ignores raised allowances."""
        self.num_generated = 0
        """The number of tokens that `generates` has generated."""
        self.behaviours: deque[Behaviour] = deque()
        self.behaviour: Behaviour = says("hello", " world")
        self.bundle_bytes = BUNDLE.to_bytes()
        self.bundle_digest = BUNDLE.digest
        self.num_bundles_asked = 0
        self.port = 0
        self.silent = False
        """Whether the engine sends no reports by itself."""
        self._sequence = 0
        self._reported = self._frame()
        self._streams: set[web.StreamResponse] = set()
        """The state streams that have received their snapshot."""
        self._runner: web.AppRunner | None = None
        self._heartbeat: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(id=self.name, data_url=self.url, control_url=self.url)

    async def start(self) -> FakeEngine:
        app = web.Application(client_max_size=2**26)
        app.router.add_get(LINK_PATH, self._link)
        app.router.add_get("/internal/state", self._state)
        app.router.add_post("/internal/drained", self._drained)
        app.router.add_get("/internal/bundle", self._bundle)
        app.router.add_get("/readyz", self._readyz)
        self._runner, self.port = await serve(app, self.port)
        self._heartbeat = asyncio.create_task(self._repeat_state())
        return self

    async def kill(self) -> None:
        """Stop like a process that is killed with SIGKILL: reset every connection and stop listening."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        await cut_off(runner)
        self._streams.clear()

    async def push_state(self, *, skip: int = 0, raw: bytes | None = None, **fields: Any) -> None:
        """Send a state frame to every connected stream; `skip` leaves a gap in the sequence."""
        for name, value in fields.items():
            setattr(self, name, value)
        self._sequence += skip
        self._reported = self._frame()
        await self._send(raw)

    async def _repeat_state(self) -> None:
        """Repeat the last report, as engines do while nothing changes."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if not self.silent:
                await self._send()

    async def _send(self, raw: bytes | None = None) -> None:
        self._sequence += 1
        frame = msgspec.structs.replace(self._reported, sequence=self._sequence)
        for stream in list(self._streams):
            with contextlib.suppress(ConnectionError):
                await stream.write(raw if raw is not None else encode_state(frame))

    def hold_state(self) -> asyncio.Event:
        """Send nothing on new state streams until the returned event is set."""
        self._may_report.clear()
        return self._may_report

    def _frame(self) -> StateFrame:
        return StateFrame(
            sequence=self._sequence,
            load=self.load,
            digests=Digests(weights=self.weights_digest, tokenizer_bundle=self.bundle_digest),
            silent_s=self.silent_s,
            frozen_s=self.frozen_s,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            step_time=self.step_time,
            models=[MODEL],
            pools=self.pools,
            adapters=self.adapters,
            draining=self.draining,
        )

    async def _link(self, http: web.Request) -> web.StreamResponse:
        if http.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": {"message": "no"}}, status=401)
        if self.refuses_link is not None:
            return self.refuses_link()
        self.num_links += 1
        link = FakeLink(http, self._answer, lambda: self.weights_digest, self.request_ids.append, self._raise_allowance)
        await link.over.wait()
        return web.Response()

    async def _answer(self, request: GenerateRequest, response: Any, http: Any) -> Any:
        """Answer a request."""
        self.requests.append(request)
        behaviour = self.behaviours.popleft() if self.behaviours else self.behaviour
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        if request.token_allowance is not None:
            self.allowances[request.request_id] = request.token_allowance
        try:
            await behaviour(self, request, response, http)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        except (Refused, ConnectionError) as refused:
            return refused.response if isinstance(refused, Refused) else response
        finally:
            self.num_inside -= 1
            self.allowances.pop(request.request_id, None)
        return response

    def _raise_allowance(self, request: GenerateRequest, tokens: int) -> None:
        if not self.deaf and request.request_id in self.allowances:
            self.num_raises += 1
            self.allowances[request.request_id] = max(self.allowances[request.request_id], tokens)

    async def _state(self, http: web.Request) -> web.StreamResponse:
        assert http.headers["Authorization"] == f"Bearer {TOKEN}"
        response = web.StreamResponse(
            headers={"Content-Type": STATE_CONTENT_TYPE, **protocol_headers(), **self.headers}
        )
        await response.prepare(http)
        self.num_state_streams += 1
        self.gateways.append(http.headers.get("X-Pagemill-Gateway"))
        try:
            await self._may_report.wait()
            self._reported = self._frame()
            self._streams.add(response)
            await response.write(encode_state(msgspec.structs.replace(self._reported, snapshot=True)))
            await asyncio.Event().wait()
        finally:
            self._streams.discard(response)
        return response

    async def _drained(self, http: web.Request) -> web.Response:
        if http.headers["Authorization"] != f"Bearer {self.token}":
            self.num_unauthorized += 1
            return web.Response(status=401)
        self.num_drained += 1
        self.gateways.append(http.headers.get("X-Pagemill-Gateway"))
        return web.Response(status=204)

    async def _bundle(self, http: web.Request) -> web.Response:
        self.num_bundles_asked += 1
        return web.Response(body=self.bundle_bytes, headers={"x-pagemill-digest": self.bundle_digest})

    async def _readyz(self, http: web.Request) -> web.Response:
        status, body = self.readyz
        return web.json_response(body, status=status)


class GatewayUnderTest:
    def __init__(self, gateway: Gateway, data_socket: socket.socket, control_socket: socket.socket) -> None:
        self.gateway = gateway
        self.url = url_of(data_socket)
        self.control_url = url_of(control_socket)
        self.session = aiohttp.ClientSession()

    def record(self, engine: FakeEngine) -> Any:
        return self.gateway.control.brain.registry.endpoints[engine.name]

    async def know(self, *engines: FakeEngine) -> None:
        """Wait until the gateway can route to all of `engines`."""
        await eventually(lambda: all(self.record(engine).usable for engine in engines))

    async def chat(self, *, stream: bool = False, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream, **fields}
        return await self.post("/v1/chat/completions", body, headers)

    async def complete(self, *, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "hi", **fields}, headers)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return Reply(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    async def get(self, path: str, *, control: bool = False, accept: str = "*/*") -> Reply:
        url, headers = (self.control_url, CONTROL) if control else (self.url, {})
        async with self.session.get(url + path, headers={**headers, "Accept": accept}) as response:
            return Reply(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    async def put_catalog(self, body: bytes) -> Reply:
        async with self.session.put(self.control_url + "/catalog", data=body, headers=CONTROL) as response:
            return Reply(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())


def catalog_of(*engines: FakeEngine, **fields: Any) -> Catalog:
    endpoints = [engine.endpoint for engine in engines]
    defaults = {"deployment": "d", "name": MODEL, "engine_token": TOKEN, "endpoints": endpoints}
    return Catalog(models=[CatalogModel(**{**defaults, **fields})])


# -- the API server of a cluster --------------------------------------------------------------------------------------

DEPLOYMENTS = "/apis/pagemill.dev/v1beta1/llmdeployments"
SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
SECRETS = "/api/v1/namespaces/pagemill/secrets"
KINDS = (DEPLOYMENTS, SLICES, SECRETS)


class ApiServer:
    """A Kubernetes API server with three kinds of objects and one history."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
        self.num_lists = 0
        self.num_watches = 0
        self.queries: list[dict[str, str]] = []
        self.status = 200
        self.closed: set[str] = set()
        """Namespaces that no client may read."""
        self.gone = False
        """Whether every new watch is refused as expired."""
        self.silent = False
        """Whether watches stay open and send nothing."""
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
            group, resource = kind.rsplit("/", 1)
            if kind != SECRETS:
                app.router.add_get(f"{group}/namespaces/{{namespace}}/{resource}", self._serve)
        self._runner, self._port = await serve(app, self._port)
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        await cut_off(runner)

    async def apply(self, kind: str, name: str, **content: Any) -> None:
        event = "MODIFIED" if name in self.objects[kind] else "ADDED"
        raw = json.loads(json.dumps(content))
        raw["metadata"] = {"name": name, "namespace": "ns", "generation": 1, **raw.get("metadata", {})}
        await self._record(kind, event, name, raw)

    async def delete(self, kind: str, name: str) -> None:
        await self._record(kind, "DELETED", name, self.objects[kind][name])

    async def forget_history(self) -> None:
        """Make the past history unavailable to watches and end the open watches."""
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
        namespace = request.match_info.get("namespace")
        if namespace in self.closed:
            return web.json_response({"kind": "Status", "message": f"{namespace} is closed"}, status=403)
        kind = request.path.replace(f"/namespaces/{namespace}", "")
        if "watch" in request.query:
            return await self._watch(request, kind, namespace)
        self.num_lists += 1
        items = [each for each in self.objects[kind].values() if _is_in(namespace, each)]
        start = int(request.query.get("continue", 0))
        page = items[start : start + 2]
        more = {"continue": str(start + 2)} if start + 2 < len(items) else {}
        return web.json_response({"metadata": {"resourceVersion": str(self._version), **more}, "items": page})

    async def _watch(self, request: web.Request, kind: str, namespace: str | None) -> web.StreamResponse:
        self.num_watches += 1
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            if seen < self._oldest or self.gone:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                return response
            for version, changed, event in [each for each in self._events if each[0] > seen and not self.silent]:
                if changed == kind and _is_in(namespace, event["object"]):
                    line = json.dumps(event).encode() + b"\n"
                    await response.write(line[:20])  # lines may arrive in parts
                    await response.write(line[20:])
                seen = version
            async with self._news:
                await self._news.wait()


def _is_in(namespace: str | None, raw: dict[str, Any]) -> bool:
    return namespace is None or raw["metadata"]["namespace"] == namespace


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
    # Every fake engine has a port of its own, and a slice a pair of ports.
    (port,) = {engine.port for engine in engines} or {1}
    ports = [{"name": "data", "port": port}, {"name": "control", "port": port}]
    labels = {"pagemill.dev/deployment": name}
    slice_name = f"{name}-{'-'.join(engine.name for engine in engines)}"
    await api.apply(
        SLICES, slice_name, metadata={"labels": labels}, endpoints=endpoints, ports=ports, addressType="IPv4"
    )


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    """Start three engines."""
    started = [await FakeEngine(f"engine-{number}").start() for number in range(3)]
    yield started
    for engine in started:
        await engine.kill()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gateways" in metafunc.fixturenames and metafunc.definition.get_closest_marker("layouts") is not None:
        metafunc.parametrize("gateways", list(LAYOUTS), indirect=True)


@pytest.fixture(scope="session")
def kept_templates() -> Iterator[KeptTemplates]:
    kept = KeptTemplates()
    yield kept
    kept.close()


@pytest.fixture
async def gateways(
    request: pytest.FixtureRequest, kept_templates: KeptTemplates
) -> AsyncIterator[Callable[..., Awaitable[GatewayUnderTest]]]:
    """Return `gateways(*engines, **settings)`, which starts a gateway and returns once it can use the engines."""
    layout = LAYOUTS[getattr(request, "param", "one process")]
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(kept_templates.in_use())
        stack.enter_context(mock.patch.object(policies, "entry_points", installed))

        async def start(*engines: FakeEngine, wait: bool = True, **settings: Any) -> GatewayUnderTest:
            defaults = {
                "port": 0,
                "control_port": 0,
                "control_token": CONTROL_TOKEN,
                "catalog": catalog_of(*engines),
                "ejection_base_s": 0.2,
                "outage_wait_s": 0.0,
                "handover_timeout_s": 0.0,
            }
            config = GatewayConfig(**{**defaults, **settings}).checked()
            data_socket, control_socket = bind("127.0.0.1", 0, "port"), bind("127.0.0.1", 0, "control_port")
            gateway = await stack.enter_async_context(layout(config))
            await stack.enter_async_context(listening(gateway, data_socket, control_socket))
            under_test = GatewayUnderTest(gateway, data_socket, control_socket)
            stack.push_async_callback(under_test.session.close)
            if wait:
                await under_test.know(*engines)
            return under_test

        yield start


@pytest.fixture
def fake() -> SimpleNamespace:
    """Return the behaviours of fake engines and other helpers, by name."""
    return SimpleNamespace(
        says=says,
        generates=generates,
        refuses=refuses,
        breaks_off=breaks_off,
        sends=sends,
        hangs=hangs,
        until=eventually,
        catalog_of=catalog_of,
        answer_frames=answer_frames,
        Engine=FakeEngine,
        DEPLOYMENTS=DEPLOYMENTS,
        SLICES=SLICES,
        SECRETS=SECRETS,
        secret_data=secret_data,
        give_keys=give_keys,
        give_model=give_model,
        give_slice=give_slice,
        MODEL=MODEL,
        TOKEN=TOKEN,
        KEY=KEY,
        MAX_MODEL_LEN=MAX_MODEL_LEN,
    )


@pytest.fixture
async def reporting_engines(engines: Any) -> AsyncIterator[None]:
    """Make engines report often, because an engine without reports gets no lines."""

    async def report() -> None:
        while True:
            for engine in engines:
                await engine.push_state()
            await asyncio.sleep(0.2)

    task = asyncio.create_task(report())
    yield
    task.cancel()


@pytest.fixture
def quick_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make batches look for their next lines sooner."""
    monkeypatch.setattr(batch_job, "TICK_S", 0.05)
