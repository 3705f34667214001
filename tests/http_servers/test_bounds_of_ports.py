"""All four ports of a gateway and an engine have the bounds of connections and heads, which `protocol` tests by itself.

`docs/security.md` lists the bounds.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from server_processes import HttpServer, read_answer, read_to_end
from waiting import WAIT_LIMIT_S

from pagemill_servers.connection import MAX_HEADERS
from pagemill_servers.connection_limits import MAX_CONTROL_CONNECTIONS

PORTS = ["data", "control"]
PATH = b"/livez"


def url_of(http_server: HttpServer, port: str) -> str:
    return http_server.url if port == "data" else http_server.control_url


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=WAIT_LIMIT_S)


@contextlib.contextmanager
def connections(url: str, number: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(connect(url))) for _ in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize("port", PORTS)
def test_every_port_bounds_the_number_of_headers(http_server: HttpServer, port: str) -> None:
    with contextlib.closing(connect(url_of(http_server, port))) as connection:
        connection.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n" % PATH + b"a:\r\n" * MAX_HEADERS + b"\r\n")
        answer = read_answer(connection)
    assert answer is not None
    assert (answer.status, answer.error()["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("port", PORTS)
def test_every_port_answers_one_request_of_a_connection_at_a_time(http_server: HttpServer, port: str) -> None:
    """A client that sends many requests and reads nothing gets no more answers than its buffer takes."""
    asked = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    before = http_server.rss_bytes()
    with connections(url_of(http_server, port), 20) as opened:
        for each in opened:
            each.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                each.sendall(asked * 4000)
        assert http_server.rss_bytes() - before < 64 * 2**20
    http_server.serves()


def test_an_idle_connection_makes_room_on_a_control_port_that_has_its_most(http_server: HttpServer) -> None:
    """One address has half of the places of a port."""
    url = http_server.control_url
    with connections(url, 1) as (first,), connections(url, MAX_CONTROL_CONNECTIONS // 2) as opened:
        assert read_to_end(first) == b"", "the connection that has been idle for longest is closed"
        opened[-1].sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % PATH)
        answer = read_answer(opened[-1])
    assert answer is not None
    assert answer.status == http.client.OK
