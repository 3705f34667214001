"""Large answers: rendered as they come, processed in parts, kept once, sent in pieces, and bounded in all."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from engine_client_inside import Inside

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import Abort, LogprobsOut, TokensOut
from pagemill_engine.output.processor import PART_TOKENS, Frame, OutputProcessor, parts_of
from pagemill_engine.server.answer import FRAME_BYTES, Answer
from pagemill_engine.server.routes.gateway_link import _Stream
from pagemill_engine.server.unread import SLOW_S
from pagemill_protocol.errors import client_too_slow
from pagemill_protocol.frames import FrameDecoder
from pagemill_protocol.link import RecordDecoder
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

MOST_IN_ALL = 400_000


@pytest.fixture
def inside(byte_tokenizer: Tokenizer) -> Inside:
    return Inside(byte_tokenizer, EngineConfig(model="m"), MOST_IN_ALL)


def request(name: str = "a", *, stream: bool = False, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(ignore_eos=True, max_tokens=900, **fields.pop("sampling", {}))
    given = {"prompt_token_ids": [65, 66], "dialect": "completions", **fields}
    return GenerateRequest(request_id=name, model="m", sampling=sampling, stream=stream, **given)


def entries(token_ids: list[int], num_top: int) -> list[LogprobsOut]:
    top = list(range(100, 100 + num_top))
    return [LogprobsOut([token_id, *top], [-0.5 - at for at in range(num_top + 1)], 1) for token_id in token_ids]


def body_of(frames: list[Frame]) -> Any:
    (last,) = [frame for frame in frames if frame.meta.last]
    return json.loads(b"".join((last.payload, *last.rest)))


@pytest.mark.parametrize("dialect", ["chat", "completions", "tgi"])
@pytest.mark.parametrize("echo", [False, True])
def test_an_answer_is_the_same_however_its_outputs_are_divided(
    byte_tokenizer: Tokenizer, dialect: str, echo: bool
) -> None:
    prompt = list(range(60, 60 + 3 * PART_TOKENS // 2))
    sampling = {"logprobs": 2, "prompt_logprobs": None if dialect == "tgi" else 1, "n": 1 if dialect == "tgi" else 2}
    shown = json.dumps({"details": True, "top": True, "prefill": echo})
    text = byte_tokenizer.decode(prompt) if echo and dialect != "chat" else None
    fields = {"prompt_token_ids": prompt, "prompt_text": text, "client_fields": shown, "return_token_ids": True}
    asked = request(dialect=dialect, sampling=sampling, **fields)
    token_ids = [65 + at % 26 for at in range(3 * PART_TOKENS)]
    outputs = [
        TokensOut(
            request_id="a",
            choice=choice,
            token_ids=token_ids,
            logprobs=entries(token_ids, 2),
            prompt_logprobs=entries(prompt[1:], 2) if choice == 0 else [],
            finish_reason="length",
        )
        for choice in range(asked.sampling.n)
    ]
    whole, divided = OutputProcessor(asked, byte_tokenizer), OutputProcessor(asked, byte_tokenizer)
    at_once = [frame for out in outputs for frame in whole.push(out).frames]
    in_parts = [frame for out in outputs for part in parts_of(out) for frame in divided.push(part).frames]
    assert body_of(in_parts) == body_of(at_once)
    assert [frame.meta for frame in in_parts if frame.meta.last] == [frame.meta for frame in at_once if frame.meta.last]
    assert max(len(part.token_ids) + len(part.prompt_logprobs) for part in parts_of(outputs[0])) == PART_TOKENS


def test_an_echo_and_its_log_probabilities_are_kept_once_for_all_choices(byte_tokenizer: Tokenizer) -> None:
    prompt = [65] * 3000
    fields = {"prompt_token_ids": prompt, "prompt_text": "A" * 3000, "return_token_ids": True}
    asked = request(sampling={"n": 40, "logprobs": 0, "prompt_logprobs": 0}, **fields)
    processor = OutputProcessor(asked, byte_tokenizer)
    report = entries(prompt[1:], 0)
    frames: list[Frame] = []
    for choice in range(40):
        out = TokensOut(
            request_id="a", choice=choice, token_ids=[66], logprobs=entries([66], 0), finish_reason="length"
        )
        first = TokensOut(request_id="a", prompt_logprobs=report) if choice == 0 else None
        frames += processor.push(first).frames if first is not None else []
        frames += processor.push(out).frames
    body = body_of(frames)
    assert len(body["choices"]) == 40
    for choice in body["choices"]:
        assert choice["text"] == "A" * 3000 + byte_tokenizer.decode([66])
        assert choice["prompt_token_ids"] == prompt
        assert choice["prompt_logprobs"][0] is None
        assert len(choice["prompt_logprobs"]) == len(choice["logprobs"]["tokens"]) - 1 == 3000
        assert choice["logprobs"]["text_offset"] == list(range(3001))
    answer = Answer()
    answer.put(frames)
    assert frames[-1].num_bytes > 8_000_000
    assert answer.num_held_bytes < 500_000


async def test_a_large_output_is_processed_in_parts_with_other_work_between_them(inside: Inside) -> None:
    """The output of a beam search for example, which arrives at once."""
    large, small = (
        inside.submit(request("large", sampling={"logprobs": 5})),
        inside.submit(request("small", stream=True)),
    )
    token_ids = [65] * (20 * PART_TOKENS)
    inside.engine_says(
        TokensOut(request_id="large#1", token_ids=token_ids, logprobs=entries(token_ids, 5), finish_reason="length"),
        TokensOut(request_id="small#2", token_ids=[66]),
    )
    assert [frame.meta.token_ids for frame in small.get_nowait()] == [[66]]
    turns = 0
    while not large.ended:
        turns += 1
        inside.engine_says(TokensOut(request_id="small#2", token_ids=[67]))
        await asyncio.sleep(0)
        assert turns < 100
    assert turns >= 20
    body = body_of(large.get_nowait(1))
    assert len(body["choices"][0]["logprobs"]["tokens"]) == len(token_ids)


async def test_outputs_behind_a_large_one_wait_for_it(inside: Inside) -> None:
    answer = inside.submit(request(stream=True))
    inside.engine_says(TokensOut(request_id="a#1", token_ids=[65] * (2 * PART_TOKENS)))
    inside.engine_says(TokensOut(request_id="a#1", token_ids=[66], finish_reason="length"))
    frames: list[Frame] = []
    while taken := await answer.take():
        frames += taken
    assert [frame.meta.position for frame in frames] == [64, 128, 129, 129]
    assert inside.client.num_requests == 0


async def test_the_slowest_readers_end_first_when_all_answers_together_hold_too_much(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    readers = {name: inside.submit(request(name, stream=True)) for name in ("fast", "slow", "slower")}
    text = [65] * PART_TOKENS
    for step in range(2000):
        clock.now += 0.01
        names = ["slower", "fast"] if step < 250 else ["slow", "fast"]
        for number, name in enumerate(readers, 1):
            if name in names:
                inside.engine_says(TokensOut(request_id=f"{name}#{number}", token_ids=text))
        readers["fast"].get_nowait()
        readers["slow"].get_nowait() if step == 250 else None
        if readers["slower"].error is not None:
            break
    assert readers["slower"].error is not None
    assert readers["slower"].error.code == "client_too_slow"
    assert Abort("slower#3") in inside.sent
    (error,) = readers["slower"].get_nowait()
    assert (error.meta.error_status, error.meta.last) == (408, True)
    assert b"client_too_slow" in error.payload
    assert readers["fast"].error is readers["slow"].error is None
    assert inside.client.unread.num_bytes <= MOST_IN_ALL


async def test_a_finished_answer_that_is_not_read_makes_room_for_others(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    unread = inside.submit(request("unread", stream=True))
    for _ in range(400):
        inside.engine_says(TokensOut(request_id="unread#1", token_ids=[65]))
    inside.engine_says(TokensOut(request_id="unread#1", token_ids=[65], finish_reason="length"))
    assert unread.ended
    clock.now += SLOW_S + 1
    others = inside.submit(request("others", stream=True))
    for _ in range(2000):
        inside.engine_says(TokensOut(request_id="others#2", token_ids=[65]))
        others.get_nowait() if unread.error is None else None
        if unread.num_held_bytes < 2000:
            break
        inside.submit(request(f"more{inside.client._num_accepted}", stream=True))
        name = f"more{inside.client._num_accepted - 1}#{inside.client._num_accepted}"
        inside.engine_says(TokensOut(request_id=name, token_ids=[65] * PART_TOKENS))
    assert unread.error is not None
    assert others.error is None


async def test_growing_bodies_count_and_the_largest_ends_with_a_503(inside: Inside) -> None:
    large = inside.submit(request("large", dialect="chat", sampling={"logprobs": 20}))
    small = inside.submit(request("small", sampling={"logprobs": 0}))
    for _ in range(900):
        inside.engine_says(
            TokensOut(request_id="large#1", token_ids=[65], logprobs=entries([65], 20)),
            TokensOut(request_id="small#2", token_ids=[65], logprobs=entries([65], 0)),
        )
        if large.error is not None:
            break
    assert large.error is not None
    assert (large.error.status, large.num_held_bytes < 2000) == (503, True)
    assert small.error is None
    inside.engine_says(
        TokensOut(request_id="small#2", token_ids=[65], logprobs=entries([65], 0), finish_reason="length")
    )
    assert small.ended
    small.get_nowait()
    while small.next_piece() is not None:
        pass
    assert small.num_held_bytes == 0


async def test_everything_counted_is_released_when_answers_are_read_closed_or_aborted(inside: Inside) -> None:
    read, closed, body = (
        inside.submit(request("read", stream=True)),
        inside.submit(request("closed", stream=True)),
        inside.submit(request("body", sampling={"logprobs": 3})),
    )
    for number, name in enumerate(("read", "closed", "body"), 1):
        for _ in range(20):
            inside.engine_says(TokensOut(request_id=f"{name}#{number}", token_ids=[65], logprobs=entries([65], 3)))
    assert inside.client.unread.num_bytes > 3 * 100
    read.get_nowait()
    for answer in (closed, body):
        answer.close()
        inside.client.abort(answer)
    assert inside.client.unread.num_bytes == 0


async def test_a_reader_takes_a_bounded_number_of_bytes_and_the_rest_stays_counted(inside: Inside) -> None:
    answer = inside.submit(request(stream=True))
    for _ in range(200):
        inside.engine_says(TokensOut(request_id="a#1", token_ids=[65]))
    before = answer.num_unread_bytes
    taken = answer.get_nowait(10_000)
    size = sum(len(frame.payload) + FRAME_BYTES for frame in taken)
    assert 10_000 <= size < 11_000
    assert answer.num_unread_bytes == before - size


def test_a_link_sends_a_large_body_in_pieces_as_far_as_it_was_credited(byte_tokenizer: Tokenizer) -> None:
    answer, stream = large_answer(byte_tokenizer)
    held = answer.num_held_bytes
    data = sent(stream)
    assert 0 < len(data) <= 256 * 1024
    assert answer.num_held_bytes > held - 2 * 256 * 1024
    while True:
        stream.credit = 100_000
        more = sent(stream)
        if not more:
            break
        data += more
    assert stream.is_sent
    assert answer.num_held_bytes == 0
    decoder = FrameDecoder()
    ((meta, payload),) = decoder.feed(data)
    decoder.close()
    assert meta.last
    assert len(json.loads(payload)["choices"][0]["logprobs"]["content"]) == 700


def test_an_answer_that_is_cut_within_its_body_ends_within_a_frame(byte_tokenizer: Tokenizer) -> None:
    answer, stream = large_answer(byte_tokenizer)
    data = sent(stream)
    error = client_too_slow()
    answer.cut(error, OutputProcessor(request(), byte_tokenizer).failure(error))
    stream.credit = 10**9
    data += sent(stream)
    assert answer.is_cut
    assert stream.is_sent
    decoder = FrameDecoder()
    assert decoder.feed(data) == []


def large_answer(tokenizer: Tokenizer) -> tuple[Answer, _Stream]:
    processor = OutputProcessor(request(dialect="chat", sampling={"logprobs": 20}), tokenizer)
    token_ids = [65] * 700
    out = TokensOut(request_id="a", token_ids=token_ids, logprobs=entries(token_ids, 20), finish_reason="length")
    answer = Answer()
    answer.put(processor.push(out).frames)
    return answer, _Stream(1, "r", answer)


def sent(stream: _Stream) -> bytes:
    return b"".join(data for kind, _, data in RecordDecoder().feed(b"".join(stream.next_records())) if kind == 7)


class Clock:
    """The time that answers read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in ("answer", "unread"):
            monkeypatch.setattr(f"pagemill_engine.server.{module}.time.monotonic", lambda: self.now)
