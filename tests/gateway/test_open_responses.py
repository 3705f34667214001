"""What Open Responses' compliance suite asserts of `/v1/responses`, against a real engine: each answer is a response
resource with all its fields, each stream has the events of its items, and calls are items.

Images are left out, since the model reads none. Its calls are required, since the small model would not make them.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from openai.types.responses import Response
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import TypeAdapter
from real_cluster import Cluster

pytestmark = pytest.mark.slow

TEXT_OR_NULL, NUMBER, INTEGER_OR_NULL = (str, type(None)), (int, float), (int, type(None))
RESOURCE: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "status", "model", "truncation", "service_tier"), (str,)),
    **dict.fromkeys(("previous_response_id", "instructions", "safety_identifier", "prompt_cache_key"), TEXT_OR_NULL),
    **dict.fromkeys(("top_p", "presence_penalty", "frequency_penalty", "temperature"), NUMBER),
    **dict.fromkeys(("created_at", "top_logprobs"), (int,)),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), INTEGER_OR_NULL),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), (bool,)),
    **dict.fromkeys(("output", "tools"), (list,)),
    **dict.fromkeys(("error", "incomplete_details", "reasoning", "usage"), (dict, type(None))),
    **dict.fromkeys(("text", "metadata"), (dict,)),
    "tool_choice": (str, dict),
}
"""The fields that a response has in any case, and their types."""
ITEMS = {
    "message": {"type", "id", "status", "role", "content"},
    "function_call": {"type", "id", "call_id", "name", "arguments", "status"},
}
DETAILS = {"input_tokens", "output_tokens", "total_tokens", "input_tokens_details", "output_tokens_details"}
LOCATION = {"type": "string", "maxLength": 20}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": {"location": LOCATION}, "required": ["location"]},
}
CALLS: dict[str, Any] = {
    "input": [{"type": "message", "role": "user", "content": "What's the weather like in San Francisco?"}],
    "tools": [WEATHER],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


def said(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"input": [{"type": "message", "role": role, "content": text} for role, text in turns]}


CASES: dict[str, dict[str, Any]] = {
    "a text": said(("user", "Say hello in exactly 3 words.")),
    "a message of the system": said(("system", "Answer with one word."), ("user", "Say hello.")),
    "earlier turns": said(("user", "My name is Alice."), ("assistant", "Hello Alice!"), ("user", "What is my name?")),
    "a call": CALLS,
}


def post(cluster: Cluster, **fields: Any) -> bytes:
    body = {"model": "smol", "temperature": 0, **fields}
    request = urllib.request.Request(
        f"{cluster.url}/v1/responses", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        found: bytes = reply.read()
        return found


def check_resource(response: dict[str, Any]) -> None:
    Response.model_validate(response)
    assert response["object"] == "response"
    wrong = {name: response.get(name, "missing") for name in RESOURCE if not _fits(response, name)}
    assert wrong == {}
    assert response["usage"].keys() >= DETAILS
    for item in response["output"]:
        assert item.keys() >= ITEMS[item["type"]]
        for part in item.get("content", []):
            assert part.keys() >= {"type", "text", "annotations", "logprobs"}
    for tool in response["tools"]:
        assert tool.keys() >= {"type", "name", "description", "parameters", "strict"}


def _fits(response: dict[str, Any], name: str) -> bool:
    return name in response and isinstance(response[name], RESOURCE[name])


@pytest.mark.parametrize("case", CASES)
def test_a_response_is_complete_and_has_all_fields(real: Cluster, case: str) -> None:
    response = json.loads(post(real, **CASES[case]))
    check_resource(response)
    assert response["status"] == "completed"
    kinds = [item["type"] for item in response["output"]]
    assert kinds == (["function_call"] if case == "a call" else ["message"])
    if case == "a call":
        assert isinstance(json.loads(response["output"][0]["arguments"])["location"], str)


@pytest.mark.parametrize("case", CASES)
def test_a_stream_has_the_events_of_its_items(real: Cluster, case: str) -> None:
    raw = post(real, **CASES[case], stream=True).decode()
    events = [json.loads(each.partition("data: ")[2]) for each in raw.split("\n\n") if "data: " in each]
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"].removeprefix("response.") for each in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-2:] == ["output_item.done", "completed"]
    delta = "function_call_arguments" if case == "a call" else "output_text"
    assert {f"{delta}.delta", f"{delta}.done"} <= set(kinds)
    written = "".join(each["delta"] for each in events if each["type"] == f"response.{delta}.delta")
    (item,) = events[-1]["response"]["output"]
    assert written == (item["arguments"] if case == "a call" else item["content"][0]["text"])
    check_resource(events[-1]["response"])
