"""The request middleware: every refusal has OpenAI's format, everything is bounded, and streams are unchanged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from waiting import WAIT_LIMIT_S

from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import CompletionRequest
from pagemill_protocol.errors import PagemillError
from pagemill_servers import request_middleware

BODY = orjson.dumps({"model": "m", "prompt": "hi"})


def make_app() -> Starlette:
    async def echo(request: Request) -> Response:
        return Response(await request_middleware.read_body(request.receive))

    async def parse(request: Request) -> Response:
        request_middleware.check_json_content_type(request.scope)
        return Response(parse_body(await request_middleware.read_body(request.receive), CompletionRequest).model)

    async def bug(request: Request) -> Response:
        raise RuntimeError("secret at 0x7f00deadbeef")

    async def limited(request: Request) -> Response:
        raise PagemillError(
            "Slow down.", status=429, type="rate_limit_error", code="rate_limit_exceeded", retry_after_s=2.4
        )

    async def stream(request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def identity(request: Request) -> Response:
        return Response(request_middleware.request_id(request.scope))

    app = Starlette(
        routes=[
            Route("/echo", echo, methods=["POST"]),
            Route("/parse", parse, methods=["POST"]),
            Route("/bug", bug),
            Route("/limited", limited),
            Route("/stream", stream),
            Route("/id", identity),
        ]
    )
    request_middleware.install_error_handlers(app)
    return app


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    app = request_middleware.RequestMiddleware(
        make_app(), max_body_bytes=1000, max_header_bytes=2000, body_timeout_s=WAIT_LIMIT_S
    )
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as session:
        yield session


def shaped(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


async def test_a_request_within_the_bounds_passes(client: httpx2.AsyncClient) -> None:
    response = await client.post("/echo", content=b"x" * 1000)
    assert (response.status_code, response.content) == (200, b"x" * 1000)
    assert (await client.post("/parse", content=BODY)).text == "m"


async def test_unknown_routes_and_methods_are_refused(client: httpx2.AsyncClient) -> None:
    assert shaped(await client.get("/nowhere"), 404)["code"] == "not_found"
    response = await client.get("/echo")
    assert "GET" in shaped(response, 405)["message"]
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("host", ["[::1", "a b", "evil.example/x?", "a:99999999", ""])
async def test_an_unknown_route_is_refused_whatever_the_host_header_says(client: httpx2.AsyncClient, host: str) -> None:
    for path in ("/nowhere", "/parse/x", "/nowhere?x=%ff"):
        response = await client.post(path, headers={"Host": host})
        assert shaped(response, 404)["code"] == "not_found"
        assert "location" not in response.headers


async def test_invalid_json_and_invalid_utf8_are_refused(client: httpx2.AsyncClient) -> None:
    assert shaped(await client.post("/parse", content=b"{"), 400)["code"] == "invalid_json"
    assert shaped(await client.post("/parse", content=b'{"prompt": "\xff"}'), 400)["param"] == "prompt"
    assert shaped(await client.post("/parse", content=b'{"prompt": "x"}'), 400)["param"] == "model"


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_content_types_other_than_json_are_refused(client: httpx2.AsyncClient, content_type: str) -> None:
    response = await client.post("/parse", content=BODY, headers={"content-type": content_type})
    assert "application/json" in shaped(response, 415)["message"]


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
async def test_json_content_types_are_accepted(client: httpx2.AsyncClient, content_type: str) -> None:
    assert (await client.post("/parse", content=BODY, headers={"content-type": content_type})).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://test:81"])
async def test_requests_that_browsers_send_for_foreign_pages_are_refused(
    client: httpx2.AsyncClient, origin: str
) -> None:
    for declared in ({}, {"content-type": ""}):
        response = await client.post("/parse", content=BODY, headers={"origin": origin, **declared})
        error = shaped(response, 403)
        assert error["code"] == "foreign_origin"
        assert "application/json" in error["message"]


@pytest.mark.parametrize(
    "headers", [{"origin": "http://test"}, {"origin": "http://evil.example", "content-type": "application/json"}, {}]
)
async def test_pages_of_this_server_and_preflighted_requests_pass(
    client: httpx2.AsyncClient, headers: dict[str, str]
) -> None:
    assert (await client.post("/parse", content=BODY, headers=headers)).status_code == 200


async def test_a_declared_body_above_the_limit_is_refused(client: httpx2.AsyncClient) -> None:
    response = await client.post("/echo", content=b"x" * 1001)
    assert "1000 bytes" in shaped(response, 413)["message"]


async def test_an_undeclared_body_above_the_limit_is_refused(client: httpx2.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 100

    shaped(await client.post("/echo", content=chunks()), 413)


async def test_large_headers_are_refused(client: httpx2.AsyncClient) -> None:
    assert shaped(await client.get("/id", headers={"x-big": "x" * 3000}), 431)["code"] == "headers_too_large"
    many = {f"x-{index}": "y" for index in range(500)}
    shaped(await client.get("/id", headers=many), 431)


async def test_internal_errors_are_reported_without_their_text(
    client: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        response = await client.get("/bug")
    error = shaped(response, 500)
    assert error["type"] == "server_error"
    assert "secret" not in response.text
    assert "secret" in caplog.text


async def test_errors_of_the_project_carry_their_headers(client: httpx2.AsyncClient) -> None:
    response = await client.get("/limited")
    assert shaped(response, 429)["code"] == "rate_limit_exceeded"
    assert response.headers["retry-after"] == "2"


async def test_valid_request_ids_are_kept_and_others_replaced(client: httpx2.AsyncClient) -> None:
    response = await client.get("/id", headers={"x-request-id": "abc-1.2:3"})
    assert response.text == response.headers["x-request-id"] == "abc-1.2:3"
    for hostile in ("a b", "x" * 129, "<script>", "é".encode()):
        response = await client.get("/id", headers={"x-request-id": hostile})
        assert response.text == response.headers["x-request-id"]
        assert len(response.text) == 32


async def call(
    app: ASGIApp,
    messages: list[Message],
    headers: Sequence[tuple[bytes, bytes]] = (),
    path: str = "/echo",
    method: str = "POST",
) -> list[Message]:
    """Make one ASGI call; after `messages`, the peer sends nothing more."""
    sent: list[Message] = []
    queue = list(messages)

    async def receive() -> Message:
        if queue:
            return queue.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "query_string": b""}
    await asyncio.wait_for(app(scope, receive, send), timeout=WAIT_LIMIT_S)
    return sent


def header_of(sent: list[Message], name: bytes) -> bytes | None:
    return dict(sent[0]["headers"]).get(name)


def part(body: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def bounded(**options: Any) -> request_middleware.RequestMiddleware:
    return request_middleware.RequestMiddleware(
        make_app(), **{"max_body_bytes": 1000, "body_timeout_s": WAIT_LIMIT_S, **options}
    )


async def test_streams_pass_chunk_by_chunk_and_unchanged() -> None:
    sent = await call(bounded(), [], path="/stream", method="GET")
    assert [message["body"] for message in sent[1:]] == [b"data: 1\n\n", b"data: 2\n\n", b""]


async def test_a_body_that_does_not_arrive_in_time_is_refused() -> None:
    sent = await call(bounded(body_timeout_s=0.05), [part(b"x", True)], [(b"content-length", b"50")])
    assert sent[0]["status"] == 408
    assert orjson.loads(sent[1]["body"])["error"]["code"] == "timeout"
    assert header_of(sent, b"connection") == b"close"


async def test_single_bytes_do_not_extend_the_deadline() -> None:
    async def dribble(scope: Scope, receive: Receive, send: Send) -> None:
        async def slow() -> Message:
            await asyncio.sleep(0.02)
            return part(b"x", True)

        await bounded(body_timeout_s=0.05)(scope, slow, send)

    sent = await call(dribble, [], [(b"transfer-encoding", b"chunked")])
    assert sent[0]["status"] == 408


async def test_a_client_that_leaves_within_its_body_gets_nothing_more() -> None:
    sent = await call(bounded(), [part(b"x", True), {"type": "http.disconnect"}], [(b"content-length", b"50")])
    assert sent[0]["status"] == 499


async def test_a_body_that_is_far_too_large_is_not_read_at_all() -> None:
    sent = await call(bounded(), [], [(b"content-length", b"9" * 15)])
    assert sent[0]["status"] == 413
    assert header_of(sent, b"connection") == b"close"


async def test_a_client_that_waits_for_100_continue_is_refused_at_once() -> None:
    sent = await call(bounded(), [], [(b"content-length", b"5000"), (b"expect", b"100-continue")])
    assert sent[0]["status"] == 413


@pytest.mark.parametrize("value", [b"abc", b"-5", b"1e3", b"9" * 40, b"\xb2"])
async def test_a_content_length_that_is_not_a_number_is_a_400(value: bytes) -> None:
    sent = await call(bounded(), [], [(b"content-length", value)])
    assert sent[0]["status"] == 400


async def test_an_answer_before_the_body_was_read_closes_the_connection() -> None:
    async def hasty(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("no", status_code=401)(scope, receive, send)

    sent = await call(request_middleware.RequestMiddleware(hasty), [part(b"x", False)], [(b"content-length", b"1")])
    assert header_of(sent, b"connection") == b"close"
    sent = await call(request_middleware.RequestMiddleware(hasty), [])
    assert header_of(sent, b"connection") is None


async def test_after_the_body_the_app_receives_the_disconnect() -> None:
    received: list[str] = []

    async def listener(scope: Scope, receive: Receive, send: Send) -> None:
        await request_middleware.read_body(receive)
        received.append((await receive())["type"])
        await Response("")(scope, receive, send)

    await call(
        request_middleware.RequestMiddleware(listener),
        [part(b"x", False), {"type": "http.disconnect"}],
        [(b"content-length", b"1")],
    )
    assert received == ["http.disconnect"]


async def test_a_stream_that_fails_is_cut_and_not_completed() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("broke")

    with pytest.raises(RuntimeError, match="broke"):
        await call(request_middleware.RequestMiddleware(broken), [])


async def test_errors_outside_the_app_have_the_same_format() -> None:
    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        raise PagemillError("Not today.", status=503, type="server_error")

    sent = await call(request_middleware.RequestMiddleware(refusing), [])
    assert sent[0]["status"] == 503
    assert orjson.loads(sent[1]["body"])["error"]["message"] == "Not today."
