"""`context_management` of Anthropic's API: which parts of a conversation are cleared, and when."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec
import pytest
from refusals import refusal_of
from request_outcomes import TEMPLATE, tokenizer_of

from pagemill_api.answers.events import Content
from pagemill_api.dialects.anthropic.edits import CLEARED
from pagemill_api.dialects.anthropic.messages import MessagesBody, MessagesDialect, read_count
from pagemill_api.dialects.base import FinishedChoice, Piece, Preparation
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.request.generate import GenerateRequest, Usage

DIALECT = MessagesDialect()
THINKING, TOOLS = "clear_thinking_20251015", "clear_tool_uses_20250919"
NUM_TURNS = 5


def tokens(value: int) -> dict[str, Any]:
    return {"type": "input_tokens", "value": value}


def uses(value: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": value}


def conversation() -> list[dict[str, Any]]:
    """Return turns with a thought, a call of `even` or `odd`, its result, a second thought and a text."""
    messages: list[dict[str, Any]] = []
    for number in range(NUM_TURNS):
        name = ("even", "odd")[number % 2]
        use = {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"number": number}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"result {number}"}
        messages += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": f"first {number}"}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "reminder"}]},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": f"last {number}"}, {"type": "text", "text": "so"}],
            },
        ]
    return [*messages, {"role": "user", "content": "and now?"}]


def parsed(*edits: dict[str, Any]) -> MessagesBody:
    body = {"model": "m", "max_tokens": 9, "messages": conversation(), "context_management": {"edits": [*edits]}}
    return DIALECT.parse(json.dumps(body).encode())


def edited(*edits: dict[str, Any]) -> tuple[MessagesBody, GenerateRequest]:
    """Return the body after its edits, and its request."""
    tokenizer = tokenizer_of()
    body = parsed(*edits)
    (request,) = body.prepare(tokenizer, Preparation(100_000, "id-1", 7), body.sampling(), None)
    tokenizer.close()
    return body, request


def applied(request: GenerateRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(request.client_fields)["applied_edits"]
    return found


def thoughts(body: MessagesBody) -> list[str]:
    return [each.reasoning_content for each in body.fields.messages if each.reasoning_content is not None]


def results(body: MessagesBody) -> list[str]:
    return [each.content for each in body.fields.messages if each.role == "tool"]


@pytest.mark.parametrize(
    ("keep", "kept_turns"),
    [
        ({}, 1),
        ({"keep": {"type": "thinking_turns", "value": 2}}, 2),
        ({"keep": {"type": "thinking_turns", "value": 0}}, 0),
        ({"keep": {"type": "thinking_turns", "value": 9}}, NUM_TURNS),
        ({"keep": "all"}, NUM_TURNS),
        ({"keep": {"type": "all"}}, NUM_TURNS),
    ],
)
def test_thinking_of_the_last_turns_is_kept(keep: dict[str, Any], kept_turns: int) -> None:
    body, request = edited({"type": THINKING, **keep})
    numbers = range(NUM_TURNS - kept_turns, NUM_TURNS)
    assert thoughts(body) == [f"{word} {number}" for number in numbers for word in ("first", "last")]
    num_cleared = NUM_TURNS - kept_turns
    saved = sum(len(f"first {number}last {number}") for number in range(num_cleared))
    assert applied(request) == (
        []
        if not num_cleared
        else [
            {
                "type": THINKING,
                "cleared_thinking_turns": num_cleared,
                "cleared_input_tokens": saved,
            }
        ]
    )


def test_results_are_cleared_beyond_the_trigger_and_the_last_ones_are_kept() -> None:
    body, request = edited({"type": TOOLS, "trigger": uses(NUM_TURNS - 1), "keep": uses(2)})
    assert results(body) == [CLEARED] * 3 + ["result 3", "result 4"]
    (report,) = applied(request)
    assert (report["type"], report["cleared_tool_uses"]) == (TOOLS, 3)
    assert report["cleared_input_tokens"] == 3 * (len("result 0") - len(CLEARED))
    body, request = edited({"type": TOOLS, "trigger": uses(NUM_TURNS), "keep": uses(2)})
    assert results(body) == [f"result {number}" for number in range(NUM_TURNS)]
    assert applied(request) == []


def test_three_uses_are_kept_and_100_000_tokens_trigger_if_the_client_says_nothing_else() -> None:
    assert results(edited({"type": TOOLS, "trigger": uses(0)})[0])[:3] == [CLEARED, CLEARED, "result 2"]
    assert CLEARED not in results(edited({"type": TOOLS})[0])


def test_the_number_of_tokens_of_the_prompt_triggers() -> None:
    num_tokens = len(edited()[1].prompt_token_ids)
    assert CLEARED in results(edited({"type": TOOLS, "trigger": tokens(num_tokens - 1)})[0])
    assert CLEARED not in results(edited({"type": TOOLS, "trigger": tokens(num_tokens)})[0])


def test_a_prompt_that_is_too_long_is_edited_before_it_is_refused() -> None:
    tokenizer = tokenizer_of()
    body = parsed({"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}})
    num_tokens = len(edited({"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}})[1].prompt_token_ids)
    assert num_tokens < len(edited()[1].prompt_token_ids)
    (request,) = body.prepare(tokenizer, Preparation(num_tokens + 9, "id-1", 7), body.sampling(), None)
    assert len(request.prompt_token_ids) == num_tokens
    tokenizer.close()


def test_a_template_that_refuses_the_conversation_at_first_gets_it_edited() -> None:
    strict = "{% if messages[2]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    bundle = msgspec.structs.replace(tokenizer_of().bundle, chat_template=strict)
    tokenizer = Tokenizer(bundle)
    messages = [*conversation()[:3], {"role": "system", "content": "Now"}]
    messages.insert(1, {"role": "system", "content": "Then"})
    edit = {"type": TOOLS, "trigger": tokens(1), "keep": uses(0)}
    given = {"model": "m", "max_tokens": 9, "system": "Be", "messages": messages}
    body = DIALECT.parse(json.dumps({**given, "context_management": {"edits": [edit]}}).encode())
    (request,) = body.prepare(tokenizer, Preparation(100_000, "id-1", 7), body.sampling(), None)
    prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert ("<user>question 0\nThen" in prompt, CLEARED in prompt) == (True, True)
    assert applied(request)[0]["cleared_tool_uses"] == 1
    tokenizer.close()


def test_some_tools_are_excluded_and_inputs_are_cleared_if_the_client_asks_for_it() -> None:
    def arguments(body: MessagesBody) -> list[str]:
        return [call["function"]["arguments"] for each in body.fields.messages for call in each.tool_calls]

    edit = {"type": TOOLS, "trigger": uses(0), "keep": uses(0)}
    body, _ = edited({**edit, "exclude_tools": ["odd"]})
    assert results(body) == [CLEARED, "result 1", CLEARED, "result 3", CLEARED]
    assert arguments(body) == [f'{{"number": {number}}}' for number in range(NUM_TURNS)]
    body, _ = edited({**edit, "exclude_tools": ["odd"], "clear_tool_inputs": True})
    assert arguments(body) == ["{}", '{"number": 1}', "{}", '{"number": 3}', "{}"]
    body, _ = edited({**edit, "clear_tool_inputs": ["odd"]})
    assert arguments(body) == ['{"number": 0}', "{}", '{"number": 2}', "{}", '{"number": 4}']


def test_nothing_is_cleared_that_saves_less_than_the_client_wants() -> None:
    edit = {"type": TOOLS, "trigger": uses(0), "keep": uses(0), "clear_tool_inputs": True}
    body, request = edited({**edit, "clear_at_least": tokens(1)})
    assert CLEARED not in results(body), "the sentence is longer than these results"
    assert applied(request) == []


def test_the_answer_has_the_edits_that_were_applied() -> None:
    _, request = edited({"type": TOOLS, "trigger": uses(0), "keep": uses(0)})
    expected = {"applied_edits": applied(request)}
    assert expected["applied_edits"]
    choice = FinishedChoice(0, "a", "stop", None, [Content("a")])
    assert json.loads(DIALECT.renderer(request, None).body([choice], Usage(3, 5)))["context_management"] == expected
    renderer = DIALECT.renderer(request, None)
    renderer.chunk(Piece(0, "a", True, "stop", None, None, [Content("a")]))
    delta = next(each for each in renderer.end(Usage(3, 5)).decode().split("\n\n") if "message_delta" in each)
    assert json.loads(delta.split("data: ")[1])["context_management"] == expected


def test_counting_tokens_applies_what_does_not_depend_on_their_number() -> None:
    def counted(*edits: dict[str, Any]) -> list[Any]:
        given = {"model": "m", "messages": conversation(), "context_management": {"edits": [*edits]}}
        return read_count(json.dumps(given).encode()).messages or []

    assert not any(
        each.reasoning_content for each in counted({"type": THINKING, "keep": {**uses(0), "type": "thinking_turns"}})
    )
    cleared = counted({"type": TOOLS, "trigger": uses(0), "keep": uses(0)})
    assert [each.content for each in cleared if each.role == "tool"] == [CLEARED] * NUM_TURNS
    error = refusal_of(counted_with, trigger=tokens(5))
    assert error.param == "context_management.edits[0].trigger"


def counted_with(**edit: Any) -> Any:
    edits = [{"type": TOOLS, **edit}]
    given = {"model": "m", "messages": conversation(), "context_management": {"edits": edits}}
    return read_count(json.dumps(given).encode())


def parsed_with(**edit: Any) -> MessagesBody:
    return parsed({"type": TOOLS}, {"type": TOOLS, **edit})


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        ({"type": "compact_20260112"}, "type"),
        ({"keep": "all"}, "keep"),
        ({"keep": {"type": "thinking_turns", "value": 1}}, "keep"),
        ({"keep": {"type": "tool_uses"}}, "keep"),
        ({"trigger": {"type": "thinking_turns", "value": 1}}, "trigger"),
        ({"clear_at_least": uses(1)}, "clear_at_least"),
        ({"type": THINKING, "trigger": uses(1)}, "trigger"),
        ({"type": THINKING, "keep": uses(1)}, "keep"),
    ],
)
def test_edits_that_are_not_done_here_are_refused_by_their_place(edit: dict[str, Any], field: str) -> None:
    assert partial(refusal_of, parsed_with)(**edit).param == f"context_management.edits[1].{field}"
