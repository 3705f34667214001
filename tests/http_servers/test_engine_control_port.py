"""An engine's control port: unauthenticated clients learn nothing, and authenticated ones get well-formed errors.

The engine is a separate one with a simulated device, because the tests put it to sleep and drain it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from light_model import light_model
from odd_http import FORBIDDEN, HEADER
from server_processes import (
    GOOD,
    MAX_MODEL_LEN,
    MIB,
    MODEL,
    Answer,
    HttpServer,
    error_of,
    examples,
    read_answer,
    read_to_end,
    request,
    start_http_server,
    without_a_hang,
)
from waiting import SOON_S, WAIT_LIMIT_S, wait_until
from wrong_keys import wrong_keys

from pagemill_protocol.versions import protocol_headers

TOKEN = "control-secret"
(VERSION,) = (f"{name}: {value}".encode() for name, value in protocol_headers().items())
RIGHT = (b"Authorization", b"Bearer " + TOKEN.encode())
OPEN = ["/livez", "/readyz", "/metrics", "/version"]
GETS = ["/internal/state", "/internal/bundle", "/is_sleeping"]
WAITING = ["/internal/drain", "/sleep", "/wake_up"]
POSTS = [*WAITING, "/internal/drained"]
GUARDED = [*(("GET", path) for path in GETS), *(("HEAD", path) for path in GETS), *(("POST", path) for path in POSTS)]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"]
ENGINE = {
    "model": light_model(),
    "served_names": [MODEL],
    "null_runner": True,
    "num_kv_blocks": 1024,
    "max_model_len": MAX_MODEL_LEN,
    "step_time": {"knots_tokens": [1, 512], "knot_ms": [2.0, 2.0]},
}


def start(tmp_path_factory: pytest.TempPathFactory, name: str) -> HttpServer:
    server = {"port": 0, "control_port": 0, "internal_token": TOKEN, "body_timeout_s": 2.0}
    server |= {"idle_connection_timeout_s": 1} if name == "idle" else {}
    values = {"engine": ENGINE, "server": server}
    return start_http_server(name, "pagemill_engine.server", tmp_path_factory.mktemp(name), values)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    http_server = start(tmp_path_factory, "controlled")
    yield http_server
    http_server.stop()


@pytest.fixture(scope="module")
def control(engine: HttpServer) -> Iterator[HttpServer]:
    """Return the same process by its control port."""
    http_server = replace(engine, url=engine.control_url)
    yield http_server
    http_server.client.close()


@pytest.fixture
def drainable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Start an engine for the drain, which cannot be undone."""
    http_server = start(tmp_path_factory, "drainable")
    yield http_server
    http_server.stop()


def ask(
    control: HttpServer, method: str, path: str, *headers: tuple[bytes, bytes], query: bytes = b"", body: bytes = b""
) -> Answer | None:
    """Return one answer over a new connection, or None if the server closed without one."""
    target = f"{path}?".encode() + query if query else path.encode()
    raw = request(body, method=method, path="TARGET", headers=[*headers, (b"Connection", b"close")])
    with contextlib.closing(control.connect()) as connection:
        connection.sendall(raw.replace(b"TARGET", target, 1))
        return read_answer(connection, method)


def wakes(control: HttpServer, engine: HttpServer) -> None:
    """Check that the engine can be woken and then serves, whatever was requested before."""
    woken = ask(control, "POST", "/wake_up", RIGHT, query=b"wait_s=30")
    assert woken is not None
    assert (woken.status, json.loads(woken.body)["state"]) == (200, "awake"), woken
    engine.serves()


# -- clients without the token -----------------------------------------------------------------------------------------

QUERY = st.sampled_from([b"", b"wait_s=0", b"level=1", b"level=2&wait_s=x", b"token=" + TOKEN.encode()])


@examples(60)
@given(wrong_keys(TOKEN) | st.none(), st.sampled_from(GUARDED), QUERY, st.sampled_from([b"", b"{}", b"\xff" * 5000]))
def test_without_the_token_every_route_is_401(
    control: HttpServer,
    engine: HttpServer,
    authorization: bytes | None,
    route: tuple[str, str],
    query: bytes,
    body: bytes,
) -> None:
    method, path = route
    headers = [(b"Authorization", authorization)] if authorization is not None else []
    answer = without_a_hang(lambda: ask(control, method, path, *headers, query=query, body=body))
    assert answer is not None
    assert answer.status == 401
    if method != "HEAD":
        assert answer.error()["code"] == "invalid_api_key"
    engine.serves()


def test_only_probes_and_scrapes_need_no_token(control: HttpServer) -> None:
    for path in OPEN:
        assert (answer := ask(control, "GET", path)) is not None
        assert answer.status == 200
    clients = ["/v1/models", "/v1/completions", "/tokenize", "/internal/link", "/openapi.json", "/", "//livez"]
    for path in clients:
        for method in ("GET", "POST", "PUT"):
            assert (answer := ask(control, method, path, RIGHT)) is not None
            assert (answer.status, answer.error()["code"]) == (404, "not_found"), path


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_get_405_with_the_allowed_ones(control: HttpServer, method: str) -> None:
    for path in (*OPEN, *GETS, *POSTS):
        allowed = {"POST"} if path in POSTS else {"GET", "HEAD"}
        if method in allowed:
            continue
        answer = ask(control, method, path, RIGHT)
        assert answer is not None
        assert (answer.status, set(answer.headers["allow"].split(", "))) == (405, allowed), path
        if method != "HEAD":
            assert answer.error()["code"] == "method_not_allowed"


# -- clients with the token --------------------------------------------------------------------------------------------

SHORT_WAITS = ["0", "0.0", "1e-9", "0.05", "+0", "-0", "00", " 0 "]
WRONG_WAITS = ["", " ", "nan", "inf", "-inf", "-1", "60.1", "1e999", "x", "0x1", "1,5", "1 2", "\x00", "٣x", "9" * 5000]


def is_wrong(wait_s: str) -> bool:
    try:
        return not 0 <= float(wait_s) <= 60
    except ValueError:
        return True


WRONG_WAIT = st.sampled_from(WRONG_WAITS) | st.text(max_size=20).filter(is_wrong)
LEVELS = st.sampled_from(["0", "1", "2", "01", "", "1.0", "-1", "١"]) | st.text(max_size=30)
ODD = st.sampled_from([b"level=", b"wait_s", b"=", b"&&", b"%", b"%ff=%00", b"a[b]=c", b"#x"])
PRINTED = st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f")
GATEWAY = st.sampled_from([b"", b"gw", b"g" * 60_000]) | st.text(PRINTED, max_size=60).map(
    lambda name: name.encode("latin-1")
)
BODIES = st.sampled_from([b"", b"{}", b"{", b"\xff\x00", b"[" * 20_000]) | st.binary(max_size=200)
DRAINS = st.tuples(st.just("/internal/drain"), st.fixed_dictionaries({"wait_s": WRONG_WAIT}))
SLEEPS = st.tuples(
    st.sampled_from(["/sleep", "/wake_up"]),
    st.fixed_dictionaries({"wait_s": st.sampled_from(SHORT_WAITS) | WRONG_WAIT}, optional={"level": LEVELS}),
)
OTHERS = st.tuples(
    st.sampled_from(["/internal/drained", "/internal/bundle", "/is_sleeping", *OPEN]),
    st.dictionaries(st.sampled_from(["wait_s", "level", "name"]), st.text(max_size=10), max_size=2),
)
ASKED = st.tuples(DRAINS | SLEEPS | OTHERS, st.lists(ODD, max_size=3), GATEWAY, BODIES)


def query_of(pairs: dict[str, str], odd: list[bytes]) -> bytes:
    return b"&".join([*(f"{name}={quote(value)}".encode() for name, value in pairs.items()), *odd])


@examples(60)
@given(st.lists(ASKED, min_size=1, max_size=5))
def test_any_request_with_the_token_is_carried_out_or_refused_in_the_error_format(
    control: HttpServer, engine: HttpServer, asked: list[Any]
) -> None:
    """Requests come in any order: the engine sleeps and wakes meanwhile."""
    for (path, pairs), odd, gateway, body in asked:
        method, query = "POST" if path in POSTS else "GET", query_of(pairs, odd)
        headers = [RIGHT, (b"X-Pagemill-Gateway", gateway)]
        answer = without_a_hang(partial(ask, control, method, path, *headers, query=query, body=body))
        assert answer is not None
        if path in WAITING and is_wrong(pairs["wait_s"]):
            assert (answer.status, answer.error()["param"] in ("wait_s", "level")) == (400, True)
        elif path == "/sleep" and answer.status == 503:  # the engine is just waking up
            assert answer.error()["code"] == "not_asleep"
            assert int(answer.headers["retry-after"]) >= 1
        elif path == "/readyz" and answer.status == 503:
            assert json.loads(answer.body)["phase"] in ("sleeping", "waking")
        else:
            answer.check()
    wakes(control, engine)


def test_an_engine_that_accepted_to_sleep_does_so(control: HttpServer, engine: HttpServer) -> None:
    """This also holds if the request comes while it wakes, and if no caller waits."""

    def asked(method: str, path: str, query: bytes = b"") -> Answer:
        answer = without_a_hang(lambda: ask(control, method, path, RIGHT, query=query))
        assert answer is not None
        return answer

    def state() -> str:
        return str(json.loads(asked("GET", "/is_sleeping").body)["state"])

    for _ in range(20):
        asked("POST", "/wake_up", b"wait_s=0")
        answer = asked("POST", "/sleep", b"wait_s=0")
        if answer.status == 503:
            assert answer.error()["code"] == "not_asleep"
            wait_until(lambda: state() == "awake")
            assert asked("POST", "/sleep", b"wait_s=0").status in (200, 202)
        else:
            assert json.loads(answer.body)["state"] in ("falling_asleep", "asleep")
        wait_until(lambda: state() == "asleep")
    wakes(control, engine)


@examples(40)
@given(st.lists(HEADER, max_size=6), st.sampled_from([*GUARDED[1:], ("GET", "/metrics")]), BODIES)
def test_any_headers_on_the_control_port_are_answered_or_refused_in_the_error_format(
    control: HttpServer, engine: HttpServer, headers: list[tuple[bytes, bytes]], route: tuple[str, str], body: bytes
) -> None:
    method, path = route
    query = b"wait_s=no" if path == "/internal/drain" else b""
    answer = without_a_hang(partial(ask, control, method, path, *headers, RIGHT, query=query, body=body))
    if answer is not None and method != "HEAD":
        answer.check()
    wakes(control, engine)


@pytest.mark.parametrize("framing", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_broken_framing_on_the_control_port_is_refused_and_closes_the_connection(
    control: HttpServer, engine: HttpServer, framing: bytes
) -> None:
    """This also holds if the answer, which needs no body, was sent before the fault."""
    smuggled = b"GET /version HTTP/1.1\r\nHost: server\r\n\r\n"
    asked = b"POST /wake_up HTTP/1.1\r\nHost: server\r\n" + b": ".join(RIGHT) + b"\r\n"
    with contextlib.closing(control.connect()) as connection:
        connection.sendall(asked + framing + smuggled)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    reported = json.loads(body)  # fails if anything follows
    if not head.startswith(b"HTTP/1.1 200 "):
        assert head.startswith(b"HTTP/1.1 400 ")
        assert error_of(body)
    assert "version" not in reported
    engine.serves()


# -- the state stream --------------------------------------------------------------------------------------------------


def num_streams(control: HttpServer) -> float:
    """Return the number of open streams; the metric does not exist before the first one."""
    answer = ask(control, "GET", "/metrics")
    assert answer is not None
    lines = [line for line in answer.body.decode().splitlines() if line.startswith("pagemill_engine_state_streams")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def head_of(method: str, *headers: tuple[bytes, bytes]) -> bytes:
    """Return the headers without the empty line that ends them."""
    given = (b": ".join(pair) for pair in headers)
    lines = [f"{method} /internal/state HTTP/1.1".encode(), b"Host: server", VERSION, *given]
    return b"\r\n".join([*lines, b""])


def begun(connection: socket.socket) -> bytes:
    """Return the first bytes of the answer's body."""
    received = b""
    while not received.partition(b"\r\n\r\n")[2]:
        received += (piece := connection.recv(65536))
        assert piece, received
    assert received.startswith(b"HTTP/1.1 200 "), received
    return received.partition(b"\r\n\r\n")[2]


def test_a_head_request_for_the_state_stream_ends_and_leaves_the_connection_usable(control: HttpServer) -> None:
    with contextlib.closing(control.connect()) as connection:
        connection.sendall(head_of("HEAD", RIGHT) + b"\r\n")
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += (byte := connection.recv(1))
            assert byte, head
        assert head.startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: server\r\n\r\n")
        answer = read_answer(connection)
    assert answer is not None
    assert set(json.loads(answer.body)) == {"version", "protocol", "compute"}
    assert num_streams(control) == 0


@examples(15)
@given(st.lists(GATEWAY, min_size=1, max_size=12), st.sampled_from([b"\r\n", b"Content-Length: 2\r\n\r\n{}"]))
def test_readers_of_any_name_get_the_state_and_leave_no_state_behind(
    control: HttpServer, engine: HttpServer, names: list[bytes], body: bytes
) -> None:
    with contextlib.ExitStack() as stack:
        for name in names:
            connection = stack.enter_context(contextlib.closing(control.connect()))
            connection.sendall(head_of("GET", RIGHT, (b"X-Pagemill-Gateway", name)) + body)
            assert begun(connection)
        assert num_streams(control) == len(names)
    wait_until(lambda: num_streams(control) == 0)
    engine.serves()


@pytest.mark.parametrize(
    ("framing", "status"),
    [
        (b"Content-Length: 10\r\n\r\n{", 408),
        (b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 408),
        (b"Content-Length: 999999999999\r\n\r\n{", 413),
    ],
)
def test_a_reader_with_an_endless_request_body_gets_no_stream(control: HttpServer, framing: bytes, status: int) -> None:
    """Its end would not be noticed, and a drain would wait for it."""
    with contextlib.closing(control.connect()) as connection:
        connection.sendall(head_of("GET", RIGHT) + framing)
        answer = read_answer(connection)
    assert answer is not None
    assert answer.error()
    assert answer.status == status
    wait_until(lambda: num_streams(control) == 0)


def test_readers_that_do_not_read_use_no_memory_and_do_not_block_others(
    control: HttpServer, engine: HttpServer
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            connection = stack.enter_context(contextlib.closing(control.connect(receive_buffer_bytes=4096)))
            connection.sendall(head_of("GET", RIGHT) + b"\r\n")
        wait_until(lambda: num_streams(control) == 100)
        engine.serves()
        before = engine.rss_bytes()
        for number in range(200):
            assert engine.post({**GOOD, "prompt": f"{number} " * 50}).status == 200
        assert engine.rss_bytes() - before < 64 * MIB
    wait_until(lambda: num_streams(control) == 0)


# -- drain -------------------------------------------------------------------------------------------------------------


def test_a_drain_tolerates_any_number_of_invalid_acknowledgements_and_ends_the_service(drainable: HttpServer) -> None:
    control = replace(drainable, url=drainable.control_url)

    def asked(path: str, query: bytes, *headers: tuple[bytes, bytes]) -> Answer:
        answer = without_a_hang(lambda: ask(control, "POST", path, RIGHT, *headers, query=query))
        assert answer is not None
        return answer

    @examples(20)
    @given(WRONG_WAIT)
    def refuses(wait_s: str) -> None:
        refused = asked("/internal/drain", query_of({"wait_s": wait_s}, []))
        assert (refused.status, refused.error()["param"]) == (400, "wait_s")

    @examples(40)
    @given(st.sampled_from(["/sleep", "/wake_up", "/internal/drained"]), GATEWAY)
    def goes_on(path: str, gateway: bytes) -> None:
        answer = asked(path, b"wait_s=0", (b"X-Pagemill-Gateway", gateway))
        if path == "/sleep":
            assert (answer.status, answer.error()["code"]) == (503, "draining")
        else:
            assert answer.status in (200, 204)

    refuses()
    drainable.serves()
    for _ in range(3):
        drained = asked("/internal/drain", b"wait_s=0")
        assert (drained.status, json.loads(drained.body)["draining"]) == (200, True)
    refuses()
    goes_on()
    late = drainable.post(GOOD)
    assert (late.status, late.error()["code"]) == (503, "draining")
    assert (alive := ask(control, "GET", "/livez")) is not None
    assert alive.status == 200
    control.client.close()


def test_an_idle_connection_is_closed_after_the_time_of_the_setting(tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = start(tmp_path_factory, "idle")
    try:
        host, port = engine.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_LIMIT_S) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
            began_s = time.monotonic()
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
            assert answer.startswith(b"HTTP/1.1 200")
            assert time.monotonic() - began_s < SOON_S, "the server closes it, much earlier than after 120 s"
    finally:
        engine.stop()
