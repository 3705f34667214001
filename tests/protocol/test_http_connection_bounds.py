"""What one connection may make a server hold or do: requests read ahead, heads, unread answers, and work for a client
that has left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import struct

import orjson
import pytest
from bounded_server import echo, error_of, exchange, serving
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from waiting import WAIT_LIMIT_S, eventually

from pagemill_protocol.errors import unauthorized
from pagemill_servers import connection
from pagemill_servers.connection_limits import FREE_HEAD_BYTES, ConnectionLimits
from pagemill_servers.direct import count_for_tenant, direct_response
from pagemill_servers.request_middleware import read_body

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSING_GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
LINE_BREAKS = b"\r\n\r\n0\r\n\r\n"


class Held:
    """An app that answers once `go` is set."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_left = 0
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        direct = direct_response(scope)
        assert direct is not None
        direct.on_disconnect = self.leave
        self.num_begun += 1
        await self.go.wait()
        await Response(b"ok")(scope, receive, send)

    def leave(self) -> None:
        self.num_left += 1


async def connected(port: int, receive_buffer_bytes: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    return client


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\nx-trailer: 1\r\n\r\n"


async def test_requests_are_read_one_at_a_time_and_answered_in_order() -> None:
    app = Held()
    async with serving(inner=app) as port, asyncio.timeout(WAIT_LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET * 500)
        await eventually(lambda: app.num_begun == 1)
        # Each turn of the loop would start another one.
        for _ in range(100):
            await asyncio.sleep(0)
        assert app.num_begun == 1
        app.go.set()
        for _ in range(500):
            await reader.readuntil(b"\r\n\r\nok")
        assert app.num_begun == 500
        writer.close()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
async def test_requests_are_separated_however_they_are_cut(size: int) -> None:
    bodies = [LINE_BREAKS, b"x" * 50, LINE_BREAKS * 4]
    data = b"".join(
        [
            GET,
            b"\r\n\r\n" + GET,
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(LINE_BREAKS), LINE_BREAKS),
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked\r\n\r\n" + chunked(*bodies),
            b"POST / HTTP/1.1\r\nhost: x\r\nupgrade: other\r\nconnection: upgrade\r\ncontent-length: 3\r\n\r\nabc",
            b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        ]
    )
    async with serving() as port:
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        answers = (await exchange(port, *pieces)).split(b"HTTP/1.1 200 OK")
    assert [each.partition(b"\r\n\r\n")[2] for each in answers[1:]] == [
        *(b"ok", b"ok", LINE_BREAKS, b"".join(bodies), b"abc", b"ok")
    ]


async def test_requests_are_separated_however_the_network_cuts_them() -> None:
    source = random.Random(1)
    async with serving() as port, asyncio.timeout(WAIT_LIMIT_S):
        for _ in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            data = (GET + b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"abc")) * 2
            cuts = [0, *sorted(source.sample(range(len(data)), 5)), len(data)]
            for start, end in itertools.pairwise(cuts):
                writer.write(data[start:end])
                await asyncio.sleep(0.001)
            for body in (b"ok", b"abc", b"ok", b"abc"):
                await reader.readuntil(b"\r\n\r\n" + body)
            writer.close()


async def test_a_client_that_reads_no_answer_is_not_answered_further_and_loses_its_connection() -> None:
    num_answered = 0

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_answered
        num_answered += 1
        await Response(b"x" * 4096)(scope, receive, send)

    limits = ConnectionLimits()
    async with serving(inner=large, limits=limits, write_timeout_s=0.3) as port:
        with contextlib.closing(await connected(port, 4096)) as client:
            sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(client, GET * 100_000))
            await eventually(lambda: limits.num_open == 1)
            await eventually(lambda: limits.num_open == 0, progress=lambda: num_answered)
            with contextlib.suppress(ConnectionError):  # it may all be in the kernels' buffers
                await sending
    assert 0 < num_answered < 500, "some 2 MB were answered although nothing was read"


async def test_the_rest_of_an_answer_that_is_not_read_keeps_no_closed_connection_open() -> None:
    async def huge(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"x" * 10_000_000)(scope, receive, send)

    limits = ConnectionLimits()
    async with serving(inner=huge, limits=limits, write_timeout_s=0.3) as port:
        with contextlib.closing(await connected(port, 4096)) as client:
            await asyncio.get_running_loop().sock_sendall(
                client, GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
            )
            await eventually(lambda: limits.num_open == 1)
            await eventually(lambda: limits.num_open == 0)


async def test_a_slow_reader_that_goes_on_reading_gets_a_long_answer() -> None:
    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"x" * 2_000_000)(scope, receive, send)

    async with serving(inner=large, write_timeout_s=1.5) as port, asyncio.timeout(WAIT_LIMIT_S):
        client = await connected(port, 32_768)
        loop, num_bytes = asyncio.get_running_loop(), 0
        await loop.sock_sendall(client, GET)
        with contextlib.closing(client):
            while num_bytes < 2_000_000:
                num_bytes += len(await loop.sock_recv(client, 65_536))
                await asyncio.sleep(0.04)


@pytest.mark.parametrize(("num_headers", "status"), [(100, 200), (101, 431)])
async def test_a_request_may_have_a_hundred_headers(num_headers: int, status: int) -> None:
    async with serving() as port:
        head = b"GET / HTTP/1.1\r\nconnection: close\r\n" + b"ab:\r\n" * (num_headers - 1) + b"\r\n"
        answer = await exchange(port, head)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert status == 200 or b"more than 100 headers" in answer


async def test_unfinished_heads_of_all_connections_have_one_budget() -> None:
    limits = ConnectionLimits(max_head_bytes=6000)
    head = b"GET / HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * (FREE_HEAD_BYTES - 300)
    many = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 80
    async with serving(limits=limits) as port, contextlib.AsyncExitStack() as stack:
        answers = []
        for _ in range(5):
            client = stack.enter_context(contextlib.closing(await connected(port)))
            await asyncio.get_running_loop().sock_sendall(client, many)
        await eventually(lambda: limits.num_head_bytes > 0)
        await eventually(lambda: limits.num_head_bytes <= 3000)
        answers.append(await exchange(port, head, b"\r\nconnection: close\r\n\r\n"))
    assert answers[0].startswith(b"HTTP/1.1 200 "), "a head below the free size is read"
    assert limits.num_head_bytes == 0


async def test_a_connection_without_room_for_its_unfinished_head_is_refused() -> None:
    limits = ConnectionLimits(max_head_bytes=2000)
    many = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 90
    async with serving(limits=limits) as port:
        assert error_of(await exchange(port, many)) == (503, "headers_over_budget")
    assert limits.num_head_bytes == 0


async def test_an_idle_connection_keeps_no_head() -> None:
    app, limits = Held(), ConnectionLimits()
    head = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 90 + b"\r\n"
    async with serving(inner=app, limits=limits) as port, asyncio.timeout(WAIT_LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        await eventually(lambda: app.num_begun == 1)
        assert limits.num_head_bytes > 0
        app.go.set()
        await reader.readuntil(b"\r\n\r\nok")
        assert limits.num_head_bytes == 0
        assert limits.num_open == 1
        writer.close()


async def test_without_memory_for_requests_read_ahead_the_connection_closes_after_the_answer() -> None:
    app, limits = Held(), ConnectionLimits(max_head_bytes=2000)
    async with serving(inner=app, limits=limits) as port, asyncio.timeout(WAIT_LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await eventually(lambda: app.num_begun == 1)
        writer.write(GET * 1000)
        await writer.drain()
        app.go.set()
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200 ") < 1000
        assert limits.num_head_bytes == 0
        writer.close()


@pytest.mark.parametrize(
    "framing",
    [
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding: gzip\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        b"transfer-encoding: chunked, chunked",
        b"transfer-encoding: x, chunked",
    ],
)
async def test_a_transfer_coding_other_than_chunked_is_refused(framing: bytes) -> None:
    async with serving() as port:
        answer = await exchange(port, b"POST / HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n" + chunked(b"abc") + GET)
    status, code = error_of(answer)
    assert status == 400
    assert code in ("unsupported_transfer_encoding", "invalid_http")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_the_refusal_of_a_transfer_coding_names_it_and_the_remedy() -> None:
    async with serving() as port:
        answer = await exchange(port, b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n")
    message = orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert "'gzip, chunked'" in message
    assert "Content-Encoding" in message


@pytest.mark.parametrize("framing", [b"content-length: 20000000", b"transfer-encoding: chunked"])
async def test_an_upload_that_is_refused_early_gets_its_answer_also_if_it_is_sent_to_its_end_first(
    framing: bytes,
) -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        raise unauthorized()

    async with serving(inner=refuse) as port:
        body = [b"x" * 100_000] * 200
        if b"chunked" in framing:
            body = [b"186a0\r\n%b\r\n" % each for each in body]
        answer = await exchange(port, b"POST / HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n", *body)
    assert error_of(answer) == (401, "invalid_api_key")
    assert b"\r\nwww-authenticate: Bearer" in answer


async def test_a_connection_stays_open_after_a_refusal_whose_body_has_arrived() -> None:
    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        raise unauthorized()

    async with serving(inner=refuse) as port, asyncio.timeout(WAIT_LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
            assert b" 401 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()


@pytest.mark.parametrize("num_bytes", [0, 1000, 70_000, 8_000_000])
@pytest.mark.parametrize("num_writes", [1, 2])
@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_is_noticed_whatever_it_has_sent(
    num_bytes: int, num_writes: int, reset: bool
) -> None:
    app = Held()
    async with serving(inner=app, max_body_bytes=10_000_000) as port, asyncio.timeout(WAIT_LIMIT_S):
        client = await connected(port)
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % num_bytes
        pieces = [head + b"x" * num_bytes] if num_writes == 1 else [head, b"x" * num_bytes]
        for piece in pieces:
            await asyncio.get_running_loop().sock_sendall(client, piece)
        await eventually(lambda: app.num_begun == 1)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        await eventually(lambda: app.num_left == 1)
        app.go.set()


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_is_noticed_however_much_it_has_sent_ahead(reset: bool) -> None:
    app, limits = Held(), ConnectionLimits()
    async with serving(inner=app, limits=limits) as port, asyncio.timeout(WAIT_LIMIT_S):
        client = await connected(port)
        await asyncio.get_running_loop().sock_sendall(client, GET * 20_000)
        await eventually(lambda: app.num_begun == 1)
        if reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        try:
            await eventually(lambda: app.num_left == 1)
        finally:
            app.go.set()
    assert app.num_begun == 1


async def test_the_connection_closes_after_the_answer_if_too_much_was_sent_ahead() -> None:
    app = Held()
    async with serving(inner=app) as port, asyncio.timeout(WAIT_LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET * 20_000)
        await writer.drain()
        await eventually(lambda: writer.transport.get_write_buffer_size() == 0)
        await asyncio.sleep(2 * connection.READ_AHEAD_WAIT_S)
        app.go.set()
        assert (await reader.read()).endswith(b"\r\n\r\nok")
        assert app.num_begun == 1
        writer.close()


async def test_a_client_that_sends_ahead_without_end_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_DISCARDED_BYTES", 1_000_000)
    app = Held()
    async with serving(inner=app) as port, asyncio.timeout(WAIT_LIMIT_S):
        with contextlib.closing(await connected(port)) as client, contextlib.suppress(ConnectionError):
            while not app.num_left:
                await asyncio.get_running_loop().sock_sendall(client, GET * 20_000)
        assert app.num_left == 1
        app.go.set()


async def test_a_client_that_leaves_is_noticed_while_its_answer_is_unread() -> None:
    left = asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        direct = direct_response(scope)
        assert direct is not None
        direct.on_disconnect = left.set
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 10_000_000, "more_body": True})
        await left.wait()

    async with serving(inner=stream) as port, asyncio.timeout(WAIT_LIMIT_S):
        client = await connected(port, 4096)
        with contextlib.closing(client):
            await asyncio.get_running_loop().sock_sendall(client, GET)
            await asyncio.get_running_loop().sock_recv(client, 100)
            client.shutdown(socket.SHUT_WR)
            await left.wait()


async def test_new_connections_close_the_oldest_idle_ones_at_the_limit() -> None:
    limits = ConnectionLimits(4)
    async with serving(limits=limits) as port, asyncio.timeout(WAIT_LIMIT_S):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await eventually(lambda: limits.num_open == 2)
        assert (await exchange(port, CLOSING_GET)).startswith(b"HTTP/1.1 200 ")
        with contextlib.suppress(ConnectionError):
            assert await idle[0][0].read() == b""
        for _, writer in idle:
            writer.close()


async def test_a_connection_beyond_the_limit_is_refused_where_all_are_busy() -> None:
    app, limits = Held(), ConnectionLimits(4)
    async with serving(inner=app, limits=limits) as port, asyncio.timeout(WAIT_LIMIT_S):
        busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in busy:
            writer.write(GET)
        await eventually(lambda: app.num_begun == 2)
        assert error_of(await exchange(port)) == (503, "too_many_connections")
        app.go.set()
        for reader, writer in busy:
            await reader.readuntil(b"\r\n\r\nok")
            writer.close()
        await eventually(lambda: limits.num_open == 0)


async def test_a_request_with_a_valid_key_counts_its_connection_for_its_tenant() -> None:
    app, limits = Held(), ConnectionLimits(4)

    async def keyed(scope: Scope, receive: Receive, send: Send) -> None:
        tenant = dict(scope["headers"]).get(b"tenant")
        if tenant is not None:
            count_for_tenant(scope, tenant.decode())
        await app(scope, receive, send)

    def get(tenant: bytes) -> bytes:
        return GET.replace(b"\r\n\r\n", b"\r\ntenant: " + tenant + b"\r\n\r\n")

    async with serving(inner=keyed, limits=limits) as port, asyncio.timeout(WAIT_LIMIT_S):
        busy = []
        for index in range(3):
            busy.append(await asyncio.open_connection("127.0.0.1", port))
            busy[-1][1].write(get(b"one" if index < 2 else b"two"))
            await eventually(lambda index=index: app.num_begun == index + 1)
        refused = get(b"one").replace(b"host: x", b"connection: close")
        assert error_of(await exchange(port, refused)) == (503, "too_many_connections")
        app.go.set()
        for _, writer in busy:
            writer.close()


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
async def test_two_headers_with_credentials_are_refused(name: bytes) -> None:
    async with serving() as port:
        head = b"GET / HTTP/1.1\r\nconnection: close\r\n" + (name + b": Bearer a\r\n") * 2 + b"\r\n"
        answer = await exchange(port, head)
    assert error_of(answer)[0] == 400
    assert b"more than one header " + name in answer


async def test_a_body_of_small_chunks_is_parsed_over_many_turns_of_the_loop() -> None:
    """Otherwise a hundred connections, each with what one read returns, delay all others for seconds."""
    num_turns = asyncio.Queue[int]()

    async def count_turns(scope: Scope, receive: Receive, send: Send) -> None:
        turns, reading = 0, asyncio.ensure_future(read_body(receive))
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
        await num_turns.put(turns)
        await Response(await reading)(scope, receive, send)

    body = random.Random(1).randbytes(60_000)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    small = head + chunked(*(body[i : i + 1] for i in range(len(body))))
    async with serving(inner=count_turns) as port, asyncio.timeout(WAIT_LIMIT_S):
        answer = await exchange(port, small + CLOSING_GET)
        turns = await num_turns.get()
    assert answer.count(body) == 1, "it arrives whole"
    assert answer.count(b"HTTP/1.1 200") == 2, "what is behind it is read"
    assert turns >= len(small) / connection.CHUNKED_PIECE_BYTES


@pytest.mark.slow
async def test_reading_stops_while_small_chunks_are_not_read_by_the_app() -> None:
    go = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await echo(scope, receive, send)

    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    sent = head + chunked(*[b"x"] * 2_000_000)
    async with serving(inner=slow, max_body_bytes=3_000_000) as port, asyncio.timeout(WAIT_LIMIT_S):
        client, num_sent = await connected(port), 0
        with client:
            for _ in range(200):  # turns, in which a server that does not stop would take all
                with contextlib.suppress(BlockingIOError):
                    num_sent += client.send(sent[num_sent : num_sent + 1_000_000])
                await asyncio.sleep(0)
            assert num_sent < len(sent), "the rest waits at the client"
            go.set()
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, sent[num_sent:])
            answer = b""
            while data := await loop.sock_recv(client, 65536):
                answer += data
    assert answer.endswith(b"x" * 2_000_000)
