"""Log probabilities of the Responses API: each message has those of the tokens of its text, streamed and plain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import TypeAdapter
from request_outcomes import tokenizer_of

from pagemill_api.dialects.base import Preparation
from pagemill_api.dialects.openai_responses.responses import ResponsesDialect
from pagemill_api.dialects.openai_responses.text_logprobs import TextLogprobs
from pagemill_api.openai.logprobs import PositionLogprobs, TokenLogprob
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import LogprobsOut, TokensOut
from pagemill_engine.output.processor import OutputProcessor
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.continuing import can_be_continued
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

DIALECT = ResponsesDialect()
LOGPROBS = "message.output_text.logprobs"
CALL = '<tool_call>{"name": "f", "arguments": {"a": "Hi"}}</tool_call>'
AGENT = AnswerFormat(tools="hermes", reasoning="think", starts_in_reasoning=True)


def parse(**fields: Any) -> Any:
    return DIALECT.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"include": [LOGPROBS]}, 0),
        ({"include": [LOGPROBS], "top_logprobs": 5}, 5),
        ({"top_logprobs": 5}, 5),
    ],
)
def test_they_are_computed_if_either_field_asks(fields: dict[str, Any], asked: int | None) -> None:
    assert parse(**fields).sampling().logprobs == asked


def answered(tokenizer: Tokenizer, text: str, stream: bool, form: AnswerFormat | None, size: int = 1) -> list[bytes]:
    request = GenerateRequest(
        request_id="resp_1",
        model="m",
        prompt_token_ids=[1],
        sampling=SamplingParams(logprobs=1, max_tokens=500),
        dialect="responses",
        client_fields='{"tools": [], "parallel_tool_calls": true, "tool_choice": "auto"}',
        answer_format=form,
        stream=stream,
        keeps_logprobs=True,
    )
    processor = OutputProcessor(request, tokenizer)
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), 0]
    payloads: list[bytes] = []
    for start in range(0, len(token_ids), size):
        ids = token_ids[start : start + size]
        entries = [LogprobsOut([each, 98], [-0.5, -1.5], 1) for each in ids]
        finish = "stop" if start + size >= len(token_ids) else None
        out = TokensOut(request_id="r", token_ids=ids, logprobs=entries, finish_reason=finish)  # type: ignore[arg-type]
        for frame in processor.push(out).frames:
            payloads += [frame.payload, *frame.rest]
    return payloads


def events_of(payloads: Sequence[bytes]) -> list[Any]:
    return [json.loads(each.partition("data: ")[2]) for each in b"".join(payloads).decode().split("\n\n") if each]


def joined(entries: list[Any]) -> bytes:
    return b"".join(bytes(each["bytes"]) for each in entries)


@pytest.mark.slow
@pytest.mark.sample("1-*", "3-Hi</think>*")
@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("Hi é😀 <there>", None),
        ("Hi </think>\n\nHi 😀 <b>x</b>", AGENT),
        (f"Hi</think>Hi{CALL}", AGENT),
        (CALL, AnswerFormat(tools="hermes")),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_each_text_has_those_of_its_tokens(text: str, form: AnswerFormat | None, size: int) -> None:
    tokenizer = tokenizer_of()
    body = json.loads(b"".join(answered(tokenizer, text, False, form, size)))
    Response.model_validate(body)
    events = events_of(answered(tokenizer, text, True, form, size))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert events[-1]["response"]["output"] == body["output"]
    parts = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
    for part in parts:
        assert joined(part["logprobs"]) == part["text"].encode()
        for entry in part["logprobs"]:
            assert entry["logprob"] == -0.5
            assert [(each["logprob"], len(each["bytes"])) for each in entry["top_logprobs"]] == [(-1.5, 1)]
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [entry for each in deltas for entry in each["logprobs"]] == [e for part in parts for e in part["logprobs"]]
    done = [each for each in events if each["type"] == "response.output_text.done"]
    assert [each["logprobs"] for each in done] == [part["logprobs"] for part in parts]


@given(st.lists(st.tuples(st.booleans(), st.text(min_size=1, max_size=4)), max_size=8), st.integers(1, 3))
def test_texts_between_others_get_their_tokens(texts: list[tuple[bool, str]], size: int) -> None:
    """Tokens of several bytes may lie across two texts; the first gets them."""
    found = TextLogprobs()
    whole = "".join(f"<{at}>{text}" for at, (_, text) in enumerate(texts)).encode()
    tokens = [whole[at : at + size] for at in range(0, len(whole), size)]
    found.add([PositionLogprobs(TokenLogprob(str(at), each, -0.5), []) for at, each in enumerate(tokens)])
    seen: list[int] = []
    for at, (is_message, text) in enumerate(texts):
        found.skip(f"<{at}>")
        if not is_message:
            found.skip(text)
            continue
        taken = [int(json.loads(row)["token"]) for row in found.take(text)]
        if size == 1:
            assert b"".join(tokens[each] for each in taken) == text.encode()
        seen += taken
    assert seen == sorted(set(seen)), "no token is given twice"


def test_a_kept_answer_counts_more_values_and_starts_again_elsewhere() -> None:
    tokenizer = tokenizer_of()

    def prepared(**fields: Any) -> GenerateRequest:
        body = parse(**fields)
        preparation = Preparation(200_000, "resp_1", 7, max_answer_values=2000)
        (request,) = body.prepare(tokenizer, preparation, body.sampling(), None)
        return request

    assert prepared(include=[LOGPROBS]).sampling.max_tokens == 2000
    kept = prepared(include=[LOGPROBS], stream=True)
    assert (kept.sampling.max_tokens, can_be_continued(kept)) == (40, False)
    plain = prepared(stream=True)
    assert can_be_continued(plain)
    assert plain.sampling.max_tokens is not None
    assert plain.sampling.max_tokens > 2000
