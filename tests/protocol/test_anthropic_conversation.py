"""Anthropic's conversations as chats: places of messages, parts that are not text, tools of clients, and errors."""

from __future__ import annotations

import asyncio
import base64
import json
from functools import partial
from typing import Any

import pytest
from refusals import refusal_of
from request_outcomes import tokenizer_of

from pagemill_api.dialects.anthropic.messages import MessagesBody, MessagesDialect, read_count
from pagemill_api.dialects.base import Preparation
from pagemill_api.openai import prepare
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

DIALECT = MessagesDialect()
HI: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"name": "f", "description": "now", "input_schema": {"type": "object"}}
USE: dict[str, Any] = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
PDF: dict[str, Any] = {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}}
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system must be first') }}{% endif %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
)


def parsed(**fields: Any) -> MessagesBody:
    body = {"model": "m", "max_tokens": 9, "messages": [HI], **fields}
    return DIALECT.parse(json.dumps(body).encode())


refused = partial(refusal_of, parsed)


def said(**fields: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in parsed(**fields).fields.messages]


def of_user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def with_result(*content: Any) -> list[dict[str, Any]]:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [*content]}
    return [HI, {"role": "assistant", "content": [USE]}, of_user(result)]


def prompt_of(body: MessagesBody, tokenizer: Tokenizer) -> str:
    sampling = prepare.within_vocabulary(body.sampling(), tokenizer)
    (request,) = body.prepare(tokenizer, Preparation(5000, "id-1", 7), sampling, None)
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


def test_a_system_message_stays_at_its_place() -> None:
    now = {"role": "system", "content": [{"type": "text", "text": "Now"}]}
    assert said(system="Be", messages=[HI, now, HI]) == [
        ("system", "Be"),
        ("user", "hi"),
        ("system", "Now"),
        ("user", "hi"),
    ]


def test_a_template_that_takes_no_later_system_message_gets_it_with_the_users() -> None:
    bundle = TokenizerBundle(
        tokenizer_json=tokenizer_of().bundle.tokenizer_json,
        chat_template=STRICT_TEMPLATE,
        eos_token_ids=[0],
        vocab_size=260,
    )
    tokenizer = Tokenizer(bundle)
    body = parsed(system="Be", messages=[HI, {"role": "system", "content": "Now"}, {"role": "user", "content": "ho"}])
    assert asyncio.run(body.render_inline(tokenizer, ParserSettings())) is None
    assert prompt_of(body, tokenizer) == "<system>Be<user>hi\nNow\nho"
    given = {"model": "m", "system": "Be", "messages": [HI, {"role": "system", "content": "Now"}, HI]}
    counted = prepare.tokenize(read_count(json.dumps(given).encode()), tokenizer, 500)
    assert len(counted) == len("<system>Be<user>hi\nNow\nhi"), "counting takes the same messages"
    tokenizer.close()


def test_a_system_message_is_read_only_until_the_next_message_of_the_user_if_it_says_so() -> None:
    until = {"role": "system", "content": "Now", "clear_at": "next_user_message"}
    assert said(messages=[HI, until]) == [("user", "hi"), ("system", "Now")]
    assert said(messages=[HI, until, HI]) == [("user", "hi"), ("user", "hi")]


def test_the_effort_of_a_system_message_holds_for_its_turn() -> None:
    low = {"role": "system", "output_config": {"effort": "low"}}
    given = {"output_config": {"effort": "high"}}
    assert parsed(messages=[HI, low], **given).fields.reasoning_effort == "low"
    called = with_result({"type": "text", "text": "so"})[1:]
    assert parsed(messages=[HI, low, *called], **given).fields.reasoning_effort == "low"
    assert parsed(messages=[HI, low, HI], **given).fields.reasoning_effort == "high"


def test_documents_and_search_results_are_text_with_their_titles() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    encoded = {"type": "base64", "media_type": "text/plain", "data": base64.b64encode("Köln".encode()).decode()}
    blocks = {"type": "content", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    found = {"type": "search_result", "source": "https://a", "title": "A", "content": [{"type": "text", "text": "x"}]}
    ((_, text),) = said(
        messages=[
            of_user(
                {"type": "document", "source": source, "title": "Weather", "context": "Today"},
                {"type": "document", "source": encoded},
                {"type": "document", "source": blocks},
                found,
            )
        ]
    )
    assert text == (
        'Document {"title": "Weather", "about": "Today"}:\nIt rains.\nKöln\none\ntwo\n'
        'Search result {"title": "A", "about": "https://a"}:\nx'
    )


def test_what_the_model_cannot_read_in_a_result_is_a_sentence_and_is_named() -> None:
    body = parsed(messages=with_result({"type": "text", "text": "seen:"}, IMAGE, PDF))
    assert body.fields.messages[-1].content == (
        "seen:\n[Here was an image, which this model cannot read.]\n"
        "[Here was a document that is not text, which this model cannot read.]"
    )
    tokenizer = tokenizer_of()
    named = ["messages[2].content[0].content[1]", "messages[2].content[0].content[2]"]
    assert body.unread_fields(tokenizer, ParserSettings()) == named
    many = parsed(messages=with_result(*[IMAGE] * 50)).unread_fields(tokenizer, ParserSettings())
    assert len(many) == 8, "the header does not grow with the conversation"
    tokenizer.close()


def test_a_budget_for_a_model_without_reasoning_has_no_effect_and_is_named() -> None:
    tokenizer = tokenizer_of()
    thinks = {"thinking": {"type": "enabled", "budget_tokens": 4000}}
    none, detected = ParserSettings(reasoning="none"), ParserSettings()
    body = parsed(**thinks)
    assert asyncio.run(body.render_inline(tokenizer, none)) is None
    sampling = body.sampling()
    (request,) = body.prepare(tokenizer, Preparation(500, "id-1", 7, parsers=none), sampling, None)
    assert request.answer_format is None
    assert body.unread_fields(tokenizer, none) == ["thinking.budget_tokens"]
    body = parsed(**thinks)
    (request,) = body.prepare(tokenizer, Preparation(500, "id-1", 7), sampling, None)
    assert body.unread_fields(tokenizer, detected) == []
    assert request.answer_format is not None
    assert request.answer_format.reasoning_budget == 4000
    tokenizer.close()


@pytest.mark.parametrize(
    ("kind", "fields", "properties"),
    [
        ("bash_20250124", {"name": "bash"}, {"command", "restart"}),
        ("text_editor_20250124", {"name": "str_replace_editor"}, {"command", "path", "old_str", "new_str"}),
        ("text_editor_20250728", {"name": "str_replace_based_edit_tool"}, {"command", "path", "insert_text"}),
        ("memory_20250818", {"name": "memory"}, {"command", "path", "old_path", "new_path"}),
        (
            "computer_20250124",
            {"name": "computer", "display_width_px": 800, "display_height_px": 600},
            {"action", "coordinate", "scroll_direction"},
        ),
    ],
)
def test_tools_that_the_client_runs_are_functions(kind: str, fields: dict[str, Any], properties: set[str]) -> None:
    (tool,) = parsed(tools=[{"type": kind, **fields}]).fields.tools
    function = tool["function"]
    assert function["name"] == fields["name"]
    assert function["description"]
    assert properties <= function["parameters"]["properties"].keys()
    assert {*function["parameters"]["required"]} <= function["parameters"]["properties"].keys()


def test_an_old_editor_can_take_back_an_edit_and_a_new_one_cannot() -> None:
    def commands(kind: str) -> list[str]:
        (tool,) = parsed(tools=[{"type": kind, "name": "e"}]).fields.tools
        found: list[str] = tool["function"]["parameters"]["properties"]["command"]["enum"]
        return found

    assert "undo_edit" in commands("text_editor_20241022")
    assert "undo_edit" not in commands("text_editor_20250429")


def test_a_deferred_tool_is_described_where_it_is_referred_to_and_not_before() -> None:
    later = {**TOOL, "name": "later", "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "later"}
    tokenizer = tokenizer_of()
    plain = prompt_of(parsed(tools=[TOOL, later]), tokenizer)
    assert "now" in plain
    assert "later" not in plain
    shown = prompt_of(parsed(tools=[TOOL, later], messages=with_result(reference)), tokenizer)
    beginning = plain.removesuffix("NoneNone<assistant>")
    assert shown.startswith(beginning), "the prefix of the prompt is the same"
    assert '{"name": "later"' in shown.removeprefix(beginning)
    added = {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}]}
    assert '{"name": "f"' in said(tools=[TOOL], messages=[HI, added])[1][1]
    removed = {**added, "content": [{**added["content"][0], "type": "tool_removal"}]}
    assert said(tools=[TOOL], messages=[HI, removed])[1][1] == 'The tool "f" is no longer available.'
    tokenizer.close()


def test_the_line_of_claude_code_for_accounts_is_no_part_of_the_prompt() -> None:
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.8ff;"},
        {"type": "text", "text": "You are an agent."},
    ]
    assert said(system=blocks)[0] == ("system", "You are an agent.")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([HI, of_user({"type": "text", "text": "a"}, IMAGE)], "messages[1].content[1].type"),
        ([of_user(PDF)], "messages[0].content[0].type"),
        (with_result({"type": "audio"}), "messages[2].content[0].content[0].type"),
        (with_result({"type": "tool_reference", "tool_name": "g"}), "messages[2].content[0].content[0].tool_name"),
        ([HI, {"role": "assistant", "content": [USE, {**USE, "name": "no name"}]}], "messages[1].content[1].name"),
        ([HI, {"role": "assistant", "content": [{**USE, "id": ""}]}], "messages[1].content[0].id"),
        ([HI, {"role": "assistant", "content": [{**USE, "input": []}]}], "messages[1].content[0].input"),
        ([HI, *with_result({"type": "text", "text": "a"})[2:]], "messages[1].content[0].tool_use_id"),
        ([HI, HI, of_user({"type": "tool_result", "tool_use_id": "t1"})], "messages[2].content[0].tool_use_id"),
        ([HI, {"role": "user"}], "messages[1].content"),
        ([HI, {"role": "system", "content": [{"type": "tool_addition"}]}], "messages[1].content[0].tool.type"),
    ],
)
def test_errors_name_the_clients_own_field(messages: list[Any], param: str) -> None:
    for system in ("", "Be brief."):
        error = refused(messages=messages, system=system, tools=[TOOL])
        assert error.param == param
        assert "tool_calls" not in error.message.replace("`tool_calls`", "")


def test_a_field_of_no_api_is_named_and_one_that_is_listed_is_not() -> None:
    tokenizer = tokenizer_of()
    ignored = {"speed": "fast", "diagnostics": {}, "fallbacks": [], "metadata": {"user_id": "a"}}
    body = parsed(frequency_penalty=1.0, **{"a\r\nb": 1, "x" * 65: 2}, **ignored)
    assert body.unread_fields(tokenizer, ParserSettings()) == ["frequency_penalty"]
    many = parsed(**{f"field_{number}": number for number in range(99)})
    assert len(many.unread_fields(tokenizer, ParserSettings())) == 8
    tokenizer.close()


def test_a_thread_is_refused_with_what_the_clients_look_for() -> None:
    error = refused(thread={"id": "thread_1"})
    body = json.loads(DIALECT.error_body(error))["error"]
    assert (body["type"], body["details"]) == (
        "invalid_request_error",
        {"error_code": "thread_unsupported_request"},
    )


def test_errors_about_the_context_have_anthropics_words_and_plain_digits() -> None:
    tokenizer = tokenizer_of()

    def error_of(body: MessagesBody) -> PagemillError:
        with pytest.raises(PagemillError) as caught:
            body.prepare(tokenizer, Preparation(1200, "id-1", 7), body.sampling(), None)
        return caught.value

    num_prompt = len(prompt_of(parsed(messages=[{"role": "user", "content": "a" * 1000}]), tokenizer).encode())
    both = error_of(parsed(messages=[{"role": "user", "content": "a" * 1000}], max_tokens=32000))
    assert both.message.startswith(f"input length and `max_tokens` exceed context limit: {num_prompt} + 32000 > 1200, ")
    alone = error_of(parsed(messages=[{"role": "user", "content": "a" * 2000}]))
    assert alone.message == f"prompt is too long: {num_prompt + 1000} tokens > 1200 maximum"
    assert (both.status, both.code, alone.code) == (400, "context_length_exceeded", "context_length_exceeded")
    tokenizer.close()
