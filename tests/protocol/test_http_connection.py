"""A real server on loopback answers endless, slow or broken headers with an error and closes the connection."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
from bounded_server import echo, error_of, exchange, serving
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from waiting import WAIT_LIMIT_S

from pagemill_servers.auth import is_loopback
from pagemill_servers.direct import direct_response


async def test_an_endless_header_is_refused_at_the_limit() -> None:
    async with serving() as port:
        answer = await exchange(port, b"GET / HTTP/1.1\r\nhost: x\r\nx-big: ", *[b"a" * 4096] * 3)
        assert error_of(answer) == (431, "headers_too_large")


async def test_a_client_over_ipv4_has_its_address_at_a_socket_of_both_families() -> None:
    async def show_client(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(f"{scope['client'][0]} {is_loopback(scope)}")(scope, receive, send)

    async with serving(inner=show_client, host="::") as port:
        answer = await exchange(port, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer.endswith(b"127.0.0.1 True")


async def test_an_endless_url_is_refused_at_the_limit() -> None:
    async with serving() as port:
        assert error_of(await exchange(port, b"GET /", *[b"a" * 4096] * 3))[0] == 431


async def test_large_headers_in_one_piece_are_refused() -> None:
    async with serving() as port:
        answer = await exchange(port, b"GET / HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 9000 + b"\r\n\r\n", end=True)
        assert error_of(answer)[0] == 431


async def test_slow_headers_are_refused() -> None:
    async with serving(header_timeout_s=0.2) as port:
        assert error_of(await exchange(port, b"GET / HTTP/1.1\r\nhost:")) == (408, "timeout")


async def test_a_silent_connection_is_closed_without_an_answer() -> None:
    async with serving(header_timeout_s=0.2) as port:
        assert await exchange(port) == b""


async def test_a_slow_second_request_on_a_connection_is_refused() -> None:
    async with serving(header_timeout_s=0.2) as port:
        answer = await exchange(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"GET / HTTP/1.1\r\nho")
        first, second = answer[: answer.index(b"HTTP/1.1 408")], answer[answer.index(b"HTTP/1.1 408") :]
        assert b"200 OK" in first
        assert error_of(second) == (408, "timeout")


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"]
)
async def test_bytes_that_are_not_http_get_a_400_in_the_error_format(garbage: bytes) -> None:
    async with serving() as port:
        assert error_of(await exchange(port, garbage)) == (400, "invalid_http")


async def test_endless_trailers_close_the_connection() -> None:
    async with serving() as port:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
        answer = await exchange(port, head, b"x-trailer: ", *[b"a" * 4096] * 500)
        assert b"200 OK" not in answer


async def test_trailers_do_not_become_headers() -> None:
    async with serving() as port:
        request = (
            b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\nhi\r\n0\r\nauthorization: Bearer forged\r\n\r\n"
        )
        assert (await exchange(port, request)).endswith(b"\r\n\r\nhi")


async def test_a_body_in_one_byte_chunks_is_served() -> None:
    async with serving() as port:
        head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        answer = await exchange(port, head, b"1\r\nx\r\n" * 20_000, b"0\r\n\r\n")
        assert answer.endswith(b"x" * 20_000)


async def test_a_body_that_is_too_large_gets_an_answer_and_no_reset() -> None:
    async with serving() as port:
        head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 5000000\r\n\r\n"
        assert error_of(await exchange(port, head, *[b"x" * 100_000] * 50)) == (413, "request_too_large")


async def test_ordinary_requests_reuse_a_connection() -> None:
    async with serving() as port:
        request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        last = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        assert (await exchange(port, request, request, last)).count(b"200 OK") == 3


@pytest.mark.parametrize("chunks", [b"zz\r\n", b"1\r\nx\r\nzz\r\n", b"1\r\nxyz", b"-1\r\n"])
async def test_a_body_with_broken_framing_gets_a_400_in_the_error_format(chunks: bytes) -> None:
    """The answer has not begun; a handler that reads the body sees a disconnect."""
    async with serving() as port:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        assert error_of(await exchange(port, head, chunks)) == (400, "invalid_http")


async def test_a_refusal_before_the_app_has_an_id_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagemill_servers.connection")
    async with serving() as port:
        answer = await exchange(port, b"GARBAGE of-a-client\r\n\r\n")
    identity = re.findall(rb"x-request-id: ([0-9a-f]{32})\r\n", answer)[0].decode()
    (line,) = caplog.messages
    assert line == f"request {identity}: 400 invalid_http before it was read"


async def test_a_refusal_within_a_body_has_the_id_of_its_request() -> None:
    begun = asyncio.Event()

    async def read(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await echo(scope, receive, send)

    async with serving(inner=read) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\ntransfer-encoding: chunked\r\n\r\n")
        await begun.wait()
        writer.write(b"zz\r\n")
        answer = await reader.read()
        writer.close()
    assert error_of(answer) == (400, "invalid_http")
    assert b"\r\nx-request-id: mine\r\n" in answer


@pytest.mark.parametrize("rest", [b"GARBAGE\r\n\r\n", b"\x00\xff", b"}"])
@pytest.mark.parametrize("num_requests", [1, 2])
async def test_requests_before_garbage_are_answered_before_the_refusal(num_requests: int, rest: bytes) -> None:
    """RFC 9112, 9.3.2: answers come in the order of the requests."""
    arrived, held = asyncio.Event(), asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        arrived.set()
        await held.wait()
        await echo(scope, receive, send)

    async with serving(inner=wait) as port:
        answering = asyncio.create_task(exchange(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * num_requests + rest))
        await arrived.wait()
        held.set()
        answer = await answering
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"] * num_requests + [b"400"]


async def test_a_request_sees_its_client_disconnect_although_another_is_pipelined() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()
        hears = asyncio.ensure_future(receive())
        while not hears.done():
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0.01)
        assert hears.result()["type"] == "http.disconnect"
        left.set()

    async with serving(inner=stream) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        await begun.wait()
        writer.transport.abort()
        async with asyncio.timeout(WAIT_LIMIT_S):
            await left.wait()


async def test_line_breaks_do_not_keep_an_idle_connection_open() -> None:
    async with serving(header_timeout_s=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nend")
        async with asyncio.timeout(WAIT_LIMIT_S):
            await reader.readuntil(b"end")
            writer.write(b"\r\n")
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("length", [None, b"4"])
async def test_an_answer_to_http_1_0_is_not_chunked_and_closes_the_connection(length: bytes | None) -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [] if length is None else [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in (b"ab", b"", b"cd"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with serving(inner=stream) as port:
        old = await exchange(port, b"GET / HTTP/1.0\r\n\r\n")
        new = await exchange(port, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    head, _, body = old.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"abcd"
    assert (b"transfer-encoding: chunked" in new) == (length is None)


@pytest.mark.parametrize("offer", [b"websocket", b"h2c", b"TLS/1.0, HTTP/2.0"])
@pytest.mark.parametrize(
    "body", [b"content-length: 3\r\n\r\nxyz", b"transfer-encoding: chunked\r\n\r\n3\r\nxyz\r\n0\r\n\r\n"]
)
async def test_an_offer_to_upgrade_is_ignored_and_the_body_is_read(offer: bytes, body: bytes) -> None:
    """Java's client offers h2c with each POST."""
    head = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: " + offer + b"\r\n"
    last = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with serving() as port:
        for pieces in ([head + body], [head, body], [*(bytes([byte]) for byte in head + body)]):
            answer = await exchange(port, *pieces, *pieces, last)
            assert answer.count(b"HTTP/1.1 200 OK") == 3
            assert answer.count(b"xyz") == 2


async def test_thousands_of_concurrent_upgrade_offers_are_ordinary_requests() -> None:
    one = b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"
    last = b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n"
    async with serving() as port:
        assert (await exchange(port, one * 3000 + last)).count(b"200 OK") == 3001


async def stream_held(scope: Scope, receive: Receive, send: Send) -> None:
    """Send two chunks: the first with the headers, the last with the end."""
    direct = direct_response(scope)
    assert direct is not None
    direct.cork()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    assert direct.write_now(b"first")
    direct.uncork()
    direct.cork()
    assert direct.write_now(b"last")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
async def test_held_chunks_are_sent_together_before_the_end_and_the_next_answer(close: bytes) -> None:
    async with serving(inner=stream_held) as port:
        request = b"GET / HTTP/1.1\r\nhost: x\r\n" + close + b"\r\n"
        answer = await exchange(port, request + b"no http\r\n\r\n" * (not close))
        body = answer.partition(b"\r\n\r\n")[2]
        assert body.startswith(b"5\r\nfirst\r\n4\r\nlast\r\n0\r\n\r\n")
        rest = body.partition(b"0\r\n\r\n")[2]
        assert rest == b"" if close else error_of(rest) == (400, "invalid_http")


async def test_a_held_chunk_is_sent_soon_if_nothing_follows() -> None:
    got_it = asyncio.Event()

    async def hold_on(scope: Scope, receive: Receive, send: Send) -> None:
        direct = direct_response(scope)
        assert direct is not None
        direct.cork()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert direct.write_now(b"first")
        await got_it.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with serving(inner=hold_on) as port, asyncio.timeout(WAIT_LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"5\r\nfirst\r\n")
        got_it.set()
        assert await reader.readuntil(b"0\r\n\r\n") == b"0\r\n\r\n"
        writer.close()
