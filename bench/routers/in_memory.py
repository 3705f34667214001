"""A gateway in one process without sockets, whose client and engines are function calls.

It allows the work of a request to be measured and counted step by step, independent of other work on the machine.
Everything between client and engines is real: HTTP, keys, limits, schema, template process, tokens, hashes, decision,
journal, log and metrics. The kernel would add one read for each piece that arrives and one write for each that leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import uvicorn
from uvicorn.server import ServerState

from pagemill_gateway.app import data_app
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.engine_http.connecting import Connector
from pagemill_gateway.processes.server import Gateway, open_gateway
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.link import RecordDecoder, RecordKind, encode_record
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.tokenizer_bundle import TokenizerBundle
from pagemill_servers.connection import bounded_protocol
from routers.answers import Answer
from routers.catalogue import KEY, LIMITS, MODEL
from routers.pod import WEIGHTS, Pod
from routers.pod import Kind as PodKind
from routers.pods import LINK_HEAD

_generate = msgspec.msgpack.Decoder(GenerateRequest)
TOKEN = "bench-internal"


class Turns:
    """Notified when other code starts to run; this base class ignores it."""

    def gateway(self) -> None: ...

    def bench(self) -> None: ...


class Wire(asyncio.Transport):
    """One end of a connection within this process."""

    turns = Turns()
    """The observer of all wires."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.num_writes = 0
        self._loop = asyncio.get_running_loop()
        self._wrote: asyncio.Future[None] | None = None
        """The waiter for the next write. It is no `asyncio.Event`, whose calls would count as the gateway's."""
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.turns.bench()
        self.num_writes += 1
        self.written.append(data)
        if self._wrote is not None and not self._wrote.done():
            self._wrote.set_result(None)
        self.turns.gateway()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol: Any = protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    async def until(self, end: bytes = b"") -> None:
        """Wait until something was written, or data that ends with `end`."""
        while not (self.written and self.written[-1].endswith(end)):
            self._wrote = self._loop.create_future()
            self.turns.gateway()
            await self._wrote
            self.turns.bench()
        self.written.clear()

    def receive(self, protocol: Any, data: bytes) -> None:
        """Pass these bytes to `protocol`, the receiver at this end."""
        self.turns.gateway()
        protocol.data_received(data)
        self.turns.bench()


class EngineWire(Wire):
    """A connection to an engine that accepts every request and sends the given frames."""

    def __init__(self, engines: Engines) -> None:
        super().__init__()
        self.protocol: Any = None
        self._engines = engines
        self._decoder = RecordDecoder()
        self._is_link = False

    def write(self, data: Any) -> None:
        self.turns.bench()
        self._take(data)
        self.turns.gateway()

    def _take(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._engines.num_writes += 1
        if self._is_link:
            for kind, number, body in self._decoder.feed(data):
                if kind == RecordKind.REQUEST:
                    self._engines.take(Exchange(self, number, _generate.decode(body)))
        else:
            self._is_link = True
            loop.call_soon(self.protocol.data_received, LINK_HEAD)


class Exchange(NamedTuple):
    """One request at an engine."""

    wire: EngineWire
    number: int
    """Number of its stream."""
    request: GenerateRequest

    def accept(self, frame: bytes) -> None:
        accepted = encode_record(RecordKind.ACCEPTED, self.number, WEIGHTS.encode())
        self._receive(accepted + encode_record(RecordKind.DATA, self.number, frame))

    def send(self, frame: bytes) -> None:
        self._receive(encode_record(RecordKind.DATA, self.number, frame))

    def end(self, frame: bytes) -> None:
        end = encode_record(RecordKind.END, self.number)
        self._receive(encode_record(RecordKind.DATA, self.number, frame) + end)

    def _receive(self, data: bytes) -> None:
        self.wire.receive(self.wire.protocol, data)


class Engines:
    def __init__(self) -> None:
        self.num_writes = 0
        """Writes of the gateway to all wires."""
        self._taken: list[Exchange] = []
        self._came = asyncio.Event()

    async def connect(self, make: Any) -> Any:
        wire = EngineWire(self)
        wire.protocol = make()
        wire.protocol.connection_made(wire)
        return wire.protocol

    def take(self, exchange: Exchange) -> None:
        self._taken.append(exchange)
        self._came.set()

    async def next(self) -> Exchange:
        while not self._taken:
            self._came.clear()
            Wire.turns.gateway()
            await self._came.wait()
            Wire.turns.bench()
        return self._taken.pop()


class Stage(NamedTuple):
    gateway: Gateway
    connect: Callable[[], tuple[Any, Wire]]
    """Opens a client connection and returns the server's protocol and the wire."""
    client: Any
    """The server's protocol of the client connection."""
    wire: Wire
    """The wire to which the server writes."""
    engines: Engines
    answer: Answer
    pods: list[Pod]

    def observe(self) -> None:
        """Let every pod send a report."""
        for number, pod in enumerate(self.pods):
            self.gateway.control.brain.observer.observe(f"pod-{number}", pod.snapshot())

    @staticmethod
    def request(body: bytes) -> bytes:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def config() -> GatewayConfig:
    key = f"{sha256(KEY.encode()).hexdigest()} tenant=bench {LIMITS}"
    return GatewayConfig(port=0, control_port=0, control_token=TOKEN, api_keys=[key]).checked()


@asynccontextmanager
async def stage(bundle: TokenizerBundle, *, num_pods: int, num_tokens: int) -> AsyncIterator[Stage]:
    kind = PodKind(MODEL, 0.01, 16_384, bundle.digest)
    engines, loop = Engines(), asyncio.get_running_loop()
    with mock.patch.object(Connector, "connect", lambda connector, origin, make: engines.connect(make)):
        gateway = await open_gateway(config())
        try:
            await _furnish(gateway, bundle, num_pods)
            app = uvicorn.Config(
                data_app(gateway.worker),
                http=bounded_protocol(),
                log_config=None,
                lifespan="off",
                access_log=False,
                proxy_headers=False,
            )
            app.load()

            def connect() -> tuple[Any, Wire]:
                wire = Wire()
                client: Any = app.http_protocol_class(config=app, server_state=ServerState(), app_state={})  # type: ignore[call-arg]
                client.connection_made(wire)
                return client, wire

            client, wire = connect()
            pods = [Pod(kind, loop) for _ in range(num_pods)]
            built = Stage(gateway, connect, client, wire, engines, Answer(MODEL, "chat", num_tokens), pods)
            built.observe()
            yield built
        finally:
            await gateway.close()


async def _furnish(gateway: Gateway, bundle: TokenizerBundle, num_pods: int) -> None:
    """Give the gateway pods and their tokenizer."""
    urls = [f"http://127.0.0.1:{number + 1}" for number in range(num_pods)]
    endpoints = [Endpoint(id=f"pod-{n}", data_url=url, control_url=url) for n, url in enumerate(urls)]
    model = CatalogModel(deployment=MODEL, name=MODEL, engine_token=TOKEN, endpoints=endpoints)
    gateway.control.brain.observer.apply_catalog(Catalog(models=[model]))
    bundles = gateway.worker.bundles

    async def data(_: str) -> bytes:
        return bundle.to_bytes()

    bundles._source = data
    await bundles.load(bundle.digest)
