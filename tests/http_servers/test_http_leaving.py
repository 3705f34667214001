"""Clients that read slowly or leave, their request ids, and the log line of each request."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_processes import ANSWER_TIMEOUT_S, MIB, MODEL, HttpServer, examples, read_answer, read_to_end, request
from waiting import wait_until

LONG = {"model": MODEL, "prompt": "hello", "max_tokens": 500, "n": 4, "ignore_eos": True}
NUM_LONG_TOKENS = 2000
HUGE = {**LONG, "n": 64, "logprobs": 20, "stream": True}
"""Some 30 MB of events, with half of the sequence slots."""
SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def nothing_runs(engine: HttpServer) -> bool:
    return engine.metric("vllm:num_requests_running") == 0 and engine.metric("vllm:num_requests_waiting") == 0


def frees_everything(engine: HttpServer, gateway: HttpServer) -> None:
    """Check that no sequence, no block and no reservation remains."""
    wait_until(lambda: nothing_runs(engine))
    wait_until(lambda: engine.metric("vllm:kv_cache_usage_perc") == 0)
    wait_until(lambda: gateway.metric("pagemill_gateway_in_flight_body_bytes") == 0)

    def in_flight() -> int:
        headers = {"Authorization": f"Bearer {gateway.control_token}"}
        status = httpx2.get(gateway.control_url + "/status", headers=headers, timeout=ANSWER_TIMEOUT_S).json()
        (endpoint,) = status["models"][0]["endpoints"]
        return int(endpoint["in_flight"] + endpoint["reserved_bytes"] + status["num_requests"])

    wait_until(lambda: in_flight() == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_hundred_clients_that_vanish_leave_no_state(
    http_server: HttpServer, engine_server: HttpServer, gateway_server: HttpServer, stream: bool
) -> None:
    before = engine_server.metric("vllm:generation_tokens_total")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(http_server.connect())) for _ in range(100)]
        for client in clients:
            client.sendall(request({**LONG, "stream": stream}))
        wait_until(lambda: engine_server.metric("vllm:generation_tokens_total") > before)
    frees_everything(engine_server, gateway_server)
    generated = engine_server.metric("vllm:generation_tokens_total") - before
    assert generated < 100 * NUM_LONG_TOKENS / 2, "the answers were generated to their ends"
    http_server.serves()


@pytest.mark.slow_for("*-8000000")
@pytest.mark.sample("*-1-1000", "*-2-70000", "engine-2-8000000", "gateway-1-8000000")
@pytest.mark.parametrize("num_bytes", [1000, 70_000, 4_000_000, 8_000_000])
@pytest.mark.parametrize("num_writes", [1, 2])
def test_a_client_that_leaves_is_noticed_whatever_the_size_of_its_body(
    http_server: HttpServer, engine_server: HttpServer, gateway_server: HttpServer, num_bytes: int, num_writes: int
) -> None:
    for stream, reset in ((True, False), (False, False), (True, True), (False, True)):
        before = engine_server.metric("vllm:generation_tokens_total")
        with contextlib.closing(http_server.connect()) as client:
            raw = request({**LONG, "stream": stream, "ignored": "x" * num_bytes})
            end_of_head = raw.index(b"\r\n\r\n") + 4
            for piece in [raw] if num_writes == 1 else [raw[:end_of_head], raw[end_of_head:]]:
                client.sendall(piece)
            wait_until(lambda before=before: engine_server.metric("vllm:generation_tokens_total") > before)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        frees_everything(engine_server, gateway_server)
        generated = engine_server.metric("vllm:generation_tokens_total") - before
        assert generated < NUM_LONG_TOKENS, "the answer was generated to its end"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_with_a_second_request_pipelined_is_noticed(
    http_server: HttpServer, engine_server: HttpServer, gateway_server: HttpServer, stream: bool
) -> None:
    before = engine_server.metric("vllm:generation_tokens_total")
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            client = stack.enter_context(contextlib.closing(http_server.connect()))
            client.sendall(request({**LONG, "stream": stream}) + request({**LONG, "stream": stream}))
        wait_until(lambda: engine_server.metric("vllm:generation_tokens_total") > before)
    frees_everything(engine_server, gateway_server)
    assert engine_server.metric("vllm:generation_tokens_total") - before < 40 * NUM_LONG_TOKENS
    http_server.serves()


@pytest.mark.parametrize("stream", [True, False])
def test_a_half_closed_connection_counts_as_a_client_that_left(
    http_server: HttpServer, engine_server: HttpServer, gateway_server: HttpServer, stream: bool
) -> None:
    """It cannot be distinguished from a closed one, so no engine computes for it any more."""
    before = engine_server.metric("vllm:generation_tokens_total")
    with contextlib.closing(http_server.connect()) as client:
        client.sendall(request({**LONG, "stream": stream}))
        wait_until(lambda: engine_server.metric("vllm:generation_tokens_total") > before)
        client.shutdown(socket.SHUT_WR)
        assert b"[DONE]" not in read_to_end(client), "the connection must be closed, not served to its end"
    frees_everything(engine_server, gateway_server)
    assert engine_server.metric("vllm:generation_tokens_total") - before < NUM_LONG_TOKENS
    http_server.serves()


@pytest.mark.slow
def test_a_slow_reader_gets_everything(http_server: HttpServer) -> None:
    with contextlib.closing(http_server.connect(receive_buffer_bytes=4096)) as client:
        client.sendall(request({**HUGE, "n": 8}, headers=[(b"Connection", b"close")]))
        assert client.recv(1, socket.MSG_PEEK)
        http_server.serves()
        answer = read_answer(client)
    assert answer is not None
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert len(answer.body) > 2 * MIB


@pytest.mark.slow
def test_a_reader_that_stops_fills_no_memory_and_loses_its_stream(
    engine_server: HttpServer, gateway_server: HttpServer
) -> None:
    """Unread bytes wait in the engine's process up to a limit, and nowhere else."""
    engine_before, gateway_before = engine_server.rss_bytes(), gateway_server.rss_bytes()
    generated = engine_server.metric("vllm:generation_tokens_total")
    with contextlib.closing(gateway_server.connect(receive_buffer_bytes=4096)) as client:
        client.sendall(request(HUGE, headers=[(b"Connection", b"close")]))
        wait_until(lambda: engine_server.metric("vllm:generation_tokens_total") > generated)
        gateway_server.serves()
        wait_until(lambda: nothing_runs(engine_server))
        assert engine_server.rss_bytes() - engine_before < 128 * MIB
        assert gateway_server.rss_bytes() - gateway_before < 24 * MIB
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)
        answer = read_answer(client)
    assert answer is not None
    last = answer.body.removesuffix(b"\n\n").rpartition(b"data: ")[2]
    assert json.loads(last)["error"]["code"] == "client_too_slow"
    assert b"[DONE]" not in answer.body
    frees_everything(engine_server, gateway_server)
    gateway_server.serves()


@examples(40)
@given(
    st.one_of(
        st.from_regex(SAFE_ID, fullmatch=True),
        st.text(st.characters(min_codepoint=1, max_codepoint=255, exclude_characters="\r\n"), max_size=150),
        st.sampled_from(["a" * 128, "a" * 129, '"}{"event":"forged"', "a\tb", "a b", "é", "../../x", "%0d%0aX: y"]),
    )
)
def test_a_valid_request_id_is_returned_and_any_other_is_replaced(
    http_servers: list[HttpServer], given_id: str
) -> None:
    raw = given_id.encode("latin-1")
    for http_server in http_servers:
        answer = http_server.exchange(b"GET /version HTTP/1.1\r\nHost: server\r\nX-Request-Id: " + raw + b"\r\n\r\n")
        assert answer is not None
        if answer.status == 400:
            assert set(raw) & set(bytes(range(32)) + b"\x7f"), "only control characters are invalid in a header"
            continue
        reported = answer.headers["x-request-id"]
        if SAFE_ID.fullmatch(given_id):
            assert reported == given_id
        else:
            assert re.fullmatch(r"[0-9a-f]{32}", reported) or reported == given_id.strip(" \t")


def test_each_request_is_one_log_line_of_json_whatever_was_sent(gateway_server: HttpServer) -> None:
    """The line contains the id and nothing else of the client's text."""
    hostile = [
        request(headers=[(b"X-Request-Id", b'a"}\\n{"event":"forged"}')]),
        request({**LONG, "max_tokens": 1, "n": 1, "user": "canary-user", "prompt": "canary-prompt"}),
        request({"model": "canary-model\n{}", "prompt": "x"}),
        request(b'{"canary-field\\u2028": 1}', headers=[(b"Authorization", b"Bearer canary-key")]),
        request(path="/canary-path/%0a%7b%22event%22:1%7d?canary=query"),
        request(path="/v1/models/canary%0aname", method="GET"),
        b"GARBAGE canary-garbage\r\n\r\n",
    ]
    for number, raw in enumerate(hostile):
        gateway_server.exchange(raw)
        marked = request({"model": "nope", "prompt": "x"}, headers=[(b"X-Request-Id", b"marker-%d" % number)])
        gateway_server.exchange(marked)
    wait_until(lambda: f"marker-{len(hostile) - 1}" in gateway_server.log.read_text())
    text = gateway_server.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(isinstance(line, dict) and line["time"] and line["level"] for line in lines)
    marked_lines = [line for line in lines if str(line.get("request_id", "")).startswith("marker-")]
    assert len(marked_lines) == len(hostile)
    assert {(line["event"], line["route"], line["status"]) for line in marked_lines} == {
        ("request", "/v1/completions", 404)
    }
    assert not any(line["event"] == "forged" for line in lines)
    assert "canary" not in text
