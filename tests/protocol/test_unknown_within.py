"""A key that no API has is named, or refused, in every object of every dialect's bodies: generated from the cases of
all fields and from bodies with the objects that those do not have."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from field_cases import DIALECTS, place_of
from request_outcomes import bodies_of, tokenizer_of

from pagemill_api.dialects.base import parsed, unread_fields
from pagemill_api.dialects.registry import dialects
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import ParserSettings

Body = dict[str, Any]
Path = tuple[str | int, ...]
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHOICE = {"type": "function", "function": {"name": "f"}}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
ITEMS_TOOL = {"type": "function", "name": "f", "parameters": {}}
ITEMS_CHOICE = {"type": "function", "name": "f"}
MORE: dict[str, list[Body]] = {
    "ChatCompletionRequest": [
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
        {"tools": [TOOL], "tool_choice": CHOICE},
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHOICE]}},
        },
        {"response_format": FORM},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "text"}},
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
                "triggers": ["<a>"],
            }
        },
    ],
    "CompletionRequest": [{"response_format": FORM}],
    "ResponsesRequest": [
        {"tools": [ITEMS_TOOL], "tool_choice": ITEMS_CHOICE},
        {"tools": [ITEMS_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [ITEMS_CHOICE]}},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
        {"input": [USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
    ],
    "MessagesRequest": [
        {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "f"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ],
    "OllamaChatRequest": [
        {"tools": [TOOL]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
    ],
}
OF_CLIENTS = {
    *("parameters", "input_schema", "schema", "json", "guided_json", "arguments", "metadata", "logit_bias"),
    *("chat_template_kwargs", "properties", "value"),
}
"""Objects whose keys are the client's: schemas, arguments, and maps."""


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = tokenizer_of()
    yield made
    made.close()


def objects(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of all objects that an API defines."""
    if isinstance(value, dict):
        yield path
        for name, inner in value.items():
            is_of_client = name in OF_CLIENTS or (name == "input" and value.get("type") == "tool_use")
            if not is_of_client and not (name == "format" and path == ()):
                yield from objects(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from objects(inner, (*path, index))


def with_key(body: Body, path: Path) -> Body:
    changed = copy.deepcopy(body)
    place: Any = changed
    for step in path:
        place = place[step]
    place["mine"] = 1
    return changed


def unread(dialect: str, body: Body, tokenizer: Tokenizer) -> list[str]:
    found = parsed(dialects()[dialect], json.dumps(body).encode(), place_of(dialect))
    found.check_form()
    return unread_fields(found, tokenizer, ParserSettings())


@pytest.mark.parametrize("name", DIALECTS)
def test_a_key_in_any_object_of_a_body_is_named_or_refused(name: str, tokenizer: Tokenizer) -> None:
    dialect, body, cases = DIALECTS[name]
    bodies = [bodies_of(body, case)[1] for case in cases.values()] + [{**body, **each} for each in MORE.get(name, [])]
    silent: set[str] = set()
    num_named = 0
    for each in bodies:
        try:
            unread(dialect, each, tokenizer)
        except PagemillError:
            continue
        for path in objects(each):
            try:
                named = unread(dialect, with_key(each, path), tokenizer)
            except PagemillError:
                continue
            # A schema that has several places is named at one of them.
            is_named = any(found.endswith("mine") for found in named)
            num_named += is_named
            silent |= set() if is_named else {f"{path} in {json.dumps(each)}"}
    assert silent == set()
    assert num_named >= 1
    refused = [each for each in MORE.get(name, []) if isinstance(_tried(dialect, {**body, **each}, tokenizer), str)]
    assert refused == [], "these bodies are valid"


def _tried(dialect: str, body: Body, tokenizer: Tokenizer) -> str | list[str]:
    try:
        return unread(dialect, body, tokenizer)
    except PagemillError as error:
        return str(error)
