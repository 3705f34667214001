"""The engine's end of a link: many requests over one connection, as a gateway sends them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from link_client import LinkClient, generate
from waiting import wait_until

from pagemill_protocol.link import (
    FREED_HEADER,
    LINK_PATH,
    LINK_PROTOCOL,
    WINDOW_BYTES,
    RecordKind,
    encode_pieces,
    encode_record,
)
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture
def link(null_server: Any) -> Iterator[LinkClient]:
    link = LinkClient(null_server.url, null_server.auth)
    assert link.status == 101
    yield link
    link.socket.close()


def a_request(request_id: str, **fields: Any) -> GenerateRequest:
    defaults: dict[str, Any] = {
        "prompt_token_ids": list(range(10, 40)),
        "sampling": SamplingParams(max_tokens=5, seed=1, ignore_eos=True),
        "stream": True,
    }
    return GenerateRequest(request_id=request_id, model=MODEL, **{**defaults, **fields})


def test_requests_at_once_are_answered_like_one_alone(link: LinkClient, null_server: Any) -> None:
    for number in (1, 2, 3):
        link.send(number, a_request(f"link-{number}", response_id="same"))
    link.read_until(1, 2, 3)
    expected = generate(null_server.url, a_request("alone", response_id="same"), null_server.auth).frames
    for number in (1, 2, 3):
        assert link.kinds(number)[0] == RecordKind.ACCEPTED
        frames = link.frames(number)
        assert [meta.token_ids for meta, _ in frames] == [meta.token_ids for meta, _ in expected]
        assert frames[-1][0].last


def test_a_link_requires_the_token_and_the_upgrade_header(null_server: Any) -> None:
    stranger = LinkClient(null_server.url, {"Authorization": "Bearer wrong"})
    stranger.socket.close()
    assert stranger.status == 401
    without_offer = httpx.get(null_server.url + LINK_PATH, headers=null_server.auth)
    assert without_offer.status_code == 426
    assert LINK_PROTOCOL in without_offer.json()["error"]["message"]


def test_another_protocol_is_not_accepted(null_server: Any) -> None:
    offer = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert httpx.get(null_server.url + LINK_PATH, headers={**null_server.auth, **offer}).status_code == 426


def test_refused_requests_have_their_status_and_the_link_continues(link: LinkClient) -> None:
    link.socket.sendall(encode_record(RecordKind.REQUEST, 1, b"no msgpack"))
    link.send(2, a_request("too-long", prompt_token_ids=list(range(100_000))))
    link.send(3, a_request("other", weights_digest="other"))
    link.send(4, a_request("good"))
    link.read_until(1, 2, 3, 4)
    assert [link.refusal(number).status for number in (1, 2, 3)] == [400, 400, 409]
    assert b"GenerateRequest" in link.refusal(1).body
    assert link.kinds(4)[-1] == RecordKind.END


def test_a_large_request_arrives_in_parts_and_one_beyond_the_limit_is_refused(link: LinkClient) -> None:
    raw = msgspec.msgpack.encode(a_request("parts"))
    for piece in (raw[:10], raw[10:20]):
        link.socket.sendall(encode_record(RecordKind.REQUEST_PART, 1, piece))
    link.socket.sendall(encode_record(RecordKind.REQUEST, 1, raw[20:]))
    for record in encode_pieces(RecordKind.REQUEST_PART, 2, bytes(9 * 2**20)):
        link.socket.sendall(record)
    link.socket.sendall(encode_record(RecordKind.REQUEST, 2))
    link.read_until(1, 2)
    assert link.kinds(1)[-1] == RecordKind.END
    assert link.refusal(2).status == 413


def test_a_cancelled_request_and_those_of_a_closed_link_are_aborted(null_server: Any) -> None:
    link = LinkClient(null_server.url, null_server.auth)
    endless = SamplingParams(max_tokens=900, ignore_eos=True)
    for number in (1, 2):
        link.send(number, a_request(f"endless-{number}", sampling=endless))
    while {link.kinds(number)[:1] == [RecordKind.ACCEPTED] for number in (1, 2)} != {True}:
        link.read_some()
    link.socket.sendall(encode_record(RecordKind.CANCEL, 1))
    link.socket.close()
    wait_until(lambda: httpx.get(null_server.url + "/load", headers=null_server.auth).json()["server_load"] == 0)


def test_bytes_beyond_the_credit_are_not_sent_and_other_streams_continue(link: LinkClient) -> None:
    large = SamplingParams(max_tokens=400, seed=1, ignore_eos=True, logprobs=20)
    link.send(1, a_request("large", sampling=large))
    wait_until(lambda: (link.read_now(0.5), link.num_bytes(1) == WINDOW_BYTES)[1])
    link.send(2, a_request("small"))
    link.read_until(2)
    assert link.num_bytes(1) == WINDOW_BYTES
    link.send_number(RecordKind.CREDIT, 1, 2**30)
    link.read_until(1)
    assert link.frames(1)[-1][0].last


@pytest.mark.slow
def test_an_engine_says_that_it_has_computed_what_is_not_read_to_gateways_that_understand_it(null_server: Any) -> None:
    large = SamplingParams(max_tokens=400, seed=1, ignore_eos=True, logprobs=20)
    with (
        contextlib.closing(LinkClient(null_server.url, null_server.auth)) as earlier,
        contextlib.closing(LinkClient(null_server.url, {**null_server.auth, FREED_HEADER: "1"})) as link,
    ):
        link.send(1, a_request("large", sampling=large))
        while RecordKind.FREED not in link.kinds(1):
            link.read_some()
        assert link.num_bytes(1) <= WINDOW_BYTES
        link.send(2, a_request("small"))
        link.read_until(2)
        assert RecordKind.FREED not in link.kinds(2), "its end says it"
        link.send_number(RecordKind.CREDIT, 1, 2**30)
        link.read_until(1)
        assert link.kinds(1).count(RecordKind.FREED) == 1
        assert link.frames(1)[-1][0].last
        earlier.send(1, a_request("earlier", sampling=large))
        wait_until(lambda: (earlier.read_now(0.5), earlier.num_bytes(1) == WINDOW_BYTES)[1])
        earlier.send_number(RecordKind.CREDIT, 1, 2**30)
        earlier.read_until(1)
        assert RecordKind.FREED not in earlier.kinds(1)


def test_an_engine_that_stops_ends_its_streams_with_an_error_and_closes_its_links(start_server: Any) -> None:
    server = start_server(server={"drain_timeout_s": 0.2})
    server.wait_for("ready")
    link = LinkClient(server.url, server.auth)
    link.send(1, a_request("cut", sampling=SamplingParams(max_tokens=900, ignore_eos=True)))
    while RecordKind.DATA not in link.kinds(1):
        link.read_some()
    server.process.send_signal(signal.SIGTERM)
    link.read_until(1)
    assert link.frames(1)[-1][0].error_code == "draining"
    assert link.socket.recv(1) == b""
    link.socket.close()
    assert server.wait_exit() == 0
