# /// script
# dependencies = ["openai==3.54.0"]
# ///
"""OpenAI's own Python client."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import openai
from checks import (
    CITY_SCHEMA,
    CITY_TOOL,
    EMBEDDING_MODEL,
    JSON_QUESTION,
    KEY,
    MAX_TOKENS,
    MODEL,
    QUESTION,
    TEXT_TOKENS,
    City,
    assert_embeddings,
    base_url,
    check,
    report_all,
    run_howto,
)

client = openai.OpenAI(base_url=base_url(), api_key=KEY, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
ASK: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0}
TEXT = {**ASK, "max_tokens": TEXT_TOKENS}
ONE_CALL = {**ASK, "parallel_tool_calls": False}
STRICT_TOOL = {**CITY_TOOL, "function": {**CITY_TOOL["function"], "strict": True}}
CHAT: Any = "/v1/chat/completions"
RESPOND: dict[str, Any] = {"model": MODEL, "input": QUESTION, "max_output_tokens": MAX_TOKENS, "temperature": 0}
NAMED = {"type": "function", "function": {"name": "record_city"}}


@check("the example of the how-to guide")
def howto() -> None:
    assert run_howto("OpenAI")["answer"]


@check("models")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


@check("chat, streamed with usage")
def stream() -> None:
    chunks = list(client.chat.completions.create(**TEXT, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage is not None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert client.chat.completions.create(**TEXT).choices[0].message.content


@check("log probabilities")
def logprobs() -> None:
    choice = client.chat.completions.create(**TEXT, logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs is not None
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


@check("completions, streamed")
def completions() -> None:
    chunks = client.completions.create(model=MODEL, prompt="Once", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


@check("`parse()` into a type")
def parse() -> None:
    message = client.chat.completions.parse(**ASK, response_format=City).choices[0].message
    assert isinstance(message.parsed, City)


@check("a type, streamed with events")
def parse_stream() -> None:
    with client.chat.completions.stream(**ASK, response_format=City) as events:
        kinds = {event.type for event in events}
        assert isinstance(events.get_final_completion().choices[0].message.parsed, City)
    assert {"chunk", "content.delta", "content.done"} <= kinds


@check("`json_object` and strict `json_schema`")
def response_formats() -> None:
    strict = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True}}
    City.model_validate_json(_text(response_format=strict))
    _text(response_format={"type": "json_object"}, messages=[{"role": "user", "content": JSON_QUESTION}])


@check("tools: `auto` and `none`")
def tools() -> None:
    assert client.chat.completions.create(**TEXT, tools=[CITY_TOOL], tool_choice="auto").choices[0].message
    message = client.chat.completions.create(**TEXT, tools=[CITY_TOOL], tool_choice="none").choices[0].message
    assert message.content
    assert not message.tool_calls


@check("tools: `required`, named and strict")
def forced_tools() -> None:
    for choice in ("required", NAMED):
        message = client.chat.completions.create(**ONE_CALL, tools=[STRICT_TOOL], tool_choice=choice).choices[0].message
        _assert_calls(message.tool_calls)


@check("a call, streamed with events")
def tool_stream() -> None:
    with client.chat.completions.stream(**ASK, tools=[STRICT_TOOL], tool_choice=NAMED) as events:
        kinds = {event.type for event in events}
        message = events.get_final_completion().choices[0].message
    _assert_calls(message.tool_calls)
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


@check("an answer to the result of a call")
def tool_result() -> None:
    message = client.chat.completions.create(**ASK, tools=[CITY_TOOL], tool_choice=NAMED).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Recorded."} for call in message.tool_calls]
    ask = {**TEXT, "messages": [*MESSAGES, message, *results]}
    assert client.chat.completions.create(**ask, tools=[CITY_TOOL], tool_choice="none").choices[0].message.content


@check("Responses: text, and `parse()` into a type")
def responses() -> None:
    assert client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=TEXT_TOKENS).output_text
    assert isinstance(client.responses.parse(**RESPOND, text_format=City).output_parsed, City)


@check("Responses: `previous_response_id`, and stored responses retrieved, listed and deleted")
def stored_response() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=2)
    ask: dict[str, Any] = {"model": MODEL, "input": "Go on.", "max_output_tokens": 2, "stream": True}
    *_, last = client.responses.create(**ask, previous_response_id=first.id)
    second = last.response
    assert client.responses.retrieve(second.id).output == second.output
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [getattr(item, "role", "") for item in items] == ["user", "assistant", "user"]
    client.responses.delete(first.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        try:
            gone(first.id)
        except openai.NotFoundError:
            continue
        raise AssertionError("a deleted response is there")


@check("files and batches: uploaded, run, read, listed, cancelled, deleted")
def batches() -> None:
    lines = [{"custom_id": str(number), "method": "POST", "url": CHAT, "body": TEXT} for number in range(3)]
    content = "\n".join([*(json.dumps(line) for line in lines), "{broken"]).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert client.files.content(file.id).read() == content
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.metadata, batch.request_counts.failed) == ("completed", {"a": "b"}, 1)
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {result["custom_id"] for result in results} == {"0", "1", "2"}
    assert all(result["response"]["body"]["choices"][0]["message"]["content"] for result in results)
    assert json.loads(client.files.content(batch.error_file_id).text)["error"]["line"] == 4
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    other = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    other = client.batches.cancel(other.id)
    while other.status == "cancelling":
        time.sleep(0.2)
        other = client.batches.retrieve(other.id)
    assert other.status == "cancelled"
    assert client.files.delete(file.id).deleted
    assert file.id not in [each.id for each in client.files.list()]


@check("Responses: a call, streamed")
def response_tools() -> None:
    tool: Any = {"type": "function", "strict": True, **CITY_TOOL["function"]}
    with client.responses.stream(**RESPOND, tools=[tool], tool_choice="required", parallel_tool_calls=False) as events:
        kinds = {event.type for event in events}
        calls = [item for item in events.get_final_response().output if item.type == "function_call"]
    assert "response.function_call_arguments.delta" in kinds
    assert [City.model_validate_json(call.arguments) for call in calls]


@check("embeddings, as floats and as base64")
def embeddings() -> None:
    made = client.embeddings.create(model=EMBEDDING_MODEL, input=["paris", "berlin"])  # base64 without being asked
    floats = client.embeddings.create(model=EMBEDDING_MODEL, input=["paris", "berlin"], encoding_format="float")
    assert [item.index for item in made.data] == [0, 1]
    assert_embeddings([item.embedding for item in made.data])
    for item, other in zip(made.data, floats.data, strict=True):
        assert all(math.isclose(*pair, abs_tol=1e-6) for pair in zip(item.embedding, other.embedding, strict=True))


@check("a prompt beyond the context: `context_length_exceeded`")
def overflow() -> None:
    refused: openai.BadRequestError | None = None
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 10_000}])
    except openai.BadRequestError as error:
        refused = error
    assert refused is not None
    assert refused.code == "context_length_exceeded"
    assert "maximum context length is" in str(refused)


def _text(**fields: Any) -> str:
    text = client.chat.completions.create(**{**ASK, **fields}).choices[0].message.content
    assert isinstance(json.loads(text), dict)
    return str(text)


def _assert_calls(calls: Any) -> None:
    assert calls
    for call in calls:
        assert call.id
        assert call.function.name == "record_city"
        City.model_validate_json(call.function.arguments)


if __name__ == "__main__":
    report_all()
