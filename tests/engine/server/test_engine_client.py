"""The HTTP process's client of the engine, with a channel that only records: refusals, ids, and late messages."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from engine_client_inside import Inside

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.channels import EngineDied
from pagemill_engine.ipc.messages import Abort, AddRequest, StepOutputs, TokensOut
from pagemill_engine.output.processor import OutputProcessor
from pagemill_engine.scheduler.admission import Admission
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

CONFIG = EngineConfig(model="m", max_num_waiting=8)


@pytest.fixture
def inside(byte_tokenizer: Tokenizer) -> Inside:
    return Inside(byte_tokenizer, CONFIG)


def request(name: str = "a", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, model="m", prompt_token_ids=[65, 66], sampling=SamplingParams(**sampling), stream=True
    )


async def test_a_request_id_can_be_reused_right_after_its_abort(inside: Inside) -> None:
    first = inside.submit(request())
    inside.client.abort(first)
    second = inside.submit(request())
    names = [message.request.request_id for message in inside.sent if isinstance(message, AddRequest)]
    assert len(set(names)) == 2
    inside.engine_says(TokensOut(request_id=names[0], finish_reason="abort"))
    inside.client.abort(first)
    assert (second.ended, inside.client.num_requests) == (False, 1)
    assert inside.sent.count(Abort(names[0])) == 1
    inside.engine_says(TokensOut(request_id=names[1], token_ids=[65], finish_reason="length"))
    assert (second.ended, inside.client.num_requests) == (True, 0)
    frames = await second.take()
    assert [frame.meta.finish_reason for frame in frames] == ["length", None]
    assert all(name.encode() not in frame.payload for frame in frames for name in names)


async def test_the_id_of_a_running_request_is_refused(inside: Inside) -> None:
    inside.submit(request())
    with pytest.raises(PagemillError) as caught:
        inside.submit(request())
    assert (caught.value.status, caught.value.param) == (400, "request_id")
    assert inside.client.num_requests == 1


async def test_a_refused_request_creates_no_sequences(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Admission, "admit")
    inside.submit(request("first", n=8))
    with pytest.raises(PagemillError) as caught:
        inside.submit(request("second"))
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)


async def test_a_request_with_more_sequences_than_the_queue_is_refused_without_retry_after(inside: Inside) -> None:
    with pytest.raises(PagemillError, match="at most 8") as caught:
        inside.submit(request(n=9))
    assert (caught.value.status, caught.value.param) == (400, "n")
    inside.client.check_capacity([request(n=4)] * 2)
    with pytest.raises(PagemillError, match="12 answers") as caught:
        inside.client.check_capacity([request(n=4)] * 3)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("stream", [True, False])
async def test_only_an_unread_stream_ends_when_too_many_bytes_wait(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A whole body is one piece of any size."""
    monkeypatch.setattr("pagemill_engine.server.answer.MAX_UNREAD_BYTES", 2000)
    asked = msgspec.structs.replace(request("a", max_tokens=100, ignore_eos=True), stream=stream)
    read, unread = inside.submit(msgspec.structs.replace(asked, request_id="b")), inside.submit(asked)
    for _ in range(60):
        outputs = [TokensOut(request_id=engine_id, token_ids=[65]) for engine_id in ("b#1", "a#2")]
        inside.engine_says(*outputs)
        if stream:
            assert await read.take()
    assert read.error is None
    if not stream:
        assert unread.error is None
        return
    assert unread.error is not None
    assert unread.error.code == "client_too_slow"
    assert Abort("a#2") in inside.sent
    frames = await unread.take()
    assert frames[-1].meta.error_status == 408
    assert sum(len(frame.payload) for frame in frames) < 4000


async def test_an_answer_that_cannot_be_rendered_fails_with_a_code_that_no_gateway_retries(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = inside.submit(request("a"))

    def cannot(*_: Any) -> Any:
        raise TypeError("Recursion limit reached")

    monkeypatch.setattr(OutputProcessor, "push", cannot)
    inside.engine_says(TokensOut(request_id="a#1", token_ids=[65]))
    assert (await answer.take())[-1].meta.error_code == "rendering_failed"


async def test_other_tasks_run_while_messages_wait(inside: Inside) -> None:
    """Otherwise a server with a fast engine would answer no probe and notice no disconnect."""
    num_received = 0

    async def recv() -> StepOutputs:
        nonlocal num_received
        num_received += 1
        if num_received > 1000:
            raise EngineDied(1)
        return StepOutputs(outputs=[])

    async def start() -> None:
        pass

    inside.recv, inside.start = recv, start  # type: ignore[attr-defined]
    running = asyncio.create_task(inside.client.run())
    for _ in range(10):
        await asyncio.sleep(0)
    running.cancel()
    assert 0 < num_received < 10
