"""The bench's HTTP: the same answer whatever pieces its bytes come in, and errors for what is no answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from certificates import write_certificate

from pagemill.bench import exchange
from pagemill.bench.exchange import Exchanges, StreamedAnswer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
Pieces = Sequence[bytes | float]


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


EVENTS = [
    event("Hel"),
    event("lo"),
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n',
]
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return CHUNKED + b"".join(map(chunk, parts)) + end


@asynccontextmanager
async def serving(*answers: Pieces, tls: ssl.SSLContext | None = None, close: bool = False) -> AsyncIterator[int]:
    """Give each request the next answer, in these pieces; yield the port. Numbers are pauses."""
    left = iter(answers)
    served: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(writer)
        while await reader.readuntil(b"\r\n\r\n"):
            await reader.readexactly(2)
            for piece in next(left):
                if isinstance(piece, bytes):
                    writer.write(piece)
                    await writer.drain()
                await asyncio.sleep(0.001 if isinstance(piece, bytes) else piece)
            if close:
                writer.close()
                return

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for each in served:
            each.close()


async def asked(port: int, times: int = 1, scheme: str = "http") -> list[StreamedAnswer]:
    exchanges = Exchanges(f"{scheme}://localhost:{port}", None)
    try:
        async with asyncio.timeout(60):
            return [await exchanges.ask(b"{}") for _ in range(times)]
    finally:
        exchanges.close()


class Unwritten(asyncio.Transport):
    def write(self, data: object) -> None:
        pass


def assert_whole(answer: StreamedAnswer) -> None:
    assert (answer.text, answer.error) == ("Hello", "")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)


async def test_the_answer_is_the_same_at_every_cut_of_its_bytes_and_the_connection_is_used_again() -> None:
    whole = chunked(*EVENTS, DONE)
    cuts = [[whole[:cut], whole[cut:]] for cut in range(1, len(whole))]
    async with serving(*cuts) as port:
        for answer in await asked(port, len(cuts)):
            assert_whole(answer)


async def test_each_event_has_the_time_of_the_read_that_brought_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    connection = exchange._Connection()
    connection.connection_made(Unwritten())
    ended = asyncio.create_task(connection.exchange(b""))
    await asyncio.sleep(0)
    first, last = chunk(EVENTS[0]), chunk(EVENTS[1] + EVENTS[2] + DONE)
    for read in (CHUNKED, first[:20], first[20:] + last[:9], last[9:] + b"0\r\n\r\n"):
        assert not ended.done()
        connection.data_received(read)
    await ended
    assert_whole(connection.answer())
    assert connection.answer().arrivals_s == [3.0, 4.0]


@pytest.mark.parametrize(
    "answer",
    [
        [chunked(b"".join(EVENTS) + DONE)],
        [chunked(*EVENTS, DONE, end=b"0;last\r\n\r\n")],
        [chunked(*EVENTS, DONE, end=b"0\r\nX-Trailer: a\r\n\r\n")],
        [chunked(*[each.replace(b"\n\n", b"\r\n\r\n") for each in (*EVENTS, DONE)])],
        [CHUNKED, b"5\r\n: a\r\n\r\n", *[chunk(each) for each in (*EVENTS, DONE)], b"0", b"\r", b"\n", b"\r", b"\n"],
        [HEAD + b"Content-Length: %d\r\n\r\n" % len(b"".join(EVENTS) + DONE), *EVENTS, DONE],
    ],
    ids=["one chunk", "extension", "trailer", "CRLF", "single bytes", "length"],
)
async def test_an_answer_may_be_framed_in_any_way(answer: Pieces) -> None:
    async with serving(answer, answer) as port:
        for each in await asked(port, 2):
            assert_whole(each)


async def test_an_answer_may_end_with_its_connection() -> None:
    async with serving([HEAD + b"\r\n", *EVENTS, DONE], [HEAD + b"\r\n", *EVENTS], close=True) as port:
        whole, cut_off = await asked(port, 2)
    assert_whole(whole)
    assert "ended the stream before the answer was complete" in cut_off.error


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([chunked(*EVENTS)[:-9]], "closed the connection before the answer was complete"),
        ([b"HTTP/1.1 200"], "closed the connection before the answer was complete"),
        ([b"SSH-2.0-OpenSSH\r\n"], "is not HTTP"),
        ([CHUNKED, b"zz\r\n"], "is not HTTP"),
        ([HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08"], "is compressed (gzip)"),
        (
            [b'HTTP/1.1 503 Busy\r\nContent-Length: 32\r\n\r\n{"error": {"message": "Busy."}}\n'],
            "The server refused (503): Busy.",
        ),
        ([b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"], "The server refused (500): no explanation"),
        ([chunked(event("a"), b'data: {"error": {"message": "Broke."}}\n\n')], "The server failed: Broke."),
    ],
)
async def test_what_is_no_answer_is_an_error_with_its_cause(answer: Pieces, error: str) -> None:
    async with serving(answer, close=True) as port:
        (found,) = await asked(port)
    assert error in found.error


async def test_an_error_that_is_null_is_none() -> None:
    events = [each.replace(b"data: {", b'data: {"error": null, ') for each in EVENTS]
    async with serving([chunked(*events, DONE)]) as port:
        assert_whole((await asked(port))[0])


async def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_ANSWER_BYTES", 1000)
    async with serving([CHUNKED, *[chunk(event("word")) for _ in range(200)]]) as port:
        (answer,) = await asked(port)
    assert "more than 1000 bytes" in answer.error


async def test_over_tls_the_answer_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = write_certificate(tmp_path, "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    whole = chunked(*EVENTS, DONE)
    async with serving([whole[:100], whole[100:]], [whole], tls=tls) as port:
        for answer in await asked(port, 2, "https"):
            assert_whole(answer)


async def test_a_server_that_is_not_trusted_gets_no_request(tmp_path: Path) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*write_certificate(tmp_path, "localhost"))
    async with serving([chunked(*EVENTS, DONE)], tls=tls) as port:
        (answer,) = await asked(port, scheme="https")
    assert "certificate" in answer.error.lower()
