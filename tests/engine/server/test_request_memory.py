"""The memory of requests in an engine's server: bodies and prompts are limited in all and for each tenant."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any
from unittest.mock import MagicMock

import pytest
from engine_client_inside import Inside

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_engine.server.engine_client import EngineClient
from pagemill_engine.server.request_memory import SEQUENCE_TOKEN_BYTES, TOKEN_BYTES, RequestMemory
from pagemill_engine.server.routes.gateway_link import GatewayLink
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.link import RecordKind, encode_record
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams


def refusal_of(memory: RequestMemory, tenant: str, num_bytes: int) -> int:
    with pytest.raises(PagemillError) as raised:
        memory.take(tenant, num_bytes)
    return raised.value.status


def test_a_tenant_gets_nine_tenths_and_others_the_rest() -> None:
    memory = RequestMemory(1000)
    memory.take("a", 500)
    memory.take("a", 400)
    assert refusal_of(memory, "a", 1) == 429, "the share of a tenant"
    memory.take("b", 90)
    assert refusal_of(memory, "c", 11) == 503, "the limit of all"
    memory.release("a", 900)
    assert memory.num_bytes == 90


def body_of(*pieces: bytes) -> Any:
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    return receive


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"6")]])
async def test_a_body_counts_while_it_is_read_and_prepared(headers: list[tuple[bytes, bytes]]) -> None:
    memory = RequestMemory(10)
    with memory.arriving("a") as body:
        assert await body.read({"headers": headers}, body_of(b"abc", b"def"), 100) == b"abcdef"
        assert memory.num_bytes == 6
    assert memory.num_bytes == 0


async def test_a_body_that_says_its_length_is_refused_before_it_arrives() -> None:
    memory = RequestMemory(10)
    receive = MagicMock(side_effect=AssertionError("the body is read"))
    with pytest.raises(PagemillError, match="max_in_flight_body_bytes"), memory.arriving("") as body:
        await body.read({"headers": [(b"content-length", b"11")]}, receive, 100)
    assert memory.num_bytes == 0


async def test_a_chunked_body_is_refused_when_it_has_grown_too_large() -> None:
    memory = RequestMemory(10)
    with pytest.raises(PagemillError) as raised, memory.arriving("") as body:
        await body.read({"headers": []}, body_of(b"x" * 8, b"x" * 8), 100)
    assert (raised.value.status, memory.num_bytes) == (503, 0)


@pytest.fixture
def inside(byte_tokenizer: Tokenizer) -> Inside:
    return Inside(byte_tokenizer, EngineConfig(model="m", max_num_waiting=100))


def request(number: int, num_tokens: int, n: int = 1) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1, n=n)
    return GenerateRequest(request_id=str(number), model="m", prompt_token_ids=[1] * num_tokens, sampling=sampling)


def memory_of(client: EngineClient, max_tokens: int) -> RequestMemory:
    memory = client._memory = RequestMemory(max_tokens * (TOKEN_BYTES + SEQUENCE_TOKEN_BYTES))
    return memory


def test_prompts_count_until_their_answers_end_and_waiting_ones_are_bounded_by_their_tokens(inside: Inside) -> None:
    memory = memory_of(inside.client, 100)
    first = inside.submit(request(1, 60))
    assert memory.num_bytes == 60 * (TOKEN_BYTES + SEQUENCE_TOKEN_BYTES)
    with pytest.raises(PagemillError) as raised:
        inside.submit(request(2, 41))
    assert raised.value.status == 503
    inside.submit(request(3, 40))
    inside.client.abort(first)
    assert memory.num_bytes == 40 * (TOKEN_BYTES + SEQUENCE_TOKEN_BYTES)
    inside.client.fail_all(PagemillError("over"))
    assert memory.num_bytes == 0


def test_each_choice_counts_and_a_request_that_can_never_have_room_names_its_field(inside: Inside) -> None:
    memory = memory_of(inside.client, 100)
    inside.submit(request(1, 10, n=8))
    assert memory.num_bytes == 10 * (TOKEN_BYTES + 8 * SEQUENCE_TOKEN_BYTES)
    with pytest.raises(PagemillError) as raised:
        inside.submit(request(2, 50, n=50))
    assert (raised.value.status, raised.value.param) == (400, "n")


class Sent:
    """A transport that records what is written."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int, bytes]] = []

    def write(self, data: bytes) -> None:
        length, stream, kind = struct.unpack("<IIB", data[:9])
        self.records.append((kind, stream, data[9 : 9 + length]))


def opened_link(max_bytes: int, max_body_bytes: int) -> tuple[GatewayLink, RequestMemory, Sent]:
    context = MagicMock()
    context.memory = memory = RequestMemory(max_bytes)
    context.settings.server.max_body_bytes = max_body_bytes
    link, sent = GatewayLink(context, {"headers": []}), Sent()
    transport: Any = sent
    link.connection_made(transport)
    return link, memory, sent


@pytest.fixture
async def link() -> tuple[GatewayLink, RequestMemory, Sent]:
    return opened_link(100, 80)


async def test_parts_of_unfinished_requests_of_a_link_have_the_memory_of_all_requests(
    link: tuple[GatewayLink, RequestMemory, Sent],
) -> None:
    gateway_link, memory, sent = link
    for number in range(3):
        gateway_link.data_received(encode_record(RecordKind.REQUEST_PART, number, b"x" * 40))
    assert memory.num_bytes == 80, "the third finds no room"
    gateway_link.data_received(encode_record(RecordKind.REQUEST_PART, 2, b"x" * 9))
    assert memory.num_bytes == 80, "the rest of it is dropped"
    gateway_link.data_received(encode_record(RecordKind.REQUEST, 2, b"x"))
    ((kind, stream, data),) = sent.records
    assert (kind, stream) == (RecordKind.REFUSED, 2)
    assert b"max_in_flight_body_bytes" in data
    gateway_link.data_received(encode_record(RecordKind.CANCEL, 1))
    assert memory.num_bytes == 40


async def test_parts_without_room_are_not_kept() -> None:
    part_bytes = 64 * 1024
    gateway_link, memory, _ = opened_link(max_bytes=100, max_body_bytes=4 * part_bytes)
    tracemalloc.start()
    try:
        for number in range(100):
            gateway_link.data_received(encode_record(RecordKind.REQUEST_PART, number, b"x" * part_bytes))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert memory.num_bytes == 0
    assert kept_bytes < 2 * part_bytes


async def test_a_lost_link_gives_back_the_memory_of_its_unfinished_requests(
    link: tuple[GatewayLink, RequestMemory, Sent],
) -> None:
    gateway_link, memory, _ = link
    gateway_link.on_lost = lambda: None
    gateway_link.data_received(encode_record(RecordKind.REQUEST_PART, 1, b"x" * 90))
    assert memory.num_bytes == 81, "one byte beyond the largest body is enough to refuse it"
    gateway_link.connection_lost(None)
    assert memory.num_bytes == 0
