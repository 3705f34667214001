"""No reader of lines divides an event of a stream, whatever characters its text has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_api.dialects.registry import dialect_of
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.output.processor import OutputProcessor
from pagemill_protocol.errors import unavailable
from pagemill_protocol.json_pieces import OneLine, on_one_line
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams

ENDS_OF_LINES = "a\u2028b\u2029c\x85d\x1ce\x1df\x1eg\x0bh\x0ci\rj\nk\u00e2\u20acl"
STREAMED = ["chat", "completions", "messages", "responses", "tgi", "ollama-chat", "ollama-generate", "kserve-generate"]


def streamed(tokenizer: Tokenizer, dialect: str, *, parsed: bool) -> bytes:
    request = GenerateRequest(
        request_id="r",
        model="m",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=None),
        dialect=dialect,
        stream=True,
        answer_format=AnswerFormat(reasoning="think", starts_in_reasoning=True) if parsed else None,
    )
    processor = OutputProcessor(request, tokenizer)
    text = f"{ENDS_OF_LINES}</think>{ENDS_OF_LINES}" if parsed else ENDS_OF_LINES
    out = TokensOut(request_id="r", token_ids=tokenizer.encode(text), finish_reason="length")
    return b"".join(frame.payload for frame in processor.push(out).frames)


@pytest.mark.parametrize("parsed", [False, True])
@pytest.mark.parametrize("dialect", STREAMED)
def test_an_event_is_one_line_for_every_reader(byte_tokenizer: Tokenizer, dialect: str, parsed: bool) -> None:
    raw = streamed(byte_tokenizer, dialect, parsed=parsed)
    raw += dialect_of(dialect).error_event(unavailable(ENDS_OF_LINES))
    lines = raw.decode().split("\n")
    assert raw.decode().splitlines() == lines[:-1]
    events = [json.loads(line.partition(":")[2] if line.startswith("data:") else line) for line in data_lines(lines)]
    assert any(ENDS_OF_LINES in text for event in events for text in texts_of(event)), "the text itself is unchanged"


def data_lines(lines: list[str]) -> list[str]:
    return [each for each in lines if each.startswith(("data:", "{")) and "[DONE]" not in each]


def texts_of(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in texts_of(each)]


@given(st.lists(st.sampled_from(["\u2028", "\u2029", "\x85", "\u00c2", "\u2020", "a", "\u20ac"])), st.data())
def test_pieces_that_divide_characters_are_escaped_like_the_whole(chars: list[str], data: st.DataObject) -> None:
    raw = json.dumps("".join(chars), ensure_ascii=False).encode()
    line, at, pieces = OneLine(), 0, b""
    while at < len(raw):
        size = data.draw(st.integers(1, 4))
        pieces += line.push(raw[at : at + size])
        at += size
    assert pieces + line.flush() == on_one_line(raw)
    assert json.loads(pieces) == json.loads(raw)
    assert len(pieces.decode().splitlines()) == 1
