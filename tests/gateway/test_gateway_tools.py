"""Tool calls, forms and reasoning through a gateway and real engine servers, with the openai client and SIGKILL."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest
from real_cluster import Cluster

pytestmark = pytest.mark.slow

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "Name the capital of France."}]


@pytest.mark.model
def test_the_real_model_calls_a_tool_as_body_and_as_stream_and_uses_its_result(real: Cluster) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    messages: list[Any] = [
        {"role": "developer", "content": "You know the weather."},
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "user", "content": "What is the weather in Paris?"},
    ]
    arguments: dict[str, Any] = {"model": "smol", "tools": [WEATHER], "temperature": 0, "max_tokens": 60}
    with real.client() as client:
        whole = client.chat.completions.create(messages=messages, tool_choice="auto", **arguments)
        calls = whole.choices[0].message.tool_calls or []
        assert whole.choices[0].finish_reason == "tool_calls"
        assert whole.choices[0].message.content is None
        assert [
            (call.function.name, json.loads(call.function.arguments)) for call in calls if call.type == "function"
        ] == [("weather", {"city": "Paris"})]
        with client.chat.completions.stream(
            messages=messages, stream_options={"include_usage": True}, **arguments
        ) as stream:
            streamed = stream.get_final_completion()
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "It rains."}
        answered = client.chat.completions.create(
            messages=[*messages, whole.choices[0].message.model_dump(exclude_none=True), result], **arguments
        )
    assert [
        call.function.model_dump(include={"name", "arguments"}) for call in streamed.choices[0].message.tool_calls or []
    ] == [calls[0].model_dump()["function"]]
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    assert answered.choices[0].finish_reason in ("stop", "length", "tool_calls")


PLAN: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
PLANNED: list[Any] = [
    {"type": "function", "function": {"name": "plan", "parameters": PLAN, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "plan"}}


def check_planned(message: Any) -> list[str]:
    """Return the names of the message's calls after a check that their arguments are valid."""
    calls = message.tool_calls or []
    for call in calls:
        jsonschema.validate(
            json.loads(call.function.arguments), PLAN if call.function.name == "plan" else {"const": {}}
        )
    return [call.function.name for call in calls]


@pytest.mark.model
@pytest.mark.parametrize(
    ("choice", "reason", "names"),
    [("required", "tool_calls", {"plan", "stop"}), (NAMED, "stop", {"plan"})],
    ids=["required", "named"],
)
def test_a_forced_call_is_made_at_temperature_1_as_body_and_as_stream(
    real: Cluster, choice: Any, reason: str, names: set[str]
) -> None:
    arguments: dict[str, Any] = {"messages": QUESTION, "tools": PLANNED, "tool_choice": choice, "max_tokens": 80}
    arguments |= {"model": "smol", "parallel_tool_calls": False, "seed": 5, "temperature": 1.0}
    with real.client() as client:
        whole = client.chat.completions.create(n=3, **arguments)
        with client.chat.completions.stream(**arguments) as stream:
            streamed = stream.get_final_completion().choices[0]
    for each in [*whole.choices, streamed]:
        (name,) = check_planned(each.message)
        assert name in names
        assert each.finish_reason == reason
        assert not each.message.content
    first = whole.choices[0].message.tool_calls or []
    assert [call.function.model_dump(include={"name", "arguments"}) for call in streamed.message.tool_calls or []] == [
        call.function.model_dump() for call in first if call.type == "function"
    ]


@pytest.mark.model
def test_arguments_of_a_forced_call_are_streamed_while_they_are_written(real: Cluster) -> None:
    with real.client() as client:
        chunks = client.chat.completions.create(
            model="smol", messages=QUESTION, tools=PLANNED, tool_choice=NAMED, max_tokens=80, stream=True
        )
        pieces = [
            call.function.arguments
            for chunk in chunks
            for call in chunk.choices[0].delta.tool_calls or []
            if call.function is not None and call.function.arguments
        ]
    assert len(pieces) > 2
    jsonschema.validate(json.loads("".join(pieces)), PLAN)


@pytest.mark.model
def test_another_engine_completes_a_forced_call_after_a_kill(start_cluster: Callable[..., Cluster]) -> None:
    cluster = start_cluster(2)
    note = {"type": "string", "pattern": "^[a-z ]{60,90}$"}
    schema = {"type": "object", "properties": {"note": note}, "required": ["note"], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "plan", "parameters": schema}}
    pieces: list[str] = []
    killed: list[str] = []
    with cluster.client() as client:
        chunks = client.chat.completions.create(
            model="smol", messages=QUESTION, tools=[tool], tool_choice=NAMED, max_tokens=200, stream=True
        )
        for chunk in chunks:
            calls = chunk.choices[0].delta.tool_calls or []
            pieces += [call.function.arguments or "" for call in calls if call.function is not None]
            if len(pieces) == 4 and not killed:
                killed = [each["id"] for each in cluster.endpoints() if each["in_flight"]]
                next(engine for engine in cluster.engines if engine.name in killed).kill()
        reason = chunk.choices[0].finish_reason
    assert len(killed) == 1
    jsonschema.validate(json.loads("".join(pieces)), schema)
    assert reason == "stop"


@pytest.mark.model
def test_a_form_works_with_tools_and_applies_after_the_reasoning(real: Cluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "plan", "schema": PLAN}}
    thinking: list[Any] = [*QUESTION, {"role": "assistant", "content": "<think>\nIt is Paris.\n"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    arguments: dict[str, Any] = {"model": "smol", "max_tokens": 200, "response_format": form}
    end = {"logit_bias": {"2": -100}}
    with real.client() as client:
        either = client.chat.completions.create(messages=QUESTION, tools=PLANNED, n=2, **arguments)
        behind = client.chat.completions.create(messages=thinking, temperature=0, extra_body=extra | end, **arguments)
    for each in either.choices:
        if each.finish_reason == "stop":
            jsonschema.validate(json.loads(each.message.content or ""), PLAN)
        elif each.finish_reason == "tool_calls":
            # `stop` is not strict, so the model may write any arguments.
            strict = [call for call in each.message.tool_calls if call.function.name == "plan"]
            assert all(jsonschema.validate(json.loads(call.function.arguments), PLAN) is None for call in strict)
    message = behind.choices[0].message
    assert message.model_dump()["reasoning_content"]
    assert (
        behind.choices[0].finish_reason == "length"
        or jsonschema.validate(json.loads(message.content or ""), PLAN) is None
    )


@pytest.mark.model
def test_the_real_model_stops_reasoning_at_its_budget(real: Cluster) -> None:
    thinking: list[Any] = [*QUESTION, {"role": "assistant", "content": "<think>\nThe capital"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "thinking_token_budget": 5}
    with real.client() as client:
        answer = client.chat.completions.create(
            model="smol", messages=thinking, max_tokens=40, temperature=0, extra_body=extra
        )
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="smol", messages=QUESTION, extra_body={"thinking_token_budget": -2})
    assert caught.value.param == "thinking_token_budget"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.choices[0].message.content


@pytest.mark.model
def test_an_unsupported_schema_is_refused_with_its_path(real: Cluster) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}, "strict": True}}
    with real.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smol", messages=QUESTION, tools=[*PLANNED, bad])
    assert caught.value.param == "tools[2].function.parameters"


@pytest.mark.model
def test_the_real_models_reasoning_is_separate_from_its_answer(real: Cluster) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "What is the capital of Italy?"},
        {"role": "assistant", "content": "<think>\nItaly is in Europe.\n</think>\nRome."},
        *QUESTION,
        {"role": "assistant", "content": "<think>\n"},
    ]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    arguments: dict[str, Any] = {"model": "smol", "messages": messages, "temperature": 0, "max_tokens": 60}
    with real.client() as client:
        whole = client.chat.completions.create(extra_body=extra, **arguments)
        chunks = list(client.chat.completions.create(extra_body=extra, stream=True, **arguments))
    message = whole.choices[0].message.model_dump()
    assert message["reasoning_content"] == message["reasoning"]
    assert "France" in message["reasoning_content"]
    assert "Paris" in (message["content"] or "")
    assert "think" not in message["content"]
    deltas = [choice.delta.model_dump() for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message["reasoning_content"]
    assert "".join(delta["content"] or "" for delta in deltas) == message["content"]
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert 0 < (whole.usage.completion_tokens_details.reasoning_tokens or 0) < whole.usage.completion_tokens
