"""`POST /v1/responses/compact`: one item takes the place of a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from refusals import refusal_of
from request_outcomes import tokenizer_of

from pagemill_api.answers.events import Content, Reasoning
from pagemill_api.dialects.base import FinishedChoice, Preparation, unread_fields
from pagemill_api.dialects.openai_responses.compaction import ASK, CompactDialect
from pagemill_api.dialects.openai_responses.items import SUMMARY
from pagemill_api.dialects.openai_responses.responses import ResponsesDialect
from pagemill_api.dialects.translation import TranslatedChat
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import Usage

COMPACT = CompactDialect()
CALL = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "x"}
OUTPUT = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
USER = {"role": "user", "content": "Write a."}


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = tokenizer_of()
    yield made
    made.close()


def parse(**fields: Any) -> TranslatedChat:
    return COMPACT.parse(json.dumps({"model": "m", "input": [USER, CALL, OUTPUT], **fields}).encode())


def test_the_model_summarizes_and_its_summary_is_read_in_place_of_the_conversation(tokenizer: Tokenizer) -> None:
    body = parse(instructions="Be brief.")
    assert [each.role for each in body.fields.messages] == ["developer", "user", "assistant", "tool", "user"]
    assert (body.fields.messages[-1].content, body.fields.stream) == (ASK, False)
    (request,) = body.prepare(tokenizer, Preparation(4000, "resp_1", 7), body.sampling(), None)
    assert request.dialect == COMPACT.name
    choice = FinishedChoice(0, "", "stop", None, [Reasoning("hm"), Content("\nThe user wants ü."), Content(" Done.")])
    answer = json.loads(COMPACT.renderer(request, None).body([choice], Usage(30, 5)))
    assert (answer["object"], answer["id"], answer["usage"]["total_tokens"]) == ("response.compaction", "resp_1", 35)
    (item,) = answer["output"]
    assert (item["type"], item["id"][:4]) == ("compaction", "cmp_")
    later = {"model": "m", "input": [item, {"role": "user", "content": "Go on."}]}
    messages = ResponsesDialect().parse(json.dumps(later).encode()).fields.messages
    assert [(each.role, each.content) for each in messages] == [
        ("developer", SUMMARY + "The user wants ü. Done."),
        ("user", "Go on."),
    ]


def test_what_has_no_effect_is_named(tokenizer: Tokenizer) -> None:
    body = parse(tools=[{"type": "web_search"}], tool_choice="auto", client_metadata={"a": "b"}, prompt_cache_key="k")
    expected = ["client_metadata", "prompt_cache_key", "tool_choice", "tools"]
    assert unread_fields(body, tokenizer, ParserSettings()) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"stream": True}, "stream"),
        ({"input": [USER, OUTPUT]}, "input[1].call_id"),
    ],
)
def test_what_cannot_be_compacted_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    assert partial(refusal_of, parse)(**fields).param == param
