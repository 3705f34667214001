"""Both HTTP servers with invalid HTTP: two lengths, broken chunks, odd bytes, endless headers and bodies."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_http import FORBIDDEN, HEADER
from server_processes import GOOD, HttpServer, error_of, examples, read_answer, read_to_end, request, without_a_hang

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: server\r\nTransfer-Encoding: chunked\r\n\r\n"
ODD_LINES = {
    "an address of another server": b"GET http://169.254.169.254/latest/meta-data HTTP/1.1",
    "no address": b"OPTIONS * HTTP/1.1",
    "a tunnel": b"CONNECT 169.254.169.254:80 HTTP/1.1",
    "a host in the path": b"GET //169.254.169.254/ HTTP/1.1",
    "brackets in the path": b"GET //[ HTTP/1.1",
    "escaped bytes": b"GET /v1/models/%ff%00%0d%0aX-Evil:%201 HTTP/1.1",
    "raw bytes": b"GET /v1/models/\xff\xfe HTTP/1.1",
    "raw bytes behind the question mark": b"GET /nowhere?\xff HTTP/1.1",
    "way up": b"GET /v1/models/../../etc/passwd HTTP/1.1",
    "slashes too many": b"GET /version// HTTP/1.1",
    "an unknown method": b"BREW /v1/models HTTP/1.1",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM",
}


@pytest.mark.parametrize("framing", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_a_request_with_ambiguous_framing_is_refused_and_closes_the_connection(
    http_server: HttpServer, framing: bytes
) -> None:
    """Bytes that follow on the connection are never read as a request."""
    smuggled = b"GET /version HTTP/1.1\r\nHost: server\r\n\r\n"
    with contextlib.closing(http_server.connect()) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: server\r\n" + framing + smuggled)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head
    assert b"x-request-id: " in head
    error_of(body)  # fails if anything follows
    http_server.serves()


@pytest.mark.parametrize("line", ODD_LINES.values(), ids=ODD_LINES.keys())
def test_odd_request_lines_are_refused_in_the_error_format(http_server: HttpServer, line: bytes) -> None:
    answer = http_server.exchange(line + b"\r\nHost: server\r\nConnection: close\r\n\r\n")
    assert answer is not None
    assert answer.status in (400, 404, 405), answer
    answer.error()
    assert b"evil" not in str(answer.headers).lower().encode()


@pytest.mark.parametrize("host", [b"[::1", b"a b", b"evil.example/x?", b"a:99999999", b"\xff", b""])
def test_a_foreign_host_is_refused_without_a_redirect(http_server: HttpServer, host: bytes) -> None:
    for path in (b"/nowhere", b"/nowhere/", b"/nowhere?x=%ff"):
        answer = http_server.exchange(
            b"POST " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: 0\r\n\r\n"
        )
        assert answer is not None
        assert (answer.status, answer.error()["code"]) in ((403, "foreign_host"), (404, "not_found"))
        assert "location" not in answer.headers


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c", b"TLS/1.0"])
def test_a_client_that_offers_another_protocol_is_served_over_http_1_1(http_server: HttpServer, upgrade: bytes) -> None:
    answer = http_server.exchange(request(headers=[(b"Connection", b"Upgrade"), (b"Upgrade", upgrade)]))
    assert answer is not None
    assert answer.status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_of_http_1_0_is_served_without_chunks(http_server: HttpServer, stream: bool) -> None:
    with contextlib.closing(http_server.connect()) as connection:
        connection.sendall(request({**GOOD, "stream": stream}).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert body.startswith(b"data: {") and body.endswith(b"[DONE]\n\n") if stream else json.loads(body)["choices"]


def test_endless_chunk_extensions_are_refused(http_server: HttpServer) -> None:
    answer = http_server.exchange([CHUNKED, b"2;", *[b"a" * 8192] * 64, b"\r\n{}\r\n0\r\n\r\n"])
    assert answer is None or answer.status == 431


def test_a_body_in_tiny_chunks_is_served(http_server: HttpServer) -> None:
    body = b'{"model":"tiny","prompt":"hello","max_tokens":2,"ignore_eos":true}'
    chunks = b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in body)
    answer = http_server.exchange([CHUNKED, chunks, b"0\r\nX-Trailer: 1\r\n\r\n"])
    assert answer is not None
    assert answer.status == 200


def test_a_body_that_never_ends_gets_413(http_server: HttpServer) -> None:
    with contextlib.closing(http_server.connect()) as connection:
        connection.sendall(CHUNKED)
        with contextlib.suppress(ConnectionError):
            for _ in range(80):
                connection.sendall(b"100000\r\n" + b" " * 0x100000 + b"\r\n")
        answer = read_answer(connection)
    assert answer is None or (answer.status, answer.error()["code"]) == (413, "request_too_large")
    http_server.serves()


def test_hundreds_of_slow_senders_delay_no_other_client(http_server: HttpServer) -> None:
    """They send half of the headers, headers without a body, or nothing; others are served meanwhile."""
    beginnings = [
        b"",
        b"\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: do",
        b"POST /v1/completions HTTP/1.1\r\nHost: server\r\nContent-Length: 1000\r\n\r\n",
        CHUNKED + b"1\r\n{\r\n",
    ]
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(contextlib.closing(http_server.connect())) for _ in range(300)]
        for index, connection in enumerate(slow):
            connection.sendall(beginnings[index % len(beginnings)])
        for _ in range(5):
            for index, connection in enumerate(slow):
                if index % len(beginnings) in (2, 3):
                    connection.sendall(b"o")
            http_server.serves()
    http_server.serves()


@examples(40)
@given(st.lists(HEADER, max_size=6), st.sampled_from([GOOD, b"", b"{}", b"{", b"\x00\xff"]))
def test_any_headers_are_served_or_refused_in_the_error_format(
    http_servers: list[HttpServer], headers: list[tuple[bytes, bytes]], body: Any
) -> None:
    for http_server in http_servers:
        raw = request(body, headers=[*headers, (b"Connection", b"close")])
        answer = without_a_hang(partial(http_server.exchange, raw))
        if answer is not None:  # otherwise the connection is closed, because the rest is not read as a request
            answer.check()
        if {name for name, _ in headers} & {b"Transfer-Encoding", b"Content-Length"}:
            assert answer is not None
            assert answer.status == 400, "the helper adds a length of its own"
        http_server.serves()
