"""The real `anthropic` Python client with a real engine server and the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.model
MODEL = "SmolLM2-135M-Instruct"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
ASK: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "max_tokens": 24, "extra_body": {"temperature": 0}}
TOOL: Any = {"name": "weather", "description": "The weather in a city.", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def client(model_server: Any) -> Iterator[anthropic.Anthropic]:
    import anthropic  # the import takes a second, which only the worker that runs this file needs

    with anthropic.Anthropic(base_url=model_server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_a_message_gets_an_answer(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**ASK)
    (block,) = answer.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 10
    assert answer.usage.output_tokens > 3


def test_a_stream_is_the_same_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.model_dump() for block in final.content] == [block.model_dump() for block in whole.content]
    assert text == whole.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_token_limit_and_a_history_with_tools_are_accepted(client: anthropic.Anthropic) -> None:
    history: list[Any] = [
        *FRANCE,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
    ]
    answer = client.messages.create(model=MODEL, max_tokens=4, messages=history, tools=[TOOL], system="Be brief.")
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert answer.usage.output_tokens <= 4


def test_the_models_are_listed_for_the_client(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active")
    assert client.models.retrieve(MODEL).max_input_tokens == model.max_input_tokens
    assert model.max_input_tokens


def test_errors_have_the_clients_classes(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        client.models.retrieve("other")
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**{**ASK, "model": "other"})
    image: Any = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x"}}]}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(**{**ASK, "messages": [image]})


def test_a_schema_constrains_the_answer(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = client.messages.create(
        model=MODEL,
        messages=FRANCE,
        max_tokens=40,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    (block,) = answer.content
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), schema)


def test_tokens_can_be_counted_in_advance(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=FRANCE, system="Be brief.").input_tokens
    answer = client.messages.create(model=MODEL, messages=FRANCE, system="Be brief.", max_tokens=1)
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_a_refused_body_has_anthropics_error_format(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model=MODEL, messages=[], max_tokens=1)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["param"] == "messages"
