"""Tools of the Responses API beside functions: as functions for the model, as items in histories and in answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from grammar_matches import matches
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal_of
from request_outcomes import tokenizer_of

from pagemill_api.answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from pagemill_api.dialects.base import FinishedChoice, Piece, Preparation, unread_fields
from pagemill_api.dialects.openai_responses.answer_items import InputText
from pagemill_api.dialects.openai_responses.items import OMITTED_PART
from pagemill_api.dialects.openai_responses.responses import ResponsesBody, ResponsesDialect
from pagemill_api.grammars.source import grammar_text
from pagemill_api.openai.prepare import needs_check
from pagemill_api.openai.unread_fields import UNREAD_HEADER, unread_headers
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage

DIALECT = ResponsesDialect()
SCHEMA = {"type": "object", "properties": {"target": {"type": "string"}}}
NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "close", "description": "Closes one.", "parameters": SCHEMA}],
}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits files."}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": SCHEMA}
TOOLS = [NAMESPACE, CUSTOM, {"type": "local_shell"}, SEARCH, {"type": "web_search", "external_web_access": True}]
PARSERS = ParserSettings()


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    made = tokenizer_of()
    yield made
    made.close()


def parse(**fields: Any) -> ResponsesBody:
    return DIALECT.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode())


refused = partial(refusal_of, parse)


def prepared(tokenizer: Tokenizer, body: ResponsesBody, parsers: ParserSettings = PARSERS) -> GenerateRequest:
    (request,) = body.prepare(tokenizer, Preparation(4000, "resp_1", 7, parsers=parsers), body.sampling(), None)
    return request


def answer(
    tokenizer: Tokenizer, name: str, arguments: list[str], finish_reason: FinishReason = "stop", **fields: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events and the item of an answer that calls a tool; a cut call has no end."""
    request = prepared(tokenizer, parse(tools=TOOLS, **fields))
    pieces: list[Event] = [CallBegin(name), *map(CallArguments, arguments)]
    if finish_reason == "stop":
        pieces.append(CallEnd())
    renderer = DIALECT.renderer(request, None)
    raw = b"".join(renderer.chunk(Piece(0, "", not at, None, None, None, [each])) for at, each in enumerate(pieces))
    raw += renderer.chunk(Piece(0, "", False, finish_reason, None, None, []))
    raw += renderer.end(Usage(1, 1))
    events = [json.loads(each.partition("data: ")[2]) for each in raw.decode().split("\n\n")[:-1]]
    body = DIALECT.renderer(request, None).body([FinishedChoice(0, "", finish_reason, None, pieces)], Usage(1, 1))
    assert isinstance(body, bytes)
    (item,) = json.loads(body)["output"]
    assert events[-1]["response"]["output"] == [item]
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    return events, item


def test_tools_become_functions() -> None:
    functions = {each["function"]["name"]: each["function"] for each in parse(tools=TOOLS).fields.tools}
    assert list(functions) == ["agents__close", "patch", "local_shell", "tool_search"]
    assert functions["agents__close"]["parameters"] == SCHEMA
    assert functions["agents__close"]["description"] == "Other agents.\n\nCloses one."
    assert functions["patch"]["parameters"]["required"] == ["input"]
    assert "command" in functions["local_shell"]["parameters"]["properties"]
    assert functions["tool_search"] == {"name": "tool_search", "description": "Finds tools.", "parameters": SCHEMA}


def test_a_response_repeats_the_tools_as_they_were_sent(tokenizer: Tokenizer) -> None:
    events, _ = answer(tokenizer, "patch", ["{}"])
    shown = events[-1]["response"]
    assert shown["tools"] == TOOLS
    assert not {"client_tools", "include"} & shown.keys()


def test_the_call_of_a_member_of_a_namespace_names_both(tokenizer: Tokenizer) -> None:
    events, item = answer(tokenizer, "agents__close", ['{"target"', ': "x"}'])
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "close")
    assert json.loads(item["arguments"]) == {"target": "x"}
    added = next(each for each in events if each["type"] == "response.output_item.added")
    assert (added["item"]["namespace"], added["item"]["name"]) == ("agents", "close")


def test_the_call_of_a_custom_tool_is_its_plain_input(tokenizer: Tokenizer) -> None:
    text = 'a "b"\\\n\tü 😀'
    written = json.dumps({"input": text})
    events, item = answer(tokenizer, "patch", [written[at : at + 3] for at in range(0, len(written), 3)])
    assert (item["type"], item["name"], item["input"], item["status"]) == (
        "custom_tool_call",
        "patch",
        text,
        "completed",
    )
    deltas = [each["delta"] for each in events if each["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == text
    (done,) = [each for each in events if each["type"] == "response.custom_tool_call_input.done"]
    assert (done["input"], done["item_id"]) == (text, item["id"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"patch": "a"}', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"other": 1, "input": "b"}', "b"),
        ("{}", "{}"),
    ],
)
def test_the_input_of_a_custom_call_in_another_form_is_kept(
    tokenizer: Tokenizer, arguments: str, expected: str
) -> None:
    events, item = answer(tokenizer, "patch", [arguments])
    assert item["input"] == expected
    deltas = [each["delta"] for each in events if each["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == expected


def test_a_cut_custom_call_is_incomplete_and_has_what_came(tokenizer: Tokenizer) -> None:
    events, item = answer(tokenizer, "patch", ['{"input": "abc\\'], "length")
    assert (item["status"], item["input"]) == ("incomplete", "abc")
    assert not [each for each in events if each["type"].endswith(".done")]


@given(st.text(), st.booleans(), st.lists(st.integers(1, 9), min_size=1))
def test_the_input_depends_on_the_text_only(text: str, ascii_only: bool, sizes: list[int]) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii_only)
    reader, shown, at = InputText(), "", 0
    while at < len(written):
        size = sizes[at % len(sizes)]
        shown += reader.push(written[at : at + size])
        at += size
    assert shown + reader.rest() == text


def test_the_call_of_the_local_shell_is_an_action(tokenizer: Tokenizer) -> None:
    _, item = answer(tokenizer, "local_shell", ['{"command": ["ls", "-l"],', ' "working_directory": "/"}'])
    assert item["action"] == {"type": "exec", "env": {}, "command": ["ls", "-l"], "working_directory": "/"}
    assert (item["type"], item["status"]) == ("local_shell_call", "completed")
    _, item = answer(tokenizer, "local_shell", ['{"command": "ls -l"}'])
    assert item["action"]["command"] == ["bash", "-lc", "ls -l"]
    _, item = answer(tokenizer, "local_shell", ['{"command": ["ls"], "env'], "length")
    assert (item["action"]["command"], item["status"]) == (["ls"], "incomplete")


def test_the_clients_search_for_tools_is_a_call_whose_result_adds_tools(tokenizer: Tokenizer) -> None:
    _, item = answer(tokenizer, "tool_search", ['{"query": "mail"}'])
    assert (item["type"], item["execution"], item["arguments"]) == ("tool_search_call", "client", {"query": "mail"})
    output = {"type": "tool_search_output", "call_id": item["call_id"], "tools": [NAMESPACE]}
    history = [{"role": "user", "content": "hi"}, item, output]
    functions = parse(tools=[SEARCH], input=history).fields.tools
    assert [each["function"]["name"] for each in functions] == ["tool_search", "agents__close"]
    assert refused(tools=[SEARCH], input=[*history[:2], {**output, "tools": [7]}]).param == "input[2].tools[0]"


def test_calls_and_outputs_of_all_kinds_are_a_history() -> None:
    calls = [
        {"type": "function_call", "call_id": "c1", "namespace": "agents", "name": "close", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** ü"},
        {"type": "local_shell_call", "id": "c3", "action": {"type": "exec", "command": ["ls"]}},
    ]
    outputs = [
        {"type": "function_call_output", "call_id": "c1", "output": "closed"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "local_shell_call_output", "id": "c3", "output": "a b"},
    ]
    search = {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "x"}}
    body = parse(tools=TOOLS, input=[{"role": "user", "content": "hi"}, search, *calls, *outputs])
    _, calling, *results = body.fields.messages
    assert [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calling.tool_calls
    ] == [
        ("c1", "agents__close", {}),
        ("c2", "patch", {"input": "*** ü"}),
        ("c3", "local_shell", {"command": ["ls"]}),
    ]
    assert [(each.tool_call_id, each.content) for each in results] == [("c1", "closed"), ("c2", "done"), ("c3", "a b")]


def test_items_and_parts_without_effect_are_named(tokenizer: Tokenizer) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "x"}},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": "data:x"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "of another server"},
        {"role": "assistant", "content": "so"},
    ]
    body = parse(input=items, tools=TOOLS, client_metadata={"a": "b"}, include=["reasoning.encrypted_content"])
    assert body.fields.messages[2].content == OMITTED_PART
    assert unread_fields(body, tokenizer, PARSERS) == [
        *("client_metadata", "input[1]", "input[3].output[0]", "input[4]", "tools[4] (web_search)")
    ]


def test_names_that_clients_make_do_not_break_the_header() -> None:
    header = unread_headers(["a\r\nx: y", "b" * 500, *map(str, range(100))])[UNREAD_HEADER]
    assert header.isascii()
    assert header.isprintable()
    assert len(header) < 1000


def test_hosted_tools_are_logged_or_refused(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    body = parse(tools=TOOLS)
    with caplog.at_level(logging.INFO):
        prepared(tokenizer, body)
    assert "request resp_1: left out are tools of type web_search" in caplog.text
    with pytest.raises(PagemillError) as caught:
        prepared(tokenizer, body, PARSERS._replace(hosted_tools="refuse"))
    assert (caught.value.param, caught.value.code) == ("tools[4].type", "unsupported_parameter")
    prepared(tokenizer, parse(tools=TOOLS[:4]), PARSERS._replace(hosted_tools="refuse"))


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "local_shell"}, "local_shell"),
        ({"type": "function", "namespace": "agents", "name": "close"}, "agents__close"),
    ],
)
def test_a_tool_of_any_kind_can_be_chosen(choice: dict[str, Any], name: str) -> None:
    assert parse(tools=TOOLS, tool_choice=choice).fields.names_function == name


OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user", "content": "a"}, {**OUTPUT, "call_id": None}]}, "input[1].call_id"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "input": "x"}]}, "input[0].call_id"),
        ({"instructions": "b", "input": [{"role": "user", "content": "a"}, OUTPUT]}, "input[1].call_id"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input[0].action"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"tools": [{"type": "web_search"}, {**NAMESPACE, "tools": [{"type": "mcp"}]}]}, "tools[1].tools[0].type"),
        ({"tools": [{"type": "web_search"}, {"type": "custom", "name": "a b"}]}, "tools[1].name"),
        (
            {"tools": [{"type": "web_search"}, NAMESPACE, {"type": "function", "name": "agents__close"}]},
            "tools[2].name",
        ),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "lark"}}]}, "tools[0].format.definition"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named_by_the_clients_path(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_reasoning_comes_back_in_the_form_that_was_asked_for(tokenizer: Tokenizer) -> None:
    def output(**fields: Any) -> list[dict[str, Any]]:
        request = prepared(tokenizer, parse(**fields))
        choice = FinishedChoice(0, "", "stop", None, [Reasoning("because ü"), Content("so")])
        items: list[dict[str, Any]] = json.loads(DIALECT.renderer(request, None).body([choice], Usage(1, 1)))["output"]
        return items

    assert "encrypted_content" not in output()[0]
    thought, said = output(include=["reasoning.encrypted_content"])
    without = {name: value for name, value in thought.items() if name != "content"}
    for item in (thought, without):
        asked = [{"role": "user", "content": "hi"}, item, said]
        assert parse(input=asked).fields.messages[1].reasoning_content == "because ü"


LETTERS = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" LF /[b"]+/\n%import common.LF'}


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [(LETTERS, 'a\nb"b', "a b"), ({"type": "grammar", "syntax": "regex", "definition": 'a/[^b]+"'}, 'a/\n"', "a/b")],
)
def test_the_input_of_a_custom_tool_conforms_to_its_grammar(
    tokenizer: Tokenizer, form: dict[str, Any], good: str, bad: str
) -> None:
    body = parse(tools=[{**CUSTOM, "format": form}, *TOOLS[:1]])
    assert form["definition"] in body.fields.tools[0]["function"]["description"]
    assert needs_check(body.fields)
    body.check_form()
    outputs = prepared(tokenizer, body).sampling.structured_outputs
    assert outputs is not None
    for text, fits in ((good, True), (bad, False)):
        call = f'Well. <tool_call>\n{{"name": "patch", "arguments": {json.dumps({"input": text})}}}\n</tool_call>'
        assert matches(grammar_text(outputs), call) == fits
    other = '<tool_call>\n{"name": "agents__close", "arguments": {"target": "x"}}\n</tool_call>'
    assert matches(grammar_text(outputs), other)
    assert matches(grammar_text(outputs), "no call")
    assert "tools[0].format" not in unread_fields(body, tokenizer, PARSERS)
    assert "tools[0].format" in unread_fields(body, tokenizer, PARSERS._replace(tools="qwen3-coder"))
    assert prepared(tokenizer, body, PARSERS._replace(tools="qwen3-coder")).sampling.structured_outputs is None


def test_a_grammar_that_cannot_be_enforced_is_refused_by_its_field() -> None:
    assert refused(tools=[{**CUSTOM, "format": {**LETTERS, "definition": "start: %json {}"}}]).param == (
        "tools[0].format.definition"
    )
    body = parse(tools=[TOOLS[-1], {**CUSTOM, "format": {**LETTERS, "definition": "start: missing"}}])
    with pytest.raises(PagemillError) as caught:
        body.check_form()
    assert caught.value.param == "tools[1].format.definition"
