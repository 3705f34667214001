"""Simulated pods in one process, each on its own port: the upstreams of all measured routers.

They serve our engine's protocol (`/internal/*`), OpenAI's API, and the health, model and metrics routes that other
routers use. This module is only HTTP; `pod` simulates a pod. Run it as `python -m routers.pods --help`. The first line
of stdout is JSON with the ports, and each SIGUSR1 prints a line with the number of state frames sent so far.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import signal
from functools import partial
from pathlib import Path
from typing import cast

import httptools
import msgspec
import uvloop

from pagemill_api.openai import render
from pagemill_protocol.frames import STATE_CONTENT_TYPE
from pagemill_protocol.link import LINK_PATH, LINK_PROTOCOL, RecordDecoder, RecordKind, encode_record
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.tokenizer_bundle import bundle_digest
from pagemill_protocol.versions import protocol_headers
from routers.answers import Answer, http_chunk
from routers.busy import Busy, Habit
from routers.pod import WEIGHTS, Kind, Pod, Stream

_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%bTransfer-Encoding: chunked\r\n\r\n"
SSE_HEAD = _STREAM_HEAD % (render.SSE_CONTENT_TYPE.encode(), b"Cache-Control: no-cache\r\n")
LINK_HEAD = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {LINK_PROTOCOL}\r\n\r\n".encode()
STATE_HEAD = _STREAM_HEAD % (
    STATE_CONTENT_TYPE.encode(),
    b"".join(f"{name}: {value}\r\n".encode() for name, value in protocol_headers().items()),
)
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="{model}"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{model_name="{model}"}} 0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{model_name="{model}"}} {usage}
"""


class Model:
    """The model that every pod serves."""

    def __init__(self, kind: Kind, num_tokens: int, bundle: bytes) -> None:
        self.name = kind.model
        self.bundle = bundle
        self.chat = Answer(kind.model, "chat", num_tokens)
        self.completion = Answer(kind.model, "completions", num_tokens)
        self.cards = render.models_body([render.ModelCard(kind.model, 1, 8192)])


class _Asked(msgspec.Struct):
    """The fields that a pod reads from an OpenAI body."""

    stream: bool = False


_asked = msgspec.json.Decoder(_Asked)
_generate = msgspec.msgpack.Decoder(GenerateRequest)


class Connection(asyncio.Protocol):
    def __init__(self, pod: Pod, model: Model) -> None:
        self._pod = pod
        self._model = model
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._stream: Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the link has begun
        except httptools.HttpParserError:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._pod.unsubscribe(self._transport)
        if self._stream is not None:
            self._pod.drop(self._stream)

    def on_message_begin(self) -> None:
        self._url = b""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, body, model = self._url.partition(b"?")[0], b"".join(self._body), self._model
        if path == b"/v1/chat/completions":
            self._answer(model.chat, body)
        elif path == b"/v1/completions":
            self._answer(model.completion, body)
        elif path == LINK_PATH.encode():
            self._transport.write(LINK_HEAD)
            successor = Link(self._pod, model, self._transport)
            self._transport.set_protocol(successor)
        elif path == b"/internal/state":
            self._transport.write(STATE_HEAD)
            self._pod.subscribe(self._transport, self._write_chunk)
        else:
            self._send(*self._page(path))

    def _answer(self, answer: Answer, body: bytes) -> None:
        if not _asked.decode(body).stream:
            self._send(200, b"application/json", answer.body())
            return
        self._transport.write(SSE_HEAD)
        self._begin(Stream(lambda data, done: self._transport.write(data), answer, None))

    def _begin(self, stream: Stream) -> None:
        self._stream = stream
        self._pod.begin(stream)

    def _page(self, path: bytes) -> tuple[int, bytes, bytes]:
        if path in (b"/health", b"/health_generate", b"/ping"):
            return 200, b"text/plain", b""
        if path in (b"/readyz", b"/livez"):
            return 200, b"application/json", b'{"phase":"ready","detail":""}'
        if path == b"/v1/models":
            return 200, b"application/json", self._model.cards
        if path == b"/version":
            return 200, b"application/json", b'{"version":"0.32.0"}'
        if path == b"/metrics":
            return 200, b"text/plain; version=0.0.4", self._metrics()
        if path == b"/internal/bundle":
            return 200, b"application/vnd.msgpack", self._model.bundle
        if path == b"/internal/drained":
            return 200, b"application/json", b"{}"
        return 404, b"application/json", b'{"error":{"message":"There is no such route."}}'

    def _metrics(self) -> bytes:
        pod = self._pod
        return METRICS.format(model=self._model.name, running=pod.num_running, usage=pod.kv_usage).encode()

    def _send(self, status: int, kind: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % (status, b"OK" if status == 200 else b"Not Found", kind, len(body)) + body)

    def _write_chunk(self, data: bytes) -> None:
        self._transport.write(http_chunk(data))


class Link(asyncio.Protocol):
    """The link of one gateway process, with all of its requests."""

    def __init__(self, pod: Pod, model: Model, transport: asyncio.Transport) -> None:
        self._pod = pod
        self._model = model
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._decoder = RecordDecoder()
        self._parts: dict[int, bytes] = {}
        self._streams: dict[int, Stream] = {}
        self._records: list[bytes] = []
        """Records to write at the end of this turn of the event loop."""

    def data_received(self, data: bytes) -> None:
        for kind, number, body in self._decoder.feed(data):
            if kind == RecordKind.REQUEST:
                self._generate(number, self._parts.pop(number, b"") + body)
            elif kind == RecordKind.REQUEST_PART:
                self._parts[number] = self._parts.get(number, b"") + body
            elif kind == RecordKind.CANCEL and number in self._streams:
                self._pod.drop(self._streams.pop(number))

    def connection_lost(self, error: Exception | None) -> None:
        for stream in self._streams.values():
            self._pod.drop(stream)

    def _generate(self, number: int, body: bytes) -> None:
        request = _generate.decode(body)
        answer = self._model.chat if request.dialect == "chat" else self._model.completion
        self._write(encode_record(RecordKind.ACCEPTED, number, WEIGHTS.encode()))
        stream = self._streams[number] = Stream(partial(self._write_frames, number), answer, request)
        self._pod.begin(stream)

    def _write_frames(self, number: int, data: bytes, done: bool) -> None:
        self._write(encode_record(RecordKind.DATA, number, data))
        if done:
            self._write(encode_record(RecordKind.END, number))
            self._streams.pop(number, None)

    def _write(self, record: bytes) -> None:
        if not self._records:
            self._loop.call_soon(self._flush)
        self._records.append(record)

    def _flush(self) -> None:
        records, self._records = self._records, []
        self._transport.write(b"".join(records))


async def serve(num_pods: int, kind: Kind, model: Model, habit: Habit) -> None:
    """Listen on `num_pods` free ports, print them, and serve until the process is terminated."""
    loop = asyncio.get_running_loop()
    ports, pods = [], []
    for _ in range(num_pods):
        pod = Pod(kind, loop)
        Busy(pod, habit, loop).begin()
        pods.append(pod)
        server = await loop.create_server(partial(Connection, pod, model), "127.0.0.1", 0, backlog=4096)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps({"ports": ports}), flush=True)
    loop.add_signal_handler(signal.SIGUSR1, _tell_frames, pods)
    gc.freeze()
    await asyncio.Event().wait()


def _tell_frames(pods: list[Pod]) -> None:
    print(json.dumps({"num_frames": sum(pod.num_frames for pod in pods)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, required=True)
    parser.add_argument("--model", required=True, help="model name in clients' requests")
    parser.add_argument("--bundle", type=Path, required=True, help="file of an encoded tokenizer bundle")
    parser.add_argument("--tokens", type=int, default=32, help="number of tokens of every answer")
    parser.add_argument("--step-ms", type=float, default=10.0, help="milliseconds between two tokens of an answer")
    parser.add_argument("--blocks", type=int, default=16_384, help="number of KV blocks of a pod")
    parser.add_argument(
        "--prefix-chunks", type=int, default=0, help="number of prefix chunks in each pod's prefix cache from the start"
    )
    parser.add_argument(
        "--shared-prefix-chunks",
        type=int,
        default=0,
        help="number of these prefix chunks that are the same in all pods",
    )
    parser.add_argument(
        "--steps-per-s",
        type=float,
        default=0.0,
        help="simulated steps per second of requests that no client sends; 0: none",
    )
    parser.add_argument(
        "--churn", type=int, default=0, help="number of prefix chunks that each such step adds and evicts"
    )
    args = parser.parse_args()
    habit = Habit(args.prefix_chunks, args.shared_prefix_chunks, args.steps_per_s, args.churn)
    bundle = args.bundle.read_bytes()
    kind = Kind(args.model, args.step_ms / 1000, args.blocks, bundle_digest(bundle))
    uvloop.run(serve(args.pods, kind, Model(kind, args.tokens, bundle), habit))


if __name__ == "__main__":
    main()
