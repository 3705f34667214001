"""Fields that only chat templates read, and that a model's template does not read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from byte_bundle import byte_bundle

from pagemill_api.dialects.base import unread_fields
from pagemill_api.dialects.registry import dialects
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.request.answer_format import ParserSettings

SILENT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
READING = (
    "{% for m in messages %}<{{ m.role }}>{{ m['name'] }}{{ m.content }}{% endfor %}"
    "{{ enable_thinking }}{{ reasoning_effort }}{{ verbosity }}"
)
OF_TOOLS = SILENT + "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
DUMPING = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
DEMANDING = "{% for m in messages %}{% if not m.name %}{{ raise_exception('No name.') }}{% endif %}{% endfor %}"
USER = {"role": "user", "content": "hi"}
NAMED = {"messages": [{**USER, "name": "ann"}]}
CHAT = {"model": "m", "messages": [USER]}
RESPONSE = {"model": "m", "input": "hi"}
EFFORTS = {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}
PARSERS = ParserSettings()


def unread(template: str, fields: dict[str, Any], dialect: str = "chat", body: dict[str, Any] = CHAT) -> list[str]:
    tokenizer = Tokenizer(byte_bundle(template))
    try:
        parsed = dialects()[dialect].parse(json.dumps({**body, **fields}).encode())
        return unread_fields(parsed, tokenizer, PARSERS)
    finally:
        tokenizer.close()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, []),
        ({"verbosity": "low"}, ["verbosity"]),
        ({"reasoning_effort": "low"}, ["reasoning_effort"]),
        ({"reasoning_effort": "none"}, ["reasoning_effort"]),
        ({"reasoning": {"effort": "low", "max_tokens": -1}}, ["reasoning.effort"]),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "date_string": "today"}},
            ["chat_template_kwargs.date_string", "chat_template_kwargs.enable_thinking"],
        ),
        ({**NAMED, "verbosity": "low"}, ["messages.name", "verbosity"]),
    ],
)
def test_a_silent_template_reads_none_and_a_reading_one_all(fields: dict[str, Any], names: list[str]) -> None:
    assert unread(SILENT, fields) == names
    assert set(unread(READING, fields)) <= {"chat_template_kwargs.date_string"}


def test_an_effort_of_none_and_either_switch_act_through_a_switch() -> None:
    template = SILENT + "{{ thinking }}"
    assert unread(template, {"reasoning_effort": "none"}) == []
    assert unread(template, {"reasoning_effort": "low"}) == ["reasoning_effort"]
    assert unread(template, {"chat_template_kwargs": {"enable_thinking": False}}) == []


@pytest.mark.parametrize(
    ("template", "is_read"), [(OF_TOOLS, False), (SILENT, False), (READING, True), (DUMPING, True), (DEMANDING, True)]
)
def test_the_name_of_a_message_is_read_if_the_prompt_depends_on_it(template: str, is_read: bool) -> None:
    assert unread(template, NAMED) == ([] if is_read else ["messages.name"])


def test_translated_bodies_get_the_names_of_their_own_fields() -> None:
    message = {**CHAT, "max_tokens": 9}
    assert unread(SILENT, EFFORTS, "responses", RESPONSE) == ["reasoning.effort", "text.verbosity"]
    assert unread(READING, EFFORTS, "responses", RESPONSE) == []
    assert unread(SILENT, {"thinking": {"type": "disabled"}}, "messages", message) == ["thinking"]
    assert unread(SILENT, {"output_config": {"effort": "low"}}, "messages", message) == ["output_config.effort"]
    assert unread(SILENT, {"think": "low"}, "ollama-chat") == ["think"]
    assert unread(SILENT + "{{ enable_thinking }}", {"think": "low"}, "ollama-chat") == []


def test_bodies_that_are_no_chats_have_none() -> None:
    assert unread(SILENT, {"prompt": "hi"}, "completions", {"model": "m"}) == []
    assert unread(SILENT, {"input": "hi"}, "embeddings", {"model": "m"}) == []


def test_a_chat_with_names_is_not_rendered_on_the_event_loop() -> None:
    tokenizer = Tokenizer(byte_bundle(SILENT))
    tokenizer.warm_up()

    def rendered(fields: dict[str, Any]) -> str | None:
        parsed = dialects()["chat"].parse(json.dumps({**CHAT, **fields}).encode())
        return asyncio.run(parsed.render_inline(tokenizer, PARSERS))

    try:
        assert rendered({}) == "<user>hi"
        assert rendered(NAMED) is None
    finally:
        tokenizer.close()
