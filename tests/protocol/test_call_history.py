"""Earlier calls in a conversation: their ids and arguments have the form that the model's chat template takes."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from pagemill_api.answers.events import CallBegin
from pagemill_api.dialects.base import FinishedChoice, Piece
from pagemill_api.dialects.registry import dialect_of
from pagemill_api.openai import prepare
from pagemill_api.openai.parse import parse_body
from pagemill_api.openai.schemas import ChatCompletionRequest
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.generate import GenerateRequest, Usage
from pagemill_protocol.request.sampling import SamplingParams

MISTRAL = (
    "{% if tools %}{% endif %}{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    '{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}'
    "({{ c.id }}:{{ c.function.arguments | tojson }}){% endfor %}"
    "{% elif m.role == 'tool' %}[RESULT {{ m.tool_call_id }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
NATIVE = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f"}}


def rendered(tokenizer: Tokenizer, template: str, calls: list[Any], results: list[str]) -> str:
    """Return the prompt of a conversation with these calls in one message, and results for these ids."""
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": each, "content": "1"} for each in results),
    ]
    body = json.dumps({"model": "m", "messages": messages, "tools": [TOOL]}).encode()
    own = Tokenizer(msgspec.structs.replace(tokenizer.bundle, chat_template=template))
    try:
        request = prepare.prepare_chat(
            parse_body(body, ChatCompletionRequest), own, max_model_len=4096, request_id="r", created_unix_s=0
        )
        return own.decode(request.prompt_token_ids)
    finally:
        own.close()


def call(call_id: str = "c1", **function: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", **function}}


def ids_of(dialect: str, tools: str, response_id: str, *, stream: bool, choice: int = 0) -> list[str]:
    """Return the ids of two calls of an answer."""
    request = GenerateRequest(
        request_id=response_id,
        model="m",
        prompt_token_ids=[1],
        sampling=SamplingParams(),
        dialect=dialect,
        stream=stream,
        answer_format=AnswerFormat(tools=tools),
    )
    renderer = dialect_of(dialect).renderer(request, None)
    events = [CallBegin("f", 0), CallBegin("g", 1)]
    if stream:
        raw = renderer.chunk(Piece(choice, "", True, "stop", None, None, events)) + renderer.end(Usage())
    else:
        body = renderer.body([FinishedChoice(choice, "", "stop", events=events)], Usage())
        raw = body if isinstance(body, bytes) else b"".join(body)
    return list(dict.fromkeys(re.findall(r'"(?:call_id|id)":"(call_[0-9a-f]+|[A-Za-z0-9]{9})"', raw.decode())))


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_ids_have_the_form_of_the_models_parser_and_are_unique_over_choices_and_turns(dialect: str) -> None:
    short = ids_of(dialect, "mistral", "resp-1", stream=False)
    assert len(short) == 2
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in short)
    assert ids_of(dialect, "mistral", "resp-1", stream=True) == short
    assert set(ids_of(dialect, "mistral", "resp-2", stream=False)).isdisjoint(short)
    assert all(each.startswith("call_") for each in ids_of(dialect, "hermes", "resp-1", stream=False))
    if dialect == "chat":
        assert set(ids_of(dialect, "mistral", "resp-1", stream=False, choice=1)).isdisjoint(short)


def test_ids_are_numbered_over_the_chat_for_templates_whose_calls_begin_with_them(byte_tokenizer: Tokenizer) -> None:
    template = (
        NATIVE
        + "<|tool_calls_section_begin|>{% for m in messages if m.tool_call_id %}<{{ m.tool_call_id }}>{% endfor %}"
    )
    foreign = ["call_0123456789abcdef01234567", "toolu_9"]
    text = rendered(byte_tokenizer, template, [call(each, arguments="{}") for each in foreign], foreign[::-1])
    assert re.findall(r"functions\.f:\d", text) == [f"functions.f:{number}" for number in (0, 1, 1, 0)]
    assert not any(each in text for each in foreign)


def test_ids_of_other_servers_are_shortened_consistently_for_templates_that_need_it(byte_tokenizer: Tokenizer) -> None:
    foreign = ["call_0123456789abcdef01234567", "toolu_9", "Abcd12345"]
    calls = [call(each, arguments="{}") for each in foreign]
    text = rendered(byte_tokenizer, MISTRAL, calls, foreign[::-1])
    ids = re.findall(r"\((\w+):", text)
    assert re.findall(r"RESULT (\w+)", text) == ids[::-1]
    assert len(set(ids)) == 3
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)
    assert ids[2] == "Abcd12345", "an id of this form is kept"
    assert "toolu_9" in rendered(byte_tokenizer, NATIVE, calls, foreign), "other templates get the client's ids"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ({}, "{}"),
        ({"arguments": None}, "{}"),
        ({"arguments": ""}, "{}"),
        ({"arguments": "null"}, "{}"),
        ({"arguments": "[]"}, "{}"),
        ({"arguments": '{"a": [1]}'}, '{"a": [1]}'),
        ({"arguments": json.dumps('{"a": "é"}')}, '{"a": "é"}'),
        ({"arguments": '{"a": 1, "city": "Ro'}, '{"a": 1}'),
        ({"arguments": "{"}, "{}"),
    ],
)
def test_arguments_of_earlier_calls_are_one_object_for_templates(
    byte_tokenizer: Tokenizer, function: dict[str, Any], expected: str
) -> None:
    assert rendered(byte_tokenizer, NATIVE, [call(**function)], ["c1"]) == f"<tool_call>Hic1{expected}1"


@pytest.mark.parametrize("arguments", ["[1]", "7", '"text"', "{'a': 1}", '{"a": 1} and', "Rome", json.dumps("[1]"), {}])
def test_arguments_that_are_no_object_are_refused_by_their_place(byte_tokenizer: Tokenizer, arguments: Any) -> None:
    with pytest.raises(PagemillError) as caught:
        rendered(byte_tokenizer, NATIVE, [call(), call("c2", arguments=arguments)], ["c1"])
    assert (caught.value.status, caught.value.param) == (400, "messages[1].tool_calls[1].function.arguments")


def test_the_responses_api_names_the_arguments_of_its_own_items() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "broken"}
    with pytest.raises(PagemillError) as caught:
        dialect_of("responses").parse(json.dumps({"model": "m", "input": [item]}).encode())
    assert caught.value.param == "input[0].arguments"
