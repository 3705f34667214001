"""Answers of models, cut into any pieces, are parsed into the same reasoning, text and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from answer_cases import ALL, CASES, calls_of, events_of, merged, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_api.answers.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from pagemill_api.answers.parser import AnswerParser
from pagemill_api.answers.registry import (
    call_syntax,
    detect_tools,
    reasoning_parser_names,
    tool_parser_names,
)
from pagemill_protocol.request.answer_format import AnswerFormat

FORMS = [
    *(AnswerFormat(tools=name, string_parameters={"weather": ["city"]}) for name in CASES),
    *(AnswerFormat(tools=name, reasoning="think", string_parameters={"weather": ["city"]}) for name in CASES),
    AnswerFormat(reasoning="magistral", starts_in_reasoning=True),
    AnswerFormat(reasoning="hunyuan", tools="hunyuan"),
    AnswerFormat(reasoning="ernie", tools="hermes", starts_in_reasoning=True),
]


def test_every_registered_parser_has_a_case() -> None:
    assert set(tool_parser_names()) == {"auto", "none", *CASES}
    assert reasoning_parser_names() == [
        "auto",
        "none",
        "think",
        "magistral",
        "seed-oss",
        "gemma4",
        "hunyuan",
        "ernie",
        "harmony",
    ]


@pytest.mark.parametrize(("name", "answer", "content", "calls"), ALL)
def test_an_answer_is_parsed_into_text_and_calls(
    name: str, answer: str, content: str, calls: list[tuple[str, object]]
) -> None:
    events = events_of(AnswerFormat(tools=name, string_parameters={"weather": ["city"]}), answer)
    assert (text_of(events), calls_of(events)) == (content, calls)


@pytest.mark.parametrize(("name", "answer", "content", "calls"), ALL)
def test_reasoning_comes_before_text_and_calls(
    name: str, answer: str, content: str, calls: list[tuple[str, object]]
) -> None:
    form = AnswerFormat(tools=name, reasoning="think", string_parameters={"weather": ["city"]})
    before = (
        "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant"
        if name == "harmony"
        else "<think>\nWhy?\n</think>\n\n"
    )
    events = events_of(form, before + answer)
    assert events[0] == Reasoning("Why?")
    assert (text_of(events).strip(), calls_of(events)) == (content.strip(), calls)


SNIPPETS = st.sampled_from(
    [answer for _, answer, _, _ in ALL]
    + [
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<answer>",
        "</answer>",
        " \n",
        "{",
        '"',
        "\\",
        "}",
        "[",
        "(",
        ")",
        "words",
        "=",
        ">",
        ",",
    ]
)


@settings(max_examples=num_examples(300), deadline=None)
@given(st.sampled_from(FORMS), st.lists(SNIPPETS, max_size=4).map("".join), st.data())
def test_events_do_not_depend_on_where_the_answer_is_cut(form: AnswerFormat, answer: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(answer)))
    answer = answer[start:] if data.draw(st.booleans()) else answer
    cut = data.draw(st.integers(0, len(answer)))
    whole, single = AnswerParser(form), AnswerParser(form)
    before = merged(whole.push(answer[:cut]))
    assert merged([event for char in answer[:cut] for event in single.push(char)]) == before
    assert single.in_reasoning == whole.in_reasoning
    rest = [event for char in answer[cut:] for event in single.push(char)] + single.finish()
    assert merged(whole.push(answer[cut:]) + whole.finish()) == merged(rest)


def test_arguments_are_streamed_while_they_are_written() -> None:
    parser = AnswerParser(AnswerFormat(tools="hermes"))
    assert parser.push('<tool_call>{"name": "f"') == [CallBegin("f")]
    assert parser.push(', "arguments": {"a') == [CallArguments('{"a')]
    assert parser.push('": 1}') == [CallArguments('": 1}')]


TRIGGERS = {
    "hermes": ('<tool_call>\n{"name": "weather"', ', "arguments": {'),
    "llama3-json": ('{"name": "weather"', ', "parameters": {'),
    "mistral": ('[TOOL_CALLS] [{"name": "weather"', ', "arguments": {'),
    "deepseek": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>", "{"),
    "harmony": ("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>", "{"),
    "kimi-k2": ("<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>", "{"),
    "gemma4": ("<|tool_call>call:weather{", ""),
    "nemotron": ('<TOOLCALL>[{"name": "weather"', ', "arguments": {'),
    "hunyuan": ('<tool_calls>[{"name": "weather"', ', "arguments": {'),
    # These formats write arguments one by one.
    "qwen3-coder": ("<tool_call>\n<function=weather>", "\n<parameter=city>\nR"),
    "seed-oss": ("<seed:tool_call>\n<function=weather>", "\n<parameter=city>R"),
    "minimax-m2": ('<minimax:tool_call>\n<invoke name="weather">', '\n<parameter name="city">R'),
    "glm": ("<tool_call>weather\n", "<arg_key>city</arg_key>\n<arg_value>R"),
    # A call is Python when it is complete.
    "pythonic": ("[weather(city='Rome'", ""),
    "lfm2": ("<|tool_call_start|>[weather(city='Rome'", ""),
}
"""For each parser, a text that names the function and the text that produces the first piece of the arguments."""


@pytest.mark.parametrize("name", CASES)
def test_a_calls_first_events_are_at_most_one_character_late(name: str) -> None:
    """A token has at least one character, so the first streamed delta is at most one token late."""
    named, argued = TRIGGERS[name]
    parser = AnswerParser(AnswerFormat(tools=name, string_parameters={"weather": ["city"]}))
    seen: dict[type[Event], int] = {}
    for num_chars, char in enumerate(named + argued + ('"' if argued.endswith("{") else ")"), start=1):
        for event in parser.push(char):
            seen.setdefault(type(event), num_chars)
    assert seen[CallBegin] <= len(named) + 1
    assert seen[CallArguments] <= len(named + argued) + 1


@pytest.mark.parametrize("name", sorted(set(CASES) - {"harmony", "llama3-json"}))
def test_a_format_is_detected_by_its_calls_and_parses_what_it_writes(name: str) -> None:
    template = {"deepseek": "```json"}.get(name, "")
    syntax = call_syntax(name, template)
    assert syntax is not None
    calls: list[tuple[str, Any]] = [("weather", {"city": "Rome"}), ("f", {"a": 1, "b": [True, {"c": "x"}]})]
    written = syntax.example(calls)
    assert detect_tools(written) == name
    assert calls_of(events_of(AnswerFormat(tools=name, string_parameters={"weather": ["city"]}), written)) == calls


STREAMED = {
    "qwen3-coder": ("<tool_call>\n<function=weather>\n<parameter=city>\n", "\n</parameter>"),
    "seed-oss": ("<seed:tool_call>\n<function=weather>\n<parameter=city>", "</parameter>"),
    "minimax-m2": ('<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">', "</parameter>"),
    "glm": ("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>", "</arg_value>"),
    "gemma4": ('<|tool_call>call:weather{city:<|"|>', '<|"|>'),
}


@pytest.mark.parametrize("name", STREAMED)
def test_a_long_text_argument_grows_with_the_answer(name: str) -> None:
    before, after = STREAMED[name]
    parser = AnswerParser(AnswerFormat(tools=name, string_parameters={"weather": ["city"]}))
    parser.push(before)
    seen = ""
    for piece in ("Once", ' "upon"', "\n\n a", " time\\"):
        events = parser.push(piece)
        seen += "".join(event.text for event in events if isinstance(event, CallArguments))
        assert seen.endswith(json.dumps(piece)[1:-1])
    assert parser.push(after) == [CallArguments('"')]


def test_without_parallel_calls_only_the_first_call_is_returned() -> None:
    text, content, calls = CASES["hermes"][0]
    events = events_of(AnswerFormat(tools="hermes", parallel=False), text)
    assert (text_of(events), calls_of(events)) == (content, calls[:1])


def test_an_answer_of_reasoning_only_has_no_text() -> None:
    form = AnswerFormat(reasoning="think", starts_in_reasoning=True)
    assert events_of(form, "Hm, <", "thi") == [Reasoning("Hm, <thi")]


WHY, CALL = Reasoning("Why?"), '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
CALLED = [CallBegin("f"), CallArguments("{}"), CallEnd()]


@pytest.mark.parametrize(("name", "tag"), [("hunyuan", "answer"), ("ernie", "response")])
@pytest.mark.parametrize(
    ("answer", "events"),
    [
        ("<think>\nWhy?\n</think>\n<TAG>\nA  b.\n\nC\n</TAG>", [WHY, Content("A  b.\n\nC")]),
        ("<think>\nWhy?\n</think>\n\n<TAG>\nA\n</TAG>\n" + CALL, [WHY, Content("A"), *CALLED]),
        ("<think>\nWhy?\n</think>\n" + CALL, [WHY, *CALLED]),
        ("<think>\nWhy?\n</think>\nA <TAG> b </TAG>", [WHY, Content("A <TAG> b </TAG>")]),
        ("<TAG>A</TAG>", [Content("A")]),
        ("<think>\nWhy?\n</think>\n<TAG>\nA\n</TAG", [WHY, Content("A\n</TAG")]),
        ("<think>\nWhy?\n</think>\n<TAG>\nA \n", [WHY, Content("A \n")]),
        ("<think>\nWhy?\n</think>\n<TAG", [WHY, Content("<TAG")]),
    ],
)
def test_markers_around_the_text_behind_reasoning_are_left_out(
    name: str, tag: str, answer: str, events: list[Event]
) -> None:
    form, answer = AnswerFormat(reasoning=name, tools="hermes"), answer.replace("TAG", tag)
    expected = [
        each._replace(text=each.text.replace("TAG", tag)) if isinstance(each, Content) else each for each in events
    ]
    assert events_of(form, answer) == events_of(form, *answer) == expected


def test_hidden_reasoning_is_left_out() -> None:
    assert events_of(AnswerFormat(reasoning="think", shows_reasoning=False), "<think>a</think>b") == [Content("b")]
