"""No field is ignored in silence: what nothing reads is named in the header, in every dialect and place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from field_cases import DIALECTS, SCHEMAS, place_of
from request_outcomes import tokenizer_of

from pagemill_api.dialects.base import parsed, unread_fields
from pagemill_api.dialects.registry import dialects
from pagemill_api.openai.unread_fields import unread_headers
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import ParserSettings

USER = {"role": "user", "content": "hi"}
NAMED = ("mine", "x-y")
"""Fields that no API has."""


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = tokenizer_of()
    yield made
    made.close()


def unread(dialect: str, body: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    found = parsed(dialects()[dialect], json.dumps(body).encode(), place_of(dialect))
    return unread_fields(found, tokenizer, ParserSettings())


@pytest.mark.parametrize("name", DIALECTS)
def test_an_unknown_field_is_named(name: str, tokenizer: Tokenizer) -> None:
    dialect, body, _ = DIALECTS[name]
    before = unread(dialect, body, tokenizer)
    assert unread(dialect, {**body, **dict.fromkeys(NAMED, 1)}, tokenizer) == sorted([*before, *NAMED])
    assert unread(dialect, {**body, **dict.fromkeys(NAMED)}, tokenizer) == before, "null is no value"


VALUES: dict[str, Any] = {"user": "ann", "safety_identifier": "ann", "prompt_cache_key": "key", "max_tool_calls": 3}
LISTED = [
    (name, field)
    for name in DIALECTS
    for field in sorted(SCHEMAS[name].IGNORED)
    if field.isidentifier() and (name, field) != ("GenerateBody", "stream")
]


@pytest.mark.parametrize(("name", "field"), LISTED)
def test_a_field_that_is_listed_as_without_effect_is_named(name: str, field: str, tokenizer: Tokenizer) -> None:
    dialect, body, _ = DIALECTS[name]
    assert field in unread(dialect, {**body, field: VALUES.get(field, {"a": "b"})}, tokenizer)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHAT = {"model": "m", "messages": [USER]}
MESSAGE = {**CHAT, "max_tokens": 9}
PLACES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "a message": ("chat", {"model": "m", "messages": [{**USER, "mine": 1}]}, ["messages.mine"]),
    "a part": (
        "chat",
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
        ["messages.content.cache_control"],
    ),
    "a tool": ("chat", {**CHAT, "tools": [{**TOOL, "mine": 1}]}, ["tools.mine"]),
    "a function": (
        "chat",
        {**CHAT, "tools": [{"type": "function", "function": {**TOOL["function"], "mine": 1}}]},  # type: ignore[dict-item]
        ["tools.function.mine"],
    ),
    "options of a stream": ("chat", {**CHAT, "stream": True, "stream_options": {"mine": 1}}, ["stream_options.mine"]),
    "Anthropic's message": ("messages", {**MESSAGE, "messages": [{**USER, "mine": 1}]}, ["messages.mine"]),
    "Anthropic's block": (
        "messages",
        {**MESSAGE, "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "mine": 1}]}]},
        ["messages.content.mine"],
    ),
    "Anthropic's tool": (
        "messages",
        {**MESSAGE, "tools": [{"name": "f", "input_schema": {}, "mine": 1}]},
        ["tools.mine"],
    ),
    "Anthropic's system prompt": (
        "messages",
        {**MESSAGE, "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        ["system.cache_control"],
    ),
    "an item": ("responses", {"model": "m", "input": [{**USER, "mine": 1}]}, ["input.mine"]),
    "an item's part": (
        "responses",
        {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "mine": 1}]}]},
        ["input.content.mine"],
    ),
    "a tool of responses": (
        "responses",
        {"model": "m", "input": "a", "tools": [{"type": "function", "name": "f", "parameters": {}, "mine": 1}]},
        ["tools.mine"],
    ),
    "a form": (
        "responses",
        {"model": "m", "input": "a", "text": {"format": {"type": "text", "mine": 1}}},
        ["text.format.mine"],
    ),
    "Ollama's options": ("ollama-chat", {**CHAT, "options": {"mine": 1}}, ["options.mine"]),
    "Ollama's message": ("ollama-chat", {"model": "m", "messages": [{**USER, "mine": 1}]}, ["messages.mine"]),
    "TGI's parameters": ("tgi", {"inputs": "a", "parameters": {"mine": 1}}, ["parameters.mine"]),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_field_within_a_body_is_named_with_its_path(place: str, tokenizer: Tokenizer) -> None:
    dialect, body, names = PLACES[place]
    assert unread(dialect, body, tokenizer) == names


def test_what_is_read_is_not_named(tokenizer: Tokenizer) -> None:
    for dialect, body, cases in DIALECTS.values():
        assert unread(dialect, body, tokenizer) == []
        for field, case in cases.items():
            before, changes = case if isinstance(case, tuple) else ({}, case)
            try:
                names = unread(dialect, {**body, **before, **changes}, tokenizer)
            except PagemillError:
                continue
            assert field not in names, (dialect, field)


def test_a_header_names_a_bounded_number_of_fields(tokenizer: Tokenizer) -> None:
    found = unread("chat", {**CHAT, **{f"mine{at}": 1 for at in range(500)}}, tokenizer)
    assert len(found) <= 32
    assert len(unread_headers(found)["x-pagemill-unread-fields"]) < 32 * 70
