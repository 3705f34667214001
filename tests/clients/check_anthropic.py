# /// script
# dependencies = ["anthropic==2.12.0"]
# ///
"""Anthropic's own Python client, on /v1/messages."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from checks import CITY_SCHEMA, KEY, MAX_TOKENS, MODEL, QUESTION, City, base_url, check, report_all

client = anthropic.Anthropic(base_url=base_url().removesuffix("/v1"), api_key=KEY, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
ASK: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
ONE = {"disable_parallel_tool_use": True}
TOOLS: Any = [{"name": "record_city", "description": "Record a city", "input_schema": CITY_SCHEMA}]


@check("models")
def models() -> None:
    listed = {model.id: model for model in client.models.list()}
    assert listed[MODEL] == client.models.retrieve(MODEL)
    assert listed[MODEL].max_input_tokens


@check("messages, streamed too")
def messages() -> None:
    assert client.messages.create(**ASK).content[0].text
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens


@check("`count_tokens`")
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    usage = client.messages.create(**ASK).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@check("tools: `any` and named, and an answer to the result")
def tools() -> None:
    for choice in ({"type": "any", **ONE}, {"type": "tool", "name": "record_city", **ONE}):
        answer = client.messages.create(**ASK, tools=TOOLS, tool_choice=choice)
        (use,) = [block for block in answer.content if block.type == "tool_use"][:1]
        City.model_validate(use.input)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "Recorded."}]}
    uses = {"role": "assistant", "content": [use.model_dump()]}
    ask = {**ASK, "messages": [*MESSAGES, uses, result]}
    assert client.messages.create(**ask, tools=TOOLS, tool_choice={"type": "none"}).content


@check("a call, streamed")
def tool_stream() -> None:
    with client.messages.stream(**ASK, tools=TOOLS, tool_choice={"type": "any", **ONE}) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
    City.model_validate_json("".join(parts))


@check("`output_config` with a JSON schema")
def output_format() -> None:
    form = {"format": {"type": "json_schema", "schema": CITY_SCHEMA}}
    City.model_validate(json.loads(client.messages.create(**ASK, output_config=form).content[0].text))


if __name__ == "__main__":
    report_all()
